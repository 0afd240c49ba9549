"""Checks all invariants that must hold between two steps of the core. For tests, and for an engine at rest."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import (
    ABSENT,
    ASIDE,
    CLOSED,
    COMING,
    FAIL_MODE,
    FILLING,
    FREE,
    HELD,
    HERE,
    LATER,
    LEAVING,
    NEVER,
    NONE,
    OF_WINDOWS,
    QUEUED,
    QUEUES,
    READY_WAIT,
    RESERVED_MASK,
    RESERVED_SHIFT,
    RUNNING,
    SLOTTED,
    UNUSED,
)
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table


class IntegrityError(PaellaError):
    """The core's tables contradict each other, which is a bug in the core."""


def _require(condition: Any, message: str, *facts: object) -> None:
    if not condition:
        raise IntegrityError(message + (f": {', '.join(map(str, facts))}" if facts else ""))


def check_integrity(s: State) -> None:
    """Raises IntegrityError if the state contradicts itself. Call it between steps."""
    for count in ("touched", "asking", "leaving"):
        _require(s.core[count][0] == 0, "a noted change was not settled", count)
    _check_queues(s)
    _check_lanes(s)
    _check_sets(s)
    _check_streams(s)
    _check_occupancy(s)
    _check_weights(s)


def _check_weights(s: State) -> None:
    """Checks that every byte of weights on the GPU is counted once, and within the budget."""
    r, w = s.residency[0], s.weights
    if not r["managed"]:
        return
    held = int(w["bytes"][(w["stage"] == COMING) | (w["stage"] == HERE)].sum())
    held += int(r["load_bytes"]) if r["load_granted"] else 0
    _require(held == r["held_bytes"], "weights are miscounted", held, r["held_bytes"])
    _require(held <= r["budget_bytes"], "the weights on the GPU exceed the budget", held, r["budget_bytes"])
    for name, stage in (("coming", COMING), ("leaving", LEAVING)):
        _require((w["stage"] == stage).sum() == r[name], "moves are miscounted", name)
    _require(not w["marked"].any(), "a model stays marked")
    for lane in np.flatnonzero(s.lane["flight_at"] >= 0):
        m, k = s.lane["model"][lane], s.lane["issued"][lane] - 1
        last = w["chunks"][m] if s.lane["whole"][lane] else s.segment["chunks"][m, s.lane["size"][lane], k]
        there = w["stage"][m] == HERE or (w["stage"][m] == COMING and w["arrived"][m] >= last)
        _require(there, "a lane runs without its weights", lane)


def check_at_rest(s: State, within_s: float = 30.0) -> None:
    """As `check_integrity`, for a core whose loop runs on another thread, once it is at rest.

    A request is answered before its lane is free again, so a state read in between is in the middle of a step, not
    broken. Without work the loop rests, and an error that persists then is a real one.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            return check_integrity(s)
        except (IntegrityError, IndexError):
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def _walk(r: Table, root: int) -> list[int]:
    """The rows of a leftist heap, whose shape is checked too."""
    rows: list[int] = []
    stack = [(root, NONE)] if root >= 0 else []
    while stack:
        row, up = stack.pop()
        rows.append(row)
        node = r[row]
        _require(node["up"] == up, "a queued request has lost its parent", row)
        heights = [0, 0]
        for side, child in enumerate((int(node["left"]), int(node["right"]))):
            if child >= 0:
                keys = [(r[each]["order"], r[each]["sequence"]) for each in (row, child)]
                _require(keys[0] < keys[1], "a queue is out of order", row, child)
                heights[side] = int(r[child]["height"])
                stack.append((child, row))
        _require(heights[0] >= heights[1] and node["height"] == heights[1] + 1, "a queue leans the wrong way", row)
    return rows


def _follow(r: Table, row: int, last: int) -> list[int]:
    """The rows of a queue's list."""
    rows: list[int] = []
    left = NONE
    while row >= 0:
        node = r[row]
        _require(node["height"] == 0 and node["left"] == left, "a queue's list is broken", row)
        if rows:
            keys = [(r[each]["order"], r[each]["sequence"]) for each in (left, row)]
            _require(keys[0] < keys[1], "a queue's list is out of order", row)
        rows.append(row)
        left, row = row, int(node["right"])
    _require(left == last, "a queue's list has lost its end", last)
    return rows


