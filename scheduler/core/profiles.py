"""Profiles: the times and resources of a model's batch sizes and segments, for scheduling. Stored as JSON.

`install` fills a model's rows in the core's tables from its profile.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.instrument.gpu_model.parts import SmLimits, Timing
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.job import PARAMS
from paellapy.scheduler.core.rings import Message, post
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.values import (
    Rule,
    check_values,
    integer,
    is_finite_number,
    number,
    or_none,
    shortened,
)

MOST_NS = 1e18  # 32 years; times in ns are 64-bit integers

# --- parameters of models, by name: numbers that a model carries for policies, which declare the ones they read


def checked_params(given: Mapping[str, float]) -> dict[str, float]:
    """The parameters as floats; ProfileError if they are not valid.

    >>> checked_params({"limit": 1})
    {'limit': 1.0}
    """
    if not isinstance(given, Mapping) or len(given) > PARAMS:
        raise ProfileError(
            f"params={shortened(given)}: it must be a dict of at most {PARAMS} numbers, as in params={{'limit': 0.5}}",
            field="params", given=given, limit=PARAMS,
        )  # fmt: skip
    for name, value in given.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ProfileError(
                f"params has the name {name!r}: it must be an identifier, because policies read it as job.params.NAME",
                field="params", given=name,
            )  # fmt: skip
        if not is_finite_number(value):
            raise ProfileError(f"params[{name!r}]={value!r}: it must be a finite number", field="params", given=value)
    return {name: float(value) for name, value in given.items()}


def _key(name: str) -> int:
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1  # 0 stands for no name


def checked_priority(given: Any) -> int:
    """The priority as an integer; ProfileError if it is none, or out of range.

    >>> checked_priority(-1)
    -1
    """
    try:
        number = int(given) if isinstance(given, float) and given.is_integer() else operator.index(given)
    except TypeError:
        number = codes.NEVER
    if not -codes.NEVER < number < codes.NEVER:
        raise ProfileError(
            f"priority={shortened(given)}: it must be an integer between -2⁶² and 2⁶²", field="priority", given=given
        )
    return number


@dataclass(frozen=True, slots=True)
class SegmentProfile:
    """One segment alone on the GPU. Footprints are the resources resident at once: those of the largest kernel."""

    time_ns: float
    blocks: int = 1
    warps: int = 8
    registers: int = 8192
    shared_bytes: int = 0
    kernels: int = 1
    bytes: float = 0.0  # traffic to memory, all kernels together
    compute: float = 0.0  # fraction of the GPU's capacity, 0 … 1; 0: not known
    memory: float = 0.0  # the same; 0: computed from `bytes`

    def __post_init__(self) -> None:
        check_values(self, _OF_SEGMENT, ProfileError)


_OF_SEGMENT = {
    "time_ns": number(0, MOST_NS, above=True),
    **dict.fromkeys(("blocks", "warps", "kernels"), number(1, MOST_NS)),
    **dict.fromkeys(("registers", "shared_bytes", "bytes"), number(0, MOST_NS)),
    **dict.fromkeys(("compute", "memory"), number(0, 1)),
}


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The scheduler's knowledge of a model: for each batch size, the segments of its program.

    >>> m = ModelProfile("net", {1: [SegmentProfile(5e4)] * 4, 8: [SegmentProfile(8e4)] * 4}, target_ms=1.0)
    >>> m.alone_ns(3)
    320000.0
    """

    name: str
    sizes: Mapping[int, Sequence[SegmentProfile]]
    target_ms: float | None = None
    priority: int = 0
    share: float = 1.0
    instances: int = 4
    queue_limit: int = 1 << 20
    # Part of the GPU that a batch of each size keeps busy, if it was measured; otherwise it is estimated from the
    # segments.
    demand: Mapping[int, float] = field(default_factory=dict)
    together: Mapping[int, int] = field(default_factory=dict)  # number of runs at once when that was measured
    about: str = field(default="", compare=False)
    input_bytes: int = 0  # of one request; 0: not known, and nothing to copy
    params: Mapping[str, float] = field(default_factory=dict)  # for policies, by name
    resident: bool | str = "auto"  # True: its weights stay on the GPU; False: only while requests wait or run
    weight_bytes: int = 0  # on the GPU; 0: not known, and nothing to bring
    # By batch size, for each segment: how many bytes, from the start of the weights, it and the segments before it
    # need. A size that is left out needs all weights from the start.
    needs: Mapping[int, Sequence[int]] = field(default_factory=dict)
    length_of: str = ""  # the model of which this is one length: requests of all its lengths go in the policy's order

    def __post_init__(self) -> None:
        check_values(self, _OF_MODEL, ProfileError, f"{shortened(self.name)}: ", model=self.name)
        object.__setattr__(self, "priority", checked_priority(self.priority))
        if wrong := [batch for batch, each in self.needs.items() if len(each) != len(self.sizes.get(batch, each))]:
            raise ProfileError(
                f"{self.name}: needs has {len(self.needs[wrong[0]])} entries for batches of {wrong[0]}: it must have "
                "one for each segment", model=self.name, field="needs", given=self.needs,
            )  # fmt: skip
        try:
            object.__setattr__(self, "params", checked_params(self.params))
        except ProfileError as e:
            raise ProfileError(f"{self.name}: {e}", model=self.name, **e.__dict__) from None
        object.__setattr__(self, "sizes", {batch: tuple(self.sizes[batch]) for batch in sorted(self.sizes)})

    @property
    def batch(self) -> tuple[int, ...]:
        return tuple(self.sizes)

    @property
    def target_ns(self) -> int:
        return codes.NEVER if self.target_ms is None else int(self.target_ms * 1e6)

    def alone_ns(self, batch: int = 1) -> float:
        """Time of a batch with the GPU to itself, at the smallest size that holds it."""
        fitting = [size for size in self.sizes if size >= batch]
        if not fitting:
            most = max(self.sizes)
            raise ProfileError(
                f"{self.name} has no batch size for {batch} requests: the largest is {most}",
                model=self.name, field="batch", given=batch, limit=most,
            )  # fmt: skip
        return math.fsum(segment.time_ns for segment in self.sizes[fitting[0]])


