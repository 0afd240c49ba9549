"""The same trivial model behind LitServe, a bare aiohttp handler (the floor) and our server, in one run.

    python benchmarks/serving_compare.py [--seconds 3] [--rounds 5] [--servers one,1,2] [--venv DIR]

One closed-loop client with 1 and 32 connections asks all of them. All servers run all the time and take turns, so that
other load of the machine affects all alike; figures are medians over the rounds. LitServe is installed into its own
environment (a temporary folder, or `--venv`, which is kept). It takes no binary bodies: it gets small tensors as JSON,
as the others do in one of the cases, and large ones as base64 in JSON.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, finish, medians
from serving_floor import SIZES, in_rounds, server

from paellapy.cluster.processes import free_port
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import Bench, run_bench, summarize
from paellapy.serving.bench.targets import BODIES, HttpTarget, Inputs, made_up
from paellapy.serving.preflight import loop_factory

CASES = {"small, ours binary": ("small", True), "small, all JSON": ("small", False),
         "large, ours binary": ("large", True)}  # fmt: skip
LITSERVE = """
import base64, sys
import litserve as ls
import numpy as np

class Echo(ls.LitAPI):
    def setup(self, device):
        pass
    def decode_request(self, request):
        tensor = request["inputs"][0]
        if isinstance(tensor["data"], str):
            return np.frombuffer(base64.b64decode(tensor["data"]), np.float32).reshape(tensor["shape"]), True
        return np.array(tensor["data"], np.float32).reshape(tensor["shape"]), False
    def predict(self, x):
        return x[0].copy(), x[1]
    def encode_response(self, output):
        y, text = output
        data = base64.b64encode(y.tobytes()).decode() if text else y.reshape(-1).tolist()
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": list(y.shape), "data": data}]}

if __name__ == "__main__":
    apis = [Echo(api_path=f"/v2/models/{name}/infer") for name in ("small", "large")]
    server = ls.LitServer(apis, accelerator="cpu", fast_queue="--fast-queue" in sys.argv, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error", access_log=False)
"""


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


@contextlib.contextmanager
def litserve(python: Path, script: Path, *options: str) -> Iterator[str]:
    port = free_port("127.0.0.1")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([python, script, str(port), *options], start_new_session=True, **quiet)
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


def ask(kind: str, url: str, load: Load) -> dict[str, float]:
    if kind.startswith("litserve"):
        bench = Bench(LitTarget(url, load), load)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(bench.run())
        found = summarize(url, load, [(bench.outcomes, bench.seconds, bench.late_s)])["all"]
    else:
        found = run_bench(url, load)["all"]
    assert not found["errors"], (kind, found["errors"])
    return {"per_s": found["answered_per_s"], "p50_ms": found["latency_ms"]["p50"]}


def main() -> None:
    parser = arguments(__doc__, seconds=3.0, rounds=5)
    parser.add_argument("--servers", default="one,1,2", help="one: HTTP and engine in one process; numbers of workers")
    parser.add_argument("--venv", type=Path, help="environment where LitServe is or will be installed")
    o = parser.parse_args()
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder, script = o.venv or scratch / "venv", scratch / "serving_litserve.py"
        script.write_text(LITSERVE)
        python = folder / "bin" / "python"
        if not python.exists():
            print("installing LitServe into an environment of its own", flush=True)
            venv.create(folder, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", "litserve", "numpy"], check=True)
        ours = {"paellapy" if kind == "one" else f"paellapy, {kind} workers": kind for kind in o.servers.split(",")}
        started = {name: stack.enter_context(server(kind)) for name, kind in {"floor": "floor", **ours}.items()}
        servers = {name: each.url for name, each in started.items()}
        servers["litserve"] = stack.enter_context(litserve(python, script))
        servers["litserve fast queue"] = stack.enter_context(litserve(python, script, "--fast-queue"))
        version = subprocess.check_output([python, "-c", "import litserve; print(litserve.__version__)"], text=True)
        runs = in_rounds(list(servers), CASES, o, lambda kind, load: ask(kind, servers[kind], load))
    cases = {label: {name: medians(each) for name, each in by_server.items()} for label, by_server in runs.items()}
    rows = []
    for label in CASES:
        row = cases[f"{label}, 32 clients"]
        best = max(row[name]["per_s"] for name in row if name.startswith("litserve"))
        over = ", ".join(f"{row[name]['per_s'] / best:.1f}" for name in ours)
        rows.append([label, f"{best:,.0f}", *(f"{row[name]['per_s']:,.0f}" for name in ours), over])
    head = ["load", "LitServe", *(name.removeprefix("paellapy, ").replace("paellapy", "one process") for name in ours),
            "over LitServe"]  # fmt: skip
    content = {"device": "virtual:h200", "litserve": version.strip(), "rounds": o.rounds, "seconds": o.seconds}
    finish(o, "serving_compare", {**content, "cases": cases}, "requests a second, 32 clients", [head, *rows])


if __name__ == "__main__":
    main()
