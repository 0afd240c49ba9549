"""The core with a producer and a GPU driven by hand: tests decide what happens when."""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from core_check import check_integrity

from paellapy.instrument.gpu_model.parts import part
from paellapy.instrument.numba_ext.link import compiled
from paellapy.scheduler.core import codes, rings, step, tables
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.profiles import (
    Capacity,
    ModelProfile,
    SegmentProfile,
    install,
    open_model,
    post_message,
    set_capacity,
)
from paellapy.scheduler.policies.policy import Policy, attach_policy, find_policy

# A producer in the core's process.


@compiled
def claim(s: st.State, producer: int, model: int, client: int = 0) -> int:
    """A slot to write inputs into: instance · rings.SLOTS + slot, or rings.STAGED. A claimed slot must be posted."""
    return int(rings.claim_slot(s, producer, model, client))


@compiled
def mark_ready(s: st.State, instance: int, slot: int) -> None:
    """Marks the inputs of a claimed slot as written."""
    rings.set_ready(s, instance, slot)


@compiled
def release(s: st.State, instance: int, slot: int) -> None:
    """Marks the outputs of a completed request as read."""
    rings.clear_hold(s, instance, slot)


@compiled
def ask_to_be_woken(s: st.State, producer: int) -> None:
    """The next completion is to write to the producer's eventfd. Look at the ring after this, and then sleep."""
    rings.announce_sleep(rings.address(s.wake, producer), rings.ANYTHING)


@compiled
def take_done(s: st.State, producer: int, into: tables.Table) -> int:
    """Moves at most len(into) completions out of the ring; returns their number. One consumer at a time."""
    return int(rings.take_completions(s, producer, into.ctypes.data, into.shape[0]))


LIMITS = st.Limits(
    models=4, instances=16, instances_per_model=4, sizes=3, batch=8, segments=8, requests=48, clients=4, inputs=2
)


def profile(name: str = "m", segments: int = 3, batch: tuple[int, ...] = (1,), ns: float = 50e3, **more: Any) -> Any:
    """A model whose segments take `ns` alone at batch 1, and 1.5 times as long for every doubling of the batch."""
    sizes = {b: [SegmentProfile(ns * b**0.5, blocks=8 * b, kernels=4)] * segments for b in batch}
    return ModelProfile(name, sizes, **more)