def _is_program(batch: Any, program: Any) -> bool:
    some = isinstance(program, Sequence) and len(program) > 0
    return _BATCH.fits(batch) and some and all(isinstance(each, SegmentProfile) for each in program)


def _each(rule: Rule) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, Mapping) and all(map(rule.fits, given.values()))


def _are_bytes(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(_BYTES.fits, given))


_BATCH = integer(1, 1 << 20)
_BYTES = integer(0, 1 << 62)
_ABOVE = number(0, above=True)
_OF_MODEL = {
    **dict.fromkeys(("name", "about", "length_of"), Rule(lambda given: isinstance(given, str), "a text")),
    "sizes": Rule(
        lambda given: isinstance(given, Mapping) and bool(given) and all(_is_program(*each) for each in given.items()),
        "a dict of at least one batch size, from 1 up, each with its segments",
    ),
    "target_ms": or_none(number(0, MOST_NS / 1e6, above=True)),
    "share": _ABOVE,
    "instances": integer(1, 1 << 20),
    "queue_limit": integer(0, 1 << 62),
    "input_bytes": _BYTES,
    "weight_bytes": _BYTES,
    "demand": Rule(_each(_ABOVE), "a dict of parts of the GPU above 0"),
    "together": Rule(_each(_BATCH), "a dict of numbers of runs from 1 up"),
    "resident": Rule(lambda given: given == "auto" or isinstance(given, bool), "'auto', True or False"),
    "needs": Rule(_each(Rule(_are_bytes, "")), "a dict of bytes for each segment"),
}


def save_profiles(path: str | Path, profiles: Iterable[ModelProfile]) -> None:
    """Writes profiles as JSON, for `load_profiles` and `paellapy simulate path`.

    >>> from tempfile import TemporaryDirectory
    >>> net = ModelProfile("net", {1: [SegmentProfile(5e4)]})
    >>> with TemporaryDirectory() as folder:
    ...     save_profiles(f"{folder}/net.json", [net])
    ...     load_profiles(f"{folder}/net.json") == [net]
    True
    """
    Path(path).write_text(json.dumps({"models": [asdict(each) for each in profiles]}, indent=1) + "\n")


def load_profiles(path: str | Path) -> list[ModelProfile]:
    """Reads profiles that `save_profiles` wrote; errors name the file."""
    try:
        return [
            ModelProfile(
                **{
                    **model,
                    "sizes": {int(b): [SegmentProfile(**each) for each in s] for b, s in model["sizes"].items()},
                    "demand": {int(b): float(part) for b, part in model.get("demand", {}).items()},
                    "together": {int(b): int(n) for b, n in model.get("together", {}).items()},
                    "needs": {int(b): [int(n) for n in needs] for b, needs in model.get("needs", {}).items()},
                }
            )
            for model in json.loads(Path(path).read_text())["models"]
        ]
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as e:
        raise ProfileError(f"{path} is not a file of model profiles: {e}", field="path", given=str(path)) from e


