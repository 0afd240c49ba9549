"""Texts over HTTP: how long does the event loop stand still while 64 clients send them?

    MINILM=folder python benchmarks/texts.py [--device virtual:h200] [--seconds 20]

An encoder serves /v1/embeddings in this process; another one has the clients. Texts have a lognormal length of 8 to 250
words; each 20th request is wrong: no text, a huge one, an empty list, wrong dimensions. A callback every millisecond
sees for how long the loop did not run; a third process with an idle loop sees how much of that is the machine's. The
encoder is a small random one, or that of the folder $MINILM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from harness import arguments, save, show

CLIENTS, EVERY_S = 64, 0.001
FIGURES = ("longest_ms", "p999_ms", "above_5_ms", "own_work_ms")
WRONG = [
    {"input": "word " * 100_000}, {"input": []}, {"input": "a", "dimensions": 1 << 20}, {"input": "a", "model": "none"},
]  # fmt: skip


class Gaps:
    """How long an event loop did not run, by a callback that asks for every millisecond; and how much of that its own
    work took, in CPU time of its thread.
    """

    def __init__(self) -> None:
        self.ms: list[float] = []
        self.own_ms: list[float] = []
        self._last = self._last_cpu = 0.0

    def begin(self) -> None:
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()
        asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def _look(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        self.ms.append((now - self._last - EVERY_S) * 1e3)
        self.own_ms.append((cpu - self._last_cpu) * 1e3)
        self._last, self._last_cpu = now, cpu
        asyncio.get_running_loop().call_later(EVERY_S, self._look)

    def figures(self) -> dict[str, float]:
        ms = sorted(self.ms)
        return {
            "longest_ms": ms[-1], "p999_ms": ms[int(len(ms) * 0.999)], "above_5_ms": sum(each > 5 for each in ms),
            "own_work_ms": max(self.own_ms),
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


async def run(command: list[str]) -> Any:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(said)


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=20.0)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--idle", action="store_true", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.url or o.idle:
        print(json.dumps(asyncio.run(clients(o.url, o.seconds) if o.url else idle(o.seconds))))
        return
    from paellapy.instrument.device import Device
    from paellapy.serving.preflight import loop_factory

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        found = runner.run(measured(o))
    rows = [(name, *(f"{found[name][key]:.2f}" for key in FIGURES))
            for name in ("stall", "idle")]  # fmt: skip
    head = ["", "longest, ms", "99.9 %, ms", "times above 5 ms", "longest own work, ms"]
    show("The event loop did not run", head, rows)
    print(found["clients"])
    save("texts", found, Device.open(o.device), o.out)


if __name__ == "__main__":
    main()
