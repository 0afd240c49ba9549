"""Instances, the plan of the GPU's memory after Salus, and arenas in which instances of several models take turns.

    weights of every model  +  instances of every model x (inputs, outputs, scratch)  <=  memory given to the engine

An instance holds one batch in flight: pinned host slots that callers write into, and one block of device memory. All
batch sizes of an instance share that block, since only one of them runs at a time. With arenas, instances of models
that do not run at the same time share it too. The memory in use is then bounded by the weights of all models and the
largest instances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import CaptureError, MemoryPlanError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.models.tensors import Capturable, TensorSpec

ALIGN = 256  # the alignment of the CUDA driver's allocations; Triton specialises kernels on 16


class Memory(ABC):
    """A block of device memory, and pinned host memory beside it."""

    host: NDArray[np.uint8]
    block: SharedBlock | None = None  # the shared block of the host memory, if other processes may map it

    @abstractmethod
    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array over part of the device block."""

    def tensor(self, offset: int, host_offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """The device's array of a tensor whose slots are at `host_offset` of the host block."""
        return self.array(offset, shape, dtype)

    @abstractmethod
    def free(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InstancePlan:
    """Where an instance's tensors lie: offsets into its device block and into its pinned block."""

    device: dict[str, int]
    host: dict[str, int]
    scratch: int  # start of the arena in the device block
    scratch_bytes: int
    words: int  # start of the completion words in the pinned block
    n_words: int
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.scratch + self.scratch_bytes


def plan_instance(model: Capturable, scratch_bytes: int, segments: int) -> InstancePlan:
    """Places inputs, outputs, then scratch; every tensor has room for the largest batch.

    Behind the pinned tensors lie a completion word for each of up to `segments` segments, one for the whole program,
    and one word per segment that is set when all blocks of its last kernel are on the SMs.
    """
    device, host = Bump(), Bump()
    offsets: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for key, spec in tensors(model):
        for bump, table in zip((device, host), offsets, strict=True):
            table[key] = bump.take(spec.nbytes * model.max_batch)
    words = host.take(8 * (2 * segments + 1))
    return InstancePlan(offsets[0], offsets[1], device.used, scratch_bytes, words, segments + 1, host.used)


def tensors(model: Capturable) -> list[tuple[str, TensorSpec]]:
    """Inputs and outputs under names that cannot collide: a model may call both of them "x"."""
    return [(f"in:{k}", s) for k, s in model.inputs.items()] + [(f"out:{k}", s) for k, s in model.outputs.items()]


class Instance:
    """The buffers of one batch in flight."""

    def __init__(
        self, index: int, model: Capturable, plan: InstancePlan, memory: Memory, partitions: tuple[int, ...] = ()
    ) -> None:
        self.index, self.model, self.plan, self.memory = index, model, plan, memory
        self.partitions = partitions  # SM partitions, to one of which the instance may be confined
        self.arena: Arena | None = None  # the arena that it shares with other models' instances
        self.inputs = {k: self._host_view(f"in:{k}", s) for k, s in model.inputs.items()}
        self.outputs = {k: self._host_view(f"out:{k}", s) for k, s in model.outputs.items()}
        self._slot_bytes: dict[int, tuple[list[memoryview], dict[str, memoryview]]] = {}

    def slot_bytes(self, slot: int) -> tuple[list[memoryview], dict[str, memoryview]]:
        """The bytes of a slot: its inputs in the model's order, and its outputs. Copying bytes between memoryviews
        takes a fraction of the time that arrays take.
        """
        found = self._slot_bytes.get(slot)
        if found is None:
            inputs = [_bytes(array[slot : slot + 1]) for array in self.inputs.values()]
            outputs = {key: _bytes(array[slot : slot + 1]) for key, array in self.outputs.items()}
            found = self._slot_bytes[slot] = inputs, outputs
        return found

    @property
    def words(self) -> NDArray[np.uint64]:
        """Completion words: one per segment, the last for the whole program."""
        return self.memory.host[self.plan.words :][: 8 * self.plan.n_words].view(np.uint64)

    @property
    def draining(self) -> NDArray[np.uint64]:
        """Per segment: when the last block of its last kernel started, if that kernel reports it; 0 before."""
        start = self.plan.words + 8 * self.plan.n_words
        return self.memory.host[start:][: 8 * (self.plan.n_words - 1)].view(np.uint64)

    def _host_view(self, key: str, spec: TensorSpec) -> NDArray[Any]:
        offset, nbytes = self.plan.host[key], spec.nbytes * self.model.max_batch
        raw = self.memory.host[offset : offset + nbytes]
        return raw.view(spec.dtype).reshape(self.model.max_batch, *spec.shape)

    def device_inputs(self, batch: int) -> dict[str, Any]:
        return {k: self._device_array(f"in:{k}", s, batch) for k, s in self.model.inputs.items()}

    def device_outputs(self, batch: int) -> dict[str, Any]:
        return {k: self._device_array(f"out:{k}", s, batch) for k, s in self.model.outputs.items()}

    def _device_array(self, key: str, spec: TensorSpec, batch: int) -> Any:
        return self.memory.tensor(self.plan.device[key], self.plan.host[key], (batch, *spec.shape), spec.dtype)

    def scratch(self, bump: Bump, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """An array in the instance's arena."""
        nbytes = math.prod(shape) * dtype.itemsize
        return self.memory.array(self.plan.scratch + bump.take(nbytes), shape, dtype)


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class Reservation:
    weights_bytes: int
    instance_bytes: int
    instances: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.instance_bytes * self.instances


class MemoryPlan:
    """How much of the engine's memory each model holds."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.reservations: dict[str, Reservation] = {}
        # Set where weights come and go: the bytes of weights on the GPU, and the state of each model's weights.
        self.weights_on_gpu: Callable[[], int] | None = None
        self.instances_held: Callable[[], int] | None = None
        self.account: Callable[[], dict[str, Any]] = dict

    @property
    def held_bytes(self) -> int:
        return self.instances_bytes + self.weights_bytes

    @property
    def instances_bytes(self) -> int:
        """Inputs, outputs and scratch of all instances."""
        if self.instances_held is not None:
            return self.instances_held()
        return sum(r.instance_bytes * r.instances for r in self.reservations.values())

    def note(self, name: str, reservation: Reservation) -> Reservation:
        """Records a model's memory that was counted elsewhere."""
        self.reservations[name] = reservation
        return reservation

    @property
    def weights_bytes(self) -> int:
        """Weights that are on the GPU."""
        if self.weights_on_gpu is not None:
            return self.weights_on_gpu()
        return sum(r.weights_bytes for r in self.reservations.values())

    def __call__(self) -> dict[str, Any]:
        """The account: the engine's budget, the bytes of instances and weights, and the state of each model."""
        models = {
            name: {"weights_bytes": r.weights_bytes, "instances": r.instances, "instance_bytes": r.instance_bytes}
            for name, r in list(self.reservations.items())  # another thread may load a model
        }
        about = self.account()
        for name, more in about.pop("models", {}).items():
            models.setdefault(name, {}).update(more)
        return {
            "budget_bytes": self.budget_bytes,
            "instances_bytes": self.instances_bytes,
            "weights_bytes": self.weights_bytes,
            "free_bytes": self.budget_bytes - self.held_bytes,
            **about,
            "models": models,
        }

    def reserve(self, name: str, weights_bytes: int, instance_bytes: int, wanted: int, least: int = 1) -> Reservation:
        """Reserves memory for the weights and `least` to `wanted` instances; MemoryPlanError if they do not fit."""
        # Weights that can be evicted do not count here: the core chooses which ones leave.
        free = self.budget_bytes - (self.instances_bytes if self.weights_on_gpu else self.held_bytes)
        instances = min(wanted, max(0, free - weights_bytes) // max(1, instance_bytes)) if weights_bytes <= free else 0
        if instances < least:
            needed = weights_bytes + least * instance_bytes
            raise MemoryPlanError(
                f"model {name!r} does not fit: weights {readable_bytes(weights_bytes)} + {least} "
                f"instance{'s' * (least > 1)} of {readable_bytes(instance_bytes)} = {readable_bytes(needed)}, "
                f"but {readable_bytes(free)} of the engine's {readable_bytes(self.budget_bytes)} are free"
                f"{self._others()}. "
                "Unload a model, use fewer instances or smaller batches, or give the engine more memory_bytes.",
                model=name, needed_bytes=needed, free_bytes=free, limit_bytes=self.budget_bytes,
            )  # fmt: skip
        self.reservations[name] = Reservation(weights_bytes, instance_bytes, instances)
        return self.reservations[name]

    def release(self, name: str) -> None:
        self.reservations.pop(name, None)

    def _others(self) -> str:
        if not self.reservations:
            return ""
        return " (" + ", ".join(f"{n}: {readable_bytes(r.total_bytes)}" for n, r in self.reservations.items()) + ")"


# -- arenas


def rounded(nbytes: int) -> int:
    """Rounds up to a power of two, at least 4096.

    >>> rounded(5000), rounded(1)
    (8192, 4096)
    """
    return max(4096, 1 << (nbytes - 1).bit_length())


@dataclass(slots=True, eq=False)
class Arena:
    """Memory for one instance at a time. `foreign_bytes`: memory of other libraries' allocators for its instances."""

    index: int
    nbytes: int
    memory: Any
    foreign_bytes: int = 0
    users: dict[str, int] = field(default_factory=dict)  # models, with their priorities

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.foreign_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """A model's need for arenas: `count` of them, each with this many bytes."""

    name: str
    nbytes: int
    foreign_bytes: int
    count: int
    priority: int = 0


class Arenas:
    """Arenas of several models. Sizes are powers of two; an instance takes the least used arena that is large enough.

    Models of different priority share an arena only if memory is short: an instance that has started keeps its arena
    while it waits for weights, and nothing can take the arena from it.

    `make(nbytes)` allocates device memory with a method `free()`; `claim(nbytes)` counts it, and may refuse; `give`
    counts it as free again.
    """

    def __init__(self, make: Callable[[int], Any], claim: Callable[[int], None], give: Callable[[int], None]) -> None:
        self._make, self._claim, self._give = make, claim, give
        self._all: dict[int, Arena] = {}
        self._apart: list[Arena] = []  # arenas that no instance shares; they have no number

    @property
    def held_bytes(self) -> int:
        return sum(each.total_bytes for each in (*self._all.values(), *self._apart))

    def choose(self, need: Need, most: int, spare: Callable[[int, bool], bool]) -> list[Arena]:
        """Arenas for a model's instances. New ones are made, up to `most` of this size, while their bytes can be
        spared.

        `spare(nbytes, apart)`: whether they can; `apart`: to keep models of different priority apart.
        """
        try:
            return [self._one(need, most, spare) for _ in range(need.count)]
        except BaseException:
            self.leave(need.name)
            raise

    def _one(self, need: Need, most: int, spare: Callable[[int, bool], bool]) -> Arena:
        size = rounded(need.nbytes)
        more = size + need.foreign_bytes
        large = [each for each in self._all.values() if each.nbytes >= size]
        alike = [each for each in large if {*each.users.values()} <= {need.priority}]
        fitting = [each for each in alike if need.name not in each.users]
        if fitting:
            new = len(alike) < most and min(len(each.users) for each in fitting) > 0 and spare(more, False)
        else:
            fitting = [each for each in large if need.name not in each.users]
            new = not fitting or spare(more, True)
        if new and self._claimed(more, may_fail=bool(fitting)):
            index = next(k for k in range(len(self._all) + 1) if k not in self._all)
            chosen = self._all[index] = Arena(index, size, self._make(size), need.foreign_bytes)
        else:
            chosen = min(fitting, key=lambda each: (len(each.users), each.nbytes))
            if need.foreign_bytes > chosen.foreign_bytes:
                self._claim(need.foreign_bytes - chosen.foreign_bytes)
                chosen.foreign_bytes = need.foreign_bytes
        chosen.users[need.name] = need.priority
        return chosen

    def _claimed(self, nbytes: int, may_fail: bool) -> bool:
        try:
            self._claim(nbytes)
        except MemoryPlanError:  # there is an arena to share
            if not may_fail:
                raise
            return False
        return True

    def make_apart(self, nbytes: int, foreign_bytes: int) -> Arena | None:
        """An arena that no instance shares; None if the memory is refused."""
        more = nbytes + foreign_bytes
        if not self._claimed(more, may_fail=True):
            return None
        try:
            made = Arena(-1, nbytes, self._make(nbytes), foreign_bytes)
        except BaseException:
            self._give(more)
            raise
        self._apart.append(made)
        return made

    def free_apart(self, arena: Arena) -> None:
        self._apart.remove(arena)
        arena.memory.free()
        self._give(arena.total_bytes)

    def leave(self, name: str) -> None:
        """Removes a model that has no instances any more, and frees arenas that no model uses."""
        for arena in list(self._all.values()):
            arena.users.pop(name, None)
            if not arena.users:
                del self._all[arena.index]
                arena.memory.free()
                self._give(arena.total_bytes)


# -- sizes in bytes


def readable_bytes(nbytes: int) -> str:
    """A number of bytes with a fitting unit.

    >>> readable_bytes(3 << 20), readable_bytes(12)
    ('3.0 MiB', '12 B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"


def aligned(nbytes: int) -> int:
    """Rounds up to a multiple of the alignment, at least one, so that an empty array has its own address.

    >>> aligned(1), aligned(256)
    (256, 256)
    """
    return max(ALIGN, -(-nbytes // ALIGN) * ALIGN)


class Bump:
    """Hands out consecutive offsets into a block of memory, which is freed as a whole."""

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity, self.used = capacity, 0

    def take(self, nbytes: int) -> int:
        offset, size = self.used, aligned(nbytes)
        if self.capacity is not None and offset + size > self.capacity:
            raise CaptureError(
                f"asked for {offset + size:,} bytes of scratch memory, but its first run needed {self.capacity:,}: "
                "a model must allocate the same memory in every run", given=offset + size, limit=self.capacity
            )  # fmt: skip
        self.used = offset + size
        return offset
