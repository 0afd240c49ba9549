"""Checks of queues: each is in order, and requests outside of instances are in the queue of their client."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import ASIDE, BARRED, NONE, PASSED, UNUSED
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table


class IntegrityError(PaellaError):
    """The core's tables contradict each other, which is a bug in the core."""


def require(condition: Any, message: str, *facts: object) -> None:
    if not condition:
        raise IntegrityError(message + (f": {', '.join(map(str, facts))}" if facts else ""))


def walk(r: Table, root: int) -> list[int]:
    """The rows of a leftist heap, whose shape is checked too."""
    rows: list[int] = []
    stack = [(root, NONE)] if root >= 0 else []
    while stack:
        row, up = stack.pop()
        rows.append(row)
        node = r[row]
        require(node["up"] == up, "a queued request has lost its parent", row)
        heights = [0, 0]
        for side, child in enumerate((int(node["left"]), int(node["right"]))):
            if child >= 0:
                keys = [(r[each]["order"], r[each]["sequence"]) for each in (row, child)]
                require(keys[0] < keys[1], "a queue is out of order", row, child)
                heights[side] = int(r[child]["height"])
                stack.append((child, row))
        require(heights[0] >= heights[1] and node["height"] == heights[1] + 1, "a queue leans the wrong way", row)
    return rows


def follow(r: Table, row: int, last: int) -> list[int]:
    """The rows of a queue's list."""
    rows: list[int] = []
    left = NONE
    while row >= 0:
        node = r[row]
        require(node["height"] == 0 and node["left"] == left, "a queue's list is broken", row)
        if rows:
            keys = [(r[each]["order"], r[each]["sequence"]) for each in (left, row)]
            require(keys[0] < keys[1], "a queue's list is out of order", row)
        rows.append(row)
        left, row = row, int(node["right"])
    require(left == last, "a queue's list has lost its end", last)
    return rows


def check_aside(s: State) -> list[int]:
    """The requests that are set aside, after a check that each is in its client's queue, and counted."""
    r = s.request
    found: list[int] = []
    let_in = np.flatnonzero((r["let_ns"] > 0) & (r["state"] != UNUSED))
    require(len(let_in) == s.client["let"].sum(), "requests that were let in are miscounted")
    for c in np.flatnonzero((s.client["aside"] > 0) | (s.client["let"] > 0) | (s.client["first"] >= 0)):
        client = s.client[c]
        rows = walk(r, int(client["root"])) + follow(r, int(client["first"]), int(client["last"]))
        require(len(rows) == client["aside"], "a client miscounts its requests that are set aside", c)
        right = (r["state"][rows] == ASIDE).all() and (r["client"][rows] == c).all()
        require(right, "a client's queue holds a request of another client or state", c)
        require(not rows or client["waits"], "a client with requests set aside is not listed", c)
        found += rows
        let = r["let_ns"][let_in[r["client"][let_in] == c]]
        require(len(let) == client["let"], "a client miscounts the requests that were let in", c)
        apart = abs(let.sum() - client["let_ns"])
        require(apart <= 1e-6 * let.sum() + 1e-3, "the time of requests that were let in does not add up", c)
    by_model = np.bincount(r["model"][found], minlength=len(s.model))
    require((by_model == s.model["aside"]).all(), "a model miscounts its requests that are set aside")
    waiting = s.waiting[: s.core["waiting"][0]]
    require(sorted(waiting) == np.flatnonzero(s.client["waits"]).tolist(), "clients that wait are miscounted")
    return found


def check_barred(s: State) -> list[int]:
    """The requests that `admit` keeps out of instances, after a check that each is in its queue, and counted."""
    r, core = s.request, s.core[0]
    require(core["refused"] == 0, "a refused instance was not looked at")
    found_in = [(int(each) >> 32, int(each) & 0xFFFF_FFFF) for each in s.barred[: core["barred"]]]
    listed = zip(*(each.tolist() for each in np.nonzero(s.kept["listed"])), strict=True)
    require(sorted(found_in) == sorted(listed), "clients that are kept out are miscounted")
    found: list[int] = []
    for c, m in found_in:
        kept = s.kept[c, m]
        rows = walk(r, int(kept["root"])) + follow(r, int(kept["first"]), int(kept["last"]))
        require(len(rows) == kept["n"], "a client miscounts its requests that are kept out", c, m)
        right = (r["state"][rows] == BARRED).all() and (r["client"][rows] == c).all() and (r["model"][rows] == m).all()
        require(right, "a queue of a client holds a request of another client, model or state", c, m)
        found += rows
    require(len(found) == core["kept_out"], "requests that are kept out are miscounted")
    passed = np.zeros_like(s.kept["passed"])
    let = np.flatnonzero(r["state"] == PASSED)
    np.add.at(passed, (r["client"][let], r["model"][let]), 1)
    require((passed == s.kept["passed"]).all(), "requests that were let pass are miscounted")
    return found
