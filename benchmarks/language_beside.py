"""Language models beside other work on one GPU: in one process under one policy, and in processes under MPS.

    python benchmarks/language_beside.py [--parts targets mps high five] [--device virtual:h200 --quick]

`targets`: eight chats beside a closed loop of resnet50 on batches of 64 images, for several times between tokens, and
under streams and stream priorities; `mps`: the same in two processes. `high`: requests of high priority for resnet50
beside chats. `five`: a language model, two encoders, resnet50 and training, all in one process and in one each.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
import numpy as np
from background import serving, trainee
from language_models import SHAPES, rounds_of, write_folder, write_texts
from models import Kind

import paellapy as pp

PARTS = ("targets", "mps", "high", "five")
TARGETS_MS = (3, 4, 6, 10)
CHATS, TOKENS = 8, 400
LOOP = Kind("resnet50", items=64)
# Percentages of the SMs that MPS gives to the processes, by role; others have all.
MPS_TWO: dict[str, dict[str, int]] = {"MPS": {}, "MPS, loop 50 %": {"loop": 50}}
MPS_FIVE: dict[str, dict[str, int]] = {
    "MPS": {}, "MPS, training 30 %": {"train": 30}, "MPS, parts": {"texts": 60, "bert": 40, "distilbert": 40,
                                                                   "resnet50": 40, "train": 20},
}  # fmt: skip


def where(o: Any) -> str:
    return "cuda" if o.device.startswith("cuda") else "cpu"


# -- eight chats and a loop


async def chats(engine: pp.Engine, vocabulary: int, count: int, tokens: int, ended: Callable[[], bool]) -> list[float]:
    """Times between tokens, in ms, of chats that begin at once; they ask again until this is over."""
    gaps: list[float] = []

    async def chat(seed: int) -> None:
        rng = np.random.default_rng(seed)
        while True:
            last = 0.0
            prompt = rng.integers(0, vocabulary, 64).tolist()
            async for _ in engine.generate("model", prompt, max_tokens=tokens, temperature=0.6, ignore_eos=True):
                now = time.perf_counter()
                if last:
                    gaps.append((now - last) * 1e3)
                last = now
            if ended():
                return

    await asyncio.gather(*(chat(k) for k in range(count)))
    return gaps


async def loops(engine: pp.Engine, loop: Kind, seconds: float, ended: asyncio.Event) -> float:
    """Batches per second of two clients that ask again at once."""
    answered, began, batch = 0, time.perf_counter(), {"input": loop.inputs()[0]}

    async def one() -> None:
        nonlocal answered
        while not ended.is_set() and time.perf_counter() - began < seconds:
            await engine.infer(loop.label, batch)
            answered += 1

    await asyncio.gather(one(), one())
    return answered / (time.perf_counter() - began)


def summary(gaps: list[float], target: float, shared: float, alone: float) -> dict[str, float]:
    p50, p99 = np.quantile(gaps, (0.5, 0.99))
    return {"in_time": float(np.mean(np.array(gaps) <= target)), "tbt_p50_ms": float(p50), "tbt_p99_ms": float(p99),
            "loop": shared / alone}  # fmt: skip


def beside(engine: pp.Engine, vocabulary: int, loop: Kind, o: Any, target: float) -> dict[str, float]:
    async def both() -> dict[str, float]:
        ended = asyncio.Event()
        alone = await loops(engine, loop, o.seconds / 3, ended)
        task = asyncio.create_task(loops(engine, loop, math.inf, ended))
        gaps = await chats(engine, vocabulary, o.chats, o.tokens, lambda: True)
        ended.set()
        return summary(gaps, target, await task, alone)

    return asyncio.run(both())


def targets(o: Any, folder: Path) -> dict[str, Any]:
    setups = [(f"slack, {t} ms", "slack", t, 0) for t in ((1000,) if o.quick else TARGETS_MS)]
    setups += [("streams", "streams", TARGETS_MS[-1], 0), ("stream priorities", "streams", TARGETS_MS[-1], 1),
               ("priority", "priority", TARGETS_MS[-1], 1)]  # fmt: skip
    found = {}
    with pp.Engine(o.device) as engine:
        engine.load(o.loop.model((1,), 2, 0, where(o)))
        for name, policy, target, priority in setups:
            engine.set_policy(policy)
            engine.load(texts_of(folder, o, tbt_ms=target, priority=priority))
            write_texts(engine, [(8, 4)] * o.chats, SHAPES[o.shape][6])
            found[name] = rounds_of([beside(engine, SHAPES[o.shape][6], o.loop, o, target) for _ in range(o.rounds)])
            engine.unload("model")
            print(f"{name}: {json.dumps({k: v for k, v in found[name].items() if k != 'rounds'})}", flush=True)
    return found


def texts_of(folder: Path, o: Any, **options: Any) -> pp.LanguageModel:
    about = {"sequences": o.chats, "context": 1024, "chunk": 64 if o.quick else 256, "capture": "ahead"}
    return pp.LanguageModel(folder, name="model", **{**about, **options})


# -- processes


class Child:
    """A role in a process of its own, which does what it is told and says what it found."""

    def __init__(self, role: str, folder: Path, o: Any, percent: int | None, env: dict[str, str]) -> None:
        more = {**env, **({} if percent is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)})}
        command = [sys.executable, __file__, "--role", role, "--folder", str(folder), "--device", o.device,
                   "--shape", o.shape, *(["--quick"] if o.quick else [])]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=harness.environment(**more)
        )

    def tell(self, **what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def said(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"a process ended: {self._process.args!s}")

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def children(roles: dict[str, int | None], folder: Path, o: Any) -> Iterator[dict[str, Child]]:
    with ExitStack() as stack:
        env = {} if where(o) == "cpu" else stack.enter_context(harness.mps_daemon())
        found = {}
        for role, percent in roles.items():
            found[role] = Child(role, folder, o, percent, env)
            stack.callback(found[role].end)
        for each in found.values():
            each.said()
        yield found


def mps(o: Any, folder: Path) -> dict[str, Any]:
    found = {}
    for name, percent in MPS_TWO.items():
        with children({role: percent.get(role) for role in ("chats", "loop")}, folder, o) as two:
            runs = []
            for _ in range(o.rounds):
                two["loop"].tell(seconds=o.seconds / 3)
                alone = two["loop"].said()["rate"]
                two["loop"].tell(seconds=None)
                two["chats"].tell(tokens=o.tokens)
                gaps = two["chats"].said()["gaps"]
                two["loop"].tell(end=True)
                runs.append({**summary(gaps, TARGETS_MS[-1], two["loop"].said()["rate"], alone), "alone": alone})
        found[name] = rounds_of(runs)
        print(f"{name}: {json.dumps({k: v for k, v in found[name].items() if k != 'rounds'})}", flush=True)
    whole = found["MPS"]["alone"]
    for each in found.values():  # a loop that has fewer SMs is slower alone, too
        each["loop"] *= each["alone"] / whole
    return found


def be_chats(o: Any) -> None:
    with pp.Engine(o.device, policy="slack") as engine:
        engine.load(texts_of(o.folder, o))
        write_texts(engine, [(8, 4)] * o.chats, SHAPES[o.shape][6])
        answer(ready=True)
        for line in sys.stdin:
            about = json.loads(line)
            gaps = asyncio.run(chats(engine, SHAPES[o.shape][6], o.chats, about["tokens"], lambda: True))
            answer(gaps=gaps)


def be_loop(o: Any) -> None:
    with pp.Engine(o.device, policy="streams") as engine:
        engine.load(o.loop.model((1,), 2, 0, where(o)))
        answer(ready=True)

        async def obey() -> None:
            read = asyncio.get_running_loop().run_in_executor
            running, ended = None, asyncio.Event()
            while line := await read(None, sys.stdin.readline):
                about = json.loads(line)
                if about.get("end") and running is not None:
                    ended.set()
                    answer(rate=await running)
                elif about["seconds"] is None:
                    ended = asyncio.Event()
                    running = asyncio.create_task(loops(engine, o.loop, math.inf, ended))
                else:
                    answer(rate=await loops(engine, o.loop, about["seconds"], asyncio.Event()))

        asyncio.run(obey())


def answer(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# -- requests of high priority beside chats


def high(o: Any, folder: Path) -> dict[str, Any]:
    runs = []
    with serving(o.device, o.quick) as (engine, load):
        engine.load(texts_of(folder, o))
        vocabulary = SHAPES[o.shape][6]
        for seed in range(o.rounds):
            alone = load(seed, o.seconds)
            began = time.perf_counter()
            gaps = asyncio.run(chats(engine, vocabulary, o.chats, o.tokens, lambda: True))
            own = len(gaps) / (time.perf_counter() - began)
            ended, texts = threading.Event(), []
            thread = threading.Thread(
                target=lambda ended=ended, texts=texts: texts.extend(
                    asyncio.run(chats(engine, vocabulary, o.chats, o.tokens, ended.is_set))
                )
            )
            began = time.perf_counter()
            thread.start()
            time.sleep(0.1)
            shared = load(seed, o.seconds)
            ended.set()
            thread.join()
            rate = len(texts) / (time.perf_counter() - began)
            p99, p99_alone = float(np.percentile(shared, 99)), float(np.percentile(alone, 99))
            runs.append({"p99_alone_ms": p99_alone, "p99_ms": p99, "p99": p99 / p99_alone,
                         "p50": float(np.median(shared) / np.median(alone)), "tokens": rate / own})  # fmt: skip
        found = {**rounds_of(runs), "wrong": load.wrong}
    print(json.dumps(found), flush=True)
    return found


# -- five models


class Role:
    """A model with its load: `run` returns the part of what was asked that was answered in time."""

    def __init__(self, name: str, o: Any, folder: Path) -> None:
        self.name, self._o, self._folder = name, o, folder
        self._alone = 1.0

    def load(self, engine: pp.Engine) -> None:
        o = self._o
        if self.name == "texts":
            engine.load(texts_of(self._folder, o, ttft_ms=1e4 if o.quick else 200, tbt_ms=1e4 if o.quick else 15))
            write_texts(engine, [(8, 4)] * 2, SHAPES[o.large][6])
        elif self.name == "train":
            step, state = trainee("transformer", where(o), o.quick)
            self.job = engine.background(step, name="train", state=state)
            self._alone = self.speed(o.seconds)
            self.job.pause()
        else:
            kind = Kind("tiny4") if o.quick else Kind(self.name)
            self.kind, self.ms, self.rate = kind, *FIVE[self.name]
            if o.quick:
                self.ms, self.rate = 1e4, 10.0
            model = kind.model((1, 4, 8), 2, 0, where(o)).changed(name=self.name, target_ms=self.ms)
            engine.load(model)

    def speed(self, seconds: float) -> float:
        before, began = self.job.steps, time.perf_counter()
        time.sleep(seconds)
        return float((self.job.steps - before) / (time.perf_counter() - began))

    def run(self, engine: pp.Engine, seed: int, seconds: float) -> float:
        if self.name == "train":
            self.job.resume()
            speed = self.speed(seconds)
            self.job.pause()
            return speed / self._alone
        ask = self._text if self.name == "texts" else self._request
        rate = (2.0 if self._o.quick else 4.0) if self.name == "texts" else self.rate
        return asyncio.run(self._poisson(engine, ask, rate, seed, seconds))

    async def _poisson(self, engine: pp.Engine, ask: Any, rate: float, seed: int, seconds: float) -> float:
        rng = np.random.default_rng(seed)
        gaps = rng.exponential(1.0 / rate, max(2, int(rate * seconds)))
        began, due, tasks = time.perf_counter(), 0.0, []
        for k, gap in enumerate(gaps):
            due += float(gap)
            if (wait := due - (time.perf_counter() - began)) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(ask(engine, k, began + due)))
        return float(np.mean(await asyncio.gather(*tasks)))

    async def _request(self, engine: pp.Engine, k: int, due: float) -> float:
        given = self.kind.inputs()
        await engine.infer(self.name, {next(iter(engine.models[self.name].inputs)): given[k % len(given)]})
        return float(time.perf_counter() - due <= self.ms * 1e-3)

    async def _text(self, engine: pp.Engine, k: int, due: float) -> float:
        """The part of its tokens that are in time."""
        o = self._o
        prompt = np.random.default_rng(k).integers(0, SHAPES[o.large][6], 32 if o.quick else 250).tolist()
        last, in_time, limit = due, [], 0.2
        async for _ in engine.generate("model", prompt, max_tokens=8 if o.quick else 100, ignore_eos=True):
            now = time.perf_counter()
            in_time.append(o.quick or now - last <= limit)
            last, limit = now, 0.015
        return float(np.mean(in_time))


# target in ms, requests per second
FIVE = {"bert": (8.0, 150.0), "distilbert": (5.0, 300.0), "resnet50": (5.0, 250.0)}
ROLES = ("texts", *FIVE, "train")


def five(o: Any, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pp.Engine(o.device, policy="slack") as engine:
        roles = [Role(name, o, folder) for name in ROLES]
        for each in reversed(roles):
            each.load(engine)
        found["one process"] = goodput([at_once(engine, roles, seed, o.seconds) for seed in range(o.rounds + 1)][1:])
    print(json.dumps(found), flush=True)
    for name, percent in MPS_FIVE.items():
        with children({role: percent.get(role) for role in ROLES}, folder, o) as each:
            runs = []
            for seed in range(o.rounds + 1):
                for child in each.values():
                    child.tell(seed=seed, seconds=o.seconds)
                runs.append({role: child.said()["good"] for role, child in each.items()})
        found[name] = goodput(runs[1:])
        print(json.dumps({name: found[name]}), flush=True)
    best = max(each["all"] for name, each in found.items() if name != "one process")
    return {**found, "over_mps": found["one process"]["all"] / best}


def goodput(runs: list[dict[str, float]]) -> dict[str, Any]:
    return rounds_of([{**run, "all": sum(run.values())} for run in runs])


def at_once(engine: pp.Engine, roles: list[Role], seed: int, seconds: float) -> dict[str, float]:
    good: dict[str, float] = {}

    def run(role: Role) -> None:
        good[role.name] = role.run(engine, seed, seconds)

    threads = [threading.Thread(target=run, args=(each,)) for each in roles]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return {each.name: good[each.name] for each in roles}


def be_role(name: str, o: Any) -> None:
    with pp.Engine(o.device, policy="slack") as engine:
        role = Role(name, o, o.folder)
        role.load(engine)
        answer(ready=True)
        for line in sys.stdin:
            about = json.loads(line)
            answer(good=role.run(engine, about["seed"], about["seconds"]))


# -- all


def rows_beside(results: dict[str, Any]) -> list[Any]:
    made: list[Any] = [("chats and a loop under", "in time", "TBT p50, ms", "p99, ms", "loop ÷ alone")]
    for name, each in {**results.get("targets", {}), **results.get("mps", {})}.items():
        made.append((name, f"{100 * each['in_time']:.1f} %", f"{each['tbt_p50_ms']:.2f}",
                     f"{each['tbt_p99_ms']:.2f}", f"{each['loop']:.2f}"))  # fmt: skip
    return made


def rows_five(results: dict[str, Any]) -> list[Any]:
    made: list[Any] = [("five models in", *ROLES, "sum")]
    for name, each in results.get("five", {}).items():
        if name != "over_mps":
            made.append((name, *(f"{each[role]:.2f}" for role in ROLES), f"{each['all']:.2f}"))
    return made


def figures(results: dict[str, Any]) -> dict[str, str]:
    found = {}
    if "high" in results:
        found["text.high"] = f"{results['high']['p99']:.2f}"
        found["text.high-tokens"] = f"{results['high']['tokens']:.2f}"
    if "five" in results:
        found["text.five"] = f"{results['five']['over_mps']:.2f}"
    return found


def main() -> None:
    parser = harness.arguments(__doc__, device="cuda", quick=True, rounds=5, seconds=1.5)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="0.6B", help="of the chats")
    parser.add_argument("--large", choices=SHAPES, default="4B", help="of the one among five models")
    parser.add_argument("--role", help="be one of the processes")
    parser.add_argument("--folder", type=Path, help="of its language model")
    o = parser.parse_args()
    o.chats, o.tokens, o.loop = CHATS, TOKENS, LOOP
    if o.quick:
        o.device, o.rounds, o.seconds = "virtual:h200", 2, 0.3
        o.chats, o.tokens, o.loop, o.shape, o.large = 2, 4, Kind("tiny4", items=4), "tiny", "tiny"
    if o.role:
        {"chats": be_chats, "loop": be_loop}.get(o.role, lambda o: be_role(o.role, o))(o)
        return
    results = harness.stored("language_beside", o.out)
    with tempfile.TemporaryDirectory() as made:
        for part in o.parts:
            folder = Path(made) / (o.large if part == "five" else o.shape)
            if not folder.exists():
                folder.mkdir()
                write_folder(folder, folder.name)
            results[part] = {"targets": targets, "mps": mps, "high": high, "five": five}[part](o, folder)
            save(results, o)
    tables = {"language-models-beside": rows_beside(results), "language-models-five": rows_five(results)}
    for name, (head, *lines) in tables.items():
        harness.show(name, head, lines)
    print(json.dumps(figures(results)))


def save(results: dict[str, Any], o: Any) -> None:
    with pp.Device(o.device) as device:
        tables = {"language-models-beside": rows_beside(results), "language-models-five": rows_five(results)}
        harness.save("language_beside", results, device, o.out, tables=tables, figures=figures(results))


if __name__ == "__main__":
    main()