def _check_aside(s: State) -> list[int]:
    """The requests that are set aside, after a check that each is in its client's queue, and counted."""
    r = s.request
    found: list[int] = []
    let_in = np.flatnonzero((r["let_ns"] > 0) & (r["state"] != UNUSED))
    _require(len(let_in) == s.client["let"].sum(), "requests that were let in are miscounted")
    for c in np.flatnonzero((s.client["aside"] > 0) | (s.client["let"] > 0) | (s.client["first"] >= 0)):
        client = s.client[c]
        rows = _walk(r, int(client["root"])) + _follow(r, int(client["first"]), int(client["last"]))
        _require(len(rows) == client["aside"], "a client miscounts its requests that are set aside", c)
        right = (r["state"][rows] == ASIDE).all() and (r["client"][rows] == c).all()
        _require(right, "a client's queue holds a request of another client or state", c)
        _require(not rows or client["waits"], "a client with requests set aside is not listed", c)
        found += rows
        let = r["let_ns"][let_in[r["client"][let_in] == c]]
        _require(len(let) == client["let"], "a client miscounts the requests that were let in", c)
        apart = abs(let.sum() - client["let_ns"])
        _require(apart <= 1e-6 * let.sum() + 1e-3, "the time of requests that were let in does not add up", c)
    by_model = np.bincount(r["model"][found], minlength=len(s.model))
    _require((by_model == s.model["aside"]).all(), "a model miscounts its requests that are set aside")
    waiting = s.waiting[: s.core["waiting"][0]]
    _require(sorted(waiting) == np.flatnonzero(s.client["waits"]).tolist(), "clients that wait are miscounted")
    return found


