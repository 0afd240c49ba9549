"""Latency of the first request after a load ÷ that of the tenth, each model in a fresh process.

    python benchmarks/first_request.py [--device cuda] [--models mlp,cnn] [--rounds 5]

The engine is asked directly, and over HTTP.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from typing import Any

from harness import ServerProcess, announce, arguments, finish, ranged, said_by

import paellapy as pp
from paellapy import demo

REQUESTS = 20
AIM = 1.5


def inputs(model: pp.Model) -> dict[str, Any]:
    import numpy as np

    return {name: np.zeros(spec.shape, spec.dtype) for name, spec in model.inputs.items()}


def by_engine(device: str, name: str) -> list[float]:
    """Milliseconds of the first requests of this process."""
    with pp.Engine(device) as engine:
        model = demo.load(name)
        engine.load(model)
        given, found = inputs(model), []
        for _ in range(REQUESTS):
            since = time.perf_counter()
            engine.infer_sync(name, given)
            found.append((time.perf_counter() - since) * 1e3)
    return found


def by_http(device: str, name: str) -> list[float]:
    tensors = [
        {"name": key, "datatype": "FP32", "shape": [1, *x.shape], "data": x.ravel().tolist()}
        for key, x in inputs(demo.load(name)).items()
    ]
    body, found = json.dumps({"inputs": tensors}).encode(), []
    with ServerProcess(__file__, "--device", device, "--serve", name) as server:
        line = http.client.HTTPConnection(server.url.removeprefix("http://"))
        line.connect()
        for _ in range(REQUESTS):
            since = time.perf_counter()
            line.request("POST", f"/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
            answer = line.getresponse()
            answer.read()
            found.append((time.perf_counter() - since) * 1e3)
            assert answer.status == 200, answer.status
    return found


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", rounds=3)
    parser.add_argument("--models", default=",".join(demo.names()))
    parser.add_argument("--ask", help="ask an engine in this process for one model")
    parser.add_argument("--serve", help="serve one model")
    given = parser.parse_args()
    if given.serve:
        server = {"port": 0, "log_level": "warning"}
        model = demo.load(given.serve)
        pp.serve([model], device=given.device, server=server, announce=announce)
        return
    if given.ask:
        print(json.dumps(by_engine(given.device, given.ask)))
        return
    found: dict[str, Any] = {}
    for _ in range(given.rounds):
        for name in given.models.split(","):
            by_way = {"engine": said_by(__file__, "--device", given.device, "--ask", name),
                      "HTTP": by_http(given.device, name)}  # fmt: skip
            for way, ms in by_way.items():
                row = found.setdefault(f"{name}, {way}", {"first_ms": [], "tenth_ms": [], "ratio": []})
                tenth = statistics.median(ms[8:12])  # one request may be disturbed
                for key, value in (("first_ms", ms[0]), ("tenth_ms", tenth), ("ratio", ms[0] / tenth)):
                    row[key].append(value)
    rows = [[name, *(ranged(row[key]) for key in ("first_ms", "tenth_ms", "ratio")), f"≤ {AIM}"]
            for name, row in found.items()]  # fmt: skip
    head = ["model, asked", "first request, ms", "tenth, ms", "first ÷ tenth", "aim"]
    name, title = f"first_request_{given.device.partition(':')[0]}", f"first request on {given.device}"
    finish(given, name, found, title, [head, *rows], pp.Device(given.device))


if __name__ == "__main__":
    main()
