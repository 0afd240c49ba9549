"""What a policy sees: a job, the GPU, a segment. The fields of these classes are the columns of the policies' tables.

Times are floats, because ranks are. A field of type `int` may be an index.
"""

from __future__ import annotations

from inspect import get_annotations
from typing import Any, Protocol

import numpy as np

PARAMS = 8  # named numbers of a model that a policy may read
PER_MODEL = 256  # rows of a policy's own numbers that are kept for every model: models that the core may have
OWN_NAMES = 32  # a policy's own numbers that are kept once
OWN_PER_MODEL = 8  # and for every model


class SegmentFacts(Protocol):
    """A segment, alone on the GPU. `compute` and `memory` are parts of what the GPU can do, 0 … 1; 0: not known."""

    ns: float
    blocks: float  # resident at once
    occupancy: float  # part of the GPU's blocks, warps, registers or shared memory that these hold: the fullest
    compute: float
    memory: float
    copy_bytes: float  # inputs of a full batch, before the first segment; 0: none, or not known


class DoneSegment(SegmentFacts, Protocol):
    """A segment that is done; the whole program where it was launched in one piece."""

    took_ns: float  # from its start on the GPU, as far as the host sees it, to now
    number: int  # from 0


class TopFacts(Protocol):
    """Launched segments of the jobs of highest priority: sums. `ns` counts all, the others each job's oldest."""

    ns: float
    blocks: float
    compute: float
    memory: float


class Job(Protocol):
    """One lane's requests, or one request for `order`: numbers, times in ns."""

    now_ns: float
    arrival_ns: float  # of its oldest request
    deadline_ns: float  # earliest deadline, or arrival + target where it has none; NEVER or more without either
    target_ns: float  # NEVER: none
    priority: float
    remaining_ns: float  # time alone of what has not completed
    total_ns: float
    batch: float
    started: float  # 1: some of it was launched
    share: float  # of the model
    deficit_ns: float  # GPU time the model is owed under fair sharing; negative: it had more than that
    client: float
    client_deficit_ns: float
    client_start_ns: float  # fair-queueing start tag: orders the requests of backlogged clients fairly
    occupancy: float  # fullest of the GPU's resources, 0 … 1 and beyond when oversubscribed
    used_ns: float  # time alone of the segments that its model has had done
    missing_bytes: float  # of the model's weights, that are not on the GPU
    ready_ns: float  # when it could start and need not wait for weights on its way; now_ns or before: it can
    model: int  # row, from 0; index of numbers that are kept per model
    tenant: int  # `client` as a whole number
    segment: SegmentFacts  # the next to be launched
    params: Any  # the model's parameters, by the names that the policy declares


class Gpu(Protocol):
    """What is on the GPU: sums over launched segments, against what it can hold.

    `resident`: each lane's oldest launched segment; `pending`: the segments queued behind it. `issue` is in kernels per
    second.
    """

    now_ns: float
    capacity_blocks: float
    capacity_warps: float
    capacity_registers: float
    capacity_shared_bytes: float
    capacity_issue: float
    capacity_memory: float  # bytes per ns
    resident_blocks: float
    resident_warps: float
    resident_registers: float
    resident_shared_bytes: float
    resident_issue: float
    pending_blocks: float
    pending_warps: float
    pending_registers: float
    pending_shared_bytes: float
    pending_issue: float
    active_jobs: float
    active_priority: float  # highest among active jobs; kept only for policies with `admit`
    waiting_jobs: float
    max_active: float
    occupancy: float  # fullest resource, resident ÷ capacity
    lower_ns: float  # launched segments of jobs below active_priority, time alone; kept as `top` is
    top: TopFacts  # of jobs of active_priority; kept only for policies with `admit` that read it


class Owner(Protocol):
    """A loaded model whose weights are on the GPU and could leave, for `victim`."""

    now_ns: float
    bytes: float
    priority: float
    share: float
    demand: float  # its requests of late: a request counts for 1/e after Tuning.demand_memory_ns
    used_ns: float  # when its latest request came
    came_ns: float  # when its weights came
    reload_ns: float  # what it would take to bring them back
    model: int


Own = Any  # what a policy keeps between calls, by the names that it declares


def _columns(seen: type) -> np.dtype[np.void]:
    kinds = {"float": "f8", "int": "i8", "SegmentFacts": SEGMENT_FACTS, "TopFacts": TOP_FACTS, "Any": NO_NAMES}
    # What is inherited comes last: else Numba would take one record for the other, and warn of it.
    named = {name: kind for each in seen.__mro__ for name, kind in get_annotations(each).items()}
    return np.dtype([(name, kinds[kind]) for name, kind in named.items()], align=True)


SEGMENT_FACTS: Any = None
TOP_FACTS: Any = None
NO_NAMES = np.dtype([(f"p{k}", "f8") for k in range(PARAMS)], align=True)  # policies give these names of their own
SEGMENT_FACTS = _columns(SegmentFacts)
TOP_FACTS = _columns(TopFacts)
DONE = _columns(DoneSegment)  # row 0 of State.done_segment; policies see it as `segment`
JOB = _columns(Job)
OWNER = _columns(Owner)  # row 0 of State.owner; policies see it as `model`
GPU = _columns(Gpu)  # row 0 of State.gpu; policies see it as `gpu`

# What a policy was given by a model: the name's hash, and the value.
PARAM = np.dtype([("key", "u8"), ("value", "f8")], align=True)

# core.facts: what is worked out only for policies that read it; shares of compute and memory, when a model is loaded
READS_SEGMENT, READS_TOP, READS_PARAMS, READS_SHARES, READS_WEIGHTS, READS_DEFICIT = 1, 2, 4, 8, 16, 32
