"""The SM model's state: created for a part, enlarged, and examined when it is stuck."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device import sm_layout as lay
from paellapy.instrument.device.heaps import new_tree
from paellapy.instrument.device.parts import Part
from paellapy.instrument.device.timing import Timing
from paellapy.instrument.errors import LaunchError
from paellapy.instrument.records import BLOCK, SM_LINE

_KINDS = ("launch", "copy", "record", "wait")


def new_state(part: Part, timing: Timing, seed: int, backfill: bool, lines: NDArray[Any] | None) -> lay.State:
    sm, n, streams = part.sm, part.sms, 32
    slots = n * sm.blocks
    gpu = np.zeros(1, lay.GPU)
    gpu["backfill"], gpu["grid_limit"], gpu["seed"], gpu["fp_threads"] = backfill, part.concurrent_grids, seed, -1
    for name in ("launch_ns", "jitter", "kernel_gap_ns", "graph_gap_ns", "grid_issue_ns", "block_issue_ns"):
        gpu[name] = getattr(timing, name)
    if lines is None:
        lines = np.zeros(n, SM_LINE)
    elif lines.dtype != SM_LINE or lines.shape != (n,):
        raise LaunchError(f"lines must be an array of {n} SM_LINE, one for each SM of the {part.title}")
    queue = np.zeros((streams, 6), np.int64)
    queue[:, [lay.Q_HEAD, lay.Q_TAIL]] = -1
    window = np.zeros((64, 3), np.int64)
    window[0, lay.W_SMS] = n
    return lay.State(
        gpu=gpu,
        command=np.zeros(1024, lay.COMMAND),
        cost=np.zeros((1024, lay.COST_COLUMNS)),
        stream=np.zeros((streams, 4), np.int64),
        stream_t=np.full(streams, -np.inf),
        queue=queue,
        todo=np.zeros(streams + 1, np.int64),
        event=np.zeros((64, 3), np.int64),
        engine=np.zeros(3),
        ready=np.zeros(streams),
        ready_id=np.zeros(streams, np.int64),
        waiting=np.zeros(part.concurrent_grids + 1, np.int64),
        timed=np.zeros(slots + 2 * streams),
        timed_id=np.zeros(slots + 2 * streams, np.int64),
        free=np.tile(np.array([sm.threads, sm.registers, sm.shared_bytes, sm.blocks], np.int64), (n, 1)),
        gpc=np.concatenate([[0], np.cumsum(part.gpc_sms)]).astype(np.int64),
        window=window,
        flag=np.zeros(64, np.int64),
        ids=np.zeros(1024, np.int64),
        # The top of the stack is taken first: slot 0 of an SM before its others.
        stack=np.arange(slots).reshape(n, sm.blocks)[:, ::-1].copy(),
        slot=np.zeros((slots, 3), np.int64),
        dirty=np.zeros((2, n), np.int64),
        pool=np.zeros((lay.POOLS, n, 3)),
        pool_n=np.zeros((lay.POOLS, n), np.int64),
        heap=np.zeros(lay.POOLS * slots),
        heap_id=np.zeros(lay.POOLS * slots, np.int64),
        clock=_clocks(part, timing),
        tree=np.stack([new_tree(n)] * (lay.POOLS + 1)),
        trace=np.zeros(1024, BLOCK),
        lines=lines,
        use=np.zeros((n, 4)),
    )


def _clocks(part: Part, timing: Timing) -> NDArray[np.float64]:
    """The pools' rates per nanosecond: GB/s are bytes per ns, TFLOPS are a thousand flops per ns."""
    clock = np.zeros((lay.POOLS, 5))
    clock[lay.MEMORY, lay.C_TOTAL] = part.bandwidth_gbps * timing.bandwidth_efficiency
    clock[lay.MEMORY, lay.C_PER_SM] = timing.sm_bytes_per_clock * part.clock_mhz / 1000
    clock[[lay.FP32, lay.TENSOR], lay.C_TOTAL] = np.inf
    clock[lay.FP32, lay.C_PER_SM] = part.fp32_tflops * 1000 * timing.flops_efficiency / part.sms
    clock[lay.TENSOR, lay.C_PER_SM] = part.fp16_tensor_tflops * 1000 * timing.tensor_efficiency / part.sms
    return clock


