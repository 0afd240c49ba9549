"""Latency of the first request after a load ÷ that of the tenth, each model in a fresh process.

    python benchmarks/first_request.py [--device cuda] [--models mlp,cnn] [--rounds 5]

The engine is asked directly, and over HTTP by a client in another process.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from harness import arguments, environment, ranged, save, script_in, show

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
    command = [*script_in(None, __file__), "--device", device, "--serve", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        assert server.stdout is not None
        if not (url := server.stdout.readline().strip()):
            raise SystemExit("the server ended before it was ready")
        try:
            tensors = [
                {"name": key, "datatype": "FP32", "shape": [1, *x.shape], "data": x.ravel().tolist()}
                for key, x in inputs(demo.load(name)).items()
            ]
            body, found = json.dumps({"inputs": tensors}).encode(), []
            line = http.client.HTTPConnection(url.removeprefix("http://"))
            line.connect()
            for _ in range(REQUESTS):
                since = time.perf_counter()
                line.request("POST", f"/v2/models/{name}/infer", body, {"Content-Type": "application/json"})
                answer = line.getresponse()
                answer.read()
                found.append((time.perf_counter() - since) * 1e3)
                assert answer.status == 200, answer.status
        finally:
            server.terminate()
    return found


def child(device: str, name: str, way: str) -> list[float]:
    command = [sys.executable, __file__, "--device", device, "--ask", name, way]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr[-1500:])
    found: list[float] = json.loads(run.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", rounds=3)
    parser.add_argument("--models", default=",".join(demo.names()))
    parser.add_argument("--ask", nargs=2, metavar=("MODEL", "WAY"), help="measure in this process")
    parser.add_argument("--serve", help="serve one model")
    given = parser.parse_args()
    if given.serve:
        server = {"port": 0, "log_level": "warning"}
        model = demo.load(given.serve)
        pp.serve([model], device=given.device, server=server, announce=lambda url: print(url, flush=True))
        return
    if given.ask:
        name, way = given.ask
        print(json.dumps((by_http if way == "HTTP" else by_engine)(given.device, name)))
        return
    found: dict[str, Any] = {}
    for _ in range(given.rounds):
        for name in given.models.split(","):
            for way in ("engine", "HTTP"):
                ms = child(given.device, name, way)
                row = found.setdefault(f"{name}, {way}", {"first_ms": [], "tenth_ms": [], "ratio": []})
                tenth = statistics.median(ms[8:12])  # one request may be disturbed
                for key, value in (("first_ms", ms[0]), ("tenth_ms", tenth), ("ratio", ms[0] / tenth)):
                    row[key].append(value)
    rows = [[name, *(ranged(row[key]) for key in ("first_ms", "tenth_ms", "ratio")), f"≤ {AIM}"]
            for name, row in found.items()]  # fmt: skip
    head = ["model, asked", "first request, ms", "tenth, ms", "first ÷ tenth", "aim"]
    show(f"first request on {given.device}", head, rows)
    name = f"first_request_{given.device.partition(':')[0]}"
    print(save(name, found, pp.Device(given.device), given.out, tables={name.replace("_", "-"): [head, *rows]}))


if __name__ == "__main__":
    main()
