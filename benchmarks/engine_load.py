"""Engines with models under a compiled load generator, which is never the bottleneck, and which checks every output.

While the generator runs it takes the place of the engine's own producer, so nobody else may use the engine; with
`producer=1` it is the second of an engine that has two (`Limits(producers=2)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from models import VARIANTS, Kind
from numpy.typing import NDArray

from paellapy.instrument.numba_ext.cache import EntryCache
from paellapy.scheduler.core import codes, rings, tables
from paellapy.scheduler.core.admission import ADMISSION_REQUEST, ADMITTED, end_admitted, new_limits, reader, try_admit
from paellapy.scheduler.core.atomics import call_launch, call_write, copy_bytes, load_at, store_at
from paellapy.scheduler.core.copier import copy_inputs
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.rings import must_ring
from paellapy.scheduler.core.state import Limits, producer_rows, read_clock
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.policies.policy import Policy

GIVE_UP_NS = 60_000_000_000


def compiled(function: Any) -> Any:
    """Kept on disk until anything changes that it calls. Unlike the core it allocates memory, so Numba links it."""
    made = numba.njit(nogil=True, error_model="numpy")(function)
    made._cache = EntryCache(function)
    return made


@compiled
def ring_bell(word: Any, bell: int, write: int, scratch: Any) -> None:
    if must_ring(word.ctypes.data, True):
        scratch[0] = 1
        call_write(write, np.int32(bell), scratch.ctypes.data, np.uint64(8))


@compiled
def drive(
    s: Any, producer: int, ask: Any, limits: Any, n: int, at_ns: Any, model: Any, which: Any, loops: Any,
    until_ns: int, rows: Any, source: Any, priority: Any, client: Any, deadline_ns: Any, out_address: Any,
    out_bytes: Any, outstanding: int, think_ns: int, owner: Any, free: Any, buffer: Any, results: Any, arrival: Any,
    finish: Any, status: Any, word: Any, bell: int, pauses: Any, scratch: Any, asked: Any, message: Any,
) -> int:  # fmt: skip
    """Sends request i < n at at_ns[i], at most `outstanding` at a time, and waits for all; how many were sent, or -1.

    Beside them each entry of `loops` is a client of that model that asks again as soon as it is answered, until
    `until_ns` and until the others are done. Their requests are numbered from n on. With `limits` for every model
    requests that would be late are refused when they come; `ask` is the state with a scratch row of its own. After an
    answer nothing is sent for `think_ns`. `pauses`: the longest time the generator stood still.
    """
    room = model.shape[0]
    n_free = free.shape[0]
    start = read_clock(s, scratch)
    sent = done = 0
    next_loop, in_loops, idle = n, 0, loops.copy()
    n_idle = idle.shape[0]
    thinks_until = last = np.int64(0)
    while done < n or in_loops > 0 or (next_loop < room and n_idle > 0 and scratch[6] < until_ns):
        now = read_clock(s, scratch) - start
        scratch[6] = now
        if now > GIVE_UP_NS:
            return -1
        pauses[0] = max(pauses[0], now - last)
        last = now
        posted = False
        while n_free > 0:
            if sent < n and sent - done < outstanding and at_ns[sent] <= now and now >= thinks_until:
                i = sent
                # Latency counts from when the request was due, also when the generator comes late.
                arrival[i] = start + (at_ns[i] if at_ns[i] > 0 else now)
                sent += 1
            elif n_idle > 0 and next_loop < room and (now < until_ns or done < n):
                i = next_loop
                n_idle -= 1
                model[i], arrival[i] = idle[n_idle], start + now
                next_loop += 1
                in_loops += 1
            else:
                break
            row = free[n_free - 1]
            m = model[i]
            due = codes.NEVER if deadline_ns[m] == 0 else arrival[i] + deadline_ns[m]
            limit = deadline_ns[m]
            if limits.shape[0] > 0 and limit > 0:
                a = asked[0]
                a.model, a.priority, a.deadline_ns, a.limit_ns = rows[m], priority[m], due, float(limit)
                a.entered_ns, a.now_ns = arrival[i], start + now
                if try_admit(ask, limits, m, a) != ADMITTED:
                    status[i], finish[i] = codes.QUEUE_FULL, arrival[i]
                    done += 1
                    continue
            # As a server does it: straight into a slot of the instance that is open, if one is.
            at = rings.claim_slot(s, producer, rows[m], client[m])
            instance = slot = codes.NONE
            if at >= 0:
                instance, slot = at // rings.SLOTS, at % rings.SLOTS
            c = message[0]
            c.request, c.serial, c.model, c.instance, c.slot = row, i + 1, rows[m], instance, slot
            c.client, c.priority, c.arrival_ns, c.deadline_ns = client[m], priority[m], arrival[i], due
            c.source = source[m, which[i]]
            while not rings.publish(s, producer, message.ctypes.data):
                ring_bell(word, bell, s.call[0].write, scratch[4:])
            if at >= 0:
                copy_inputs(s, source[m, which[i]], instance, slot, rows[m])
                rings.set_ready(s, instance, slot)
            owner[row] = i
            n_free -= 1
            posted = True
            break  # a copy takes its time: others may be done by now, and who is due next is let in by the clock
        k = rings.take_completions(s, producer, buffer.ctypes.data, buffer.shape[0])
        for j in range(k):
            entry = buffer[j]
            row = entry.request
            i = owner[row]
            finish[i], status[i] = entry.finish_ns, entry.status
            if entry.status == codes.OK:
                n_bytes = out_bytes[model[i]]
                where = out_address[entry.instance] + np.uint64(entry.slot * n_bytes)
                copy_bytes(results[i : i + 1].ctypes.data, where, np.uint64(n_bytes))
                rings.clear_hold(s, entry.instance, entry.slot)
            if limits.shape[0] > 0 and deadline_ns[model[i]] > 0:
                end_admitted(s, limits, model[i], arrival[i], finish[i], float(deadline_ns[model[i]]), entry.status)
            free[n_free] = row
            n_free += 1
            thinks_until = now + think_ns
            if i < n:
                done += 1
            else:
                idle[n_idle] = model[i]
                n_idle += 1
                in_loops -= 1
        if posted or k > 0:
            ring_bell(word, bell, s.call[0].write, scratch[4:])
    scratch[7] = read_clock(s, scratch) - start
    return next_loop


@compiled
def launch_alone(s: Any, instance: int, size: int, source: Any, think_ns: int, times: Any, scratch: Any) -> None:
    """One launch of an instance's whole graph, seen complete by spinning on its word: nothing can be quicker.

    With `source` the inputs are first copied to where the graph reads them, as for every request.
    """
    w = s.whole[instance, size]
    for k in range(times.shape[0]):
        begin = read_clock(s, scratch)
        if source.shape[0] > 0:
            copy_inputs(s, source[k % source.shape[0]], instance, 0, s.instance[instance].model)
        if call_launch(s.call[0].graph_launch, w.handle, s.stream[s.instance[instance].pool, 0]) != 0:
            times[k] = -1
            return
        while load_at(w.word) == np.uint64(0):
            pass
        end = read_clock(s, scratch)
        times[k] = end - begin
        store_at(w.word, np.uint64(0))
        while read_clock(s, scratch) < end + think_ns:
            pass


def lognormal_gaps(rng: np.random.Generator, rate: float, sigma: float, n: int) -> NDArray[np.int64]:
    """Arrival times with lognormal gaps of the given mean rate, as Paella's clients have them."""
    gaps = rng.lognormal(np.log(1e9 / rate) - sigma**2 / 2, sigma, n)
    return np.cumsum(gaps).astype(np.int64) + 1


