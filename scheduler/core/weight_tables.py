"""Tables of weights that come and go: the weights on the GPU, their budget, and the orders to the mover."""

from __future__ import annotations

import numpy as np

# [1]
RESIDENCY = np.dtype(
    [
        # set from outside
        ("managed", "i8"),  # 0: all weights stay on the GPU, and this table is not used
        ("look_at_moves", "u8"),  # addresses of the core's functions for weights that move; 0 where all stay
        ("order_moves", "u8"),
        ("budget_bytes", "i8"),  # budget for weights on the GPU
        ("ns_per_byte", "f8"),  # of a copy from host memory, by the tuned number link_gbps
        ("mover_fd", "i8"),  # eventfd that wakes the mover; NONE: there is none
        # current state
        ("held_bytes", "i8"),  # bytes of models COMING and HERE, and of a granted load
        ("coming", "i8"),  # number of models
        ("leaving", "i8"),
        ("link_free_ns", "f8"),  # when all ordered copies will be done
        ("look", "i8"),  # 1: there may be moves to order
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
        ("ns_per_byte", "f8"),  # of its copy, if not from host memory; 0: from host memory. Written by `Residents`
        ("held", "i8"),  # 1: the weights do not leave, because a batch size of the model is being captured
        # by the core
        ("stage", "i8"),  # OUT …
        ("arrived", "i8"),  # number of chunks
        ("asked", "i8"),  # 1: ordered although no request waits
        ("unwanted", "i8"),  # 1: ordered to leave, although its memory is not needed
        ("marked", "i8"),  # 1: chosen to leave, by the models examined so far
        ("stop", "i8"),  # 1: starts no more jobs, and leaves for a model that has waited long
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
