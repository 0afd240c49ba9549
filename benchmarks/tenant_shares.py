"""Tenants with shares 1, 3 and 6 that always have requests waiting: the GPU time that each gets.

    python benchmarks/tenant_shares.py [--device cuda] [--seconds 4]

It tests the policy `fair` in three ways: `simulate`, an engine asked by threads, and a server asked over HTTP by client
processes that name their tenant in `X-Client-Id`. All ask for one model, with one request per batch. A tenant's GPU
time is taken from the core's account, or the server's metrics, and counted while all three ask.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import arguments, environment, save, show, stored

import paellapy as pp
from paellapy import demo
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.load import run_bench

SHARES = {"a": 1.0, "b": 3.0, "c": 6.0}
CLIENTS = 48  # of each tenant: even the largest share leaves some of its own waiting
POLICY = "fair"
TENANTS = {name: {"share": share} for name, share in SHARES.items()}


def model(device: str) -> pp.Model:
    """One that clients can ask for faster than the device answers."""
    if device.startswith("cuda"):
        from models import Bound

        return Bound("compute_bound").model((1,), 4, 0, "cuda")
    return demo.load("cnn", batch=(1,))


def divided(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    had = {name: after[name] - before[name] for name in SHARES}
    found = {name: each / sum(had.values()) for name, each in had.items()}
    off = max(abs(found[name] * sum(SHARES.values()) / share - 1) for name, share in SHARES.items())
    return {"shares": found, "furthest_off": off}


def counted(look: Callable[[], dict[str, float]], seconds: float) -> dict[str, Any]:
    time.sleep(1.0)  # all of them ask by now
    before = look()
    time.sleep(seconds)
    return divided(before, look())


def by_engine(device: str, seconds: float) -> tuple[dict[str, Any], pp.ModelProfile]:
    stop = threading.Event()
    with pp.Engine(device, policy=POLICY) as engine:
        made = model(device)
        engine.load(made)
        for name, share in SHARES.items():
            engine.tenant(name, share=share)
        inputs = {key: np.zeros(spec.shape, spec.dtype) for key, spec in made.inputs.items()}

        def ask(client: str) -> None:
            while not stop.is_set():
                engine.infer_sync(made.name, inputs, client=client)

        threads = [threading.Thread(target=ask, args=(name,)) for name in SHARES for _ in range(CLIENTS)]
        for each in threads:
            each.start()
        found = counted(lambda: {name: each["gpu_ms"] for name, each in engine.tenants.items()}, seconds)
        stop.set()
        for each in threads:
            each.join()
        return found, engine.model_profile(made.name)


def by_simulation(profile: pp.ModelProfile, seconds: float) -> dict[str, Any]:
    """The second half of a run; the requests that wait at its end are in both halves, and cancel out."""

    def had(duration: float) -> dict[str, float]:
        a, b, c = (pp.ClosedLoop(profile.name, clients=CLIENTS, duration=duration, client=name) for name in SHARES)
        found: dict[str, float] = pp.simulate([profile], a + b + c, POLICY, tenants=TENANTS).gpu_ms["clients"]
        return found

    return divided(had(seconds), had(2 * seconds))


def gpu_seconds(url: str) -> dict[str, float]:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    rows = re.findall(r'^paellapy_tenant_gpu_seconds_total\{tenant="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in rows}


def by_http(device: str, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", device, "--seconds", str(seconds + 6)]
    server = subprocess.Popen([*command, "--serve"], stdout=subprocess.PIPE, text=True, env=environment())
    asking: list[subprocess.Popen[bytes]] = []
    try:
        assert server.stdout is not None
        if not (url := server.stdout.readline().strip()):
            raise SystemExit("the server ended before it was ready")
        asking += [subprocess.Popen([*command, "--ask", url, name], env=environment()) for name in SHARES]
        waits_until = time.monotonic() + 60
        while len(gpu_seconds(url)) < len(SHARES) or min(gpu_seconds(url).values()) == 0.0:
            if time.monotonic() > waits_until or any(each.poll() for each in asking):
                raise SystemExit("a client has asked for nothing")
            time.sleep(0.1)
        return counted(lambda: gpu_seconds(url), seconds)
    finally:
        for each in (*asking, server):
            each.terminate()
            each.wait()


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=4.0)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--ask", nargs=2, metavar=("URL", "TENANT"), help="be a client")
    o = parser.parse_args()
    if o.serve:
        server = {"port": 0, "log_level": "warning"}
        pp.serve([model(o.device)], device=o.device, policy=POLICY, tenants=TENANTS, server=server,
                 announce=lambda url: print(url, flush=True))  # fmt: skip
        return
    if o.ask:
        url, name = o.ask
        run_bench(url, Load(concurrency=CLIENTS, duration_s=o.seconds, warmup_s=0.0, headers={"X-Client-Id": name}))
        return
    found: dict[str, Any] = {"shares": SHARES, "clients_of_each": CLIENTS}
    found["engine"], profile = by_engine(o.device, o.seconds)
    found["simulate"] = by_simulation(profile, o.seconds)
    found["http"] = by_http(o.device, o.seconds)
    name = o.device.partition(":")[0]
    rows = []
    for device, title in (("virtual", "virtual GPU"), ("cuda", "H200")):
        known = found if device == name else stored(f"tenant_shares_{device}", o.out)
        for way in ("engine", "http", "simulate"):
            if way in known:
                shares = " : ".join(f"{x:.3f}" for x in known[way]["shares"].values())
                rows.append([way, title, shares, f"{100 * known[way]['furthest_off']:.1f} %"])
    head = ["asked over", "on", "part of the GPU's time", "furthest off"]
    show("tenants of shares 1, 3 and 6", head, rows)
    tables = {"tenant-shares": [head, *rows]}
    print(save(f"tenant_shares_{name}", found, pp.Device(o.device), o.out, tables=tables))


if __name__ == "__main__":
    main()