# --- demand: the part of the GPU that a program keeps busy, computed from the time of several runs at once
#
# If n programs independently want the GPU for a fraction u of their time, they keep it busy for 1 - (1 - u)^n of the
# time. Each then takes u / (1 - (1 - u)^n) of the GPU's time. This measured quantity is the program's *demand*; it
# falls with n. To be comparable, demands are given for TOGETHER runs at once.


TOGETHER = 8  # runs at once for measuring a demand, if there are as many instances
MOST_BUSY = 0.995  # at 1 no other program would ever run


def busy_alone(demand: float, together: int) -> float:
    """The fraction of its time for which a program wants the GPU, if `together` runs at once have this demand each.

    A demand near 1 / together only means that hardly any run waited. Then half of it is returned, since runs whose
    waiting is too short to measure still have a cost.

    >>> [round(busy_alone(*each), 3) for each in ((0.25, 8), (0.12, 8), (0.9, 1), (1.0, 8))]
    [0.213, 0.06, 0.9, 0.995]
    """
    if together <= 1:
        return min(demand, MOST_BUSY)
    low, high = demand / 2, MOST_BUSY
    for _ in range(50):
        busy = (low + high) / 2
        if busy / (1 - (1 - busy) ** together) < demand:
            low = busy
        else:
            high = busy
    return high


def usual_demand(demand: float, together: int) -> float:
    """Converts a demand measured with `together` runs at once to TOGETHER runs.

    The result never exceeds the demand measured with fewer runs, even for programs so short that hardly any run waited.

    >>> [round(usual_demand(*each), 3) for each in ((0.25, 8), (0.29, 5), (1.0, 2), (0.08, 5))]
    [0.25, 0.231, 0.995, 0.08]
    """
    if together == TOGETHER:
        return demand
    busy = busy_alone(demand, together)
    usual = float(busy / (1 - (1 - busy) ** TOGETHER))
    return min(usual, demand) if together < TOGETHER else usual


# --- the capacity of a GPU, and the part of it that a segment takes


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity of a whole GPU."""

    blocks: float
    warps: float
    registers: float
    shared_bytes: float
    issue_ns: float  # between the starts of two kernels
    memory: float = 0.0  # bytes per ns; 0: not known

    @classmethod
    def of(cls, sms: int, sm: SmLimits, timing: Timing | None = None, memory: float = 0.0) -> Capacity:
        """The capacity of a GPU with this number of SMs and these limits."""
        issue_ns = (timing or Timing()).grid_issue_ns
        return cls(sms * sm.blocks, sms * sm.warps, sms * sm.registers, sms * sm.shared_bytes, issue_ns, memory)

    def slots(self, segment: SegmentProfile) -> float:
        """The part of the room for blocks that a segment takes, by warps, registers or shared memory: the largest."""
        return max(
            segment.blocks / self.blocks,
            segment.warps / self.warps,
            segment.registers / self.registers,
            segment.shared_bytes / self.shared_bytes,
        )

    def issuing(self, segment: SegmentProfile) -> float:
        """The part of the rate of kernel starts that a segment takes."""
        return segment.kernels * self.issue_ns / segment.time_ns


# --- models in the core's tables: rows that are filled from a profile, opened, and freed


def set_capacity(state: State, capacity: Capacity) -> None:
    """Sets the capacity for the core's account of resident work."""
    gpu = state.gpu[0]
    for name in ("blocks", "warps", "registers", "shared_bytes", "memory"):
        gpu[f"capacity_{name}"] = getattr(capacity, name)
    gpu["capacity_issue"] = 1e9 / max(capacity.issue_ns, 1.0)  # kernels per second


def set_params(state: State, model: int, params: Mapping[str, float]) -> None:
    """Sets the parameters of a model that is being installed."""
    state.model_params[model] = 0
    for k, (name, value) in enumerate(params.items()):
        state.model_params[model, k] = (_key(name), value)
    _resolve(state, model)


