"""Requests a second and latency of the server, beside a bare aiohttp handler that decodes and echoes, in one run.

    python benchmarks/serving_floor.py [--seconds 3] [--rounds 3] [--out DIR]

The handler is the floor that aiohttp sets: uvloop, msgspec, no routing to speak of, no engine. The server runs a model
of one kernel on the virtual GPU, in its own process, and so also pays for the CPU that computes the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import save

from serving.bench import Load, run_bench

SMALL, LARGE = 64, 75_264  # floats; the larger is an image of 3 x 224 x 224 as FP16, 301 KB as FP32
SIZES = {"small": SMALL, "large": LARGE}


def models() -> list[Any]:
    import triton
    from serving_kernels import copy

    from scheduler.model import Model, TensorSpec

    def echo(name: str, n: int, batch: tuple[int, ...]) -> Model:
        def fn(weights: Any, inputs: Any, outputs: Any) -> None:
            total = inputs["x"].shape[0] * n
            copy[(triton.cdiv(total, 1024),)](inputs["x"], outputs["y"], total, B=1024)

        specs = {"inputs": {"x": TensorSpec((n,))}, "outputs": {"y": TensorSpec((n,))}}
        return Model(name, fn, batch=batch, **specs)

    return [echo("small", SMALL, (1, 2, 4, 8, 16, 32)), echo("large", LARGE, (1, 2, 4, 8))]


def serve_paellapy() -> None:
    import paellapy as pp

    pp.serve(models(), device="virtual:h200", server={"port": 0}, announce=lambda url: print(url, flush=True))


def serve_floor() -> None:
    import asyncio

    import msgspec
    import numpy as np
    import uvloop
    from aiohttp import web

    from serving.protocol import RequestBody, ResponseBody, ResponseTensor

    decode = msgspec.json.Decoder(RequestBody).decode
    encode = msgspec.json.Encoder().encode

    async def infer(request: web.Request) -> web.Response:
        body = await request.read()
        length = request.headers.get("Inference-Header-Content-Length")
        name = request.match_info["model"]
        if length is None:
            parsed = decode(body)
            array = np.array(msgspec.json.decode(parsed.inputs[0].data, type=list[float]), np.float32)
            tensor = ResponseTensor("y", "FP32", parsed.inputs[0].shape, data=array.tolist())
            return web.Response(body=encode(ResponseBody(name, "1", [tensor])), content_type="application/json")
        view = memoryview(body)
        parsed = decode(view[: int(length)])
        array = np.frombuffer(view[int(length) :], np.float32)
        tensor = ResponseTensor("y", "FP32", parsed.inputs[0].shape, {"binary_data_size": array.nbytes})
        header = encode(ResponseBody(name, "1", [tensor]))
        return web.Response(
            body=header + array.tobytes(),
            headers={"Inference-Header-Content-Length": str(len(header))},
            content_type="application/octet-stream",
        )

    async def metadata(request: web.Request) -> web.Response:
        name = request.match_info["model"]
        return web.json_response({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, SIZES[name]]}]})

    async def main() -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v2/models/{model}/infer", infer)
        app.router.add_get("/v2/models/{model}", metadata)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()

    uvloop.run(main())


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Both servers are up all the time and take turns, so that what else the machine does falls on both."""
    kinds = [("small", True), ("small", False), ("large", True)]
    cases = [(model, binary, clients) for model, binary in kinds for clients in (1, 32)]
    found: dict[str, Any] = {}
    with server("floor") as floor, server("paellapy") as ours:
        for model, binary, concurrency in cases:
            load = Load((model,), concurrency=concurrency, binary=binary, duration_s=seconds, warmup_s=seconds / 3)
            runs: dict[str, list[dict[str, Any]]] = {"floor": [], "paellapy": []}
            for _ in range(rounds):
                for name, url in (("floor", floor), ("paellapy", ours)):
                    result = run_bench(url, load)
                    assert not result["all"]["errors"], result["all"]["errors"]
                    runs[name].append(result["all"])
            label = f"{model} {'binary' if binary else 'JSON'}, {concurrency} client{'s' * (concurrency > 1)}"
            found[label] = {
                name: {
                    "per_s": statistics.median(r["answered_per_s"] for r in each),
                    "p50_ms": statistics.median(r["latency_ms"]["p50"] for r in each),
                }
                for name, each in runs.items()
            }
            a, b = found[label]["paellapy"], found[label]["floor"]
            found[label]["ratio_per_s"] = a["per_s"] / b["per_s"]
            found[label]["ratio_p50"] = a["p50_ms"] / b["p50_ms"]
            print(
                f"{label:26s} floor {b['per_s']:8.0f}/s {b['p50_ms']:7.3f} ms   paellapy {a['per_s']:8.0f}/s "
                f"{a['p50_ms']:7.3f} ms   {found[label]['ratio_per_s']:.2f}x",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=("floor", "paellapy"))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    arguments = parser.parse_args()
    if arguments.serve:
        (serve_floor if arguments.serve == "floor" else serve_paellapy)()
        return
    found = measure(arguments.seconds, arguments.rounds)
    print("written to", save("serving_floor", {"device": "virtual:h200", "cores": os.cpu_count(), "cases": found},
                             folder=arguments.out))  # fmt: skip


if __name__ == "__main__":
    main()