def poisson(rng: np.random.Generator, rate: float, n: int) -> NDArray[np.int64]:
    return np.cumsum(rng.exponential(1e9 / rate, n)).astype(np.int64) + 1


def in_order(times: Sequence[NDArray[np.int64]], models: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Arrivals for each of the models as those of one client: times and models."""
    at, model = np.concatenate(times), np.repeat(np.array(models, np.int64), [len(each) for each in times])
    order = np.argsort(at, kind="stable")
    return at[order], model[order]


@dataclass(frozen=True, slots=True)
class Run:
    """What became of the requests of one run."""

    model: NDArray[np.int64]
    which: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]
    latency_ns: NDArray[np.int64]
    status: NDArray[np.int64]
    outputs: NDArray[np.uint8]  # a row of bytes for each request: its first output
    took_ns: int
    generator_pause_ns: int  # the longest time in which the generator was not run, by whomever

    @property
    def throughput(self) -> float:
        return float((self.status == codes.OK).sum() / self.took_ns * 1e9)

    @property
    def steady_throughput(self) -> float:
        """While as many were outstanding as might be: from half of the answers on, until the last request was sent.

        Policies put some requests off. Until those fill the queue too much is counted, and in the end, when only they
        are left, too little.
        """
        finish = np.sort((self.arrival_ns + self.latency_ns)[self.status == codes.OK])
        begin, end = finish[len(finish) // 2], self.arrival_ns.max()
        if end <= begin:
            return self.throughput
        return float(((finish > begin) & (finish <= end)).sum() / (end - begin) * 1e9)


class Generator:
    """Drives one engine. `inputs[m]` holds the inputs a request of model m may have, one per row."""

    def __init__(self, engine: Engine, names: list[str], inputs: list[NDArray[Any]], producer: int = 0) -> None:
        self.engine, self.names, self.inputs, self._producer = engine, names, inputs, producer
        state = engine.state
        if not state.call["clock"][0]:  # loops in Python bring their own clock
            from paellapy.scheduler.core.step import attach_loop

            attach_loop(state)
        by_name = {loaded.model.name: loaded for loaded in engine.loaded_rows().values()}
        self.loaded = [by_name[name] for name in names]
        self._rows = np.array([loaded.row for loaded in self.loaded], np.int64)
        self._source = np.zeros((len(inputs), max(len(each) for each in inputs)), np.uint64)
        for m, each in enumerate(inputs):
            self._source[m, : len(each)] = [row.ctypes.data for row in each]
        self._out_address = np.zeros(len(state.instance), np.uint64)
        for loaded in self.loaded:
            for instance, row in zip(loaded.instances, loaded.instance_rows, strict=True):
                self._out_address[row] = next(iter(instance.outputs.values())).ctypes.data
        specs = [next(iter(loaded.model.outputs.values())) for loaded in self.loaded]
        self._out_bytes = np.array([spec.nbytes for spec in specs], np.int64)
        self._scratch = np.zeros(8, np.int64)

    def run(
        self, at_ns: NDArray[np.int64], model: NDArray[np.int64], which: NDArray[np.int64], outstanding: int = 1 << 30,
        *, loops: Sequence[int] = (), until_ns: int = 0, loop_room: int = 0, priority: Sequence[int] | None = None,
        client: Sequence[int] | None = None, deadline_ns: Sequence[int] | None = None, may_fail: bool = False,
        admission: bool = False, think_ns: int = 0,
    ) -> Run:  # fmt: skip
        """Sends what is due and waits for everything. `priority`, `client` and `deadline_ns` (0: none) are by model.

        `think_ns`: after an answer nothing is sent for so long.
        `admission`: as the server does it, what would miss its deadline is refused when it comes.
        """
        n, state = len(at_ns), self.engine.state
        room = n + (loop_room if loops else 0)
        arrival, finish, status = (np.zeros(room, np.int64) for _ in range(3))
        models, whichs = np.zeros(room, np.int64), np.arange(room, dtype=np.int64)
        models[:n], whichs[:n] = model, which
        whichs[n:] %= min(len(each) for each in self.inputs)
        outputs = np.zeros((room, int(self._out_bytes.max())), np.uint8)
        rows = len(state.request)
        bell = self.engine.core.bell
        none = [0] * len(self.names)
        self._scratch[6:] = 0
        if admission and loops:
            raise ValueError("closed loops ask again when they are answered: admission is for the others")
        limits = new_limits((each.model.max_batch for each in self.loaded if admission), self.engine.tuning)
        pauses, message = np.zeros(1, np.int64), np.zeros(1, tables.SUBMISSION)
        message["kind"] = codes.SUBMIT
        sent = drive(
            state, self._producer, reader(state), limits, n, at_ns, models, whichs,
            np.array(loops, np.int64), until_ns, self._rows, self._source,
            np.array(priority or none, np.int64), np.array(client or none, np.int64),
            np.array(deadline_ns or none, np.int64), self._out_address,
            self._out_bytes, outstanding, think_ns, np.zeros(rows, np.int64),
            np.array(producer_rows(self.engine.limits, self._producer)),
            np.zeros(256, tables.COMPLETION), outputs, arrival, finish, status, bell.word, bell.fd, pauses,
            self._scratch, np.zeros(1, ADMISSION_REQUEST), message,
        )  # fmt: skip
        if sent < 0 or ((status[:sent] != codes.OK).any() and not may_fail):
            bad = {codes.STATUS[k]: int((status == k).sum()) for k in np.unique(status)}
            raise RuntimeError(f"not every request was answered: {bad}")
        if loops and sent == room:
            raise RuntimeError(f"the closed loops made {loop_room} requests before their time was over: give more room")
        cut = slice(0, sent)
        return Run(
            models[cut], whichs[cut], arrival[cut], (finish - arrival)[cut], status[cut], outputs[cut],
            int(self._scratch[7]), int(pauses[0]),
        )  # fmt: skip

    def alone_ns(self, model: int, repeats: int, copied: bool, think_ns: int) -> NDArray[np.int64]:
        """Times of single whole launches of batch 1, without the engine; `copied`: each after the copy of its inputs.

        Of the instance that the engine would take next: on another, elsewhere in memory, the same takes a bit more or
        less.
        """
        times = np.zeros(repeats, np.int64)
        source = self._source[model, : len(self.inputs[model]) if copied else 0]
        rows = self.loaded[model].instance_rows
        opened = int(self.engine.state.model["filling"][self._rows[model]])
        instance = opened if opened in rows else rows[0]
        launch_alone(self.engine.state, instance, 0, source, think_ns, times, self._scratch)
        return times


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is set up; systems that differ in policy only share one."""

    batch: tuple[int, ...] = (1,)
    instances: int = 12
    active: int | None = 8
    quantum_us: float = 100.0
    queues: int = 32  # hardware queues of the process (CUDA_DEVICE_MAX_CONNECTIONS)
    partitions: int = 0  # of SMs
    by_share: bool = False  # as many instances in all, more for models that are asked for more often
    memory_bytes: int | None = None

    def instances_of(self, share: NDArray[np.float64]) -> list[int]:
        least = 2
        if not self.by_share:
            return [self.instances] * len(share)
        return [least + round((self.instances - least) * len(share) * each) for each in share.tolist()]


NONE = np.zeros(0, np.int64)
ROOM = 400_000  # requests of closed loops


class Loaded:
    """An engine with models, and the time that each takes alone."""

    def __init__(
        self, device: str, kinds: Sequence[Kind], setup: Setup, priorities: Sequence[int] | None = None,
        references: dict[str, tuple[NDArray[Any], float]] | None = None, shares: bool = False,
    ) -> None:  # fmt: skip
        """`references`: the expected outputs by label, filled as needed."""
        self.kinds, self.setup, self.priorities = kinds, setup, list(priorities or [0] * len(kinds))
        self.engine = Engine(
            device, max_active=setup.active, quantum_us=setup.quantum_us, limits=Limits(segments=256),
            sm_partitions=setup.partitions, segment_shares=shares, memory_bytes=setup.memory_bytes,
        )  # fmt: skip
        where = "cuda" if device.startswith("cuda") else "cpu"
        share = np.array([kind.share for kind in kinds])
        self.share = share / share.sum() if share.sum() else np.full(len(kinds), 1 / len(kinds))
        for kind, priority, instances in zip(kinds, self.priorities, setup.instances_of(self.share), strict=True):
            self.engine.load(kind.model(setup.batch, instances, priority, where))
        names = [kind.label for kind in kinds]
        self.alone_ns = np.array([self.engine.profile(name)[0].whole_ns for name in names])
        self.generator = Generator(self.engine, names, [kind.inputs() for kind in kinds])
        known = {} if references is None else references
        for kind in kinds:
            if kind.label not in known:
                known[kind.label] = kind.expected(where)
        self.expected, self.rounding = zip(*(known[name] for name in names), strict=True)
        self.checked = self.wrong = 0

    def check(self, run: Run) -> None:
        """Every output against the module's own in eager mode: within 2 % of the largest, or, where fp16 itself is
        further than that from fp32, as near as that.
        """
        for m, kind in enumerate(self.kinds):
            rows = np.flatnonzero((run.model == m) & (run.status == codes.OK))
            if not len(rows):
                continue
            wanted = self.expected[m][run.which[rows]].reshape(len(rows), -1)
            dtype = next(iter(self.generator.loaded[m].model.outputs.values())).dtype
            found = run.outputs[rows][:, : wanted.shape[1] * dtype.itemsize].copy().view(dtype).astype(np.float32)
            scale = np.abs(wanted).max() + 1e-6
            bad = ~(np.abs(found - wanted).max(axis=1) <= max(0.02 * scale, self.rounding[m]))
            self.checked += len(rows)
            self.wrong += int(bad.sum())
            if bad.any():
                worst = float(np.abs(found - wanted).max() / scale)
                print(f"{kind.label}: {int(bad.sum())} of {len(rows)} outputs wrong, by up to {worst:.3f} of the scale")

    def mix(self, rng: np.random.Generator, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return rng.choice(len(self.kinds), n, p=self.share).astype(np.int64), rng.integers(0, VARIANTS, n)

    def offer(
        self, policy: str | Policy, at_ns: NDArray[np.int64], model: NDArray[np.int64], which: NDArray[np.int64],
        active: int | float | None = None, **more: Any,
    ) -> Run:  # fmt: skip
        """`active`: jobs at once, a number of them or (a float) what they may demand together."""
        self.engine.set_policy(policy)
        core = self.engine.state.core
        if isinstance(active, float):
            core["max_active"][0], core["demand_limit"][0] = len(self.engine.state.instance), active
        elif active is not None:
            core["max_active"][0], core["demand_limit"][0] = active, np.inf
        run = self.generator.run(at_ns, model, which, priority=self.priorities, **more)
        self.check(run)
        return run

    def saturate(self, policy: str | Policy, active: int | float | None, n: int, outstanding: int, seed: int) -> Run:
        model, which = self.mix(np.random.default_rng(seed), n)
        return self.offer(policy, np.zeros(n, np.int64), model, which, active, outstanding=outstanding)

    def summary(self, run: Run) -> dict[str, Any]:
        """Latencies as slowdown (÷ alone at batch 1), of what was answered."""
        good = run.status == codes.OK
        slow = run.latency_ns / self.alone_ns[run.model]
        slow_ok = slow[good] if good.any() else np.array([np.nan])
        return {
            "offered": len(run.model), "answered": int(good.sum()), "throughput": run.throughput,
            "p50_slowdown": float(np.quantile(slow_ok, 0.5)), "p99_slowdown": float(np.quantile(slow_ok, 0.99)),
            "within_4x": float((good & (slow <= 4)).mean()),
        }  # fmt: skip

    def loops(self, policy: Any, which: Sequence[int], seconds: float, **more: Any) -> dict[str, Any]:
        """Closed loops; each model's part of the GPU, as time alone of what it completed and as the GPU's time, and its
        requests a second.
        """
        state, rows = self.engine.state, [each.row for each in self.generator.loaded]
        used, gpu = state.model["used_ns"][rows], state.model["gpu_ns"][rows]
        given = {"loops": list(which), "until_ns": int(seconds * 1e9), "loop_room": ROOM, **more}
        run = self.offer(policy, NONE, NONE, NONE, **given)
        had, names = (state.model["used_ns"][rows] - used) / run.took_ns, [kind.label for kind in self.kinds]
        ran = (state.model["gpu_ns"][rows] - gpu) / run.took_ns
        return {
            "alone_share": dict(zip(names, had.tolist(), strict=True)),
            "gpu_share": dict(zip(names, ran.tolist(), strict=True)),
            "per_s": {name: float((run.model == m).sum() / run.took_ns * 1e9) for m, name in enumerate(names)},
        }

    def beside(
        self, policy: str, seed: int, rate: float, seconds: float, high: Sequence[int], low: Sequence[int],
        arrivals: str = "poisson", active: int | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Requests for each of `high` at this rate (0: a closed loop of the first), beside loops of `low`."""
        rng = np.random.default_rng(seed)
        at, model, loops, until = NONE, NONE, list(low), 0
        if rate:
            n = max(20, int(rate * seconds))
            even = (np.arange(n) * (1e9 / rate)).astype(np.int64) + 1
            times = [poisson(rng, rate, n) if arrivals == "poisson" else even + int(1e9 / rate / len(high) * k)
                     for k in range(len(high))]  # fmt: skip
            at, model = in_order(times, high)
        else:
            loops, until = [high[0], *low], int(seconds * 1e9)
        which = rng.integers(0, VARIANTS, len(at))
        run = self.offer(policy, at, model, which, active, loops=loops, until_ns=until, loop_room=ROOM)
        us = run.latency_ns[np.isin(run.model, high) & (run.status == codes.OK)] / 1e3
        return {
            "p50_us": float(np.quantile(us, 0.5)), "p99_us": float(np.quantile(us, 0.99)),
            "low_per_s": float(np.isin(run.model, low).sum() / run.took_ns * 1e9),
        }  # fmt: skip

    def profiles(self) -> list[ModelProfile]:
        """The measurements made when the models were loaded."""
        return [self.engine.model_profile(kind.label) for kind in self.kinds]

    def close(self) -> None:
        self.engine.close()
