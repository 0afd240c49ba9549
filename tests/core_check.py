"""Checks every invariant of the core's tables that must hold between two steps."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
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
    stack = [(root, codes.NONE)] if root >= 0 else []
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
    left = codes.NONE
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


def check_held_back(s: State) -> list[int]:
    """The requests that are held back, after a check that each is in the queue of its client and model, and counted."""
    requests, core = s.request, s.core[0]
    require(core["refused"] == 0, "a refused instance was not looked at")
    places = [(int(each) >> 32, int(each) & 0xFFFF_FFFF) for each in s.held_queues[: core["held_queues"]]]
    listed = zip(*(each.tolist() for each in np.nonzero(s.held_back["listed"])), strict=True)
    require(sorted(places) == sorted(listed), "held-back queues are miscounted")
    found: list[int] = []
    for c, m in places:
        queue = s.held_back[c, m]
        rows = walk(requests, int(queue["root"])) + follow(requests, int(queue["first"]), int(queue["last"]))
        require(len(rows) == queue["n"], "a held-back queue miscounts its requests", c, m)
        for name, value in (("state", codes.HELD_BACK), ("client", c), ("model", m)):
            require((requests[name][rows] == value).all(), "a held-back queue holds a wrong request", c, m, name)
        found += rows
    require(len(found) == core["held_back"], "requests that are held back are miscounted")
    for name in ("model", "client"):
        table = getattr(s, name)["held_back"]
        require((np.bincount(requests[name][found], minlength=len(table)) == table).all(), f"a {name} miscounts them")
    queued = np.zeros_like(s.held_back["released"])
    released = np.flatnonzero((requests["released"] > 0) & (requests["state"] != codes.UNUSED))
    require((requests["state"][released] == codes.QUEUED).all(), "a released request has left its queue", released)
    np.add.at(queued, (requests["client"][released], requests["model"][released]), 1)
    require((queued == s.held_back["released"]).all(), "released requests are miscounted")
    charged = np.flatnonzero((requests["released_ns"] > 0) & (requests["state"] != codes.UNUSED))
    n, ns = (
        np.bincount(requests["client"][charged], weights, minlength=len(s.client))
        for weights in (None, requests["released_ns"][charged])
    )
    require((n == s.client["released"]).all(), "a client miscounts its released requests")
    apart = np.abs(ns - s.client["released_ns"])
    require((apart <= 1e-6 * ns + 1e-3).all(), "the time of released requests does not add up")
    return found


def check_integrity(s: State) -> None:
    """Raises IntegrityError if the state contradicts itself. Call it between steps."""
    for count in ("dirty_instances", "dirty_models", "cancelled"):
        require(s.core[count][0] == 0, "a noted change was not settled", count)
    _check_queues(s)
    _check_instances(s)
    _check_sets(s)
    _check_streams(s)
    _check_occupancy(s)
    _check_weights(s)


def _check_weights(s: State) -> None:
    """Checks that every byte of weights on the GPU is counted once, and within the budget."""
    residency, w = s.residency[0], s.weights
    if not residency["managed"]:
        return
    held = int(w["bytes"][(w["location"] == codes.LOADING) | (w["location"] == codes.RESIDENT)].sum())
    held += int(residency["load_bytes"]) if residency["load_granted"] > 0 else 0
    require(held == residency["held_bytes"], "weights are miscounted", held, residency["held_bytes"])
    require(
        held <= residency["budget_bytes"], "the weights on the GPU exceed the budget", held, residency["budget_bytes"]
    )
    for name, location in (("loading", codes.LOADING), ("evicting", codes.EVICTING)):
        require((w["location"] == location).sum() == residency[name], "moves are miscounted", name)
    require(not w["victim"].any(), "a model stays marked")
    for instance in np.flatnonzero(s.instance["flight_at"] >= 0):
        m, k = s.instance["model"][instance], s.instance["issued"][instance] - 1
        last = (
            w["chunks"][m] if s.instance["whole"][instance] else s.segment["chunks"][m, s.instance["size"][instance], k]
        )
        there = w["location"][m] == codes.RESIDENT or (w["location"][m] == codes.LOADING and w["arrived"][m] >= last)
        require(there, "an instance runs without its weights", instance)


def check_at_rest(s: State, within_s: float = 30.0) -> None:
    """As `check_integrity`, for a core whose loop runs on another thread, once it is at rest.

    A request is answered before its instance is free again, so a state read in between is in the middle of a step, not
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
    requests = s.request
    is_queued = requests["state"] == codes.QUEUED
    seen: Counter[int] = Counter()
    for m in np.flatnonzero(s.model["n_instances"]):
        rows = walk(requests, int(s.model["root"][m])) + follow(
            requests, int(s.model["first"][m]), int(s.model["last"][m])
        )
        require(len(rows) == s.model["queued"][m], "a model miscounts its queue", m)
        right = is_queued[rows].all() and (requests["model"][rows] == m).all()
        require(right, "a queue holds a request of another model or state", m)
        seen.update(rows)
        room = int(s.model["free_n"][m]) + (s.model["filling"][m] >= 0)
        if rows and s.core["mode"][0] != codes.FAIL_MODE and s.model["filling"][m] >= 0:
            instance = s.model["filling"][m]
            reserved = (int(s.instance_word[instance, 0]) >> codes.RESERVED_SHIFT) & codes.RESERVED_MASK
            slots = s.size["batch"][m, s.model["n_sizes"][m] - 1]
            require(reserved == slots, "requests are queued beside free slots", m)
        elif rows and s.core["mode"][0] != codes.FAIL_MODE:
            require(room == 0, "requests are queued beside a free instance", m)
    seen.update(check_held_back(s))
    slotted = s.slot[s.slot >= 0]
    seen.update(int(row) for row in slotted)
    require((requests["state"][slotted] == codes.SLOTTED).all(), "a slot holds a request whose state is not SLOTTED")
    used = np.flatnonzero(requests["state"] != codes.UNUSED)
    require(all(n == 1 for n in seen.values()) and set(seen) == set(used.tolist()), "a request is lost or doubled")
    live = s.core["live"][0]
    require(len(used) == live == s.model["live"].sum() == s.client["live"].sum(), "requests are miscounted")
    by_flow = np.bincount(s.model["flow"], s.model["live"], len(s.model))
    require((s.flow["live"].sum(axis=0) == by_flow).all(), "a model miscounts its clients' requests")
    own = s.client["tenant"] > 0
    require((s.flow["live"].sum(axis=1)[own] == s.client["live"][own]).all(), "a tenant miscounts its requests")
    require(is_queued.sum() == s.core["queued"][0], "queued requests are miscounted")
    busy = np.flatnonzero(s.model["queued"])
    jobs = (s.model["queued"][busy] / s.size["batch"][busy, s.model["n_sizes"][busy] - 1]).sum()
    require(abs(jobs - s.core["queued_jobs"][0]) < 1e-6, "queued jobs are miscounted")
    due = s.due[: s.core["due"][0]]
    require((requests["due_at"][due] == np.arange(len(due))).all(), "the deadline heap has lost a request")
    require(((requests["due_at"] >= 0).sum()) == len(due), "a request claims a place in the deadline heap")
    for i in range(1, len(due)):
        require(
            requests["deadline_ns"][due[(i - 1) // 2]] <= requests["deadline_ns"][due[i]],
            "deadlines are out of order",
            i,
        )
    waiting = used[(requests["deadline_ns"][used] < codes.NEVER) & (requests["due_at"][used] < 0)]
    for row in waiting:  # only a request that is entirely on the GPU may be past its deadline
        instance = s.instance[requests["instance"][row]]
        require(
            instance["state"] == codes.RUNNING and instance["issued"] == instance["segments"],
            "a deadline is forgotten",
            row,
        )
    shares = s.flow["share"][s.flow["live"] > 0].sum()
    counted = s.core["shares"][0]
    require(abs(shares - counted) <= 1e-5 * counted + 1e-8, "fair shares do not add up", shares, counted)


def _check_streams(s: State) -> None:
    held = s.instance["stream_at"][s.flight[: s.core["flight"][0]]]
    require((held >= 0).all(), "an instance is in flight without a stream")
    queues = np.where(held >= codes.OF_PARTITIONS, (held - codes.OF_PARTITIONS) % codes.QUEUES, held)
    found = np.bincount(queues, minlength=len(s.stream_jobs))
    require((found == s.stream_jobs).all(), "the jobs on a stream are miscounted")
    require(
        (s.instance["stream_at"] >= 0).sum() == s.core["flight"][0], "an instance holds a stream and is not in flight"
    )
    confined = np.flatnonzero(s.instance["partition"] >= 0)
    require((s.instance["flight_at"][confined] >= 0).all(), "an instance is in a partition and not in flight")
    found = s.overlap[s.instance["partition"][confined]].sum(axis=0)
    require((found == s.partition_load).all(), "the load of the partitions is miscounted")


def _check_free_instances(s: State, ids: Any) -> None:
    instances = s.instance[ids]
    require((s.slot[ids] < 0).all() and (instances["live"] == 0).all(), "a free instance holds a request")
    require((s.instance_word[ids, 0] & np.uint64(codes.CLOSED) != 0).all(), "a free instance is open")
    require((s.model["filling"][instances["model"]] != ids).all(), "a free instance fills")
    require((instances["done"] <= instances["issued"]).all(), "segments of a free instance are out of order")
    for place in ("ready_at", "active_at", "flight_at"):
        require((instances[place] == codes.NONE).all(), "a free instance is listed", place)
    for m in np.flatnonzero(s.model["n_instances"]):
        of_model = s.model_instance[m, : s.model["n_instances"][m]]
        free = s.free_instance[m, : s.model["free_n"][m]]
        if s.model["state"][m] != codes.ABSENT:
            expected = sorted(of_model[s.instance["state"][of_model] == codes.FREE].tolist())
            require(sorted(free.tolist()) == expected, "a free instance is lost or doubled", m)


def _fits(sizes: Any, instance: Any) -> bool:
    """Whether the instance runs at the smallest size for its requests, or at the smallest there was when it started."""
    best = np.flatnonzero(sizes["batch"] >= instance["items"])[0]
    right = instance["size"] == best or (instance["size"] > best and sizes["capture"][best] != codes.LATER)
    return bool(right and sizes["segments"][instance["size"]] > 0)


def _check_instances(s: State) -> None:
    free = np.flatnonzero((s.instance["model"] >= 0) & (s.instance["state"] == codes.FREE))
    _check_free_instances(s, free)
    ids = np.flatnonzero((s.instance["model"] >= 0) & (s.instance["state"] != codes.FREE))
    words, filling, managed = s.instance_word[:, 0].tolist(), s.model["filling"].tolist(), s.residency["managed"][0]
    ready_of, known_of = (np.bitwise_count(each).sum(axis=1).tolist() for each in (s.instance_ready, s.instance_known))
    most, in_flight = int(s.core["max_in_flight"][0]), int(s.core["flight"][0])
    # Plain numbers: reading a field of a record costs a hundred times as much, and tests check after every step.
    names = ("instance", "model", "arrival_ns", "deadline_ns", "priority")
    facts = list(zip(*(s.request[name].tolist() for name in names), strict=True))
    for instance, row, slot in zip(ids.tolist(), s.instance[ids].tolist(), s.slot[ids].tolist(), strict=True):
        a = dict(zip(s.instance.dtype.names or (), row, strict=True))
        m = a["model"]
        requests = [facts[each] for each in slot if each >= 0]
        word = words[instance]
        reserved, ready = (word >> codes.RESERVED_SHIFT) & codes.RESERVED_MASK, ready_of[instance]
        require(len(requests) == a["live"], "an instance miscounts its requests", instance)
        require(
            (ready <= reserved and a["taken"] <= reserved) or a["state"] == codes.HELD,
            "an instance overflows",
            instance,
        )
        require(known_of[instance] == a["taken"], "an instance knows other slots than it counts", instance)
        require(
            bool(word & codes.CLOSED) or a["state"] == codes.FILLING, "an instance is open and not filling", instance
        )
        require((filling[m] == instance) == (a["state"] == codes.FILLING), "two instances of a model fill", instance)
        require(a["done"] <= a["issued"] <= max(a["segments"], a["issued"]), "segments are out of order", instance)
        if requests:
            at, of, arrivals, deadlines, priorities = zip(*requests, strict=True)
            right = {*at} == {instance} and {*of} == {m}
            require(right, "a slot holds a request of another instance or model", instance)
            require(a["arrival_ns"] == min(arrivals), "an instance forgot its oldest request", instance)
            require(a["deadline_ns"] == min(deadlines), "an instance forgot a deadline", instance)
            require(a["priority"] == max(priorities), "an instance forgot a priority", instance)
        absent = managed and (
            s.weights["location"][m] != codes.RESIDENT or s.weights["stopped"][m]
        )  # all weights, or some
        arena = a["arena"]
        taken = arena >= 0 and s.arena[arena] != instance + 1 and (s.arena[arena] or s.arena_kept[arena])
        if a["state"] == codes.RUNNING and a["arena"] >= 0:
            require(s.arena[a["arena"]] == instance + 1, "two instances run in one arena", instance)
        if a["state"] == codes.RUNNING:
            require(a["taken"] == reserved == ready, "an instance runs without all its inputs", instance)
            require(a["done"] < a["segments"], "an instance is done and not ended", instance)
            require(_fits(s.size[m, : s.model["n_sizes"][m]], a), "an instance runs at the wrong size", instance)
            ahead = a["issued"] - a["done"]
            require(ahead <= max(most, 1) + (most == 1), "an instance runs too far ahead", instance)
            standing = a["active_at"] >= 0 and a["yields"] and in_flight > 0  # for a short job
            later = s.core["one_by_one"][0] and s.core["changed"][0]  # the host comes to it after other launches
            forgotten = not (ahead > 0 or a["ready_at"] >= 0 or standing or ((absent or later) and a["active_at"] >= 0))
            require(not forgotten, "an instance with work is neither waiting nor active", instance)
        if a["state"] in (codes.HELD, codes.READY_WAIT):
            places = (a["ready_at"], a["active_at"], a["flight_at"])
            require(places == (codes.NONE, codes.NONE, codes.NONE), "an instance that does not run is listed", instance)
        if a["state"] == codes.FILLING:
            listed = a["ready_at"] >= 0
            right = listed == (a["live"] > 0) or ((absent or taken) and not listed)
            require(right, "a filling instance is not in the heap, or should not be", instance)


def _check_sets(s: State) -> None:
    for name, ids in (("ready", s.ready), ("active", s.active), ("flight", s.flight)):
        members, column = ids[: s.core[name][0]], f"{name}_at"
        require((s.instance[column][members] == np.arange(len(members))).all(), f"{name} has lost an instance")
        require((s.instance[column] >= 0).sum() == len(members), f"an instance claims a place in {name}")
    ready = s.ready[: s.core["ready"][0]]
    for i in range(1, len(ready)):
        require(
            s.instance["rank"][ready[(i - 1) // 2]] <= s.instance["rank"][ready[i]],
            "the heap of instances is out of order",
            i,
        )
    held = s.held[: s.core["held"][0]]
    waiting = np.flatnonzero((s.instance["state"] == codes.HELD) | (s.instance["state"] == codes.READY_WAIT))
    require(sorted(held.tolist()) == waiting.tolist(), "a held instance is lost or doubled")
    require(s.core["active"][0] <= s.core["max_active"][0], "too many instances are active")
    demand = s.instance["demand"][s.active[: s.core["active"][0]]].sum()
    counted = s.core["demand"][0]
    require(abs(demand - counted) <= 1e-6 * (1 + demand), "the demand of active instances is miscounted", demand)
    flight = np.flatnonzero((s.instance["state"] == codes.RUNNING) & (s.instance["issued"] > s.instance["done"]))
    require(sorted(s.flight[: s.core["flight"][0]].tolist()) == flight.tolist(), "an instance in flight is not listed")
    both = (s.instance["ready_at"] >= 0) & (s.instance["active_at"] >= 0)
    require(not both.any(), "an instance is active and waits")


def _check_occupancy(s: State) -> None:
    """Checks that resident and pending resources are the sums over the segments in flight."""
    inst = s.instance[s.flight[: s.core["flight"][0]]]
    n = inst["issued"] - inst["done"]
    which = np.repeat(np.arange(len(n)), n)
    ahead = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n)  # 0: the oldest of its instance
    segment = np.where(inst["whole"][which], 0, inst["done"][which] + ahead)
    f = s.segment[inst["model"][which], inst["size"][which], segment]
    issue = f["kernels"] / np.maximum(f["time_ns"], 1.0) * 1e9
    footprint = np.array([f["blocks"], f["warps"], f["registers"], f["shared_bytes"], issue])
    sums = {"resident": footprint[:, ahead == 0].sum(axis=1), "pending": footprint[:, ahead > 0].sum(axis=1)}
    for kind, expected in sums.items():
        names = [f"{kind}_{what}" for what in ("blocks", "warps", "registers", "shared_bytes", "issue")]
        counted = np.array([s.gpu[name][0] for name in names])
        close = (np.abs(counted - expected) <= 1e-6 * np.abs(expected) + 1.0).all()
        require(close, f"{kind} occupancy does not add up", counted, expected)
