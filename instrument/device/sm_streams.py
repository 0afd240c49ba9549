"""Streams, hardware queues, events and copies of the SM model: what may go next, and when. Compiled."""

from __future__ import annotations

from paellapy.instrument.device.heaps import heap_push
from paellapy.instrument.device.jit import part
from paellapy.instrument.device.sm_layout import (
    COPY,
    DONE,
    DONE_LINK,
    E_FIRED,
    E_WAITERS,
    ENGINE,
    EVENT,
    FINISH,
    GRAPH,
    ISSUED,
    KIND,
    LATENCY,
    LAUNCH,
    LINK,
    PRIORITY,
    PRIORITY_NS,
    Q_HEAD,
    Q_NEXT_WAITER,
    Q_TAIL,
    Q_TIMER,
    Q_TODO,
    Q_WAITS,
    RECORD,
    REPORT,
    REPORTED,
    S_BUSY,
    S_CURRENT,
    S_GRAPH,
    S_QUEUE,
    START,
    STATUS,
    STREAM,
    SUBMIT,
    WAIT,
    State,
)


@part
def set_timer(s: State, at: float, identity: int) -> None:
    gpu = s.gpu[0]
    heap_push(s.timed, s.timed_id, 0, gpu.timed, at, identity)
    gpu.timed += 1


@part
def look_at(s: State, queue: int) -> None:
    gpu = s.gpu[0]
    if s.queue[queue, Q_TODO] == 0:
        s.queue[queue, Q_TODO] = 1
        s.todo[(gpu.todo_head + gpu.todo) % s.todo.shape[0]] = queue
        gpu.todo += 1


@part
def finish_work(s: State, handle: int) -> None:
    """A launch or copy is over: its stream may go on."""
    gpu = s.gpu[0]
    i = handle & (s.ci.shape[0] - 1)
    s.cf[i, FINISH] = gpu.now_ns
    gpu.pending -= 1
    stream = s.ci[i, STREAM]
    s.stream[stream, S_BUSY] = 0
    s.stream_t[stream] = gpu.now_ns
    s.ci[i, STATUS] = REPORTED
    if s.ci[i, REPORT] != 0:
        s.ci[i, STATUS] = DONE
        s.ci[i, DONE_LINK] = -1
        if gpu.unreported == 0:
            gpu.done_head = handle
        else:
            s.ci[gpu.done_tail & (s.ci.shape[0] - 1), DONE_LINK] = handle
        gpu.done_tail = handle
        gpu.unreported += 1
    look_at(s, s.stream[stream, S_QUEUE])


@part
def ready_ns(s: State, i: int) -> float:
    """When the command at the head of its queue may go, now that its stream is free."""
    gpu = s.gpu[0]
    stream = s.ci[i, STREAM]
    last: float = s.stream_t[stream]
    submit: float = s.cf[i, SUBMIT]
    if s.ci[i, KIND] != LAUNCH:
        return max(submit, last)
    same_graph = s.ci[i, GRAPH] != 0 and s.ci[i, GRAPH] == s.stream[stream, S_GRAPH]
    gap: float = gpu.graph_gap_ns if same_graph else gpu.kernel_gap_ns
    launch: float = gpu.launch_ns
    return max(submit + launch, last + gap)


@part
def fire(s: State, event: int) -> None:
    """The event happens: the queues that wait for it may go on."""
    s.event[event, E_FIRED] = 1
    waiter = s.event[event, E_WAITERS]
    while waiter >= 0:
        s.queue[waiter, Q_WAITS] = 0
        look_at(s, waiter)
        waiter = s.queue[waiter, Q_NEXT_WAITER]


@part
def advance_queue(s: State, queue: int) -> None:
    """Let go of the queue's head as long as it may: a queue is first in, first out, over all streams mapped onto it."""
    gpu = s.gpu[0]
    while s.queue[queue, Q_HEAD] >= 0 and s.queue[queue, Q_WAITS] == 0:
        handle = s.queue[queue, Q_HEAD]
        i = handle & (s.ci.shape[0] - 1)
        stream = s.ci[i, STREAM]
        if s.stream[stream, S_BUSY] != 0:
            return
        at = ready_ns(s, i)
        if at > gpu.now_ns:
            if s.queue[queue, Q_TIMER] == 0:
                s.queue[queue, Q_TIMER] = 1
                set_timer(s, at, s.slot.shape[0] + queue)
            return
        kind = s.ci[i, KIND]
        event = s.ci[i, EVENT]
        if kind == WAIT and s.event[event, E_FIRED] == 0:
            s.queue[queue, Q_WAITS] = 1
            s.queue[queue, Q_NEXT_WAITER] = s.event[event, E_WAITERS]
            s.event[event, E_WAITERS] = queue
            return
        s.queue[queue, Q_HEAD] = s.ci[i, LINK]
        if s.queue[queue, Q_HEAD] < 0:
            s.queue[queue, Q_TAIL] = -1
        s.cf[i, START] = gpu.now_ns
        if kind == LAUNCH:
            s.ci[i, STATUS] = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = s.ci[i, GRAPH]
            heap_push(s.ready, s.ready_id, 0, gpu.ready, gpu.now_ns - s.ci[i, PRIORITY] * PRIORITY_NS, handle)
            gpu.ready += 1
        elif kind == COPY:
            s.ci[i, STATUS] = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = 0
            engine = s.ci[i, ENGINE]
            s.cf[i, START] = max(gpu.now_ns, s.engine[engine])
            s.engine[engine] = s.cf[i, START] + s.cf[i, LATENCY]
            set_timer(s, s.engine[engine], s.slot.shape[0] + s.queue.shape[0] + stream)
        else:
            s.ci[i, STATUS] = REPORTED
            s.cf[i, FINISH] = gpu.now_ns
            gpu.pending -= 1
            s.stream_t[stream] = gpu.now_ns
            if kind == RECORD:
                fire(s, event)


@part
def drain_todo(s: State) -> None:
    gpu = s.gpu[0]
    while gpu.todo > 0:
        queue = s.todo[gpu.todo_head]
        gpu.todo_head = (gpu.todo_head + 1) % s.todo.shape[0]
        gpu.todo -= 1
        s.queue[queue, Q_TODO] = 0
        advance_queue(s, queue)


@part
def link_new(s: State) -> None:
    """Append the commands written since the last call to their queues."""
    gpu = s.gpu[0]
    while gpu.linked < gpu.next:
        handle = gpu.linked
        gpu.linked += 1
        gpu.pending += 1
        i = handle & (s.ci.shape[0] - 1)
        s.ci[i, LINK] = -1
        queue = s.stream[s.ci[i, STREAM], S_QUEUE]
        tail = s.queue[queue, Q_TAIL]
        if tail < 0:
            s.queue[queue, Q_HEAD] = handle
        else:
            s.ci[tail & (s.ci.shape[0] - 1), LINK] = handle
        s.queue[queue, Q_TAIL] = handle
        look_at(s, queue)
    drain_todo(s)
