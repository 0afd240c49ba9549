"""Requests that leave before they are done: cancelled, too late, or given up with their front end or weights."""

from __future__ import annotations

from paellapy.instrument.jit import part
from paellapy.scheduler.core.barred import unbar
from paellapy.scheduler.core.codes import ASIDE, BARRED, CANCELLED, EXPIRED, NONE, PASSED, RUNNING
from paellapy.scheduler.core.heaps import queue_remove
from paellapy.scheduler.core.lanes import ask, touch
from paellapy.scheduler.core.requests import complete, undue
from paellapy.scheduler.core.slots import count_queued, look_again, wait_for_copy
from paellapy.scheduler.core.state import State


@part
def take_out(s: State, row: int, status: int, now: int) -> None:
    """Cancels or expires a request in any state."""
    r = s.request[row]
    m = r.model
    lane = r.lane
    if r.state == ASIDE:
        queue_remove(s, s.client[r.client], row)
        s.client[r.client].aside -= 1
        s.model[m].aside -= 1
        ask(s, m)
    elif r.state == BARRED:
        unbar(s, row)
        ask(s, m)
    elif lane < 0:
        if r.state == PASSED:
            s.kept[r.client, m].passed -= 1
        queue_remove(s, s.model[m], row)
        count_queued(s, m, -1)
        ask(s, m)
    else:
        wait_for_copy(s, row)
        s.slot[lane, r.slot] = NONE
        s.lane[lane].live -= 1
        look_again(s, lane)
        touch(s, lane)
    complete(s, row, status, now)


@part
def expire(s: State, now: int) -> None:
    """Removes requests that were cancelled or are too late."""
    core = s.core[0]
    while True:
        status = EXPIRED
        if core.leaving > 0:
            core.leaving -= 1
            row = s.leaving[core.leaving]
            status = CANCELLED
            if s.request[row].leaving == 0:  # it got another answer in the meantime
                continue
        elif core.due > 0 and s.request[s.due[0]].deadline_ns <= now:
            row = s.due[0]
        else:
            break
        lane = s.request[row].lane
        if (
            status == EXPIRED
            and lane >= 0
            and s.lane[lane].state == RUNNING
            and s.lane[lane].issued == s.lane[lane].segments
        ):
            undue(s, row)  # all of it is on the GPU: it is late, but dropping it would save nothing
        else:
            take_out(s, row, status, now)
