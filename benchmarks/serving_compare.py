"""The same trivial model behind LitServe, a bare aiohttp handler (the floor) and our server, in one run.

    python benchmarks/serving_compare.py [--seconds 3] [--rounds 5] [--workers 0 1 2] [--venv DIR] [--out DIR]

One closed-loop client with 1 and 32 connections asks all of them. All servers run all the time and take turns, so that
other load of the machine affects all alike; figures are medians over the rounds. LitServe is installed into its own
environment (a temporary folder, or `--venv`, which is kept). It takes no binary bodies: it gets small tensors as JSON,
as the others do in one of the cases, and large ones as base64 in JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import save
from serving_floor import SIZES, models
from serving_floor import server as floor_server

from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import Bench, run_bench, summarize
from paellapy.serving.bench.targets import BODIES, HttpTarget, Inputs, made_up
from paellapy.serving.preflight import loop_factory

HERE = Path(__file__).parent
CASES = [("small", True), ("small", False), ("large", True)]


class LitTarget(HttpTarget):
    """LitServe: no metadata to ask for, and large tensors as text."""

    async def prepare(self, rng: np.random.Generator) -> list[str]:
        for name in self.load.models:
            inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, SIZES[name]]}]
            self._inputs[name] = [(inputs, made_up(name, inputs, 1, rng)) for _ in range(BODIES)]
        return list(self.load.models)

    def _make(self, name: str, inputs: Any, arrays: Inputs, timeout_us: int | None, level: int | None) -> bytes:
        x = arrays["x"]
        data = base64.b64encode(x.tobytes()).decode() if name == "large" else x.reshape(-1).tolist()
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": data}]}
        headers = {"Content-Type": "application/json"}
        return self._endpoint.request("POST", f"/v2/models/{name}/infer", json.dumps(body).encode(), headers)


def serve_paellapy(workers: int) -> None:
    import paellapy as pp

    settings = {"port": 0, "workers": workers}
    pp.serve(models(), device="virtual:h200", server=settings, announce=lambda url: print(url, flush=True))


@contextlib.contextmanager
def paellapy_server(workers: int) -> Iterator[str]:
    command = [sys.executable, __file__, "--serve", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate()


def environment(folder: Path) -> Path:
    """A Python with LitServe in it."""
    python = folder / "bin" / "python"
    if not python.exists():
        print("installing LitServe into an environment of its own", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "litserve", "numpy"], check=True)
    return python


@contextlib.contextmanager
def litserve_server(python: Path, *options: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, HERE / "serving_litserve.py", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    break
            if process.poll() is not None:
                raise SystemExit("LitServe did not start")
            time.sleep(0.1)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):  # it starts processes of its own
            os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def ask(kind: str, url: str, load: Load) -> dict[str, Any]:
    if not kind.startswith("litserve"):
        return run_bench(url, load)["all"]
    target = LitTarget(url, load)
    bench = Bench(target, load)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(bench.run())
    return summarize(url, load, [(bench.outcomes, bench.seconds, bench.late_s)])["all"]


def measure(servers: dict[str, str], seconds: float, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for model, binary in CASES:
        for concurrency in (1, 32):
            load = Load((model,), concurrency=concurrency, binary=binary, duration_s=seconds, warmup_s=seconds / 3)
            runs: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
            for turn in range(rounds):
                names = list(servers)
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    result = ask(name, servers[name], load)
                    assert not result["errors"], (name, result["errors"])
                    runs[name].append(result)
            label = f"{model} {'binary' if binary else 'JSON'}, {concurrency} client{'s' * (concurrency > 1)}"
            found[label] = {name: _median(each) for name, each in runs.items()}
            shown = "   ".join(f"{k} {v['per_s']:.0f}/s {v['p50_ms']:.2f} ms" for k, v in found[label].items())
            print(f"{label:26s} {shown}", flush=True)
    return found


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    per_s = [run["answered_per_s"] for run in runs]
    p50 = [run["latency_ms"]["p50"] for run in runs]
    return {
        "per_s": statistics.median(per_s),
        "p50_ms": statistics.median(p50),
        "per_s_all": [round(each, 1) for each in per_s],
        "p50_ms_all": [round(each, 4) for each in p50],
    }


def ratios(cases: dict[str, Any]) -> dict[str, Any]:
    """Of the medians: requests a second over LitServe's best and over the floor's, and p50 over the floor's."""
    found: dict[str, Any] = {}
    for label, servers in cases.items():
        rivals = [each["per_s"] for name, each in servers.items() if name.startswith("litserve")]
        for name, ours in servers.items():
            if name.startswith("paellapy"):
                found.setdefault(label, {})[name] = {
                    "per_s_over_litserve": ours["per_s"] / max(rivals),
                    "per_s_over_floor": ours["per_s"] / servers["floor"]["per_s"],
                    "p50_over_floor": ours["p50_ms"] / servers["floor"]["p50_ms"],
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2], help="0: HTTP and engine in one process")
    parser.add_argument("--venv", type=Path, default=None, help="environment where LitServe is or will be installed")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve_paellapy(arguments.serve)
        return
    with contextlib.ExitStack() as stack:
        folder = arguments.venv or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        python = environment(folder)
        servers = {
            "floor": stack.enter_context(floor_server("floor")),
            "litserve": stack.enter_context(litserve_server(python)),
            "litserve fast queue": stack.enter_context(litserve_server(python, "--fast-queue")),
        }
        for n in arguments.workers:
            name = "paellapy" if n == 0 else f"paellapy, {n} worker{'s' * (n > 1)}"
            servers[name] = stack.enter_context(paellapy_server(n))
        version = subprocess.run([python, "-c", "import litserve; print(litserve.__version__)"],
                                 capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
        cases = measure(servers, arguments.seconds, arguments.rounds)
    found = {
        "device": "virtual:h200", "cores": os.cpu_count(), "litserve": version, "rounds": arguments.rounds,
        "seconds": arguments.seconds, "cases": cases, "ratios": ratios(cases),
    }  # fmt: skip
    for label, each in found["ratios"].items():
        for name, values in each.items():
            print(f"{label:26s} {name:20s} " + "  ".join(f"{key} {value:.2f}" for key, value in values.items()))
    print("written to", save("serving_compare", found, folder=arguments.out))


if __name__ == "__main__":
    main()
