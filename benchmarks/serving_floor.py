"""Requests per second and latency of the server, beside a bare aiohttp handler that decodes and echoes, in one run.

    python benchmarks/serving_floor.py [--seconds 2] [--rounds 5] [--servers floor,one,1,2]
    python benchmarks/serving_floor.py --servers floor,one,2,keys,log,keys+log --cases "small binary" --rounds 12
    python benchmarks/serving_floor.py --against CHECKOUT --seconds 0.8

The handler is the floor that aiohttp sets: uvloop, msgspec, almost no routing, no engine. `one` is the server in one
process, `keys`, `log` and `keys+log` the same with API keys, with an access log, and with both; 1, 2, … are HTTP
workers in front of an engine process. All run a model of one kernel on the virtual GPU, and so also pay for the CPU
time that computes the kernel.

All servers run all the time and are asked in turn, and each round compares with its own floor, so that other load of
the machine affects all of them. Figures are medians over the rounds. With `--against`, the servers of another version
run beside those of this one, and the ratios now ÷ before of every round are stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ServerProcess, announce, arguments, commits, finish, medians, spread, trees

from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

SMALL, LARGE = 64, 75_264  # floats; the larger is an image of 3 x 224 x 224 as FP16, 301 KB as FP32
SIZES = {"small": SMALL, "large": LARGE}
# The model of each case, and whether its tensors are binary.
CASES = {"small binary": ("small", True), "small JSON": ("small", False), "large binary": ("large", True),
         "large JSON": ("large", False)}  # fmt: skip
SLOW = 4  # a load of megabytes of JSON takes this many times as long, for enough answers
BEFORE = " before"  # behind the name of a server of another version

Runs = dict[str, dict[str, list[dict[str, Any]]]]  # by case and server


def models() -> list[Any]:
    import triton
    from kernels import copy

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
    log = {"access_log": True} if "log" in kind else {"log_level": "warning"}
    keys = {f"client {k}": f"secret {k}" for k in range(8)} if "keys" in kind else {}
    server = {"port": 0, **log}
    pp.serve(models(), device="virtual:h200", server=server, keys=keys, workers=workers, announce=announce)


def serve_floor() -> None:
    import msgspec
    import numpy as np
    import uvloop
    from aiohttp import web

    from paellapy.serving.protocol import RequestBody, ResponseBody, ResponseTensor

    decode, encode = msgspec.json.Decoder(RequestBody).decode, msgspec.json.Encoder().encode

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
        headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
        return web.Response(body=header + array.tobytes(), headers=headers)

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
        announce(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    uvloop.run(main())


def server(kind: str, checkout: Path | None = None) -> ServerProcess:
    log = subprocess.DEVNULL if "log" in kind else None
    return ServerProcess(__file__, "--serve", kind, checkout=checkout, stderr=log)


def cpu_s(pid: int) -> dict[str, float]:
    """Time on a CPU so far of a process and its children, by their names."""
    found: dict[str, float] = defaultdict(float)
    for each in (pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        name = Path(f"/proc/{each}/comm").read_text().strip()
        tasks = Path(f"/proc/{each}/task").iterdir()
        found[name] += sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9
    return found


def one_run(asked: ServerProcess, load: Load) -> dict[str, Any]:
    before, own = cpu_s(asked.process.pid), time.process_time()
    result = run_bench(asked.url, load)["all"]
    own = time.process_time() - own
    assert not result["errors"], result["errors"]
    requests = result["answered_per_s"] * (load.duration_s + load.warmup_s)
    if not requests:
        raise SystemExit(f"no request for {load.models[0]!r} was answered within {load.duration_s} s: raise --seconds")
    after = cpu_s(asked.process.pid)
    cpu_us = {name: (after[name] - before.get(name, 0.0)) / requests * 1e6 for name in after}
    return {"per_s": result["answered_per_s"], "p50_ms": result["latency_ms"]["p50"],
            "cpu_us": {**cpu_us, "client": own / requests * 1e6}}  # fmt: skip


def measure(kinds: list[str], o: Any) -> Runs:
    asked = o.cases.split(",") if o.cases else [case for case in CASES if case != "large JSON" or o.against]
    cases, servers = {case: CASES[case] for case in asked}, {}
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            checkout = trees(o)["before"] if kind.endswith(BEFORE) else None
            servers[kind] = stack.enter_context(server(kind.removesuffix(BEFORE), checkout))
        return in_rounds(kinds, cases, o, lambda kind, load: one_run(servers[kind], as_client(kind, load)))


def as_client(kind: str, load: Load) -> Load:
    """With the last of the keys, if the server has any."""
    return replace(load, headers={"X-API-Key": "secret 7"}) if kind.startswith("keys") else load


def in_rounds(
    kinds: list[str], cases: dict[str, tuple[str, bool]], o: Any, ask: Callable[[str, Load], dict[str, Any]]
) -> Runs:
    """What each server does with one client and with 32, for each model, with binary tensors or not."""
    loads: dict[str, Load] = {}
    for case, (model, binary) in cases.items():
        seconds = o.seconds * (SLOW if model == "large" and not binary else 1)
        for n in (1, 32):
            load = Load((model,), concurrency=n, binary=binary, duration_s=seconds, warmup_s=seconds / 4)
            loads[f"{case}, {n} client{'s' * (n > 1)}"] = load
    runs: Runs = {label: {kind: [] for kind in kinds} for label in loads}
    for k in range(o.rounds + 1):  # the first round warms up
        for label, load in loads.items():
            for kind in kinds[:: 1 if k % 2 else -1]:  # none is always behind the same other one
                found = ask(kind, load)
                if k:
                    runs[label][kind].append(found)
        print(f"round {k} of {o.rounds}", flush=True)
    return runs


def beside_floor(runs: Runs) -> dict[str, Any]:
    """Medians, and the median of the rounds' own ratios to the floor."""
    found: dict[str, Any] = {}
    for label, by_kind in runs.items():
        for kind, each in by_kind.items():
            pairs = list(zip(each, by_kind["floor"], strict=True))
            ratios = {f"ratio_{name.removesuffix('_ms')}": statistics.median(a[name] / b[name] for a, b in pairs)
                      for name in ("per_s", "p50_ms")}  # fmt: skip
            found.setdefault(label, {})[kind] = {**medians(each), **ratios}
    return found


