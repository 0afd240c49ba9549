"""Tables of weights that come and go: what is on the GPU, what it may hold, and the orders to who moves them."""

from __future__ import annotations

import numpy as np

# [1]
RESIDENCY = np.dtype(
    [
        # set from outside
        ("managed", "i8"),  # 0: all weights stay on the GPU, and nobody looks here
        ("budget_bytes", "i8"),  # of weights on the GPU
        ("ns_per_byte", "f8"),  # of a copy from the host's memory; follows what copies took
        ("mover_fd", "i8"),  # eventfd that wakes the mover; NONE: there is none
        # how things stand
        ("held_bytes", "i8"),  # of models COMING and HERE, and of a load that has been let in
        ("coming", "i8"),  # models
        ("leaving", "i8"),
        ("link_free_ns", "f8"),  # when all that was ordered will have been copied
        ("look", "i8"),  # 1: there may be something to order, for models that want to come or are to leave
        ("load_bytes", "i8"),  # a model is to be loaded and wants room for its weights,
        ("load_priority", "i8"),
        ("load_since_ns", "f8"),  # 0: it has not been looked at
        ("load_granted", "i8"),  # 1: it has the room
        # counters
        ("brought", "i8"),
        ("brought_bytes", "i8"),
        ("evicted", "i8"),
        ("evicted_bytes", "i8"),
        ("failed", "i8"),
        ("reload_ns", "f8"),  # from the order to the last chunk, all together
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
        ("word", "u8"),  # address of a word for each chunk, which the copy sets when the chunk is there
        ("keep", "i8"),  # AUTO …
        ("ns_per_byte", "f8"),  # of its copy, where that is not one from the host's memory; 0: it is. The mover's
        # by the core
        ("stage", "i8"),  # OUT …
        ("arrived", "i8"),  # chunks
        ("asked", "i8"),  # 1: wanted although no request waits
        ("unwanted", "i8"),  # 1: to leave, although nobody needs its place
        ("marked", "i8"),  # 1: would leave, by what has been looked at so far
        ("stop", "i8"),  # 1: starts nothing more: it leaves for one that has waited long
        ("served", "i8"),  # batches since it came
        ("ordered_ns", "f8"),
        ("came_ns", "f8"),
        ("begin_ns", "f8"),  # when its copy began, as it looks from the latest chunk
        ("demand", "f8"),  # requests, each counting for less as time goes by
        ("demand_ns", "f8"),  # as of when
        ("used_ns", "f8"),  # when the latest request came
        ("hits", "i8"),  # requests that found the weights on the GPU,
        ("misses", "i8"),  # and those that did not
        ("brought", "i8"),
        ("evicted", "i8"),
        ("reload_ns", "f8"),
    ],
    align=True,
)

# Orders to the mover, carried out one after the other.
MOVE = np.dtype([("kind", "i8"), ("model", "i8")], align=True)
