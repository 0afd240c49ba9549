"""The number of Python files that a request, a reload of weights and a training step cross, on the virtual GPU.

    python benchmarks/flows.py [--against CHECKOUT] [--only http] [--verbose]

Counts files of paellapy in which a Python function is called between two moments; compiled code is not seen. Threads of
the engine are counted too, and listed one by one.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, commit, environment, save, show

FLOWS = ("http", "reload", "step")
FOLDERS = ("instrument", "scheduler", "serving", "paellapy")
crossed: dict[str, list[str]] = defaultdict(
    list
)  # by thread, in order; a file is noted when the one before was another
recording = False


def watch(frame: Any, event: str, _: Any) -> None:
    if recording and event == "call":
        path = Path(frame.f_code.co_filename)
        name = next((f"{top}/{str(path).rpartition(f'/{top}/')[2]}" for top in FOLDERS if f"/{top}/" in str(path)), "")
        files = crossed[threading.current_thread().name]
        if name and "site-packages" not in str(path) and (not files or files[-1] != name):
            files.append(name)


class Recording:
    def __enter__(self) -> None:
        global recording
        crossed.clear()
        recording = True

    def __exit__(self, *_: object) -> None:
        global recording
        recording = False


def http_flow() -> None:
    """A warm binary request: server and engine in one process."""
    import signal

    import numpy as np
    import uvloop

    import paellapy as pp
    from paellapy import demo

    signal.signal = lambda *_: None  # type: ignore[assignment]  # the server is not in the main thread
    uvloop.Loop.add_signal_handler = lambda *_, **__: None
    url: list[str] = []
    ready = threading.Event()
    model = demo.load("mlp")

    def announce(found: str) -> None:
        url.append(found)
        ready.set()

    settings = {"device": "virtual:h200", "server": {"port": 0}, "announce": announce}
    threading.Thread(target=lambda: pp.serve([model], **settings), name="server", daemon=True).start()
    assert ready.wait(180)
    ((name, spec),) = model.inputs.items()
    x = np.zeros(spec.shape, np.float32)
    tensor = {"name": name, "datatype": "FP32", "shape": [1, *spec.shape], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    line = http.client.HTTPConnection(url[0].removeprefix("http://"))

    def ask() -> None:
        line.request("POST", f"/v2/models/{model.name}/infer", head + x.tobytes(), headers)
        answer = line.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()

    for _ in range(5):
        ask()
    time.sleep(0.5)
    with Recording():
        ask()
        time.sleep(0.05)


def reload_flow() -> None:
    """A request whose model's weights were evicted."""
    import numpy as np

    import paellapy as pp
    from paellapy import demo

    with pp.Engine("virtual:h200", memory_bytes=24 << 20) as engine:
        models = [demo.load(name) for name in ("mlp", "cnn")]
        for model in models:
            engine.load(model)

        def ask(model: Any) -> None:
            engine.infer_sync(model.name, {k: np.zeros(spec.shape, spec.dtype) for k, spec in model.inputs.items()})

        for _ in range(2):
            for model in models:
                ask(model)
            engine.evict("mlp")
        with Recording():
            ask(models[0])


def step_flow() -> None:
    """One step of a training job, its data included."""
    import torch

    import paellapy as pp

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1e-3))

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def data() -> Any:
        while True:
            yield torch.randn(4, 8)

    def wait(condition: Any) -> None:
        while not condition():
            time.sleep(0.0005)

    with pp.Engine("virtual:h200") as engine:
        job = engine.background(step, state=[net, optimizer], data=data())
        wait(lambda: job.steps >= 6)
        job.pause()
        wait(lambda: job.state == "paused")
        done = job.steps
        job.resume()
        with Recording():
            wait(lambda: job.steps > done)
        job.stop()
        job.join()


def counted(checkout: Path, flow: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--flow", flow]
    run = subprocess.run(command, env=environment(checkout), cwd=checkout, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{flow} in {checkout}: {run.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", choices=FLOWS, action="append", help="may be repeated")
    parser.add_argument("--verbose", action="store_true", help="list the files of each thread, in order")
    parser.add_argument("--flow", choices=FLOWS, help="count one in this process")
    given = parser.parse_args()
    if given.flow:
        threading.setprofile(watch)
        sys.setprofile(watch)
        {"http": http_flow, "reload": reload_flow, "step": step_flow}[given.flow]()
        sys.setprofile(None)
        print(json.dumps(dict(crossed)), flush=True)
        os._exit(0)  # the server's thread would keep the process
    trees = {"now": ROOT} | ({"before": given.against.resolve()} if given.against else {})
    results: dict[str, Any] = {"commits": {name: commit(tree) for name, tree in trees.items()}}
    rows = []
    for flow in given.only or FLOWS:
        row = [flow]
        for name, tree in trees.items():
            threads = counted(tree, flow)
            files = {file for each in threads.values() for file in each}
            by_thread = {thread: len(set(each)) for thread, each in threads.items()}
            results.setdefault(flow, {})[name] = {"files": len(files), "by thread": by_thread}
            row.append(f"{len(files)} ({', '.join(f'{thread} {n}' for thread, n in by_thread.items())})")
            if given.verbose:
                print(
                    f"{flow}, {name}:",
                    *(f"  {thread}: {' → '.join(each)}" for thread, each in threads.items()),
                    sep="\n",
                )
        rows.append(row)
    show("Python files crossed, in all and by thread", ["flow", *trees], rows)
    print(save("flows", results, folder=given.out))


if __name__ == "__main__":
    main()
