"""Texts over HTTP: how long does the event loop stand still while 64 clients send them?

    MINILM=folder python benchmarks/texts.py [--device virtual:h200] [--seconds 20]

An encoder serves /v1/embeddings in this process; another one has the clients. Texts have a lognormal length of 8 to 250
words; each 20th request is wrong: no text, a huge one, an empty list, wrong dimensions. A callback every millisecond
sees for how long the loop did not run; a third process with an idle loop sees how much of that is the machine's. The
encoder is a small random one, or that of the folder $MINILM.

    python benchmarks/texts.py --load [--device virtual:h200] [--seeds 3]

How many texts a second are answered in time, 99 of 100? Lengths are lognormal, 8 to 512 tokens. All texts at 512
tokens, a dynamic batcher for each size, and the engine's lengths: in simulated time with the device's profiles, and on
a GPU also measured. Each text has the smallest size that fits it; clients of an engine may also choose a larger one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
from harness import arguments, save, show

CLIENTS, EVERY_S = 64, 0.001
FIGURES = ("longest_ms", "p999_ms", "above_5_ms", "callback_ms")
WRONG = [
    {"input": "word " * 100_000}, {"input": []}, {"input": "a", "dimensions": 1 << 20}, {"input": "a", "model": "none"},
]  # fmt: skip


LENGTHS, BATCH = (32, 64, 128, 256, 512), (1, 4, 16)
DEADLINE = 10.0  # times the time of one text of 512 tokens alone
IN_TIME, SECONDS, STEP = 0.99, 0.5, 1.03


class Gaps:
    """How long an event loop did not run, by a callback that asks for every millisecond; and the CPU time of its
    longest callback, which other work of the machine does not change.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._last = self._callback_s = 0.0
        self._run = asyncio.Handle._run

    def begin(self) -> None:
        asyncio.Handle._run = lambda handle: self._timed(handle)
        self._last = time.perf_counter()
        asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def _timed(self, handle: asyncio.Handle) -> None:
        began = time.thread_time()
        self._run(handle)
        self._callback_s = max(self._callback_s, time.thread_time() - began)

    def _look(self) -> None:
        now = time.perf_counter()
        self.ms.append((now - self._last - EVERY_S) * 1e3)
        self._last = now
        asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def figures(self) -> dict[str, float]:
        ms = sorted(self.ms)
        return {
            "longest_ms": ms[-1], "p999_ms": ms[int(len(ms) * 0.999)], "above_5_ms": sum(each > 5 for each in ms),
            "callback_ms": self._callback_s * 1e3,
        }  # fmt: skip


async def idle(seconds: float) -> dict[str, float]:
    gaps = Gaps()
    gaps.begin()
    await asyncio.sleep(seconds)
    return gaps.figures()


