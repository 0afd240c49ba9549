"""Checks all invariants that must hold between two steps of the core. For tests, and for an engine at rest."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from paellapy.scheduler.core.check_queues import IntegrityError, check_aside, check_barred, follow, require, walk
from paellapy.scheduler.core.codes import (
    ABSENT,
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
    PASSED,
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


def check_integrity(s: State) -> None:
    """Raises IntegrityError if the state contradicts itself. Call it between steps."""
    for count in ("touched", "asking", "leaving"):
        require(s.core[count][0] == 0, "a noted change was not settled", count)
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
    held += int(r["load_bytes"]) if r["load_granted"] > 0 else 0
    require(held == r["held_bytes"], "weights are miscounted", held, r["held_bytes"])
    require(held <= r["budget_bytes"], "the weights on the GPU exceed the budget", held, r["budget_bytes"])
    for name, stage in (("coming", COMING), ("leaving", LEAVING)):
        require((w["stage"] == stage).sum() == r[name], "moves are miscounted", name)
    require(not w["marked"].any(), "a model stays marked")
    for lane in np.flatnonzero(s.lane["flight_at"] >= 0):
        m, k = s.lane["model"][lane], s.lane["issued"][lane] - 1
        last = w["chunks"][m] if s.lane["whole"][lane] else s.segment["chunks"][m, s.lane["size"][lane], k]
        there = w["stage"][m] == HERE or (w["stage"][m] == COMING and w["arrived"][m] >= last)
        require(there, "a lane runs without its weights", lane)


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


def _check_queues(s: State) -> None:
    """Checks that every accepted request is in exactly one queue or slot, and counted once."""
    r = s.request
    is_queued = (r["state"] == QUEUED) | (r["state"] == PASSED)
    seen: Counter[int] = Counter()
    for m in np.flatnonzero(s.model["n_lanes"]):
        rows = walk(r, int(s.model["root"][m])) + follow(r, int(s.model["first"][m]), int(s.model["last"][m]))
        require(len(rows) == s.model["queued"][m], "a model miscounts its queue", m)
        right = is_queued[rows].all() and (r["model"][rows] == m).all()
        require(right, "a queue holds a request of another model or state", m)
        seen.update(rows)
        room = int(s.model["free_n"][m]) + (s.model["filling"][m] >= 0)
        if rows and s.core["mode"][0] != FAIL_MODE and s.model["filling"][m] >= 0:
            lane = s.model["filling"][m]
            reserved = (int(s.lane_word[lane, 0]) >> RESERVED_SHIFT) & RESERVED_MASK
            slots = s.size["batch"][m, s.model["n_sizes"][m] - 1]
            require(reserved == slots, "requests are queued beside free slots", m)
        elif rows and s.core["mode"][0] != FAIL_MODE:
            require(room == 0, "requests are queued beside a free lane", m)
    seen.update(check_aside(s))
    seen.update(check_barred(s))
    slotted = s.slot[s.slot >= 0]
    seen.update(int(row) for row in slotted)
    require((r["state"][slotted] == SLOTTED).all(), "a slot holds a request whose state is not SLOTTED")
    used = np.flatnonzero(r["state"] != UNUSED)
    require(all(n == 1 for n in seen.values()) and set(seen) == set(used.tolist()), "a request is lost or doubled")
    live = s.core["live"][0]
    require(len(used) == live == s.model["live"].sum() == s.client["live"].sum(), "requests are miscounted")
    require((s.flow["live"].sum(axis=0) == s.model["live"]).all(), "a model miscounts its clients' requests")
    own = s.client["tenant"] > 0
    require((s.flow["live"].sum(axis=1)[own] == s.client["live"][own]).all(), "a tenant miscounts its requests")
    require(is_queued.sum() == s.core["queued"][0], "queued requests are miscounted")
    busy = np.flatnonzero(s.model["queued"])
    jobs = (s.model["queued"][busy] / s.size["batch"][busy, s.model["n_sizes"][busy] - 1]).sum()
    require(abs(jobs - s.core["queued_jobs"][0]) < 1e-6, "queued jobs are miscounted")
    due = s.due[: s.core["due"][0]]
    require((r["due_at"][due] == np.arange(len(due))).all(), "the deadline heap has lost a request")
    require(((r["due_at"] >= 0).sum()) == len(due), "a request claims a place in the deadline heap")
    for i in range(1, len(due)):
        require(r["deadline_ns"][due[(i - 1) // 2]] <= r["deadline_ns"][due[i]], "deadlines are out of order", i)
    waiting = used[(r["deadline_ns"][used] < NEVER) & (r["due_at"][used] < 0)]
    for row in waiting:  # only a request that is entirely on the GPU may be past its deadline
        lane = s.lane[r["lane"][row]]
        require(lane["state"] == RUNNING and lane["issued"] == lane["segments"], "a deadline is forgotten", row)
    shares = s.flow["share"][s.flow["live"] > 0].sum()
    counted = s.core["shares"][0]
    require(abs(shares - counted) <= 1e-5 * counted + 1e-8, "fair shares do not add up", shares, counted)


def _check_streams(s: State) -> None:
    held = s.lane["stream_at"][s.flight[: s.core["flight"][0]]]
    require((held >= 0).all(), "a lane is in flight without a stream")
    queues = np.where(held >= OF_WINDOWS, (held - OF_WINDOWS) % QUEUES, held)
    found = np.bincount(queues, minlength=len(s.stream_jobs))
    require((found == s.stream_jobs).all(), "the jobs on a stream are miscounted")
    require((s.lane["stream_at"] >= 0).sum() == s.core["flight"][0], "a lane holds a stream and is not in flight")
    confined = np.flatnonzero(s.lane["window"] >= 0)
    require((s.lane["flight_at"][confined] >= 0).all(), "a lane is in a window and not in flight")
    found = s.overlap[s.lane["window"][confined]].sum(axis=0)
    require((found == s.window_load).all(), "the load of the windows is miscounted")


def _check_free_lanes(s: State, ids: Any) -> None:
    lanes = s.lane[ids]
    require((s.slot[ids] < 0).all() and (lanes["live"] == 0).all(), "a free lane holds a request")
    require((s.lane_word[ids, 0] & np.uint64(CLOSED) != 0).all(), "a free lane is open")
    require((s.model["filling"][lanes["model"]] != ids).all(), "a free lane fills")
    require((lanes["done"] <= lanes["issued"]).all(), "segments of a free lane are out of order")
    for place in ("ready_at", "active_at", "flight_at"):
        require((lanes[place] == NONE).all(), "a free lane is listed", place)
    for m in np.flatnonzero(s.model["n_lanes"]):
        of_model = s.model_lane[m, : s.model["n_lanes"][m]]
        free = s.free_lane[m, : s.model["free_n"][m]]
        if s.model["state"][m] != ABSENT:
            expected = sorted(of_model[s.lane["state"][of_model] == FREE].tolist())
            require(sorted(free.tolist()) == expected, "a free lane is lost or doubled", m)


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
        require(len(rows) == a["live"], "a lane miscounts its requests", lane)
        require((ready <= reserved and a["taken"] <= reserved) or a["state"] == HELD, "a lane overflows", lane)
        require(known_of[lane] == a["taken"], "a lane knows other slots than it counts", lane)
        require(bool(word & CLOSED) or a["state"] == FILLING, "a lane is open and not filling", lane)
        require((filling[m] == lane) == (a["state"] == FILLING), "two lanes of a model fill", lane)
        require(a["done"] <= a["issued"] <= max(a["segments"], a["issued"]), "segments are out of order", lane)
        if len(rows):
            facts = s.request[rows]
            right = (facts["lane"] == lane).all() and (facts["model"] == m).all()
            require(right, "a slot holds a request of another lane or model", lane)
            require(a["arrival_ns"] == facts["arrival_ns"].min(), "a lane forgot its oldest request", lane)
            require(a["deadline_ns"] == facts["deadline_ns"].min(), "a lane forgot a deadline", lane)
            require(a["priority"] == facts["priority"].max(), "a lane forgot a priority", lane)
        absent = managed and (s.weights["stage"][m] != HERE or s.weights["stop"][m])  # all weights, or some
        berth = a["berth"]
        taken = berth >= 0 and s.berth[berth] != lane + 1 and (s.berth[berth] or s.berth_kept[berth])
        if a["state"] == RUNNING and a["berth"] >= 0:
            require(s.berth[a["berth"]] == lane + 1, "two lanes run in one berth", lane)
        if a["state"] == RUNNING:
            require(a["taken"] == reserved == ready, "a lane runs without all its inputs", lane)
            require(a["done"] < a["segments"], "a lane is done and not ended", lane)
            require(_fits(s.size[m, : s.model["n_sizes"][m]], a), "a lane runs at the wrong size", lane)
            ahead = a["issued"] - a["done"]
            most = s.core["look_ahead"][0]
            require(ahead <= max(most, 1) + (most == 1), "a lane runs too far ahead", lane)
            standing = a["active_at"] >= 0 and a["back"] and s.core["flight"][0] > 0  # for a short job
            later = s.core["one_by_one"][0] and s.core["changed"][0]  # the host comes to it after other launches
            forgotten = not (ahead > 0 or a["ready_at"] >= 0 or standing or ((absent or later) and a["active_at"] >= 0))
            require(not forgotten, "a lane with work is neither waiting nor active", lane)
        if a["state"] in (HELD, READY_WAIT):
            places = (a["ready_at"], a["active_at"], a["flight_at"])
            require(places == (NONE, NONE, NONE), "a lane that does not run is listed", lane)
        if a["state"] == FILLING:
            listed = a["ready_at"] >= 0
            right = listed == (a["live"] > 0) or ((absent or taken) and not listed)
            require(right, "a filling lane is not in the heap, or should not be", lane)


def _check_sets(s: State) -> None:
    for name, ids in (("ready", s.ready), ("active", s.active), ("flight", s.flight)):
        members, column = ids[: s.core[name][0]], f"{name}_at"
        require((s.lane[column][members] == np.arange(len(members))).all(), f"{name} has lost a lane")
        require((s.lane[column] >= 0).sum() == len(members), f"a lane claims a place in {name}")
    ready = s.ready[: s.core["ready"][0]]
    for i in range(1, len(ready)):
        require(
            s.lane["rank"][ready[(i - 1) // 2]] <= s.lane["rank"][ready[i]], "the heap of lanes is out of order", i
        )
    held = s.held[: s.core["held"][0]]
    waiting = np.flatnonzero((s.lane["state"] == HELD) | (s.lane["state"] == READY_WAIT))
    require(sorted(held.tolist()) == waiting.tolist(), "a held lane is lost or doubled")
    require(s.core["active"][0] <= s.core["max_active"][0], "too many lanes are active")
    demand = s.lane["demand"][s.active[: s.core["active"][0]]].sum()
    counted = s.core["demand"][0]
    require(abs(demand - counted) <= 1e-6 * (1 + demand), "the demand of active lanes is miscounted", demand)
    flight = np.flatnonzero((s.lane["state"] == RUNNING) & (s.lane["issued"] > s.lane["done"]))
    require(sorted(s.flight[: s.core["flight"][0]].tolist()) == flight.tolist(), "a lane in flight is not listed")
    both = (s.lane["ready_at"] >= 0) & (s.lane["active_at"] >= 0)
    require(not both.any(), "a lane is active and waits")


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
        close = (np.abs(counted - expected) <= 1e-6 * np.abs(expected) + 1.0).all()
        require(close, f"{kind} occupancy does not add up", counted, expected)
