"""Small traces whose pictures can be calculated by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from paellapy.instrument.records import BLOCK, LAUNCH
from paellapy.instrument.traces.trace import DeviceFacts, Trace
from paellapy.scheduler.engine.trace import JOB_RECORD, OWNER, SEGMENT_RECORD, EngineTrace

EPOCH = 1_780_000_000_000_000_000
TOY = DeviceFacts("toy", n_sm=3, max_warps_per_sm=64, compute_capability=(9, 0), versions={"driver": "580"})
NAMES = ("gemm", "add<int>", "softmax")
WARPS = (4, 8, 16)

Row = tuple[int, int, int, int, int]  # launch, block, sm, start, duration


def make(rows: list[Row], device: DeviceFacts = TOY, **counts: int) -> Trace:
    """Launches 1, 2 and 3 of one kernel each, on streams 7, 7 and 9; times from EPOCH on."""
    launches = np.zeros(3, LAUNCH)
    launches["launch"] = [1, 2, 3]
    launches["kernel"] = [0, 1, 2]
    launches["warps"] = WARPS
    launches["registers"] = [32, 64, 128]
    launches["blocks"] = launches["grid"][:, 0] = 6
    launches["stream"] = [7, 7, 9]
    blocks = np.zeros(len(rows), BLOCK)
    for i, (launch, block, sm, start, duration) in enumerate(rows):
        blocks[i] = (launch, launch - 1, sm, block, 0, EPOCH + start, EPOCH + start + duration)
    return Trace(blocks, launches, NAMES, device, **counts)


# Two waves of `gemm`, and `add<int>` beside the second.
MIX: list[Row] = [
    (1, 0, 0, 0, 4000),
    (1, 1, 1, 0, 4000),
    (1, 2, 2, 0, 5000),
    (1, 3, 0, 4000, 4000),
    (2, 0, 0, 5000, 1000),
    (2, 1, 1, 5000, 2500),
    (2, 2, 1, 5500, 2500),
]

_times = st.one_of(st.integers(0, 20), st.integers(0, 10**6))
_rows = st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 2), _times, _times)
schedules = st.lists(_rows, max_size=25).map(make)


def many(n: int, n_sm: int = 132, per_sm: int = 8) -> Trace:
    """Three kernels one after another, with every SM always full."""
    slots = n_sm * per_sm
    rounds = -(-n // slots)
    duration = np.zeros(rounds * slots, np.int64)
    duration[:n] = np.random.default_rng(0).integers(1000, 3000, n)
    end = EPOCH + np.cumsum(duration.reshape(rounds, slots), axis=0).ravel()
    blocks = np.zeros(n, BLOCK)
    blocks["kernel"] = np.arange(n) * 3 // n
    blocks["launch"] = blocks["kernel"] + 1
    blocks["block"] = np.arange(n)
    blocks["sm"] = np.arange(n) % slots % n_sm
    blocks["start_ns"], blocks["end_ns"] = (end - duration)[:n], end[:n]
    return Trace(blocks, make([]).launches, NAMES, DeviceFacts("H200", n_sm, 64, (9, 0)))


def engine_trace(policy: str = "paella") -> EngineTrace:
    """Two requests of `bert` in one batch of two segments, one of them late; one request of `resnet` never launched."""
    trace = make(MIX)
    found = EngineTrace(trace.blocks, trace.launches, trace.kernels, TOY)
    jobs = [
        (1, 0, 4, 0, 2, 0, 0, 0, EPOCH - 2000, EPOCH - 500, EPOCH + 8500, EPOCH + 6000),
        (2, 0, 4, 1, 2, 0, 5, 1, EPOCH - 1000, EPOCH - 500, EPOCH + 8500, EPOCH + 9000),
        (3, 1, -1, 0, 0, 2, 0, 0, EPOCH + 1000, -1, EPOCH + 3000, EPOCH + 3000),
    ]
    segments = [(0, 4, 2, 0, 4, EPOCH, EPOCH + 4900), (0, 4, 2, 1, 3, EPOCH + 5000, EPOCH + 8000)]
    owners = [(1, 0, 4), (2, 0, 4), (3, 1, 5)]
    found.know(
        np.array(jobs, JOB_RECORD), np.array(segments, SEGMENT_RECORD), np.array(owners, OWNER), ("bert", "resnet"),
        policy, False,
    )  # fmt: skip
    return found