async def clients(url: str, seconds: float) -> dict[str, float]:
    """Each client sends its next text when it has its answer."""
    answers, took = {"right": 0, "refused": 0}, []
    end = time.monotonic() + seconds

    async def client(k: int, session: aiohttp.ClientSession) -> None:
        rng = random.Random(k)
        while time.monotonic() < end:
            wrong = rng.random() < 0.05
            words = min(250, max(8, int(rng.lognormvariate(4.0, 0.9))))
            text = " ".join(rng.choice(("w1", "w2", "w3", "the", "house")) for _ in range(words))
            body = {"model": "texts", **(rng.choice(WRONG) if wrong else {"input": text})}
            began = time.monotonic()
            async with session.post(f"{url}/v1/embeddings", json=body) as answer:
                await answer.read()
            assert answer.status in ((400, 404) if wrong else (200,)), (answer.status, words, wrong)
            answers["refused" if wrong else "right"] += 1
            took.append((time.monotonic() - began) * 1e3)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CLIENTS)) as session:
        await asyncio.gather(*(client(k, session) for k in range(CLIENTS)))
    took.sort()
    return {**answers, "p50_ms": took[len(took) // 2], "p99_ms": took[int(len(took) * 0.99)]}


async def measured(o: argparse.Namespace) -> dict[str, Any]:
    import paellapy as pp
    from paellapy.serving.config import ServerConfig
    from paellapy.serving.preflight import share_interpreter, spare_objects
    from paellapy.serving.registry import Registry, entry_of
    from paellapy.serving.server import Server

    share_interpreter()
    with tempfile.TemporaryDirectory() as made:
        folder = os.environ.get("MINILM")
        if folder is None:
            from encoder_families import encoder

            folder = made
            encoder("Bert", Path(made), max_position_embeddings=512, num_hidden_layers=1)
        model = await asyncio.to_thread(pp.Model.from_pretrained, folder, name="texts", batch=(1, 8),
                                        capture="ahead")  # fmt: skip
    with pp.Engine(o.device) as engine:
        server = Server(Registry(engine, [entry_of(model)]), ServerConfig(port=0, grace_s=0.0))
        await server.start()
        await server.load()
        await asyncio.to_thread(spare_objects)
        ask = [sys.executable, __file__, "--url", server.url, "--seconds"]
        await run([*ask, "2"])  # what is made once
        gaps = Gaps()
        gaps.begin()
        sent, beside = await asyncio.gather(run([*ask, str(o.seconds)]), run([sys.executable, __file__, "--idle",
                                            "--seconds", str(o.seconds)]))  # fmt: skip
        found = {"stall": gaps.figures(), "idle": beside, "clients": sent}
        await server.stop()
        return found


@dataclass(frozen=True, slots=True)
class System:
    """How texts become batches: all at the longest size, each size by itself, or as the engine does it."""

    policy: str
    sizes: str = "lengths"  # or "longest", or "apart": a queue for each size, which knows no other
    instances: int = 0  # of each size; 0: as many as the engine gives it
    active: int | None = None


SYSTEMS = {
    "all at 512": System("paella", "longest"),
    "dynamic batcher, sizes at once": System("streams", "apart", 1),
    "dynamic batcher, two of each size": System("streams", "apart", 2),
    "dynamic batcher, one at a time": System("fifo", "apart", 1, active=1),
    "lengths": System("paella"), "lengths, slack": System("slack"),
}  # fmt: skip
Holds = Callable[[System, float, int], bool]  # whether 99 of 100 texts are in time at a rate


def in_time(o: argparse.Namespace) -> dict[str, Any]:
    """The highest rate at which 99 of 100 texts are in time, by system: simulated and, on a GPU, measured."""
    import numpy as np
    from encoder_families import encoder

    import paellapy as pp

    tokens = np.random.default_rng(0).lognormal(4.0, 0.9, 100_000).clip(8, LENGTHS[-1])
    part = np.bincount(np.searchsorted(LENGTHS, tokens), minlength=len(LENGTHS)) / len(tokens)
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    real = o.device.startswith("cuda")
    found: dict[str, Any] = {"part_by_length": {str(n): float(p) for n, p in zip(LENGTHS, part, strict=True)}}
    with tempfile.TemporaryDirectory() as folder:
        encoder("Bert", Path(folder), max_position_embeddings=512, **shape)
        for instances in sorted({each.instances for each in SYSTEMS.values()}) if real else [0]:
            with pp.Engine(o.device) as engine:
                engine.load(pp.Model.from_pretrained(
                    folder, name="texts", length=LENGTHS, batch=BATCH, capture="ahead", before=None, takes=None,
                    instances=instances or None, dtype="float16" if real else None,
                ))  # fmt: skip
                if instances == 0:
                    profiles = [engine.model_profile("texts", length=n) for n in LENGTHS]
                    deadline_ms = DEADLINE * profiles[-1].alone_ns() / 1e6
                    alone = {str(n): each.alone_ns() / 1e6 for n, each in zip(LENGTHS, profiles, strict=True)}
                    found |= {"deadline_ms": deadline_ms, "alone_ms": alone}
                    found["per_second"] = highest(simulated(profiles, part, deadline_ms), SYSTEMS, o.seeds)
                if real:
                    systems = {name: each for name, each in SYSTEMS.items() if each.instances == instances}
                    rates = highest(measured_on(engine, part, deadline_ms), systems, o.seeds[:1], 1000.0)
                    found.setdefault("measured_per_second", {}).update(rates)
    return found


def highest(holds: Holds, systems: dict[str, System], seeds: Sequence[int], least: float = 100.0) -> dict[str, float]:
    """By system: the median over seeds."""

    def of(system: System, seed: int) -> float:
        low, high = least, 2 * least
        while holds(system, high, seed):
            low, high = high, 2 * high
        while high / low > STEP:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(system, middle, seed) else (low, middle)
        return low

    return {name: statistics.median(of(each, seed) for seed in seeds) for name, each in systems.items()}


def simulated(profiles: Sequence[Any], part: Any, deadline_ms: float) -> Holds:
    import paellapy as pp

    def holds(system: System, rate: float, seed: int) -> bool:
        apart = {"length_of": ""} if system.sizes == "apart" else {}
        models = [replace(each, instances=system.instances or each.instances, **apart) for each in profiles]
        mix = {each.name: float(p) for each, p in zip(profiles, part, strict=True)}
        names = {profiles[-1].name: 1.0} if system.sizes == "longest" else mix
        load = pp.Poisson(rate, names, duration=SECONDS, deadline_ms=deadline_ms)
        given = [each for each in models if each.name in names]
        run = pp.simulate(given, load, system.policy, seed=seed, active=system.active)
        return bool(run.all.within_target >= IN_TIME)

    return holds


def measured_on(engine: Any, part: Any, deadline_ms: float) -> Holds:
    import numpy as np
    from engine_load import Generator, poisson

    from paellapy.scheduler.core import codes

    base = engine.core.models.find("texts")
    sizes = list(base.by_length.values())
    draw = np.random.default_rng(1)
    inputs = [np.concatenate([draw.integers(4, 60, (8, each.model.length)) if key == "input_ids" else
                              np.full((8, each.model.length), int(key == "attention_mask"))
                              for key in each.model.inputs], 1).astype(np.int64) for each in sizes]  # fmt: skip
    generator = Generator(engine, [each.model.name for each in sizes], inputs)
    table, rows = engine.core.state.model, [each.row for each in sizes]
    together, limits = table["length_of"][rows].copy(), [int(deadline_ms * 1e6)] * len(sizes)

    def holds(system: System, rate: float, seed: int) -> bool:
        engine.set_policy(system.policy)
        if system.active is not None:
            engine.core.state.core["max_active"][0] = system.active
        table["length_of"][rows] = 0 if system.sizes == "apart" else together
        n, rng = int(rate * SECONDS), np.random.default_rng(seed)
        share = [0.0] * (len(sizes) - 1) + [1.0] if system.sizes == "longest" else part
        model = rng.choice(len(sizes), n, p=share).astype(np.int64)
        run = generator.run(poisson(rng, rate, n), model, rng.integers(0, 8, n), deadline_ns=limits, may_fail=True)
        good = (run.status == codes.OK) & (run.latency_ns <= limits[0])
        return bool(good.mean() >= IN_TIME)

    return holds


async def run(command: list[str]) -> Any:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(said)


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=20.0, seeds=range(3))
    parser.add_argument("--load", action="store_true", help="texts a second that are in time, simulated")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.url or o.idle:
        print(json.dumps(asyncio.run(clients(o.url, o.seconds) if o.url else idle(o.seconds))))
        return
    from paellapy.instrument.device import Device
    if o.load:
        made = in_time(o)
        kinds = {"simulated": made["per_second"]}
        if "measured_per_second" in made:
            kinds = {"measured": made["measured_per_second"], **kinds}
        head = ["system", *(f"{kind}{of}" for kind in kinds for of in (", texts/s", " ÷ all at 512"))]
        rows = [(name, *(cell for rates in kinds.values()
                         for cell in (f"{rates[name]:,.0f}", f"{rates[name] / rates['all at 512']:.2f}")))
                for name in SYSTEMS]  # fmt: skip
        show("Texts a second, 99 % in time", head, rows)
        save("texts_load", made, Device.open(o.device), o.out, tables={"texts-load": [head, *rows]})
        return
    with asyncio.Runner() as runner:  # Python's own loop, whose callbacks can be timed
        found = runner.run(measured(o))
    of_loops = [(name, *(f"{found[name][key]:.2f}" for key in FIGURES))
            for name in ("stall", "idle")]  # fmt: skip
    head = ["", "longest, ms", "99.9 %, ms", "times above 5 ms", "longest callback, CPU ms"]
    show("The event loop did not run", head, of_loops)
    print(found["clients"])
    save("texts", found, Device.open(o.device), o.out)


if __name__ == "__main__":
    main()