def declare_params(state: State, params: Mapping[str, float]) -> None:
    """Sets the parameters that the policy reads, with the defaults for models without them."""
    state.policy_params[...] = 0
    for k, (name, value) in enumerate(params.items()):
        state.policy_params[k] = (_key(name), value)
    for model in range(len(state.model_params)):
        _resolve(state, model)


def _resolve(state: State, model: int) -> None:
    values = dict(zip(state.model_params["key"][model], state.model_params["value"][model], strict=True))
    for k, (key, value) in enumerate(zip(state.policy_params["key"], state.policy_params["value"], strict=True)):
        state.param[model, k] = values.get(key, value) if key else 0.0


def estimated_demand(state: State, program: Sequence[SegmentProfile]) -> float:
    """The part of the GPU that one run keeps busy: its fullest resource, segment by segment."""
    gpu = state.gpu[0]
    capacity = [gpu[f"capacity_{each}"] or np.inf for each in ("warps", "registers", "shared_bytes", "issue")]
    total = used = 0.0
    for each in program:
        needs = (each.warps, each.registers, each.shared_bytes, each.kernels / each.time_ns * 1e9)
        total += each.time_ns
        used += each.time_ns * max(need / most for need, most in zip(needs, capacity, strict=True))
    return min(max(used / total, 0.01), 1.0)


def _check_limits(state: State, profile: ModelProfile, slots: int) -> None:
    _, sizes, segments = state.segment.shape
    rows = int(((state.model["state"] == codes.ABSENT) & (state.model["n_instances"] == 0)).sum())
    instances = int((state.instance["model"] == codes.NONE).sum())
    for column, given, most in (
        ("sizes", len(profile.sizes), sizes),
        ("batch", slots, state.slot.shape[1]),
        ("segments", max(len(each) for each in profile.sizes.values()), segments),
        ("instances_per_model", profile.instances, state.model_instance.shape[1]),
        ("instances", profile.instances, instances),
        ("models", 1, rows),
    ):
        if given > most:
            raise ProfileError(
                f"{profile.name}: {column}={given}, but the tables have room for {most}: give larger Limits",
                model=profile.name, field=column, given=given, limit=most,
            )  # fmt: skip


def install(
    state: State, profile: ModelProfile, batch: Sequence[int] = (), whole_batches: bool = False
) -> tuple[int, list[int]]:
    """Fills a free model row and free instances from a profile; returns their numbers. `open_model` then lets requests
    in. `batch` also names sizes that `install_size` adds later; the smallest and the largest must be in the profile.
    `whole_batches`: each request is a batch of its own, which no other request joins.

    Completion words are the state's own. A backend that writes to other words sets `launch` and `whole` of the
    instances, their inputs, and `n_inputs`, before it opens the model.
    """
    _check_limits(state, profile, 1 if whole_batches else max(profile.batch))
    rows = np.flatnonzero((state.model["state"] == codes.ABSENT) & (state.model["n_instances"] == 0))
    instances = np.flatnonzero(state.instance["model"] == codes.NONE)[: profile.instances]
    m = int(rows[0])
    row = state.model[m]
    row["priority"], row["share"], row["target_ns"] = profile.priority, profile.share, profile.target_ns
    sizes = sorted({*profile.batch, *batch})
    row["queue_limit"], row["n_sizes"], row["n_instances"] = profile.queue_limit, len(sizes), len(instances)
    row["n_inputs"], row["whole_batches"] = 0, whole_batches
    row["length_of"] = _key(profile.length_of) if profile.length_of else 0
    lengths = np.flatnonzero((state.model["length_of"] == row["length_of"]) & (state.model["n_instances"] > 0))
    row["flow"] = lengths[0] if profile.length_of else m
    row["generation"] += 1
    state.outcome[m] = 0
    state.model["trial_ns"][m] = 0.0
    set_params(state, m, profile.params)
    for k, each in enumerate(sizes):
        state.size[m, k] = (each, 0, codes.LATER, 0.0, 0.0)
        if each in profile.sizes:
            install_size(state, m, profile, each)
    _install_weights(state, m, profile, int(state.tuning["chunk_bytes"][0]))
    state.model_instance[m, : len(instances)] = instances
    state.instance["model"][instances] = m
    n_words = state.segment.shape[2] + 1
    words = state.word.ctypes.data + 8 * (np.arange(n_words) + n_words * instances[:, None])
    state.launch["word"][instances] = words[:, None, :-1]
    state.whole["word"][instances] = words[:, -1:]
    state.instance_partition[instances] = codes.NONE
    state.instance["arena"][instances] = codes.NONE
    if state.core["partitions"][0]:
        state.confined[instances] = 0
    state.word[instances] = 0
    return m, [int(instance) for instance in instances]


