"""What a policy sees: a job and the GPU. The fields of these classes are the columns of the tables JOB and GPU."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Job(Protocol):
    """One lane's requests, or one request for `order`: numbers, times in ns. Times are floats, because ranks are."""

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
    model: float


class Gpu(Protocol):
    """What `admit` sees of the GPU: sums over launched segments, against what it can hold.

    `resident`: each lane's oldest launched segment; `pending`: the segments queued behind it. `issue` is in kernels per
    second.
    """

    capacity_blocks: float
    capacity_warps: float
    capacity_registers: float
    capacity_shared_bytes: float
    capacity_issue: float
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


def _columns(seen: type) -> np.dtype[np.void]:
    return np.dtype([(name, "f8") for name in seen.__annotations__], align=True)


JOB = _columns(Job)
GPU = _columns(Gpu)  # row 0 of State.gpu; policies see it as `gpu`
