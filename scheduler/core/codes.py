"""The numbers in the core's tables: states, kinds, statuses, bit fields, and the sizes of fixed tables."""

from __future__ import annotations

NEVER = 1 << 62  # a time that never comes: no deadline, no target
NONE = -1  # no row
OWN_ROWS = 64  # request rows of the engine's own process, where other processes have producers
RECENT = 4096  # latencies kept per model: a power of two
TENANT_NAME = 64  # bytes of a tenant's name
LOG_SIZE = 1 << 14  # completions kept for watchers of requests from other processes

ABSENT, OPEN, CLOSING = range(3)  # model.state; a CLOSING model finishes accepted requests and refuses new ones

# instance.state. FREE: unused. FILLING: producers and the core put requests into it. READY_WAIT: its turn came and it
# is closed, but a producer is still writing inputs. RUNNING: its segments are, or will be, on the GPU. HELD: done, its
# outputs are being read.
FREE, FILLING, READY_WAIT, RUNNING, HELD = range(5)

# request.state. UNUSED: the row belongs to a producer. QUEUED: without a slot. SLOTTED: in an instance. HELD_BACK: by
# its client's limit, or by `admit`. A request that is cancelled or expires leaves its slot empty (NONE); its instance
# runs for the other requests.
UNUSED, QUEUED, SLOTTED, HELD_BACK = range(4)

# done.status
# FAILED: the GPU is lost. SUSPECTED: it was lost while this request was on it, so the request may be the cause.
# FAULTED: the model failed on the values of this request only.
OK, CANCELLED, EXPIRED, QUEUE_FULL, DRAINING, FAILED, NO_MODEL, MODEL_CLOSED, NO_WEIGHTS, FAULTED, SUSPECTED = range(11)
STATUS = ("ok", "cancelled", "expired", "queue full", "draining", "failed", "no such model", "model closed",
          "weights not there", "faulted", "failed while it ran")  # fmt: skip

# submit.kind
SUBMIT, CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, FAIL = range(6)

VIRTUAL, CUDA = range(2)  # core.backend

RUN_MODE, DRAIN_MODE, FAIL_MODE = range(3)  # core.mode

# SM partitions: the maximum, and the number from which an instance can choose
PARTITIONS, CHOICES = 64, 4
LEAST_PARTITIONS = 3  # fewer would leave some SMs in no partition

# State.stream: pools of streams, one for each priority of models on the GPU. The first QUEUES of a pool are handed out
# to jobs, as many as the GPU has hardware queues; the next ones belong to instances, one each; then each SM partition
# has QUEUES more.
POOLS, QUEUES, OWN_STREAMS = 8, 32, 128
OF_PARTITIONS = QUEUES + OWN_STREAMS
POOL_STREAMS = OF_PARTITIONS + PARTITIONS * QUEUES

# size.capture: of a size that is not captured yet. WANTED: a batch would have run at it. GIVEN_UP: its capture failed.
LATER, WANTED, GIVEN_UP = range(3)

# weights.location. OFF_GPU: on the host or on disk. LOADING: arriving chunk by chunk, in the order in which programs
# need them. RESIDENT: on the GPU. EVICTING: no instance uses them, and their memory is about to be reused.
OFF_GPU, LOADING, RESIDENT, EVICTING = range(4)
AUTO, PINNED, TRANSIENT = range(3)  # weights.keep: on demand; always on the GPU; only while requests wait or run
KEEP = {"auto": AUTO, True: PINNED, False: TRANSIENT}  # by the users' values
LOAD, EVICT = range(2)  # move.kind
EVICTED, MOVE_FAILED = 1, 2  # State.moved, by the mover: an order to evict was carried out; an order failed
MOVE_TAIL, MOVE_HEAD = range(2)  # State.move_ring

# State.copy_ring: rows as in State.ring; the bell is set while the copier sleeps
COPY_TAIL, COPY_HEAD, COPY_BELL = range(3)

# State.ring: heads and tails, each on its own cache line (row, column 0)
SUBMIT_TAIL, SUBMIT_HEAD, DONE_TAIL, DONE_HEAD = range(4)

# State.instance_word: closed | generation | reserved slots | the producer that reserved the last slot
PRODUCER_MASK = 0xFFFF
RESERVED_MASK = 0xFFFF
RESERVED_SHIFT = 16
RESERVED_ONE = 1 << RESERVED_SHIFT
GENERATION_SHIFT = 32
GENERATION_MASK = 0x7FFF_FFFF
CLOSED = 1 << 63
# State.slot_producer: generation << GENERATION_SHIFT | producer

MASK_WORDS = 8  # words of an instance's bit masks: one cache line
MOST_SLOTS = 64 * MASK_WORDS

GATES = 16  # gates of other processes

WHOLE = -1  # out.segment: the whole program
