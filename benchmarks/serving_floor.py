"""Requests per second and latency of the server, beside a bare aiohttp handler that decodes and echoes, in one run.

    python benchmarks/serving_floor.py [--seconds 2] [--rounds 5] [--servers floor,one,1,2] [--out DIR]
    python benchmarks/serving_floor.py --against CHECKOUT --within 280 --rounds 3

The handler is the floor that aiohttp sets: uvloop, msgspec, almost no routing, no engine. `one` is the server in one
process, `keys` the same with eight API keys, `log` with an access log (to /dev/null); 1, 2, … are HTTP workers in
front of an engine process. All run a model of one kernel on the virtual GPU, and so also pay for the CPU time that
computes the kernel.

All servers run all the time and are asked in turn, and each round compares with its own floor, so that other load of
the machine affects all of them. Figures are medians over the rounds. With more processes than cores, requests per
second show the total CPU time of each way, the client's included; `cpu_us` has it process by process.

With --against, the servers of an earlier version run beside those of this one and are asked in the same rounds. The
file has the medians of both, and `now ÷ before` the ratios of every round and their median: requests per second, median
latency, and CPU time of the server. --within S chooses the seconds of each load so that the whole run takes S seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import save
from floor_against import BEFORE, WARM_S, WARMUP, Runs, beside_before, both, commit_of, load_seconds
from floor_against import show as show_ratios

from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

SMALL, LARGE = 64, 75_264  # floats; the larger is an image of 3 x 224 x 224 as FP16, 301 KB as FP32
SIZES = {"small": SMALL, "large": LARGE}
SLOW = 4  # a load of megabytes of JSON takes this many times as long, for enough answers


def models() -> list[Any]:
    import triton
    from serving_kernels import copy

    from paellapy.scheduler.models.model import Model, TensorSpec

    def echo(name: str, n: int, batch: tuple[int, ...]) -> Model:
        def fn(weights: Any, inputs: Any, outputs: Any) -> None:
            total = inputs["x"].shape[0] * n
            copy[(triton.cdiv(total, 1024),)](inputs["x"], outputs["y"], total, B=1024)

        specs = {"inputs": {"x": TensorSpec((n,))}, "outputs": {"y": TensorSpec((n,))}}
        return Model(name, fn, batch=batch, **specs)

    return [echo("small", SMALL, (1, 2, 4, 8, 16, 32)), echo("large", LARGE, (1, 2, 4, 8))]


def serve_paellapy(kind: str) -> None:
    import paellapy as pp

    workers = int(kind) if kind.isdigit() else 0
    log = {"access_log": True} if kind == "log" else {"log_level": "warning"}
    keys = {f"client {k}": f"secret {k}" for k in range(8)} if kind == "keys" else {}
    pp.serve(
        models(), device="virtual:h200", server={"port": 0, **log}, keys=keys, workers=workers,
        announce=lambda url: print(url, flush=True),
    )  # fmt: skip


def serve_floor() -> None:
    import asyncio

    import msgspec
    import numpy as np
    import uvloop
    from aiohttp import web

    from paellapy.serving.protocol import RequestBody, ResponseBody, ResponseTensor

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


class Running:
    """A server in processes of its own."""

    def __init__(self, kind: str, checkout: Path | None = None) -> None:
        """`checkout`: of another version, which serves in place of this one."""
        script = Path(__file__) if checkout is None else checkout / "benchmarks" / Path(__file__).name
        environment = os.environ if checkout is None else {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, str(script), "--serve", kind]
        log = subprocess.DEVNULL if kind == "log" else None
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=checkout, env=environment
        )

    @functools.cached_property
    def url(self) -> str:
        """Its address, once it is ready."""
        assert self.process.stdout is not None
        if not (said := self.process.stdout.readline().strip()):
            raise SystemExit(f"a server did not start: {' '.join(map(str, self.process.args))}")  # type: ignore[arg-type]
        return said

    def cpu_s(self) -> dict[str, float]:
        """Time on a CPU so far, by name of the process."""
        found: dict[str, float] = defaultdict(float)
        for pid in (self.process.pid, *_children(self.process.pid)):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            tasks = Path(f"/proc/{pid}/task").iterdir()
            found[name] += sum(int((each / "schedstat").read_text().split()[0]) for each in tasks) * 1e-9
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate()


@contextlib.contextmanager
def server(kind: str) -> Iterator[str]:
    """The URL of one that runs meanwhile."""
    running = Running(kind)
    try:
        yield running.url
    finally:
        running.stop()


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def one_run(asked: Running, load: Load) -> dict[str, Any]:
    before, own = asked.cpu_s(), time.process_time()
    result = run_bench(asked.url, load)["all"]
    own = time.process_time() - own
    assert not result["errors"], result["errors"]
    requests = result["answered_per_s"] * (load.duration_s + load.warmup_s)
    if not requests:
        raise SystemExit(f"no request for {load.models[0]!r} was answered within {load.duration_s} s: raise --seconds")
    cpu_us = {name: (after - before.get(name, 0.0)) / requests * 1e6 for name, after in asked.cpu_s().items()}
    cpu_us["client"] = own / requests * 1e6
    return {"per_s": result["answered_per_s"], "p50_ms": result["latency_ms"]["p50"], "cpu_us": cpu_us}


def compare(runs: list[dict[str, Any]], floors: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, and the median of the rounds' own ratios."""

    def median(values: Any) -> float:
        return round(statistics.median(values), 4)

    return {
        "per_s": median(r["per_s"] for r in runs),
        "p50_ms": median(r["p50_ms"] for r in runs),
        "cpu_us": {name: median(r["cpu_us"][name] for r in runs) for name in runs[0]["cpu_us"]},
        "ratio_per_s": median(r["per_s"] / f["per_s"] for r, f in zip(runs, floors, strict=True)),
        "ratio_p50": median(r["p50_ms"] / f["p50_ms"] for r, f in zip(runs, floors, strict=True)),
        "rounds_per_s": [round(r["per_s"], 1) for r in runs],
    }