@dataclass
class Bench:
    """The core with models, a clock, and a record of its outputs."""

    models: list[ModelProfile]
    policy: str | Policy = "srpt"
    hold: bool = False
    limits: st.Limits = LIMITS
    demand: float = np.inf
    reports: bool = True  # kernels say when they have nothing left to start
    one_by_one: bool = False  # the host computes each launch
    now: int = 0
    serial: int = 0
    launched: dict[int, deque[Any]] = field(default_factory=lambda: defaultdict(deque))  # instance → not yet completed
    history: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # instance → segments of this life
    done: dict[int, Any] = field(default_factory=dict)  # serial → completion
    closed: list[int] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)  # serial → row, while in use
    unready: list[tuple[int, int]] = field(default_factory=list)  # instances and slots still to be written
    unread: list[tuple[int, int]] = field(default_factory=list)  # instances and slots whose output is still to be read

    def __post_init__(self) -> None:
        self.state = st.new_state(self.limits)
        self.free = list(range(self.limits.requests))
        self._policy = find_policy(self.policy)
        attach_policy(self.state, self._policy)
        set_capacity(self.state, Capacity.of((h200 := part("h200")).sms, h200.sm))
        self.state.core["hold"][0], self.state.core["one_by_one"][0] = self.hold, self.one_by_one
        self.state.core["demand_limit"][0] = self.demand
        self.started = np.zeros((self.limits.instances, self.limits.segments), np.uint64)
        words = self.started.ctypes.data + 8 * np.arange(self.started.size).reshape(self.started.shape)
        if self.reports:
            self.state.launch["draining"] = words[:, None, :]
        for each in self.models:
            open_model(self.state, install(self.state, each)[0])
        self.step()

    def submit(
        self, model: int = 0, *, deadline: int = codes.NEVER, priority: int = 0, client: int = 0, direct: bool = False,
        ready: bool = True, source: int = 0,
    ) -> int:  # fmt: skip
        self.serial += 1
        row = self.free.pop()
        s = self.state
        claimed = claim(s, 0, model, client) if direct else rings.STAGED
        instance, slot = (codes.NONE, codes.NONE) if claimed == rings.STAGED else divmod(claimed, rings.SLOTS)
        message = rings.Message(
            kind=codes.SUBMIT, request=row, serial=self.serial, tag=1000 + self.serial, model=model, instance=instance,
            slot=slot, client=client, priority=priority, arrival_ns=self.now, deadline_ns=deadline, source=source,
        )  # fmt: skip
        assert rings.post(s, 0, message.address)
        self.rows[self.serial] = row
        if instance >= 0:
            self.unready.append((instance, slot))
            if ready:
                self.write()
        return self.serial

    def write(self) -> None:
        """A producer finishes writing one slot."""
        if self.unready:
            mark_ready(self.state, *self.unready.pop(0))

    def read(self) -> None:
        """A producer has read one output."""
        if self.unread:
            release(self.state, *self.unread.pop(0))

    def cancel(self, serial: int) -> None:
        post_message(self.state, codes.CANCEL, request=self.rows.get(serial, 0), serial=serial)

    def tell(self, kind: int, model: int = 0, **more: int) -> None:
        post_message(self.state, kind, model, **more)

    def step(self, ns: int = 0) -> list[int]:
        """Lets time pass and the core work; returns the serials of completed requests."""
        self.now += ns
        s = self.state
        step.step(s, self.now)
        if self.one_by_one and not s.core["whole_always"][0]:
            assert s.core["out"][0] <= 1, "a launch was chosen before the one ahead was computed"
        for entry in s.out[: s.core["out"][0]]:
            instance, segment = int(entry["instance"]), int(entry["segment"])
            assert s.instance["state"][instance] == codes.RUNNING or s.core["mode"][0] == codes.FAIL_MODE
            life = self.history[instance]
            if segment in (0, codes.WHOLE):
                assert not self.launched[instance], "an instance was started while it runs"
                life.clear()
            else:
                assert life[-1] == segment - 1, "segments were reordered"
            life.append(segment)
            self.launched[instance].append(int(entry["word"]))
        s.core["out"][0] = 0
        check_integrity(s)
        return self.take()

    def take(self) -> list[int]:
        into = np.zeros(64, tables.COMPLETION)
        finished = []
        while n := take_done(self.state, 0, into):
            for entry in into[:n].copy():
                if entry["request"] < 0:
                    self.closed.append(int(entry["model"]))
                    continue
                serial = int(entry["serial"])
                assert serial not in self.done, "a request was completed twice"
                assert self.rows.pop(serial) == entry["request"]
                assert entry["tag"] == 1000 + serial
                self.done[serial] = entry
                self.free.append(int(entry["request"]))
                if self.hold and entry["status"] == codes.OK:
                    self.unread.append((int(entry["instance"]), int(entry["slot"])))
                finished.append(serial)
        return finished

    def status(self, serial: int) -> int:
        return int(self.done[serial]["status"])

    def instance_of(self, model: int) -> int:
        """The first running instance of a model."""
        rows = self.state.instance
        return int(np.flatnonzero((rows["model"] == model) & (rows["state"] == codes.RUNNING))[0])

    @property
    def running(self) -> list[int]:
        return [instance for instance, words in self.launched.items() if words]

    def drain(self, instance: int) -> None:
        """Marks all blocks of the instance's newest segment as placed on the SMs."""
        self.started[instance, max(0, int(self.state.instance["issued"][instance]) - 1)] = 1

    def finish_segment(self, instance: int) -> None:
        """The GPU completes an instance's oldest launch."""
        ctypes.c_uint64.from_address(self.launched[instance].popleft()).value = 1

    def finish(self, ns: int = 0) -> list[int]:
        """The GPU completes each instance's oldest launch; returns the serials of completed requests."""
        for instance in self.running:
            self.finish_segment(instance)
        return self.step(ns)

    def run_dry(self, limit: int = 5000, ns: int = 1000) -> None:
        """Lets producers and the GPU work until nothing is left."""
        for _ in range(limit):
            if not self.rows and not self.running and not self.unread and not self.unready:
                self.step()
                return
            while self.unready:
                self.write()
            while self.unread:
                self.read()
            self.finish(ns)
        raise AssertionError(f"still waiting for {sorted(self.rows)}")
