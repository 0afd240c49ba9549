"""Tables of clients: their shares and limits, and their requests that wait outside of lanes."""

from __future__ import annotations

import numpy as np

CLIENT = np.dtype(
    [
        ("share", "f8"),
        ("limit", "f8"),  # largest fraction of the GPU's time it may use; 0: no limit
        ("may_ns", "f8"),  # time from which it may go, by its limit
        ("virtual_ns", "f8"),
        ("used_ns", "f8"),  # time alone
        ("gpu_ns", "f8"),  # its part of the GPU's time
        ("tag_ns", "f8"),  # start tag of its next request
        ("live", "i8"),
        ("completed", "i8"),
        ("tenant", "i8"),  # 1: it has a name, and a number of its own
        # where it has a limit: its requests that are set aside, as a queue like a model's
        ("root", "i8"),
        ("first", "i8"),
        ("last", "i8"),
        ("aside", "i8"),  # their number
        ("waits", "i8"),  # 1: listed in State.waiting
        ("let", "i8"),  # requests that were let in and are not completed
        ("let_ns", "f8"),  # and their expected time alone
    ],
    align=True,
)

FLOW = np.dtype([("virtual_ns", "f8"), ("share", "f8"), ("live", "i8")], align=True)  # [client, model]

KEPT = np.dtype(  # [client, model]: requests that are BARRED, as a queue like a model's
    [
        ("root", "i8"),
        ("first", "i8"),
        ("last", "i8"),
        ("n", "i8"),  # their number
        ("listed", "i8"),  # 1: listed in State.barred
        ("passed", "i8"),  # requests that are PASSED
        ("refused_at", "i8"),  # core.rounds when a job of the client was refused: it is not asked again in that round
    ],
    align=True,
)
