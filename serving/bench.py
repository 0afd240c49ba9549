"""`paellapy bench URL`: load on any v2 endpoint, open-loop or closed-loop, and what its clients see of it.

Open-loop, requests come when they come, whether or not earlier ones are answered, and a request's latency counts from
when it was to be sent: a server that stalls cannot make its own load lighter, nor its latencies shorter.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from serving.bench_client import BenchError, Endpoint, Pool
from serving.datatypes import DTYPES

Arrivals = Literal["poisson", "lognormal", "even"]

ARRIVALS: dict[str, Arrivals] = {"poisson": "poisson", "lognormal": "lognormal", "even": "even"}
PERCENTILES = (50, 90, 95, 99, 99.9)
BODIES = 16  # different inputs per model, made beforehand


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests a second, or `concurrency` clients that each wait for their answer; one of the two."""

    models: tuple[str, ...] = ()  # none: all that are ready
    rate: float | None = None
    concurrency: int | None = None
    arrivals: Arrivals = "poisson"
    sigma: float = 1.5  # of the lognormal gaps
    duration_s: float = 10.0
    warmup_s: float = 1.0  # before, not counted
    items: int = 1  # per request
    binary: bool = True
    timeout_us: int | None = None
    priority: int | None = None
    connections: int = 512
    seed: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """Of one model: latencies of what was answered, and how the rest ended."""

    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0
    refused_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def summary(self, seconds: float) -> dict[str, Any]:
        found: dict[str, Any] = {
            "answered": len(self.latencies_s),
            "answered_per_s": len(self.latencies_s) / seconds,
            "refused": self.refused,
            "errors": dict(self.errors),
        }
        if self.latencies_s:
            values = np.array(self.latencies_s) * 1e3
            found["latency_ms"] = {
                "mean": float(values.mean()),
                **{f"p{p:g}": float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)},
                "max": float(values.max()),
            }
        if self.refused_s:
            found["refusal_ms"] = {"p50": float(np.median(self.refused_s) * 1e3), "max": max(self.refused_s) * 1e3}
        return found


