"""The number of Python files that a request, a reload of weights and a training step cross, on the virtual GPU.

    python benchmarks/flows.py [--against CHECKOUT]

Counts files of paellapy in which a Python function is called between two moments; compiled code is not seen. Threads of
the engine are counted too, and listed one by one.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from harness import PRODUCT, arguments, commits, said_by, save, show, trees

import paellapy as pp
from paellapy import demo

DEVICE = "virtual:h200"
HERE = Path(pp.__file__).parents[1]
INSIDE = tuple(f"{HERE / folder}/" for folder in PRODUCT)
crossed: dict[str, set[str]] = defaultdict(set)  # files by thread
watching = threading.Event()


def watch(frame: Any, event: str, _: Any) -> None:
    file = frame.f_code.co_filename
    if watching.is_set() and event == "call" and file.startswith(INSIDE):
        crossed[threading.current_thread().name].add(os.path.realpath(file))


@contextmanager
def watched() -> Iterator[None]:
    crossed.clear()
    watching.set()
    yield
    watching.clear()


def wait(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.0005)


def http_flow() -> None:
    """A warm binary request: server and engine in one process."""
    signal.signal = lambda *_: None  # type: ignore[assignment]  # the server is not in the main thread
    uvloop.Loop.add_signal_handler = lambda *_, **__: None
    url: list[str] = []
    model = demo.load("mlp")
    settings = {"device": DEVICE, "server": {"port": 0}, "announce": url.append}
    threading.Thread(target=lambda: pp.serve([model], **settings), name="server", daemon=True).start()
    wait(lambda: url)
    ((name, spec),) = model.inputs.items()
    x = np.zeros(spec.shape, np.float32)
    tensor = {"name": name, "datatype": "FP32", "shape": [1, *spec.shape], "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    line = http.client.HTTPConnection(url[0].removeprefix("http://"))

    def ask() -> None:
        line.request("POST", f"/v2/models/{model.name}/infer", head + x.tobytes(), headers)
        answer = line.getresponse()
        said = answer.read()
        assert answer.status == 200, said

    for _ in range(5):
        ask()
    time.sleep(0.5)
    with watched():
        ask()
        time.sleep(0.05)


def reload_flow() -> None:
    """A request whose model's weights were evicted."""
    with pp.Engine(DEVICE, memory_bytes=24 << 20) as engine:
        models = [demo.load(name) for name in ("mlp", "cnn")]
        for model in models:
            engine.load(model)

        def ask(model: Any) -> None:
            engine.infer_sync(model.name, {k: np.zeros(spec.shape, spec.dtype) for k, spec in model.inputs.items()})

        for _ in range(2):
            for model in models:
                ask(model)
            engine.evict("mlp")
        with watched():
            ask(models[0])


def step_flow() -> None:
    """One step of a training job, its data included."""
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1e-3))

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = (torch.randn(4, 8) for _ in range(1 << 20))
    with pp.Engine(DEVICE) as engine:
        job = engine.background(step, state=[net, optimizer], data=data)
        wait(lambda: job.steps >= 6)
        job.pause()
        wait(lambda: job.state == "paused")
        done = job.steps
        job.resume()
        with watched():
            wait(lambda: job.steps > done)
        job.stop()
        job.join()


FLOWS = {"http": http_flow, "reload": reload_flow, "step": step_flow}


def main() -> None:
    parser = arguments(__doc__, against=True)
    parser.add_argument("--flow", choices=FLOWS, help="count one in this process")
    given = parser.parse_args()
    if given.flow:
        threading.setprofile(watch)
        sys.setprofile(watch)
        FLOWS[given.flow]()
        sys.setprofile(None)
        print(json.dumps({thread: sorted(files) for thread, files in crossed.items()}), flush=True)
        os._exit(0)  # the server's thread would keep the process
    results: dict[str, Any] = {"commits": commits(given)}
    rows = []
    for flow in FLOWS:
        row = [flow]
        for name, tree in trees(given).items():
            threads = said_by(__file__, "--flow", flow, checkout=tree)
            by_thread = {thread: len(files) for thread, files in threads.items()}
            results.setdefault(flow, {})[name] = {"files": len(set().union(*threads.values())), "by thread": by_thread}
            row.append(f"{results[flow][name]['files']} ({', '.join(f'{t} {n}' for t, n in by_thread.items())})")
        rows.append(row)
    show("Python files crossed, in all and by thread", ["flow", *trees(given)], rows)
    print(save("flows", results, folder=given.out))


if __name__ == "__main__":
    main()
