"""What the numbers in the core's tables mean: states, kinds, statuses, bit fields, and the sizes of fixed tables."""

from __future__ import annotations

NEVER = 1 << 62  # a time that does not come: no deadline, no target
NONE = -1  # no row
OWN_ROWS = 64  # of the engine's own process, where front ends are processes beside it
RECENT = 4096  # latencies kept per model
TENANT_NAME = 64  # bytes of a tenant's name
TAP_SIZE = 1 << 14  # completions kept for those who watch the requests of other processes

ABSENT, OPEN, CLOSING = range(3)  # model.state; a CLOSING model finishes what it accepted and refuses the rest

# lane.state. FREE: nobody's. FILLING: front ends and the core put requests into it. READY_WAIT: its turn came and it is
# closed, but a front end is still writing inputs. RUNNING: segments are, or will be, on the GPU. HELD: done, outputs
# are being read.
FREE, FILLING, READY_WAIT, RUNNING, HELD = range(5)

# request.state. UNUSED: the row belongs to a front end. QUEUED: no slot yet. SLOTTED: in a lane. One that is cancelled
# or expires leaves its slot empty (NONE) behind; its lane runs on for the others.
UNUSED, QUEUED, SLOTTED = range(3)

# done.status
# FAILED: the GPU is lost. SUSPECTED: it was lost while this request was on it, which may be why. FAULTED: the model
# failed on the values of this one request; its neighbours did not.
OK, CANCELLED, EXPIRED, QUEUE_FULL, DRAINING, FAILED, NO_MODEL, MODEL_CLOSED, NO_WEIGHTS, FAULTED, SUSPECTED = range(11)
STATUS = ("ok", "cancelled", "expired", "queue full", "draining", "failed", "no such model", "model closed",
          "weights not there", "faulted", "failed while it ran")  # fmt: skip

# submit.kind
SUBMIT, CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, FAIL = range(6)

VIRTUAL, CUDA = range(2)  # core.backend

RUN_MODE, DRAIN_MODE, FAIL_MODE = range(3)  # core.mode

# Windows of SMs: at most so many; and so many of them for a lane to choose from
WINDOWS, CHOICES = 64, 4
LEAST_WINDOWS = 3  # fewer would leave SMs to nobody

# State.stream: pools of streams, one for each priority that models have on the GPU. The first QUEUES of a pool are
# handed out, as many as the GPU has hardware queues; the next belong to lanes, each to its own; then each window of SMs
# has as many again.
POOLS, QUEUES, OWN_STREAMS = 8, 32, 128
OF_WINDOWS = QUEUES + OWN_STREAMS
POOL_STREAMS = OF_WINDOWS + WINDOWS * QUEUES

# weights.stage. OUT: on the host or on disk. COMING: chunk after chunk, in the order in which programs need them. HERE:
# on the GPU. LEAVING: nobody runs on them, and their memory is about to be another's.
OUT, COMING, HERE, LEAVING = range(4)
AUTO, STAYS, GOES = range(3)  # weights.keep: by demand; always on the GPU; only while requests wait or run
BRING, EVICT = range(2)  # move.kind
GONE, BROKEN = 1, 2  # State.moved, by the mover: an order to evict was carried out; one to bring could not be
MOVE_TAIL, MOVE_HEAD = range(2)  # State.move_ring

# State.copy_ring: rows as in State.ring; the bell says that the copier sleeps
COPY_TAIL, COPY_HEAD, COPY_BELL = range(3)

# State.ring: heads and tails, each on its own cache line (row, column 0)
SUBMIT_TAIL, SUBMIT_HEAD, DONE_TAIL, DONE_HEAD = range(4)

# State.lane_word: closed | generation | reserved | the front end that reserved the last of them
FRONT_MASK = 0xFFFF
RESERVED_MASK = 0xFFFF
RESERVED_SHIFT = 16
RESERVED_ONE = 1 << RESERVED_SHIFT
GENERATION_SHIFT = 32
GENERATION_MASK = 0x7FFF_FFFF
CLOSED = 1 << 63
# State.slot_front: generation << GENERATION_SHIFT | front end

MASK_WORDS = 8  # of a lane's bit masks: one cache line
MOST_SLOTS = 64 * MASK_WORDS

GATES = 16  # of other processes

WHOLE = -1  # out.segment: the whole program
