"""The usual way to run models: PyTorch's modules called directly, by threads with a stream each.

    python benchmarks/paper_eager.py [--rates 50,100,200] [--threads 1,8] [--seeds 0-1] [--out DIR]

Figure 11's requests wait in one queue; a thread takes the next, copies its input to the GPU, calls the module, and
waits for the output. There are no graphs and no batches. Points are added to paper.json beside the other systems'. Run
paper.py first, on the same machine: slowdowns are relative to its times alone. `--device cpu --tiny` shows that it
runs, without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, SEEDS_HELP, commit, need_gpu, save, seeds
from numpy.typing import NDArray
from paper import fig11_requests
from paper_models import FIG11, TINY, Kind
from rich.progress import track

GIVE_UP_S = 60.0
Done = queue.SimpleQueue[Exception | None]  # what came of each of several things


class Eager:
    """Modules, and threads that call them, until the process ends: without work they only wait."""

    def __init__(self, kinds: tuple[Kind, ...], device: str, threads: int) -> None:
        self.kinds, self.device = kinds, device
        self.gpu = device.startswith("cuda")
        dtype = torch.float16 if self.gpu else torch.float32
        self.nets = [kind.build(device).to(dtype).to(memory_format=torch.channels_last) for kind in kinds]  # type: ignore[call-overload]
        self.inputs = [self._ready(kind.inputs(), dtype) for kind in kinds]
        self.expected, self.rounding = zip(*(kind.expected(device) for kind in kinds), strict=True)
        self.work: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        opened: Done = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._thread, args=(opened,), daemon=True).start()
        _wait_for(threads, opened)

    def _ready(self, inputs: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
        found = torch.from_numpy(inputs).to(dtype).contiguous(memory_format=torch.channels_last)
        return found.pin_memory() if self.gpu else found

    def answer(self, m: int, which: int, stream: Any) -> NDArray[Any]:
        with torch.no_grad():
            x = self.inputs[m][which : which + 1].to(self.device, non_blocking=True)
            y = self.nets[m](x)[0].to("cpu", non_blocking=True)
        if stream is not None:
            stream.synchronize()
        found: NDArray[Any] = y.float().numpy()
        return found

    def run(self, at: Any, model: Any, which: Any) -> tuple[NDArray[np.int64], int, int]:
        """Latencies from the intended arrivals, how long it took, and how many outputs were wrong."""
        latency, answers = np.zeros(len(at), np.int64), [np.zeros(0)] * len(at)
        done: Done = queue.SimpleQueue()
        begin = time.monotonic_ns()

        def serve(i: int, stream: Any) -> None:
            try:
                answers[i] = self.answer(int(model[i]), int(which[i]), stream)
                latency[i] = time.monotonic_ns() - begin - at[i]
                done.put(None)
            except Exception as e:
                done.put(e)

        for i, due in enumerate(at):
            ahead = (begin + int(due) - time.monotonic_ns()) * 1e-9
            if ahead > 0:
                time.sleep(ahead)
            self.work.put(partial(serve, i))
        _wait_for(len(at), done)
        took = time.monotonic_ns() - begin
        return latency, took, sum(self._wrong(int(model[i]), int(which[i]), y) for i, y in enumerate(answers))

    def _thread(self, opened: Done) -> None:
        """cuDNN makes its plans for each thread anew, so every thread calls every module before it is timed."""
        stream = torch.cuda.Stream() if self.gpu else None
        with torch.cuda.stream(stream) if self.gpu else contextlib.nullcontext():
            try:
                for m in range(len(self.kinds)):
                    for _ in range(3):
                        self.answer(m, 0, stream)
                opened.put(None)
            except Exception as e:
                opened.put(e)
            while True:
                self.work.get()(stream)

    def _wrong(self, m: int, which: int, found: NDArray[Any]) -> bool:
        wanted = self.expected[m][which]
        limit = max(0.02 * (float(np.abs(wanted).max()) + 1e-6), self.rounding[m])
        return not float(np.abs(found - wanted).max()) <= limit


def _wait_for(count: int, done: Done) -> None:
    for _ in range(count):
        try:
            error = done.get(timeout=GIVE_UP_S)
        except queue.Empty:
            raise SystemExit(f"nothing was answered for {GIVE_UP_S:g} s") from None
        if error is not None:
            raise error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--rates", default="50,100,200")
    parser.add_argument("--threads", default="1,8")
    parser.add_argument("--seeds", type=seeds, default=range(2), help=SEEDS_HELP)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    kinds = TINY if args.tiny else FIG11
    device = need_gpu("eager modules run on a GPU") if args.device.startswith("cuda") else None
    folder = args.out or RESULTS
    path = folder / "paper.json"
    if not path.exists():
        raise SystemExit(f"there is no {path}: run paper.py first, whose times alone slowdowns are measured by")
    results = {"commits": {}, **json.loads(path.read_text())["results"]}
    alone = np.array([results["alone_us"][kind.label] * 1e3 for kind in kinds])
    share = np.array([kind.share for kind in kinds])
    for threads in (int(each) for each in args.threads.split(",")):
        eager = Eager(kinds, args.device, threads)
        todo = [(float(rate), seed) for seed in args.seeds for rate in args.rates.split(",")]
        for rate, seed in track(todo, description=f"eager, {threads} threads"):
            at, model, which = fig11_requests(share / share.sum(), seed, 1.5, rate, args.seconds)
            latency, took, wrong = eager.run(at, model, which)
            slow = latency / alone[model]
            key = f"fig11|eager, {threads} {'thread' if threads == 1 else 'threads'}|1.5|{rate:g}|{seed}"
            results["commits"][key] = commit()
            results["points"][key] = {
                "offered": len(at), "answered": len(at), "seconds": args.seconds, "throughput": len(at) / took * 1e9,
                "p50_slowdown": float(np.quantile(slow, 0.5)), "p99_slowdown": float(np.quantile(slow, 0.99)),
                "within_4x": float((slow <= 4).mean()),
            }  # fmt: skip
            results["checked"] += len(at)
            results["wrong"] += wrong
            save("paper", results, device, folder)
    print(f"{results['checked']:,} outputs checked, {results['wrong']} wrong; {save('paper', results, device, folder)}")


if __name__ == "__main__":
    main()
