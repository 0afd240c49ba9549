"""Another way to share a GPU: a process per model under NVIDIA MPS, with or without a limit on its SMs.

    python benchmarks/paper_mps.py [--rates 2000,4000] [--percent 100,25] [--seeds 0-1] [--out DIR]

Figure 11's requests are split by model; every process runs whole graphs, one stream each. The MPS daemon is started for
the run, in its own folder, and stopped afterwards. Points are added to paper.json beside the other systems'. Run
paper.py first, on the same machine: times alone are taken from it, since here models are measured while others load.
`--device virtual:h200 --tiny` shows that it runs; every process then has its own virtual GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mps
import numpy as np
from common import RESULTS, SEEDS_HELP, commit, save, seeds
from paper import MOST_PAUSE_US, RUN_AGAIN, fig11_requests
from paper_models import FIG11, TINY
from paper_runs import Loaded, Setup
from rich.progress import track

import paellapy as pp
from paellapy.instrument.env import CONNECTIONS as QUEUES

INSTANCES = 12
SETTLE_S = 0.5  # between the last process being ready and the first request


def child(args: argparse.Namespace) -> None:
    """One model: says when it is ready, then answers each line of work with its latencies."""
    kind = (TINY if args.tiny else FIG11)[args.child]
    keep_to(args.cpus, args.child)
    loaded = Loaded(args.device, (kind,), Setup((1,), INSTANCES))
    warm = np.zeros(40, np.int64)
    loaded.offer("streams", warm, warm, warm)
    print(json.dumps({"alone_ns": float(loaded.alone_ns[0])}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        at, which = np.array(work["at"], np.int64), np.array(work["which"], np.int64)
        time.sleep(max(0.0, (work["start_ns"] - time.monotonic_ns()) * 1e-9))
        begin = time.monotonic_ns()
        late = max(0, begin - work["start_ns"])
        run = loaded.offer("streams", np.maximum(at - late, 1), np.zeros(len(at), np.int64), which)
        answer = {
            "latency_ns": run.latency_ns.tolist(), "took_ns": run.took_ns, "wrong": loaded.wrong,
            "generator_pause_us": run.generator_pause_ns / 1e3, "core_pause_us": run.core_pause_ns / 1e3,
        }  # fmt: skip
        loaded.wrong = 0
        print(json.dumps(answer), flush=True)
    loaded.close()


def keep_to(count: int, process: int) -> None:
    """So many of the CPUs, and other ones than the processes before it, as far as there are any.

    With all of them each engine would let its copier spin, and threads of eight processes would take turns.
    """
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[(process * count + k) % len(cpus)] for k in range(count)})


@contextmanager
def shared(wanted: bool) -> Iterator[dict[str, str]]:
    """The environment of processes that share the GPU through a daemon of their own."""
    if not wanted:
        yield {}
        return
    if not mps.available():
        raise SystemExit(mps.MISSING)
    with mps.daemon() as env:
        yield env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", default="2000,3000,4000,5000")
    parser.add_argument("--percent", default="100,25", help="percent of the SMs that one process may use")
    parser.add_argument("--queues", type=int, default=4, help="hardware queues of each process")
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that one process may use")
    parser.add_argument("--seeds", type=seeds, default=range(2), help=SEEDS_HELP)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cpus < 1:
        parser.error(f"--cpus {args.cpus}: a process needs one at least")
    if args.child is not None:
        return child(args)
    folder = args.out or RESULTS
    stored = json.loads((folder / "paper.json").read_text())["results"] if (folder / "paper.json").exists() else {}
    results: dict[str, Any] = {"points": {}, "commits": {}, "checked": 0, "wrong": 0, "alone_us": {}, **stored}
    for percent in args.percent.split(","):
        with shared(args.device.startswith("cuda")) as env:
            run_all(args, percent, env, results)
    print(save("paper", results, pp.Device(args.device), folder))  # opened only now: it is no client of the daemon's
    return None


def run_all(args: argparse.Namespace, percent: str, env: dict[str, str], results: dict[str, Any]) -> None:
    kinds = TINY if args.tiny else FIG11
    share = np.array([kind.share for kind in kinds])
    command = [sys.executable, __file__, "--device", args.device, "--cpus", str(args.cpus)]
    command += ["--tiny"] if args.tiny else []
    # Hardware channels are few: with 32 queues each, the third process finds no room on the GPU for its context.
    whole = {**os.environ, **env, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percent, QUEUES: str(args.queues)}
    children = [
        subprocess.Popen(
            [*command, "--child", str(m)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=whole
        )
        for m in range(len(kinds))
    ]
    try:
        alone = np.array([read(each)["alone_ns"] for each in track(children, description=f"loading, {percent} %")])
        alone = np.array([results["alone_us"].get(k.label, ns / 1e3) * 1e3 for k, ns in zip(kinds, alone, strict=True)])
        todo = [(int(r), s) for s in args.seeds for r in args.rates.split(",")]
        for rate, seed in track(todo, description=f"processes with {percent} % of the SMs"):
            at, model, which = fig11_requests(share / share.sum(), seed, 1.5, rate, args.seconds)
            again = -1
            pause_us = np.inf
            while pause_us > MOST_PAUSE_US and again < RUN_AGAIN:
                again += 1
                answers = ask(children, at, model, which)
                pause_us = max(a["generator_pause_us"] for a in answers)
                results["wrong"] += sum(a["wrong"] for a in answers)
                results["checked"] += len(at)
            slow = np.concatenate([np.array(a["latency_ns"]) / alone[m] for m, a in enumerate(answers)])
            key = f"fig11|MPS, {percent} % each|1.5|{rate}|{seed}"
            results["commits"][key] = commit()
            results["points"][key] = {
                "offered": len(at), "answered": len(slow), "seconds": args.seconds, "cpus": args.cpus,
                "throughput": len(slow) / max(a["took_ns"] for a in answers) * 1e9,
                "p50_slowdown": float(np.quantile(slow, 0.5)), "p99_slowdown": float(np.quantile(slow, 0.99)),
                "within_4x": float((slow <= 4).mean()), "generator_pause_us": pause_us,
                "core_pause_us": max(a["core_pause_us"] for a in answers), **({"run_again": again} if again else {}),
            }  # fmt: skip
            save("paper", results, None, args.out or RESULTS)
    finally:
        for each in children:
            assert each.stdin is not None
            with suppress(OSError):  # of one that has died
                each.stdin.close()
        for each in children:
            try:
                each.wait(30)
            except subprocess.TimeoutExpired:
                each.kill()


def ask(children: list[subprocess.Popen[str]], at: Any, model: Any, which: Any) -> list[Any]:
    """Every model's requests to its process, to begin at the same moment; what they answer."""
    start = time.monotonic_ns() + int(SETTLE_S * 1e9)
    for m, each in enumerate(children):
        mine = model == m
        work = {"start_ns": start, "at": at[mine].tolist(), "which": which[mine].tolist()}
        assert each.stdin is not None
        each.stdin.write(json.dumps(work) + "\n")
        each.stdin.flush()
    return [read(each) for each in children]


def read(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"a model's process ended with status {process.wait()}")


if __name__ == "__main__":
    main()
