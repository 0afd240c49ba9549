"""The core's tables, row by row: the layouts that the compiled core, producers and loops share."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = NDArray[Any]
Words = NDArray[np.uint64]

_C_TYPES = {"i8": ctypes.c_int64, "u8": ctypes.c_uint64, "f8": ctypes.c_double}


def struct_fields(record: np.dtype[Any]) -> list[tuple[str, Any]]:
    """Fields of a ctypes.Structure over a record of words: Python reads it in a third of the time."""
    return [(name, _C_TYPES[kind.str[1:]]) for name, (kind, *_) in (record.fields or {}).items()]


# [1] The core's own numbers. Unexplained counts are the lengths of the lists of the same name in `State`.
GATE = np.dtype(  # a gate of another process
    [
        ("word", "u8"),  # address of the word that says until when its launches wait; 0: there is no gate
        ("priority", "i8"),
        ("closed_until_ns", "i8"),  # 0: it is open
        ("closed_since_ns", "i8"),
        ("closed_ns", "i8"),  # total so far
        ("closes", "i8"),  # number of times it was closed
    ],
    align=True,
)
CORE = np.dtype(
    [
        # set from outside
        ("backend", "i8"),  # VIRTUAL or CUDA
        ("max_active", "i8"),  # most active jobs
        ("demand_limit", "f8"),  # largest total demand of active jobs, in GPUs
        ("max_in_flight", "i8"),  # segments of one job on the GPU at a time
        ("whole_always", "i8"),  # 1: the hardware decides, programs are launched in one piece
        # 1: programs of the highest priority are launched in one piece, where there are lower ones
        ("top_whole", "i8"),
        ("whole_idle", "i8"),  # 1: a program alone on the GPU, or short in a queue, is launched in one piece
        ("hold", "i8"),  # 1: instances wait until their outputs are read
        ("one_by_one", "i8"),  # 1: the host computes each launch; the next is chosen when that is done
        ("refresh", "i8"),  # waiting instances that are ranked afresh with each decision
        ("timeless", "i8"),  # 1: a job's rank changes only with the job
        ("may_idle", "i8"),  # 1: `admit` also decides for an idle GPU
        # 1: `admit` looks at the client, so refused jobs that have not started leave their instances
        ("by_client", "i8"),
        ("tick_ns", "f8"),  # between two calls of `tick`
        ("facts", "i8"),  # READS_SEGMENT …
        ("limited", "i8"),  # clients that have a limit
        ("own_at", "i8"),  # index in `own` of the first number that is kept per model
        ("own_names", "i8"),  # how many such numbers there are
        ("partitions", "i8"),  # number of SM partitions
        ("copier_fd", "i8"),  # eventfd that wakes the copier; NONE: there is none
        ("logs_completions", "i8"),  # 1: completions are also written to `completion_log`
        ("gates", "i8"),  # number of gates of other processes
        # current state
        ("mode", "i8"),  # RUN_MODE …
        ("error", "i8"),  # the backend's latest error
        ("outside", "i8"),  # loads, code of jobs, and leases that were taken back: the core did not launch their work
        ("suspects", "i8"),  # requests, and work from outside, that were on the GPU when it was lost
        ("lost_ns", "i8"),  # when it was lost; 0: it is there
        ("sequence", "i8"),  # number of the next request
        ("live", "i8"),  # requests accepted and not completed
        ("queued", "i8"),  # requests without a slot
        ("queued_jobs", "f8"),  # jobs that these will form, in full batches
        ("ready", "i8"),
        ("active", "i8"),
        ("flight", "i8"),
        ("held", "i8"),
        ("due", "i8"),
        ("out", "i8"),
        ("dirty_instances", "i8"),
        ("dirty_models", "i8"),
        ("cancelled", "i8"),
        ("held_queues", "i8"),
        ("held_back", "i8"),  # requests that are HELD_BACK
        ("awaiting_admit", "i8"),  # of the held queues, those that no limit holds back
        ("releases", "i8"),  # number of the latest look at the held queues
        ("refused", "i8"),
        ("changed", "i8"),  # 1: there is something to decide
        ("refresh_at", "i8"),  # index in `ready` of the instance that was ranked afresh last
        ("first_of_batch", "i8"),  # 1: the next completion is the first of its batch
        ("next_producer", "i8"),  # whose submissions are read next
        ("log_tail", "i8"),
        ("top_priority", "i8"),  # highest priority of an open model
        ("least_priority", "i8"),  # lowest priority of an open model
        ("longest_whole_ns", "f8"),  # longest program that is launched in one piece
        ("yielding", "i8"),  # active instances that launch nothing while a short job runs
        ("demand", "f8"),  # total demand of active jobs
        ("waiting_jobs", "f8"),  # average of the last period
        ("yielding_share", "f8"),  # fraction of the time in which some instances yielded
        ("overtaking_share", "f8"),  # fraction of recent jobs that should have overtaken the only one on the GPU
        ("wake_at_ns", "f8"),  # when there is something to do even without an event
        ("tick_at_ns", "f8"),  # time of the next call of `tick`; 0: there is no work
        ("admit_at_ns", "f8"),  # when a refused instance may go, as far as that depends on the time
        # fair queueing, over flows and over clients
        ("virtual_ns", "f8"),
        ("shares", "f8"),
        ("client_virtual_ns", "f8"),
        ("client_shares", "f8"),
        ("start_tag_ns", "f8"),  # largest start tag of a job that has started: the clock of start tags
        # throughput of the GPU when several jobs share it
        ("last_ns", "f8"),  # time of the last step
        ("busy_ns", "f8"),
        ("served_ns", "f8"),
        ("gain", "f8"),
        # the GPU's time: see shares.py
        ("gpu_ns", "f8"),  # time in which our work was on it
        ("gpu_at_ns", "i8"),  # time up to which that is counted
        ("gpu_clock_ns", "f8"),
        ("gpu_demand", "f8"),  # total demand of instances in flight
        # counters
        ("steps", "i8"),
        ("decisions", "i8"),
        ("rounds", "i8"),  # of decisions
        ("preemptions", "i8"),
        ("launches", "i8"),
        ("whole_launches", "i8"),
        ("confined_launches", "i8"),
        ("segments_done", "i8"),
        ("bad_ranks", "i8"),
        ("launch_ns", "f8"),  # time that the loop spent in the driver
        ("longest_launch_ns", "f8"),  # the longest time for one launch
        ("longest_copy_ns", "f8"),  # longest time until the copier had copied inputs; written by the copier
    ],
    align=True,
)

# A policy's function, and the addresses of its arguments. Where the first one is `job`, the caller passes it.
CALLBACK = np.dtype([("function", "u8"), ("first", "u8"), ("second", "u8"), ("third", "u8")], align=True)
# [1] Addresses of functions that the core calls, in its own process; 0: none.
CALLS = np.dtype(
    [
        *((role, CALLBACK) for role in ("rank", "order", "admit", "place", "tick", "done", "victim")),
        ("release_held_back", "u8"),  # functions of the core, where requests are held back
        ("give_up_refused", "u8"),
        ("step", "u8"),  # the core's own step, for loops
        ("graph_launch", "u8"),
        ("write", "u8"),  # write() of the C library
        ("clock", "u8"),  # clock_gettime
    ],
    align=True,
)

MODEL = np.dtype(
    [
        # written by the installer
        ("state", "i8"),
        ("priority", "i8"),  # larger goes first; a request may have its own
        ("share", "f8"),  # of GPU time, relative to other models'
        ("target_ns", "i8"),  # target latency: used in ranks, never expires; NEVER: none
        ("queue_limit", "i8"),  # further requests without a slot are refused
        ("generation", "u8"),  # of the row: messages meant for the row's previous model are refused
        ("n_sizes", "i8"),
        ("n_instances", "i8"),
        ("n_inputs", "i8"),
        ("length_of", "u8"),  # equal for the lengths of one model; 0: its inputs have one length
        ("flow", "i8"),  # the model in whose flows its requests count: that of its first length, or its own
        ("whole_batches", "i8"),  # 1: a request is a batch of its own; they run in the order in which they came
        ("trial_ns", "f8"),  # latency of a full batch when the model was loaded; 0: not measured
        # written by the core
        ("free_n", "i8"),  # instances on the stack free_instance[m]
        ("filling", "i8"),  # the core's own copy of State.filling[m]
        ("warm", "i8"),  # 1: the instance on top of the stack has run since the filling one was opened
        ("root", "i8"),  # heap of queued requests that arrived out of order
        ("first", "i8"),  # list of the requests that arrived in order: each behind the one before
        ("last", "i8"),
        ("queued", "i8"),
        ("live", "i8"),  # accepted and not completed
        ("held_back", "i8"),  # of these, HELD_BACK
        ("used_ns", "f8"),  # GPU time received, as time alone
        ("gpu_ns", "f8"),  # GPU time received, as its part of the time that the GPU was busy
        ("completed", "i8"),
        ("dirty", "i8"),  # 1: listed in State.dirty_models
        ("lost", "i8"),  # 1: it had a launch on the GPU when the GPU was lost
    ],
    align=True,
)

SIZE = np.dtype(  # [model, size], batch ascending
    [
        ("batch", "i8"),
        ("segments", "i8"),  # 0: not captured yet. The smallest and the largest size always are
        ("capture", "i8"),  # LATER, WANTED or GIVEN_UP
        ("total_ns", "f8"),
        ("demand", "f8"),  # part of the GPU that one such batch keeps busy: 1 / demand of them fill it
    ],
    align=True,
)

SEGMENT = np.dtype(  # [model, size, segment]
    [
        ("time_ns", "f8"),  # alone on the GPU
        ("tail_ns", "f8"),  # this segment and all after it
        ("blocks", "i8"),  # resident at once: those of the largest kernel, as far as the GPU holds them
        ("warps", "i8"),
        ("registers", "i8"),
        ("shared_bytes", "i8"),
        ("kernels", "i8"),  # kernels issued by the producer of the GPU
        ("compute", "f8"),  # fraction of the GPU's capacity; 0: not known
        ("memory", "f8"),
        ("copy_bytes", "f8"),  # bytes of the inputs, before the first segment
        ("occupancy", "f8"),  # part of the room for blocks that it takes: see Capacity.slots
        ("chunks", "i8"),  # how many chunks of the weights, from the first, must be on the GPU before it starts
    ],
    align=True,
)

INSTANCE = np.dtype(
    [
        ("model", "i8"),  # written by the installer; NONE: no instance
        ("state", "i8"),
        ("size", "i8"),  # index into the model's sizes, once closed; before, the size that would fit
        ("taken", "i8"),  # slots for which the core knows the requests
        ("items", "i8"),  # of these slots: the size of the batch
        ("live", "i8"),  # requests among them that are not completed
        ("segments", "i8"),  # segments of the size it runs at; 1 when launched whole
        ("issued", "i8"),
        ("done", "i8"),
        ("draining", "i8"),  # 1: its newest segment is about to leave room, or to end
        ("whole", "i8"),
        ("faulty", "i8"),  # 1: some of its slots are in State.instance_fault; set by the backend, in the loop
        ("rank", "f8"),
        ("demand", "f8"),  # its part of core.demand while it is active
        ("gpu_demand", "f8"),  # its part of core.gpu_demand while it is in flight
        ("gpu_from_ns", "f8"),  # core.gpu_clock_ns up to which it was charged
        ("yields", "i8"),  # 1: yields to a short job, if it is active
        ("ready_at", "i8"),  # index in State.ready, or NONE
        ("active_at", "i8"),  # index in State.active
        ("flight_at", "i8"),  # index in State.flight
        ("arrival_ns", "i8"),  # of the oldest live request
        ("latest_ns", "i8"),  # arrival of the latest of its requests
        ("deadline_ns", "i8"),  # earliest of the live requests'; NEVER: none
        ("priority", "i8"),  # highest of the live requests'
        ("inherits", "i8"),  # 1: its deadline and priority are those of a request that waits behind it
        ("client", "i8"),  # client of the oldest request
        ("client_start_ns", "f8"),
        ("started_ns", "i8"),  # first launch
        ("generation", "i8"),
        ("dirty", "i8"),  # 1: listed in State.dirty_instances
        ("pool", "i8"),  # pool of streams; by the installer
        ("stream_at", "i8"),  # the stream it has while it is in flight
        ("arena", "i8"),  # shared memory in which instances of several models run one at a time; NONE: its own
        ("partition", "i8"),  # SM partition of its latest launch while in flight; NONE: all SMs
    ],
    align=True,
)

# [instance, size, segment] and, for the whole program as one launch, [instance, size]. `handle` is launched by the
# backend (a CUDA graph exec). When it is done, it writes a number other than 0 to the u64 at `word`, which the core
# reads and clears. Segments of one instance complete in order. `draining` is the address of a word that is set once all
# blocks of a segment's last kernel are on the SMs; 0: there is no such word.
LAUNCH = np.dtype([("handle", "u8"), ("word", "u8"), ("draining", "u8")], align=True)

# Inputs that the copier is to copy into a slot.
COPY = np.dtype([("source", "u8"), ("instance", "i8"), ("slot", "i8"), ("model", "i8"), ("at_ns", "i8")], align=True)

REQUEST = np.dtype(
    [
        ("serial", "u8"),  # the producer's unique number, so that a late CANCEL cannot hit the row's next request
        ("tag", "u8"),  # the producer's own number, returned unchanged
        ("state", "i8"),
        ("model", "i8"),
        ("instance", "i8"),
        ("slot", "i8"),
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("client_start_ns", "f8"),  # fair-queueing start tag
        ("order", "f8"),  # key in its queue, before `sequence`
        ("sequence", "i8"),
        ("source", "u8"),  # staged inputs; 0: none to copy
        ("items", "i8"),  # more than 1 only for a model whose requests are whole batches
        ("left", "i8"),  # in the leftist heap of its queue; in the list, the one before
        ("right", "i8"),  # in the list, the one behind
        ("up", "i8"),
        ("height", "i8"),  # 0: in the list
        ("due_at", "i8"),  # index in the deadline heap, or NONE
        ("cancelled", "i8"),  # 1: listed in State.cancelled
        ("producer", "i8"),  # its producer
        ("released", "i8"),  # 1: it was HELD_BACK, and is in the model's queue now
        ("released_ns", "f8"),  # its part of client.released_ns; 0: its client has no limit
    ],
    align=True,
)

SUBMISSION = np.dtype(  # every field is a word: see `rings.Message`
    [
        ("sequence", "u8"),  # of the cell: position + 1 when published, position + capacity when taken
        ("kind", "i8"),
        ("request", "i8"),  # row
        ("serial", "u8"),
        ("tag", "u8"),
        ("model", "i8"),
        ("instance", "i8"),  # instance whose slot the producer reserved; NONE: staged
        ("slot", "i8"),
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("source", "u8"),
        ("generation", "u8"),  # of the model's row as the producer knows it; 0: any
        ("items", "i8"),  # 0: one
    ],
    align=True,
)

COMPLETION = np.dtype(
    [
        ("request", "i8"),  # row; NONE: concerns a model (MODEL_CLOSED)
        ("serial", "u8"),
        ("tag", "u8"),
        ("model", "i8"),
        ("instance", "i8"),  # place of the outputs; NONE: it never had a slot
        ("slot", "i8"),
        ("batch", "i8"),  # requests that ran together
        ("size", "i8"),  # index of the captured size they ran at
        ("status", "i8"),
        ("error", "i8"),  # the backend's error, with FAILED
        ("client", "i8"),
        ("priority", "i8"),
        ("arrival_ns", "i8"),
        ("deadline_ns", "i8"),
        ("started_ns", "i8"),  # first launch; NEVER: it was not launched
        ("finish_ns", "i8"),
        ("first", "i8"),  # 1: the first entry of its batch, so that each batch is counted once
    ],
    align=True,
)

# Launches of VIRTUAL backends: the loop runs entries 0 … core.out − 1 and sets core.out to 0.
OUT = np.dtype([("instance", "i8"), ("size", "i8"), ("segment", "i8"), ("word", "u8"), ("handle", "u8")], align=True)


# --- clients: their shares and limits, and their requests that are held back

CLIENT = np.dtype(
    [
        ("share", "f8"),
        ("limit", "f8"),  # largest fraction of the GPU's time it may use; 0: no limit
        ("resume_ns", "f8"),  # when its limit lets it go on
        ("virtual_ns", "f8"),
        ("used_ns", "f8"),  # time alone
        ("gpu_ns", "f8"),  # its part of the GPU's time
        ("tag_ns", "f8"),  # start tag of its next request
        ("live", "i8"),
        ("completed", "i8"),
        ("tenant", "i8"),  # 1: it has a name, and a number of its own
        ("held_back", "i8"),  # its requests that are HELD_BACK
        # where it has a limit: requests that were released and are not completed, and their expected time alone
        ("released", "i8"),
        ("released_ns", "f8"),
    ],
    align=True,
)

FLOW = np.dtype([("virtual_ns", "f8"), ("share", "f8"), ("live", "i8")], align=True)  # [client, model]

HELD_BACK = np.dtype(  # [client, model]: requests that are HELD_BACK, as a queue like a model's
    [
        ("root", "i8"),
        ("first", "i8"),
        ("last", "i8"),
        ("n", "i8"),  # their number
        ("listed", "i8"),  # 1: listed in State.held_queues
        ("over_limit", "i8"),  # 1: the client's limit holds them back, whatever `admit` says
        ("released", "i8"),  # requests that were released and are still in the model's queue
        ("asked_at", "i8"),  # core.releases when `admit` was asked last
        ("refused_at", "i8"),  # core.rounds when a job of the client was refused: it is not asked again in that round
    ],
    align=True,
)


# --- weights that come and go: the weights on the GPU, their budget, and the orders to the mover

# [1]
RESIDENCY = np.dtype(
    [
        # set from outside
        ("managed", "i8"),  # 0: all weights stay on the GPU, and this table is not used
        ("poll_moves", "u8"),  # addresses of the core's functions for weights that move; 0 where all stay
        ("order_moves", "u8"),
        ("budget_bytes", "i8"),  # budget for weights on the GPU
        ("ns_per_byte", "f8"),  # of a copy from host memory, by the tuned number link_gbps
        ("mover_fd", "i8"),  # eventfd that wakes the mover; NONE: there is none
        # current state
        ("held_bytes", "i8"),  # bytes of models LOADING and RESIDENT, and of a granted load
        ("loading", "i8"),  # number of models
        ("evicting", "i8"),
        ("link_free_ns", "f8"),  # when all ordered copies will be done
        ("pending", "i8"),  # 1: there may be moves to order
        ("load_bytes", "i8"),  # size of the weights of a model that is to be loaded
        ("load_priority", "i8"),
        ("load_since_ns", "f8"),  # when the load began to wait; 0: not yet
        ("load_granted", "i8"),  # 1: the load has its memory; NONE: it gets none, because weights could not leave
        ("stuck_before", "i8"),  # orders with lower numbers may count on memory that an eviction did not free
        # counters
        ("brought", "i8"),
        ("brought_bytes", "i8"),
        ("evicted", "i8"),
        ("evicted_bytes", "i8"),
        ("failed", "i8"),  # orders
        ("reload_ns", "f8"),  # total time from the order to the last chunk
    ],
    align=True,
)

# [model]
WEIGHTS = np.dtype(
    [
        # by the installer
        ("bytes", "i8"),  # on the GPU
        ("chunk_bytes", "i8"),  # copied at a time; the last chunk may be shorter
        ("chunks", "i8"),
        ("word", "u8"),  # address of one word per chunk, which the copy sets when the chunk has arrived
        ("keep", "i8"),  # AUTO …
        ("ns_per_byte", "f8"),  # of its copy, if not from host memory; 0: from host memory. Written by `WeightCache`
        ("locked", "i8"),  # 1: the weights stay, because a batch size of the model is being captured
        # Two models with the same weights: 1 + the row of the one that holds them, and of the other one; 0: its own.
        ("of", "i8"),
        ("also", "i8"),
        # by the core
        ("location", "i8"),  # OFF_GPU …
        ("arrived", "i8"),  # number of chunks
        ("prefetch", "i8"),  # 1: ordered although no request waits
        ("evict_requested", "i8"),  # 1: ordered to leave, although its memory is not needed
        ("victim", "i8"),  # 1: chosen to leave, among the models examined so far
        ("stopped", "i8"),  # 1: starts no more jobs, and leaves for a model that has waited long
        ("served", "i8"),  # batches since its weights came
        ("ordered_ns", "f8"),
        ("came_ns", "f8"),
        ("begin_ns", "f8"),  # estimated start of its copy, from the latest chunk
        ("demand", "f8"),  # number of recent requests, with decreasing weight
        ("demand_ns", "f8"),  # time of that number
        ("used_ns", "f8"),  # when the latest request came
        ("hits", "i8"),  # requests that found the weights on the GPU
        ("misses", "i8"),  # requests that did not
        ("brought", "i8"),
        ("evicted", "i8"),
        ("stuck", "i8"),  # evictions that failed
        ("reload_ns", "f8"),
    ],
    align=True,
)

# Orders to the mover, carried out one after the other.
MOVE = np.dtype([("kind", "i8"), ("model", "i8")], align=True)