def cases(large_json: bool) -> dict[str, tuple[str, bool, int]]:
    """Loads by their names: the model, whether its tensors are binary, and the number of clients."""
    pairs = [("small", True), ("small", False), ("large", True), *([("large", False)] if large_json else [])]
    found = [(model, binary, clients) for model, binary in pairs for clients in (1, 32)]
    return {f"{m} {'binary' if b else 'JSON'}, {n} client{'s' * (n > 1)}": (m, b, n) for m, b, n in found}


@dataclass(frozen=True, slots=True)
class Plan:
    """`checkout`: of an earlier version; a server whose name ends with BEFORE is of it. `within_s`: 0 for no limit."""

    kinds: list[str]
    seconds: float
    rounds: int
    checkout: Path | None = None
    within_s: float = 0.0


def times_as_long(model: str, binary: bool) -> int:
    return SLOW if model == "large" and not binary else 1


def measure(plan: Plan) -> tuple[Runs, float]:
    """And the seconds of each load, but for the slow ones."""
    began, wanted = time.monotonic(), cases(large_json=plan.checkout is not None)
    weight = sum(times_as_long(model, binary) for model, binary, _ in wanted.values())
    runs: Runs = {label: {kind: [] for kind in plan.kinds} for label in wanted}
    servers: dict[str, Running] = {}
    seconds = WARM_S if plan.within_s else plan.seconds
    try:
        for kind in plan.kinds:
            servers[kind] = Running(kind.removesuffix(BEFORE), plan.checkout if kind.endswith(BEFORE) else None)
        for each in servers.values():
            assert each.url  # it is up
        for k in range(plan.rounds + 1):  # the first round warms up
            round_began = time.monotonic()
            for label, (model, binary, clients) in wanted.items():
                long_s = seconds * times_as_long(model, binary)
                load = Load((model,), concurrency=clients, binary=binary, duration_s=long_s, warmup_s=long_s * WARMUP,
                            headers={"X-API-Key": "secret 3"})  # fmt: skip
                for kind in plan.kinds[:: 1 if k % 2 else -1]:  # none is always behind the same other one
                    if k:
                        runs[label][kind].append(one_run(servers[kind], load))
                    else:
                        run_bench(servers[kind].url, load)
            print(f"round {k} of {plan.rounds}: {seconds:.2f} s a load", flush=True)
            if plan.within_s and not k:
                left_s, warm_s = plan.within_s - (time.monotonic() - began), time.monotonic() - round_began
                seconds = load_seconds(left_s, warm_s, weight * len(servers), plan.rounds)
    finally:
        for each in servers.values():
            each.process.terminate()
        for each in servers.values():
            each.process.communicate()
    return runs, seconds


def beside_floor(runs: Runs) -> dict[str, Any]:
    return {label: {kind: compare(each, by_kind["floor"]) for kind, each in by_kind.items()}
            for label, by_kind in runs.items()}  # fmt: skip


def show(found: dict[str, Any]) -> None:
    for label, by_kind in found.items():
        print(label)
        for kind, each in by_kind.items():
            cpu = ", ".join(f"{name} {us:.0f}" for name, us in each["cpu_us"].items() if us >= 1)
            print(
                f"  {kind:6s} {each['per_s']:8.0f}/s ({each['ratio_per_s']:.2f}x)   p50 {each['p50_ms']:7.3f} ms "
                f"({each['ratio_p50']:.2f}x)   CPU µs a request: {cpu}"
            )


def compare_versions(plan: Plan, named: str | None, out: Path | None) -> None:
    assert plan.checkout is not None
    about = {"device": "virtual:h200", "cores": os.cpu_count(), "before": commit_of(plan.checkout, named)}
    runs, seconds = measure(plan)
    found = beside_before(runs)
    show_ratios(found)
    content = {**about, "seconds": round(seconds, 3), "rounds": plan.rounds, "cases": both(runs), "now ÷ before": found}
    print("written to", save("serving_floor_against", content, folder=out))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--servers", default="floor,one,1,2", help="floor, one, keys, log, and numbers of workers")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", type=float, default=0.0, help="seconds of the whole run, in place of --seconds")
    parser.add_argument("--against", type=Path, help="checkout of an earlier version")
    parser.add_argument("--before", help="commit of that checkout, where it has no git")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    arguments = parser.parse_args()
    if arguments.serve:
        if arguments.serve == "floor":
            serve_floor()
        else:
            serve_paellapy(arguments.serve)
        return
    kinds = arguments.servers.split(",")
    if arguments.against is not None:
        kinds = [each for kind in kinds if kind != "floor" for each in (kind, kind + BEFORE)]
        checkout = arguments.against.resolve()
        plan = Plan(kinds, arguments.seconds, arguments.rounds, checkout, arguments.within)
        compare_versions(plan, arguments.before, arguments.out)
        return
    runs, seconds = measure(Plan(kinds, arguments.seconds, arguments.rounds, None, arguments.within))
    found = beside_floor(runs)
    show(found)
    about = {"device": "virtual:h200", "cores": os.cpu_count(), "seconds": round(seconds, 3)}
    content = {**about, "rounds": arguments.rounds, "cases": found}
    print("written to", save("serving_floor", content, folder=arguments.out))


if __name__ == "__main__":
    main()