def install_size(state: State, m: int, profile: ModelProfile, batch: int) -> None:
    """Fills the rows of one batch size of a model. If the model is open, call it between two steps of the core, and
    after its handles are written.
    """
    program, chunk = profile.sizes[batch], int(state.tuning["chunk_bytes"][0])
    k = int(np.flatnonzero(state.size["batch"][m, : state.model["n_sizes"][m]] == batch)[0])
    times = np.array([each.time_ns for each in program])
    seen = profile.demand.get(batch)
    demand = usual_demand(seen, profile.together.get(batch, TOGETHER)) if seen else estimated_demand(state, program)
    size, segment = state.size[m, k], state.segment[m, k, : len(program)]
    segment["tail_ns"] = times[::-1].cumsum()[::-1]
    for name in ("time_ns", "blocks", "warps", "registers", "shared_bytes", "kernels"):
        segment[name] = [getattr(each, name) for each in program]
    segment["compute"] = [each.compute for each in program]
    capacity = state.gpu["capacity_memory"][0] or np.inf
    segment["memory"] = [each.memory or min(each.bytes / each.time_ns / capacity, 1.0) for each in program]
    segment["occupancy"] = [_occupancy(state, each) for each in program]
    segment["copy_bytes"] = 0.0
    segment["copy_bytes"][0] = batch * profile.input_bytes
    segment["chunks"] = -(-np.array(profile.needs.get(batch, (profile.weight_bytes,) * len(program))) // chunk)
    size["total_ns"], size["demand"], size["segments"] = times.sum(), demand, len(program)


def _occupancy(state: State, segment: SegmentProfile) -> float:
    """The part of the GPU's blocks, warps, registers or shared memory that a segment holds at once: the largest."""
    gpu = state.gpu[0]
    names = ("blocks", "warps", "registers", "shared_bytes")
    return float(max(getattr(segment, name) / (gpu[f"capacity_{name}"] or np.inf) for name in names))


def _install_weights(state: State, model: int, profile: ModelProfile, chunk: int) -> None:
    state.weights[model] = np.zeros((), state.weights.dtype)
    weights = state.weights[model]
    weights["location"], weights["chunk_bytes"] = codes.RESIDENT, chunk
    if state.residency["managed"][0]:  # until the installer says more, the model has no weights that could leave
        weights["keep"] = codes.PINNED
        state.segment["chunks"][model] = 0
        return
    weights["bytes"], weights["keep"] = profile.weight_bytes, codes.KEEP[profile.resident]
    weights["chunks"] = -(-profile.weight_bytes // chunk)


def remove(state: State, model: int) -> None:
    """Frees the rows of a model: only after its MODEL_CLOSED, or before it was opened.

    Where weights come and go, call it between two steps of the core.
    """
    if state.model["state"][model] != codes.ABSENT:
        raise ProfileError(
            f"model row {model} is in use: post CLOSE_MODEL and wait for MODEL_CLOSED", field="state", given=model
        )
    weights = state.weights[model]
    if state.residency["managed"][0]:
        if weights["location"] in (codes.LOADING, codes.EVICTING):
            raise ProfileError(
                f"the weights of model row {model} are moving: wait until the move is done",
                field="location",
                given=model,
            )
        state.residency["held_bytes"][0] -= weights["bytes"] if weights["location"] == codes.RESIDENT else 0
        state.residency["pending"][0] = 1
    state.weights[model] = np.zeros((), state.weights.dtype)
    state.instance["model"][state.model_instance[model, : state.model["n_instances"][model]]] = codes.NONE
    state.model["n_instances"][model] = 0


def post_message(state: State, kind: int, model: int = 0, *, request: int = 0, serial: int = 0, tag: int = 0) -> None:
    """Posts a message other than SUBMIT: CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, or FAIL (error code as `tag`)."""
    message = Message(kind=kind, request=request, serial=serial, tag=tag, model=model)
    if not post(state, 0, message.address):
        raise ProfileError("the submission ring is full: step the core, then try again", field="submit")


def open_model(state: State, model: int) -> None:
    post_message(state, codes.OPEN_MODEL, model)