def _check_queues(s: State) -> None:
    """Checks that every accepted request is in exactly one queue or slot, and counted once."""
    r = s.request
    seen: Counter[int] = Counter()
    for m in np.flatnonzero(s.model["n_lanes"]):
        rows = _walk(r, int(s.model["root"][m])) + _follow(r, int(s.model["first"][m]), int(s.model["last"][m]))
        _require(len(rows) == s.model["queued"][m], "a model miscounts its queue", m)
        right = (r["state"][rows] == QUEUED).all() and (r["model"][rows] == m).all()
        _require(right, "a queue holds a request of another model or state", m)
        seen.update(rows)
        room = int(s.model["free_n"][m]) + (s.model["filling"][m] >= 0)
        if rows and s.core["mode"][0] != FAIL_MODE and s.model["filling"][m] >= 0:
            lane = s.model["filling"][m]
            reserved = (int(s.lane_word[lane, 0]) >> RESERVED_SHIFT) & RESERVED_MASK
            slots = s.size["batch"][m, s.model["n_sizes"][m] - 1]
            _require(reserved == slots, "requests are queued beside free slots", m)
        elif rows and s.core["mode"][0] != FAIL_MODE:
            _require(room == 0, "requests are queued beside a free lane", m)
    seen.update(_check_aside(s))
    slotted = s.slot[s.slot >= 0]
    seen.update(int(row) for row in slotted)
    _require((r["state"][slotted] == SLOTTED).all(), "a slot holds a request whose state is not SLOTTED")
    used = np.flatnonzero(r["state"] != UNUSED)
    _require(all(n == 1 for n in seen.values()) and set(seen) == set(used.tolist()), "a request is lost or doubled")
    live = s.core["live"][0]
    _require(len(used) == live == s.model["live"].sum() == s.client["live"].sum(), "requests are miscounted")
    _require((s.flow["live"].sum(axis=0) == s.model["live"]).all(), "a model miscounts its clients' requests")
    own = s.client["tenant"] > 0
    _require((s.flow["live"].sum(axis=1)[own] == s.client["live"][own]).all(), "a tenant miscounts its requests")
    _require((r["state"] == QUEUED).sum() == s.core["queued"][0], "queued requests are miscounted")
    busy = np.flatnonzero(s.model["queued"])
    jobs = (s.model["queued"][busy] / s.size["batch"][busy, s.model["n_sizes"][busy] - 1]).sum()
    _require(abs(jobs - s.core["queued_jobs"][0]) < 1e-6, "queued jobs are miscounted")
    due = s.due[: s.core["due"][0]]
    _require((r["due_at"][due] == np.arange(len(due))).all(), "the deadline heap has lost a request")
    _require(((r["due_at"] >= 0).sum()) == len(due), "a request claims a place in the deadline heap")
    for i in range(1, len(due)):
        _require(r["deadline_ns"][due[(i - 1) // 2]] <= r["deadline_ns"][due[i]], "deadlines are out of order", i)
    waiting = used[(r["deadline_ns"][used] < NEVER) & (r["due_at"][used] < 0)]
    for row in waiting:  # only a request that is entirely on the GPU may be past its deadline
        lane = s.lane[r["lane"][row]]
        _require(lane["state"] == RUNNING and lane["issued"] == lane["segments"], "a deadline is forgotten", row)
    shares = s.flow["share"][s.flow["live"] > 0].sum()
    _require(np.isclose(shares, s.core["shares"][0]), "fair shares do not add up", shares, s.core["shares"][0])


def _check_streams(s: State) -> None:
    held = s.lane["stream_at"][s.flight[: s.core["flight"][0]]]
    _require((held >= 0).all(), "a lane is in flight without a stream")
    queues = np.where(held >= OF_WINDOWS, (held - OF_WINDOWS) % QUEUES, held)
    found = np.bincount(queues, minlength=len(s.stream_jobs))
    _require((found == s.stream_jobs).all(), "the jobs on a stream are miscounted")
    _require((s.lane["stream_at"] >= 0).sum() == s.core["flight"][0], "a lane holds a stream and is not in flight")
    confined = np.flatnonzero(s.lane["window"] >= 0)
    _require((s.lane["flight_at"][confined] >= 0).all(), "a lane is in a window and not in flight")
    found = s.overlap[s.lane["window"][confined]].sum(axis=0)
    _require((found == s.window_load).all(), "the load of the windows is miscounted")


def _check_free_lanes(s: State, ids: Any) -> None:
    lanes = s.lane[ids]
    _require((s.slot[ids] < 0).all() and (lanes["live"] == 0).all(), "a free lane holds a request")
    _require((s.lane_word[ids, 0] & np.uint64(CLOSED) != 0).all(), "a free lane is open")
    _require((s.model["filling"][lanes["model"]] != ids).all(), "a free lane fills")
    _require((lanes["done"] <= lanes["issued"]).all(), "segments of a free lane are out of order")
    for place in ("ready_at", "active_at", "flight_at"):
        _require((lanes[place] == NONE).all(), "a free lane is listed", place)
    for m in np.flatnonzero(s.model["n_lanes"]):
        of_model = s.model_lane[m, : s.model["n_lanes"][m]]
        free = s.free_lane[m, : s.model["free_n"][m]]
        if s.model["state"][m] != ABSENT:
            expected = sorted(of_model[s.lane["state"][of_model] == FREE].tolist())
            _require(sorted(free.tolist()) == expected, "a free lane is lost or doubled", m)


def _fits(sizes: Any, lane: Any) -> bool:
    """Whether the lane runs at the smallest size for its requests, or at the smallest there was when it started."""
    best = np.flatnonzero(sizes["batch"] >= lane["taken"])[0]
    right = lane["size"] == best or (lane["size"] > best and sizes["capture"][best] != LATER)
    return bool(right and sizes["segments"][lane["size"]] > 0)


def _check_lanes(s: State) -> None:
    free = np.flatnonzero((s.lane["model"] >= 0) & (s.lane["state"] == FREE))
    _check_free_lanes(s, free)
    ids = np.flatnonzero((s.lane["model"] >= 0) & (s.lane["state"] != FREE))
    slots = s.slot[ids]
    words, filling, managed = s.lane_word[:, 0].tolist(), s.model["filling"].tolist(), s.residency["managed"][0]
    ready_of, known_of = (np.bitwise_count(each).sum(axis=1).tolist() for each in (s.lane_ready, s.lane_known))
    # Plain numbers: reading a field of a record costs a hundred times as much, and tests check after every step.
    for lane, row, slot in zip(ids.tolist(), s.lane[ids].tolist(), slots, strict=True):
        a = dict(zip(s.lane.dtype.names or (), row, strict=True))
        m = a["model"]
        rows = slot[slot >= 0]
        word = words[lane]
        reserved, ready = (word >> RESERVED_SHIFT) & RESERVED_MASK, ready_of[lane]
        _require(len(rows) == a["live"], "a lane miscounts its requests", lane)
        _require((ready <= reserved and a["taken"] <= reserved) or a["state"] == HELD, "a lane overflows", lane)
        _require(known_of[lane] == a["taken"], "a lane knows other slots than it counts", lane)
        _require(bool(word & CLOSED) or a["state"] == FILLING, "a lane is open and not filling", lane)
        _require((filling[m] == lane) == (a["state"] == FILLING), "two lanes of a model fill", lane)
        _require(a["done"] <= a["issued"] <= max(a["segments"], a["issued"]), "segments are out of order", lane)
        if len(rows):
            facts = s.request[rows]
            right = (facts["lane"] == lane).all() and (facts["model"] == m).all()
            _require(right, "a slot holds a request of another lane or model", lane)
            _require(a["arrival_ns"] == facts["arrival_ns"].min(), "a lane forgot its oldest request", lane)
            _require(a["deadline_ns"] == facts["deadline_ns"].min(), "a lane forgot a deadline", lane)
            _require(a["priority"] == facts["priority"].max(), "a lane forgot a priority", lane)
        absent = managed and (s.weights["stage"][m] != HERE or s.weights["stop"][m])  # all weights, or some
        berth = a["berth"]
        taken = berth >= 0 and s.berth[berth] != lane + 1 and (s.berth[berth] or s.berth_kept[berth])
        if a["state"] == RUNNING and a["berth"] >= 0:
            _require(s.berth[a["berth"]] == lane + 1, "two lanes run in one berth", lane)
        if a["state"] == RUNNING:
            _require(a["taken"] == reserved == ready, "a lane runs without all its inputs", lane)
            _require(a["done"] < a["segments"], "a lane is done and not ended", lane)
            _require(_fits(s.size[m, : s.model["n_sizes"][m]], a), "a lane runs at the wrong size", lane)
            ahead = a["issued"] - a["done"]
            most = s.core["look_ahead"][0]
            _require(ahead <= max(most, 1) + (most == 1), "a lane runs too far ahead", lane)
            standing = a["active_at"] >= 0 and a["back"] and s.core["flight"][0] > 0  # for a short job
            forgotten = not (ahead > 0 or a["ready_at"] >= 0 or standing or (absent and a["active_at"] >= 0))
            _require(not forgotten, "a lane with work is neither waiting nor active", lane)
        if a["state"] in (HELD, READY_WAIT):
            places = (a["ready_at"], a["active_at"], a["flight_at"])
            _require(places == (NONE, NONE, NONE), "a lane that does not run is listed", lane)
        if a["state"] == FILLING:
            listed = a["ready_at"] >= 0
            right = listed == (a["live"] > 0) or ((absent or taken) and not listed)
            _require(right, "a filling lane is not in the heap, or should not be", lane)


def _check_sets(s: State) -> None:
    for name, ids in (("ready", s.ready), ("active", s.active), ("flight", s.flight)):
        members, column = ids[: s.core[name][0]], f"{name}_at"
        _require((s.lane[column][members] == np.arange(len(members))).all(), f"{name} has lost a lane")
        _require((s.lane[column] >= 0).sum() == len(members), f"a lane claims a place in {name}")
    ready = s.ready[: s.core["ready"][0]]
    for i in range(1, len(ready)):
        _require(
            s.lane["rank"][ready[(i - 1) // 2]] <= s.lane["rank"][ready[i]], "the heap of lanes is out of order", i
        )
    held = s.held[: s.core["held"][0]]
    waiting = np.flatnonzero((s.lane["state"] == HELD) | (s.lane["state"] == READY_WAIT))
    _require(sorted(held.tolist()) == waiting.tolist(), "a held lane is lost or doubled")
    _require(s.core["active"][0] <= s.core["max_active"][0], "too many lanes are active")
    demand = s.lane["demand"][s.active[: s.core["active"][0]]].sum()
    counted = s.core["demand"][0]
    _require(abs(demand - counted) <= 1e-6 * (1 + demand), "the demand of active lanes is miscounted", demand)
    flight = np.flatnonzero((s.lane["state"] == RUNNING) & (s.lane["issued"] > s.lane["done"]))
    _require(sorted(s.flight[: s.core["flight"][0]].tolist()) == flight.tolist(), "a lane in flight is not listed")
    both = (s.lane["ready_at"] >= 0) & (s.lane["active_at"] >= 0)
    _require(not both.any(), "a lane is active and waits")


def _check_occupancy(s: State) -> None:
    """Checks that resident and pending resources are the sums over the segments in flight."""
    sums = {kind: np.zeros(5) for kind in ("resident", "pending")}
    for lane in s.flight[: s.core["flight"][0]]:
        a = s.lane[lane]
        for k in range(a["done"], a["issued"]):
            f = s.segment[a["model"], a["size"], 0 if a["whole"] else k]
            issue = f["kernels"] / max(f["time_ns"], 1.0) * 1e9
            footprint = (f["blocks"], f["warps"], f["registers"], f["shared_bytes"], issue)
            sums["resident" if k == a["done"] else "pending"] += footprint
    for kind, expected in sums.items():
        names = [f"{kind}_{what}" for what in ("blocks", "warps", "registers", "shared_bytes", "issue")]
        counted = np.array([s.gpu[name][0] for name in names])
        close = np.allclose(counted, expected, rtol=1e-6, atol=1.0)
        _require(close, f"{kind} occupancy does not add up", counted, expected)
