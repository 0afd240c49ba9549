"""The demo models served end to end: HTTP against the engine's own latency, and requests per second by HTTP workers.

    python benchmarks/serving_demo.py [--device cuda] [--servers one,1,2,4,8] [--seconds 2] [--clients 4]

First an engine is asked without HTTP, by one client of each model and by many clients of all; then each server in turn:
`one` has all in one process, and 1, 2, … are HTTP workers in front of an engine process. Latencies are those of one
waiting client; requests per second those of many clients in separate processes.
"""

from __future__ import annotations

from typing import Any

from harness import ServerProcess, announce, arguments, finish

import paellapy as pp
from paellapy import demo
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

MANY = 128  # clients at once
TITLES = {"engine": "engine, no HTTP", "one": "one process", "1": "1 worker"}


def ask(target: str | pp.Engine, seconds: float, clients: int) -> dict[str, Any]:
    """Latency by model for a client who is alone, and the throughput of many."""
    found: dict[str, Any] = {}
    for name in demo.names():
        load = Load((name,), concurrency=1, duration_s=seconds, warmup_s=seconds / 4)
        one = run_bench(target, load)["models"][name]
        assert not one["errors"], one["errors"]
        found[name] = {key: one["latency_ms"][key] for key in ("p50", "p99")}
    load = Load(concurrency=MANY, duration_s=seconds, warmup_s=seconds / 4)
    many = run_bench(target, load, clients=1 if isinstance(target, pp.Engine) else clients)["all"]
    assert not many["errors"], many["errors"]
    latency = {key: many["latency_ms"][key] for key in ("p50", "p99")}
    return {**found, "many": {"per_s": many["answered_per_s"], "refused": many["refused"], **latency}}


def main() -> None:
    parser = arguments(__doc__, device="cuda", seconds=2.0)
    parser.add_argument("--serve", help="be a server")
    parser.add_argument("--servers", default="one,1,2,4,8", help="one, and numbers of workers")
    parser.add_argument("--clients", type=int, default=4, help="number of client processes for throughput")
    o = parser.parse_args()
    models = [demo.load(name) for name in demo.names()]
    if o.serve:
        workers = 0 if o.serve == "one" else int(o.serve)
        server = {"port": 0, "log_level": "warning"}
        pp.serve(models, device=o.device, server=server, workers=workers, announce=announce)
        return
    with pp.Engine(o.device) as engine:
        for model in models:
            engine.load(model)
        found = {"engine": ask(engine, o.seconds, o.clients)}
    for kind in o.servers.split(","):
        with ServerProcess(__file__, "--serve", kind, "--device", o.device) as server:
            found[kind] = ask(server.url, o.seconds, o.clients)
    rows = []
    for kind, each in found.items():
        alone = (f"{1e3 * each[name]['p50']:.0f} / {1e3 * each[name]['p99']:.0f}" for name in demo.names())
        many = each["many"]
        rows.append([TITLES.get(kind, f"{kind} workers"), *alone, f"{many['per_s']:,.0f}",
                     f"{many['p50']:.2f} / {many['p99']:.2f}"])  # fmt: skip
    head = ["server", *(f"`{name}`, µs" for name in demo.names()), "requests a second", "ms"]
    figures = {}
    if "one" in found:
        added = [1e3 * (found["one"][name]["p50"] - found["engine"][name]["p50"]) for name in demo.names()]
        figures = {"demo.http-least": f"{min(added):.0f}", "demo.http-most": f"{max(added):.0f}"}
    if "one" in found and "8" in found:
        figures["demo.eight-workers"] = f"{found['8']['many']['per_s'] / found['one']['many']['per_s']:.1f}"
    content = {"seconds": o.seconds, "clients": MANY, "client processes": o.clients, "found": found}
    title = f"one client: p50 / p99; {MANY} clients: requests a second, p50 / p99"
    finish(o, "serving_demo", content, title, [head, *rows], pp.Device(o.device), figures=figures)


if __name__ == "__main__":
    main()