def doubled(array: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([array, np.zeros_like(array)])


def more_streams(s: lay.State) -> lay.State:
    """Doubles the streams and queues. Timers of streams have the numbers after those of queues, so they are renumbered.
    """
    old = len(s.queue)
    count = int(s.gpu["todo"][0])
    todo = np.zeros(2 * old + 1, np.int64)
    todo[:count] = s.todo[(int(s.gpu["todo_head"][0]) + np.arange(count)) % len(s.todo)]
    s.gpu["todo_head"][0] = 0
    timed_id = np.concatenate([s.timed_id, np.zeros(2 * old, np.int64)])
    timed_id[timed_id >= len(s.slot) + old] += old
    queue = doubled(s.queue)
    queue[old:, [lay.Q_HEAD, lay.Q_TAIL]] = -1
    return s._replace(
        stream=doubled(s.stream),
        stream_t=np.concatenate([s.stream_t, np.full(old, -np.inf)]),
        queue=queue,
        todo=todo,
        ready=doubled(s.ready),
        ready_id=doubled(s.ready_id),
        timed=np.concatenate([s.timed, np.zeros(2 * old)]),
        timed_id=timed_id,
    )


def more_commands(s: lay.State, first: int, end: int) -> lay.State:
    """Doubles the rows, and moves commands `first` to `end` to their new places."""
    size = len(s.command)
    handles = np.arange(first, end)
    command = np.zeros(2 * size, lay.COMMAND)
    command[handles & (2 * size - 1)] = s.command[handles & (size - 1)]
    return s._replace(command=command)


def unfinished_launches(s: lay.State, first: int) -> NDArray[np.int64]:
    """Rows of the unfinished launches from handle `first` on, oldest first."""
    rows: NDArray[np.int64] = np.arange(first, int(s.gpu["next"][0])) & (len(s.command) - 1)
    unfinished: NDArray[np.bool_] = (s.command["kind"][rows] == lay.LAUNCH) & (s.command["status"][rows] < lay.DONE)
    return rows[unfinished]


def who_waits(s: lay.State, first: int) -> str:
    """For a state in which nothing can happen any more: each queue's head, and the event that it waits for."""
    rows = np.arange(first, int(s.gpu["next"][0])) & (len(s.command) - 1)
    records = rows[s.command["kind"][rows] == lay.RECORD]
    waits = []
    for handle in s.queue[s.queue[:, lay.Q_HEAD] >= 0, lay.Q_HEAD]:
        command = s.command[handle & (len(s.command) - 1)]
        event = command["event"]
        who = f"stream {command['stream']} ({_KINDS[command['kind']]} {handle})"
        if command["kind"] != lay.WAIT:
            waits.append(f"{who} waits for earlier work on its stream")
        elif not s.event[event, lay.E_RECORDED]:
            waits.append(f"{who} waits for event {event}, which is never recorded")
        else:
            by = s.command["stream"][records[s.command["event"][records] == event][0]]
            waits.append(f"{who} waits for event {event}, recorded later on stream {by}")
    return f"{s.gpu['pending'][0]} commands can never run: " + "; ".join(waits)


def check_idle(s: lay.State, part: Part) -> None:
    """Checks that with nothing in flight all resources are free and all counters agree; AssertionError otherwise."""
    sm = part.sm
    assert not any(s.gpu[each][0] for each in ("pending", "active", "waiting", "ready")), "work in flight"
    assert (s.free == (sm.threads, sm.registers, sm.shared_bytes, sm.blocks)).all(), "an SM misses resources"
    assert (s.pool_n == 0).all(), "an idle SM still draws on a pool"
    assert (s.clock[:, lay.C_ACTIVE] == 0).all(), "an idle pool still has an active SM"
    assert (np.sort(s.stack, axis=1).ravel() == np.arange(s.stack.size)).all(), "an SM lost a slot"
    assert (s.lines["started"] == s.lines["ended"]).all(), "a block has started and not ended"
    leaves = s.tree[lay.PLACE_TREE, s.tree.shape[1] // 2 :][: part.sms]
    known = (s.dirty[1] == 0) & (s.gpu["fp_threads"][0] >= 0)
    assert (leaves[known] == -sm.threads).all(), "the placement tree is wrong about an SM it takes for known"
