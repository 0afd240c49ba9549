"""The arguments of a policy: a job, the GPU, a segment. The fields of these classes are the columns of its tables.

Times are floats, because ranks are. A field of type `int` may be used as an index.
"""

from __future__ import annotations

from inspect import get_annotations
from typing import Any, Protocol

import numpy as np

PARAMS = 8  # named numbers of a model that a policy may read
PER_MODEL = 256  # rows for each of a policy's per-model numbers: the largest number of models in the core
OWN_NAMES = 32  # a policy's numbers that are kept once
OWN_PER_MODEL = 8  # a policy's numbers that are kept for every model


class SegmentFacts(Protocol):
    """A segment, alone on the GPU. `compute` and `memory` are fractions of the GPU's capacity, 0 … 1; 0: not known."""

    ns: float
    blocks: float  # resident at once
    # part of the GPU's blocks, warps, registers or shared memory that these hold, whichever is largest
    occupancy: float
    compute: float
    memory: float
    copy_bytes: float  # inputs of a full batch, before the first segment; 0: none, or not known


class DoneSegment(SegmentFacts, Protocol):
    """A segment that is done, or the whole program if it was launched in one piece."""

    took_ns: float  # from its start on the GPU, as seen by the host, until now
    number: int  # from 0


class TopFacts(Protocol):
    """Sums over the launched segments of the highest priority. `ns` counts all, the others each job's oldest."""

    ns: float
    blocks: float
    compute: float
    memory: float


class Job(Protocol):
    """The requests of one instance, or one request for `order`: numbers, times in ns."""

    now_ns: float
    arrival_ns: float  # of its oldest request
    deadline_ns: float  # earliest deadline, or arrival + target without one; NEVER or more without either
    target_ns: float  # NEVER: none
    priority: float
    remaining_ns: float  # time alone of the segments that have not completed
    total_ns: float
    batch: float
    started: float  # 1: some of its segments were launched
    share: float  # the model's
    deficit_ns: float  # GPU time the model is owed under fair sharing; negative: it has had more than its share
    client: float
    client_deficit_ns: float
    client_start_ns: float  # fair-queueing start tag: orders the requests of backlogged clients fairly
    occupancy: float  # use of the fullest of the GPU's resources, 0 … 1, above 1 when oversubscribed
    used_ns: float  # time alone of all completed segments of its model
    missing_bytes: float  # bytes of the model's weights that are not on the GPU
    ready_ns: float  # earliest start at which it need not wait for weights; now_ns or before: it can start now
    model: int  # row, from 0; the index of per-model numbers
    tenant: int  # `client` as an integer
    segment: SegmentFacts  # the next to be launched
    params: Any  # the model's parameters, by the names that the policy declares


class Gpu(Protocol):
    """The work on the GPU: sums over launched segments, and the GPU's capacity.

    `resident`: each instance's oldest launched segment; `pending`: the segments queued behind it. `issue` is in kernels
    per second.
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
    active_priority: float  # highest among active jobs; computed only for policies with `admit`
    waiting_jobs: float
    max_active: float
    occupancy: float  # fullest resource, resident ÷ capacity
    lower_ns: float  # time alone of launched segments of jobs below active_priority; computed like `top`
    top: TopFacts  # of the jobs of active_priority; computed only for policies whose `admit` reads it


class Owner(Protocol):
    """A loaded model whose weights are on the GPU and could leave, for `victim`."""

    now_ns: float
    bytes: float
    priority: float
    share: float
    demand: float  # number of recent requests: a request counts for 1/e after Tuning.demand_memory_ns
    used_ns: float  # when its latest request came
    came_ns: float  # when its weights came
    reload_ns: float  # time to bring them back
    model: int


Own = Any  # the numbers that a policy keeps between calls, by the names that it declares


def _columns(seen: type) -> np.dtype[np.void]:
    kinds = {"float": "f8", "int": "i8", "SegmentFacts": SEGMENT_FACTS, "TopFacts": TOP_FACTS, "Any": NO_NAMES}
    # Inherited fields come last: otherwise Numba would take one record for the other, and warn of it.
    named = {name: kind for each in seen.__mro__ for name, kind in get_annotations(each).items()}
    return np.dtype([(name, kinds[kind]) for name, kind in named.items()], align=True)


SEGMENT_FACTS: Any = None
TOP_FACTS: Any = None
NO_NAMES = np.dtype([(f"p{k}", "f8") for k in range(PARAMS)], align=True)  # policies rename these fields
SEGMENT_FACTS = _columns(SegmentFacts)
TOP_FACTS = _columns(TopFacts)
DONE = _columns(DoneSegment)  # row 0 of State.done_segment; policies see it as `segment`
JOB = _columns(Job)
OWNER = _columns(Owner)  # row 0 of State.owner; policies see it as `model`
GPU = _columns(Gpu)  # row 0 of State.gpu; policies see it as `gpu`

# A parameter given by a model: the name's hash, and the value.
PARAM = np.dtype([("key", "u8"), ("value", "f8")], align=True)

# core.facts: facts computed only for policies that read them; shares of compute and memory are computed at load time
READS_SEGMENT, READS_TOP, READS_PARAMS, READS_SHARES, READS_WEIGHTS, READS_DEFICIT = 1, 2, 4, 8, 16, 32
READS_CLIENT, READS_USE, READS_TERMS = 64, 128, 256
