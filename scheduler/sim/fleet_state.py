"""Many simulated GPUs and their routers, as tables for compiled code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.heaps import Floats, Ints, new_tree
from paellapy.instrument.table_set import TableSet, table, table_set
from paellapy.scheduler.core.codes import NEVER, NONE
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.sim.fluid_state import ARRIVAL, GAIN

PREDICTED, LEAST_LOADED, TWO_CHOICES, ROUND_ROBIN = range(4)
INBOX = 512  # most requests sent to a GPU in one period

FLEET = np.dtype(  # [1]
    [
        ("routing", "i8"),
        ("routers", "i8"),
        ("random", "u8"),  # state of the random generator
        ("unplaced", "i8"),  # requests that no GPU could take
    ],
    align=True,
)

ASKED = np.dtype(  # a request as the cluster sees it
    [
        ("first_ns", "i8"),  # when its client sent it
        ("time_ns", "i8"),  # when it was sent to its GPU
        ("model", "i4"),
        ("gpu", "i4"),
        ("record", "i4"),  # its number among the GPU's requests
        ("sent", "i4"),  # how often it was sent, including requests that it replaces
        ("finish_ns", "i8"),  # NEVER: not finished, or its GPU failed
    ],
    align=True,
)


@table_set
class Fleet(TableSet):
    """The routers' knowledge of every GPU, and the requests in transit."""

    fleet: Table = table(FLEET, 1)
    fluid_at: NDArray[np.uint64] = table(np.uint64, "gpus")  # addresses of the simulated GPUs' tables
    state_at: NDArray[np.uint64] = table(np.uint64, "gpus")
    up: Ints = table(np.int64, "gpus")
    row: Ints = table(np.int64, "gpus", "models")  # row of a model in its GPU's tables; NONE: the GPU does not have it
    report: Floats = table(np.float64, "gpus", "reported")  # the latest published Fluid.report
    step_ns: Floats = table(np.float64, "gpus", "models")  # time that one more request adds to the queue
    added_ns: Floats = table(np.float64, "routers", "gpus")  # work sent since the last report
    sent: Ints = table(np.int64, "routers", "gpus")  # requests sent since the last report
    tree: Floats = table(np.float64, "routers", "models", "nodes")  # the smallest keys of all GPUs, by model
    turn: Ints = table(np.int64, "models")
    host: Ints = table(np.int64, "models", "gpus")  # GPUs that have the model; only the first `hosts` entries count
    hosts: Ints = table(np.int64, "models")
    inbox: Table = table(ARRIVAL, "gpus", INBOX)
    arrived: Ints = table(np.int64, "gpus")  # number of requests in the inbox
    records: Ints = table(np.int64, "gpus")  # requests sent there so far


def new_fleet(rows: NDArray[np.int64], steps_ns: Floats, routing: int, routers: int, seed: int) -> Fleet:
    """`rows[gpu, model]` says where each model is. All GPUs are up and idle, and have no addresses yet."""
    gpus, models = rows.shape
    nodes = len(new_tree(gpus))
    fleet = np.zeros(1, FLEET)
    fleet["routing"], fleet["routers"] = routing, routers
    fleet["random"] = np.uint64(seed * 2 + 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    inbox = np.zeros((gpus, INBOX), ARRIVAL)
    inbox["time_ns"] = NEVER
    found = Fleet(
        fleet=fleet,
        fluid_at=np.zeros(gpus, np.uint64),
        state_at=np.zeros(gpus, np.uint64),
        up=np.ones(gpus, np.int64),
        row=np.ascontiguousarray(rows),
        report=np.zeros((gpus, models - GAIN)),
        step_ns=np.ascontiguousarray(steps_ns),
        added_ns=np.zeros((routers, gpus)),
        sent=np.zeros((routers, gpus), np.int64),
        tree=np.full((routers, models, nodes), np.inf),
        turn=np.zeros(models, np.int64),
        host=np.zeros((models, gpus), np.int64),
        hosts=np.zeros(models, np.int64),
        inbox=inbox,
        arrived=np.zeros(gpus, np.int64),
        records=np.zeros(gpus, np.int64),
    )
    set_hosts(found, range(gpus))
    return found


def set_hosts(f: Fleet, up: Sequence[int] | range) -> None:
    """Sets the GPUs that take requests from now on."""
    f.up[:] = 0
    f.up[list(up)] = 1
    for m in range(f.row.shape[1]):
        there = np.flatnonzero((f.row[:, m] != NONE) & (f.up == 1))
        f.host[m, : len(there)] = there
        f.hosts[m] = len(there)