def gaps(load: Load, rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    """Seconds between arrivals, with a mean of 1 / rate."""
    assert load.rate is not None
    if load.arrivals == "poisson":
        unit = rng.exponential(1.0, n)
    elif load.arrivals == "lognormal":
        unit = rng.lognormal(-(load.sigma**2) / 2, load.sigma, n)
    else:
        unit = np.ones(n)
    return unit / load.rate


class Bench:
    """One run against one endpoint."""

    def __init__(self, url: str, load: Load, progress: Callable[[float, int, int], None] | None = None) -> None:
        if (load.rate is None) == (load.concurrency is None):
            raise BenchError("give a rate (open-loop) or a concurrency (closed-loop), one of the two")
        if (load.rate or load.concurrency or 0) <= 0 or load.duration_s <= 0 or load.warmup_s < 0 or load.items < 1:
            raise BenchError("rate, concurrency, duration and items are above zero")
        self.url, self.load, self._progress = url, load, progress
        self.endpoint = Endpoint.of(url)
        self._rng = np.random.default_rng(load.seed)
        self.outcomes: dict[str, Outcome] = {}
        self._requests: list[tuple[str, list[bytes]]] = []
        self._counted = 0
        self.late_s = 0.0  # how late this client itself was at worst

    async def run(self) -> dict[str, Any]:
        """Loads the endpoint; a summary for JSON."""
        load = self.load
        limit = load.connections if load.concurrency is None else load.concurrency
        pool = Pool(self.endpoint, limit)
        try:
            self._requests = [(name, await self._bodies(pool, name)) for name in await self._names(pool)]
            self.outcomes = {name: Outcome() for name, _ in self._requests}
            ticker = asyncio.create_task(self._tick())
            try:
                seconds = await (self._closed(pool) if load.concurrency is not None else self._open(pool))
            finally:
                ticker.cancel()
        finally:
            pool.close()
        everything = Outcome()
        for each in self.outcomes.values():
            everything.latencies_s += each.latencies_s
            everything.refused += each.refused
            everything.refused_s += each.refused_s
            everything.errors += each.errors
        settings = {key: value for key, value in asdict(load).items() if key != "headers"}  # they may hold keys
        return {
            "url": self.url,
            "load": settings,
            "seconds": seconds,
            "client_late_ms": self.late_s * 1e3,
            "all": everything.summary(seconds),
            "models": {name: each.summary(seconds) for name, each in self.outcomes.items()},
        }

    # -- the two loops

    async def _open(self, pool: Pool) -> float:
        load, clock = self.load, time.perf_counter
        assert load.rate is not None
        tasks: set[asyncio.Task[None]] = set()
        begin = clock() + 0.01
        at, count = begin, begin + load.warmup_s
        end = count + load.duration_s
        while True:
            for gap in gaps(load, self._rng, 1024):
                at += gap
                if at >= end:
                    if tasks:
                        await asyncio.wait(tasks)
                    return load.duration_s
                if (wait := at - clock()) > 0:
                    await asyncio.sleep(wait)
                elif at >= count:
                    self.late_s = max(self.late_s, -wait)
                task = asyncio.create_task(self._one(pool, at, at >= count))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _closed(self, pool: Pool) -> float:
        load, clock = self.load, time.perf_counter
        assert load.concurrency is not None
        count = clock() + load.warmup_s
        end = count + load.duration_s

        async def client() -> None:
            while (now := clock()) < end:
                await self._one(pool, now, now >= count)

        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        return clock() - count

    async def _one(self, pool: Pool, intended: float, counted: bool) -> None:
        name, bodies = self._requests[int(self._rng.integers(len(self._requests)))]
        outcome = self.outcomes[name]
        try:
            status, body = await pool.ask(bodies[int(self._rng.integers(len(bodies)))])
        except (OSError, BenchError) as e:
            status, body = 0, str(e).encode()
        if not counted:
            return
        took = time.perf_counter() - intended
        self._counted += 1
        if status == 200:
            outcome.latencies_s.append(took)
        elif status in (429, 503):
            outcome.refused += 1
            outcome.refused_s.append(took)
        else:
            outcome.errors[f"{status or 'connection'}: {body[:120].decode(errors='replace')}"] += 1

    async def _tick(self) -> None:
        begin = time.perf_counter()
        while self._progress is not None:
            refused = sum(each.refused for each in self.outcomes.values())
            self._progress(time.perf_counter() - begin, self._counted, refused)
            await asyncio.sleep(0.1)

    # -- what is sent

    async def _get(self, pool: Pool, method: str, path: str) -> Any:
        try:
            status, body = await pool.ask(self.endpoint.request(method, path, headers=self.load.headers))
        except OSError as e:
            raise BenchError(f"{self.url} cannot be reached: {e}") from e
        if status != 200:
            raise BenchError(f"{self.url}{path}: {status} {body[:200].decode(errors='replace')}")
        try:
            return msgspec.json.decode(body)
        except msgspec.DecodeError:
            raise BenchError(f"{self.url}{path} does not answer with JSON: is it a v2 endpoint?") from None

    async def _names(self, pool: Pool) -> list[str]:
        if self.load.models:
            return list(self.load.models)
        index = await self._get(pool, "POST", "/v2/repository/index")
        names = [each["name"] for each in index if each.get("state", "READY") == "READY"]
        if not names:
            raise BenchError(f"{self.url} has no model that is ready")
        return names

    async def _bodies(self, pool: Pool, name: str) -> list[bytes]:
        metadata = await self._get(pool, "GET", f"/v2/models/{name}")
        return [self._request(name, metadata["inputs"]) for _ in range(BODIES)]

    def _request(self, name: str, inputs: list[dict[str, Any]]) -> bytes:
        load, tensors, tail = self.load, [], b""
        for each in inputs:
            if each["datatype"] not in DTYPES:
                raise BenchError(f"model {name!r}, input {each['name']!r}: {each['datatype']} inputs cannot be made up")
            shape = [load.items if extent < 0 else extent for extent in each["shape"]]
            dtype = DTYPES[each["datatype"]]
            values = self._rng.random(shape) if dtype.kind not in "biu" else self._rng.integers(0, 2, shape)
            array = np.asarray(values).astype(dtype)
            tensor: dict[str, Any] = {"name": each["name"], "shape": shape, "datatype": each["datatype"]}
            if load.binary:
                tensor["parameters"] = {"binary_data_size": array.nbytes}
                tail += array.tobytes()
            else:
                tensor["data"] = array.astype(np.float32 if dtype.kind not in "biu" else dtype).reshape(-1).tolist()
            tensors.append(tensor)
        parameters: dict[str, Any] = {"binary_data_output": load.binary}
        if load.timeout_us is not None:
            parameters["timeout"] = load.timeout_us
        if load.priority is not None:
            parameters["priority"] = load.priority
        header = json.dumps({"inputs": tensors, "parameters": parameters}).encode()
        headers = {**load.headers, "Content-Type": "application/json"}
        if load.binary:
            headers |= {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
        return self.endpoint.request("POST", f"/v2/models/{name}/infer", header + tail, headers)


def run_bench(url: str, load: Load, progress: Callable[[float, int, int], None] | None = None) -> dict[str, Any]:
    """One run, in a loop of its own: uvloop where it is installed."""
    from serving.server import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(Bench(url, load, progress).run())
