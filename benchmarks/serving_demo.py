"""The demo models served end to end: HTTP against the engine's own latency, and requests per second by HTTP workers.

    python benchmarks/serving_demo.py [--device auto] [--servers one,1,2,4,8] [--seconds 2] [--clients 4] [--out DIR]

First an engine is asked without HTTP, by one client of each model and by many clients of all; then each server in turn:
`one` has all in one process, and 1, 2, … are HTTP workers in front of an engine process. Latencies are those of one
waiting client; requests per second those of many clients in separate processes. Targets are wide enough that nothing is
refused, since a refusal is no answer.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import save
from rich.console import Console
from rich.table import Table

import paellapy as pp
from paellapy import demo
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

MANY = 128  # clients at once


def serve(device: str, workers: int) -> None:
    pp.serve(
        [demo.load(name) for name in demo.names()],
        device=device,
        server={"port": 0, "log_level": "warning"},
        workers=workers,
        announce=lambda url: print(url, flush=True),
    )


def ask(target: str | Engine, seconds: float, clients: int) -> dict[str, Any]:
    """Latency by model for a client who is alone, and what many get together."""
    found: dict[str, Any] = {}
    for name in demo.names():
        load = Load((name,), concurrency=1, duration_s=seconds, warmup_s=seconds / 4)
        one = run_bench(target, load)["models"][name]
        assert not one["errors"], one["errors"]
        found[name] = {key: round(one["latency_ms"][key], 4) for key in ("p50", "p99")}
    load = Load(concurrency=MANY, duration_s=seconds, warmup_s=seconds / 4)
    many = run_bench(target, load, clients=1 if isinstance(target, Engine) else clients)["all"]
    assert not many["errors"], many["errors"]
    found["many"] = {
        "per_s": round(many["answered_per_s"], 1),
        "refused": many["refused"],
        **{key: round(many["latency_ms"][key], 4) for key in ("p50", "p99")},
    }
    return found


def served(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--serve", kind, "--device", arguments.device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit(f"the server with workers: {kind} ended before it was ready")
            return ask(url, arguments.seconds, arguments.clients)
        finally:
            process.terminate()


def table(found: dict[str, Any]) -> Table:
    shown = Table(title="one client: p50 / p99 ms; many: requests a second", title_justify="left")
    shown.add_column("")
    for column in (*demo.names(), f"{MANY} clients/s", "p50 / p99 ms"):
        shown.add_column(column, justify="right")
    for kind, each in found.items():
        alone = [f"{each[name]['p50']:.3f} / {each[name]['p99']:.3f}" for name in demo.names()]
        many = each["many"]
        shown.add_row(kind, *alone, f"{many['per_s']:.0f}", f"{many['p50']:.2f} / {many['p99']:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--servers", default="one,1,2,4,8", help="servers to test: one, and numbers of workers")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=4, help="number of client processes for throughput")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON file (default: results/)")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device, 0 if arguments.serve == "one" else int(arguments.serve))
        return
    console, device = Console(), pp.Device(arguments.device)
    found: dict[str, Any] = {}
    with console.status("engine") as status:
        with Engine(arguments.device) as engine:
            for name in demo.names():
                engine.load(demo.load(name))
            found["engine"] = ask(engine, arguments.seconds, arguments.clients)
        for kind in arguments.servers.split(","):
            status.update(f"server with workers: {kind}")
            found[kind] = served(kind, arguments)
            settings = {"seconds": arguments.seconds, "clients": MANY, "client processes": arguments.clients}
            path = save("serving_demo", {**settings, "cores": os.cpu_count(), "found": found}, device, arguments.out)
    console.print(table(found))
    console.print("written to", str(path))


if __name__ == "__main__":
    main()
