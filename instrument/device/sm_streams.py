"""Streams, hardware queues, events and copies of the SM model: which command may go next, and when. Compiled."""

from __future__ import annotations

from paellapy.instrument.device.heaps import heap_push
from paellapy.instrument.device.sm_layout import (
    COPY,
    DONE,
    E_FIRED,
    E_WAITERS,
    ISSUED,
    LAUNCH,
    PRIORITY_NS,
    Q_HEAD,
    Q_NEXT_WAITER,
    Q_TAIL,
    Q_TIMER,
    Q_TODO,
    Q_WAITS,
    RECORD,
    REPORTED,
    S_BUSY,
    S_CURRENT,
    S_GRAPH,
    S_QUEUE,
    WAIT,
    State,
)
from paellapy.instrument.jit import part


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
    """Ends a launch or copy, so that its stream may continue."""
    gpu = s.gpu[0]
    command = s.command[handle & (s.command.shape[0] - 1)]
    command.finish_ns = gpu.now_ns
    gpu.pending -= 1
    stream = command.stream
    s.stream[stream, S_BUSY] = 0
    s.stream_t[stream] = gpu.now_ns
    command.status = REPORTED
    if command.report != 0:
        command.status = DONE
        command.done_link = -1
        if gpu.unreported == 0:
            gpu.done_head = handle
        else:
            s.command[gpu.done_tail & (s.command.shape[0] - 1)].done_link = handle
        gpu.done_tail = handle
        gpu.unreported += 1
    look_at(s, s.stream[stream, S_QUEUE])


@part
def ready_ns(s: State, i: int) -> float:
    """When the command at the head of its queue may go, now that its stream is free."""
    gpu = s.gpu[0]
    stream = s.command[i].stream
    last: float = s.stream_t[stream]
    submit: float = s.command[i].submit_ns
    if s.command[i].kind != LAUNCH:
        return max(submit, last)
    same_graph = s.command[i].graph != 0 and s.command[i].graph == s.stream[stream, S_GRAPH]
    gap: float = gpu.graph_gap_ns if same_graph else gpu.kernel_gap_ns
    launch: float = gpu.launch_ns
    return max(submit + launch, last + gap)


@part
def fire(s: State, event: int) -> None:
    """Fires an event, so that the queues waiting for it may continue."""
    s.event[event, E_FIRED] = 1
    waiter = s.event[event, E_WAITERS]
    while waiter >= 0:
        s.queue[waiter, Q_WAITS] = 0
        look_at(s, waiter)
        waiter = s.queue[waiter, Q_NEXT_WAITER]


@part
def advance_queue(s: State, queue: int) -> None:
    """Releases the queue's heads as long as they may go: a queue is first in, first out, over all its streams."""
    gpu = s.gpu[0]
    while s.queue[queue, Q_HEAD] >= 0 and s.queue[queue, Q_WAITS] == 0:
        handle = s.queue[queue, Q_HEAD]
        i = handle & (s.command.shape[0] - 1)
        stream = s.command[i].stream
        if s.stream[stream, S_BUSY] != 0:
            return
        at = ready_ns(s, i)
        if at > gpu.now_ns:
            if s.queue[queue, Q_TIMER] == 0:
                s.queue[queue, Q_TIMER] = 1
                set_timer(s, at, s.slot.shape[0] + queue)
            return
        kind = s.command[i].kind
        event = s.command[i].event
        if kind == WAIT and s.event[event, E_FIRED] == 0:
            s.queue[queue, Q_WAITS] = 1
            s.queue[queue, Q_NEXT_WAITER] = s.event[event, E_WAITERS]
            s.event[event, E_WAITERS] = queue
            return
        s.queue[queue, Q_HEAD] = s.command[i].link
        if s.queue[queue, Q_HEAD] < 0:
            s.queue[queue, Q_TAIL] = -1
        s.command[i].start_ns = gpu.now_ns
        if kind == LAUNCH:
            s.command[i].status = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = s.command[i].graph
            heap_push(s.ready, s.ready_id, 0, gpu.ready, gpu.now_ns - s.command[i].priority * PRIORITY_NS, handle)
            gpu.ready += 1
        elif kind == COPY:
            s.command[i].status = ISSUED
            s.stream[stream, S_BUSY] = 1
            s.stream[stream, S_CURRENT] = handle
            s.stream[stream, S_GRAPH] = 0
            engine = s.command[i].engine
            s.command[i].start_ns = max(gpu.now_ns, s.engine[engine])
            s.engine[engine] = s.command[i].start_ns + s.command[i].latency_ns
            set_timer(s, s.engine[engine], s.slot.shape[0] + s.queue.shape[0] + stream)
        else:
            s.command[i].status = REPORTED
            s.command[i].finish_ns = gpu.now_ns
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
    """Appends the commands written since the last call to their queues."""
    gpu = s.gpu[0]
    while gpu.linked < gpu.next:
        handle = gpu.linked
        gpu.linked += 1
        gpu.pending += 1
        command = s.command[handle & (s.command.shape[0] - 1)]
        command.link = -1
        queue = s.stream[command.stream, S_QUEUE]
        tail = s.queue[queue, Q_TAIL]
        if tail < 0:
            s.queue[queue, Q_HEAD] = handle
        else:
            s.command[tail & (s.command.shape[0] - 1)].link = handle
        s.queue[queue, Q_TAIL] = handle
        look_at(s, queue)
    drain_todo(s)