def beside_before(runs: Runs) -> dict[str, Any]:
    """Ratios now ÷ before for each case and server: requests a second, median latency, CPU time of the server."""

    def server_us(run: dict[str, Any]) -> float:
        return float(sum(us for name, us in run["cpu_us"].items() if name != "client"))

    found: dict[str, Any] = {}
    for label, by_kind in runs.items():
        for kind, now in by_kind.items():
            if kind + BEFORE in by_kind:
                pairs = list(zip(now, by_kind[kind + BEFORE], strict=True))
                found.setdefault(label, {})[kind] = {
                    "per_s": spread(a["per_s"] / b["per_s"] for a, b in pairs),
                    "p50": spread(a["p50_ms"] / b["p50_ms"] for a, b in pairs),
                    "cpu": spread(server_us(a) / server_us(b) for a, b in pairs),
                }
    return found


def cpu_rows(found: dict[str, Any], titles: dict[str, str]) -> list[list[str]]:
    """CPU time of each server for a request, in µs, and the floor's divided by it. Other load of the machine changes
    it less than the requests a second, of which servers with more threads get more.
    """
    kinds = [*next(iter(found.values()))]
    rows = [["load", *(titles.get(kind, f"{kind} workers") for kind in kinds)]]
    for label, by_kind in found.items():
        us = {kind: sum(each for name, each in row["cpu_us"].items() if name != "client")
              for kind, row in by_kind.items()}  # fmt: skip
        cells = (f"{us[kind]:.0f}" + (f" ({us['floor'] / us[kind]:.2f})" if kind != "floor" else "") for kind in kinds)
        rows.append([label, *cells])
    return rows


def main() -> None:
    parser = arguments(__doc__, seconds=2.0, rounds=5, against=True)
    parser.add_argument("--serve", help="be a server")
    parser.add_argument("--servers", default="floor,one,1,2", help="floor, one, keys, log, keys+log, or workers")
    parser.add_argument("--cases", help=f"some of {', '.join(CASES)}")
    o = parser.parse_args()
    if o.serve:
        return serve_floor() if o.serve == "floor" else serve_paellapy(o.serve)
    kinds, about = o.servers.split(","), {"device": "virtual:h200", "seconds": o.seconds, "rounds": o.rounds}
    if o.against is not None:
        kinds = [each for kind in kinds if kind != "floor" for each in (kind, kind + BEFORE)]
        found = beside_before(measure(kinds, o))

        def cell(e: dict[str, Any]) -> str:
            rounds = f"{e['per_s']['least']:.2f}–{e['per_s']['most']:.2f}"
            return f"{e['per_s']['median']:.2f} ({rounds}) / {e['cpu']['median']:.2f}"

        rows = [[label, *map(cell, by_kind.values())] for label, by_kind in found.items()]
        head = ["requests a second (rounds) / CPU time", *next(iter(found.values()))]
        content = {**about, "commits": commits(o), "now ÷ before": found}
        return finish(o, "serving_floor_against", content, "now ÷ before", [head, *rows], table="serving-against")
    found = beside_floor(measure(kinds, o))
    titles = {"floor": "floor", "one": "one process", "keys": "with keys", "log": "with an access log",
              "keys+log": "with both", "1": "1 worker"}  # fmt: skip
    names = (titles.get(kind, f"{kind} workers") for kind in kinds)
    rows = [["load", *names, "ratios of requests a second", "of medians"]]
    for label, by_kind in found.items():
        over = [", ".join(f"{row[ratio]:.2f}" for kind, row in by_kind.items() if kind != "floor")
                for ratio in ("ratio_per_s", "ratio_p50")]  # fmt: skip
        rows.append([label, *(f"{row['per_s']:,.0f} / {row['p50_ms']:.2f}" for row in by_kind.values()), *over])
    if "keys" in kinds:
        rows = cpu_rows(found, titles)
        return finish(o, "serving_floor_keys", {**about, "cases": found}, "CPU time of the servers", rows)
    return finish(o, "serving_floor", {**about, "cases": found}, "requests a second / median latency in ms", rows)


if __name__ == "__main__":
    main()
