"""Priority queues over the state's tables: an indexed binary heap, and a leftist heap whose nodes are request rows.

The binary heap stores the index of each member, so that members can change their key or leave. A queue is a
list for requests that arrive in order, and a leftist heap for the others. All models share one table of rows, however
the load is distributed; an operation costs O(1) in order and O(log n) at worst.
"""

from __future__ import annotations

from typing import Any

from paellapy.instrument.numba_ext.link import part
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.tables import Table

# --- binary heap: `ids` in heap order, `at` each member's index, least (key, tie) first -----------------------------


@part
def heap_up(ids: Any, at: Any, key: Any, tie: Any, i: int) -> int:
    """Moves the member at `i` up to its place; returns its new index."""
    me = ids[i]
    while i > 0:
        up = (i - 1) >> 1
        other = ids[up]
        if key[other] < key[me] or (key[other] == key[me] and tie[other] <= tie[me]):
            break
        ids[i] = other
        at[other] = i
        i = up
    ids[i] = me
    at[me] = i
    return i


@part
def heap_down(ids: Any, n: int, at: Any, key: Any, tie: Any, i: int) -> None:
    me = ids[i]
    while True:
        down = 2 * i + 1
        if down >= n:
            break
        if down + 1 < n:
            a, b = ids[down], ids[down + 1]
            if key[b] < key[a] or (key[b] == key[a] and tie[b] < tie[a]):
                down += 1
        other = ids[down]
        if key[me] < key[other] or (key[me] == key[other] and tie[me] <= tie[other]):
            break
        ids[i] = other
        at[other] = i
        i = down
    ids[i] = me
    at[me] = i


@part
def heap_add(ids: Any, n: int, at: Any, key: Any, tie: Any, member: int) -> None:
    """Adds a member to a heap of n; the caller keeps the count."""
    ids[n] = member
    heap_up(ids, at, key, tie, n)


@part
def heap_remove(ids: Any, n: int, at: Any, key: Any, tie: Any, member: int) -> None:
    """Removes a member from a heap of n; the caller keeps the count."""
    i = at[member]
    at[member] = codes.NONE
    last = ids[n - 1]
    if last != member:
        ids[i] = last
        at[last] = i
        heap_down(ids, n - 1, at, key, tie, heap_up(ids, at, key, tie, i))


# --- leftist heap of request rows, least (order, sequence) first ---------------------------------------------------


@part
def before(r: Table, a: int, b: int) -> bool:
    first: bool = r[a].order < r[b].order or (r[a].order == r[b].order and r[a].sequence < r[b].sequence)
    return first


@part
def balance(r: Table, node: int) -> bool:
    """Puts the higher child left; returns whether the node's height changed."""
    left, right = r[node].left, r[node].right
    high = r[left].height if left >= 0 else 0
    low = r[right].height if right >= 0 else 0
    if high < low:
        r[node].left, r[node].right = right, left
        low = high
    changed: bool = r[node].height != low + 1
    r[node].height = low + 1
    return changed


@part
def queue_merge(r: Table, a: int, b: int) -> int:
    """Merges two heaps; returns the new root."""
    if a < 0 or b < 0:
        return b if a < 0 else a
    if before(r, b, a):
        a, b = b, a
    root = a
    while r[a].right >= 0:
        right = r[a].right
        if before(r, b, right):
            r[a].right = b
            r[b].up = a
            b, right = right, b
        a = right
    r[a].right = b
    r[b].up = a
    while a >= 0:  # only right spines were walked: O(log n) nodes
        balance(r, a)
        a = r[a].up
    return root


@part
def heap_out(r: Table, root: int, row: int) -> int:
    """Removes any row from a leftist heap; returns the new root."""
    up, left, right = r[row].up, r[row].left, r[row].right
    if left >= 0:
        r[left].up = codes.NONE
    if right >= 0:
        r[right].up = codes.NONE
    below = queue_merge(r, left, right)
    if up < 0:
        return below
    if r[up].left == row:
        r[up].left = below
    else:
        r[up].right = below
    if below >= 0:
        r[below].up = up
    while up >= 0 and balance(r, up):
        up = r[up].up
    return root


# --- a queue of requests: a model's, or a held-back one


@part
def queue_add(s: State, queue: Any, row: int) -> None:
    """Adds a row to the queue in a row of `State.model` or `State.held_back`."""
    requests = s.request
    requests[row].left, requests[row].right, requests[row].up = codes.NONE, codes.NONE, codes.NONE
    last = queue.last
    if last < 0 or not before(requests, row, last):
        requests[row].height = 0
        requests[row].left = last
        if last < 0:
            queue.first = row
        else:
            requests[last].right = row
        queue.last = row
    else:
        requests[row].height = 1
        queue.root = queue_merge(requests, queue.root, row)


@part
def queue_first(s: State, queue: Any) -> int:
    """The row that comes next, or NONE."""
    first, root = queue.first, queue.root
    if first < 0 or (root >= 0 and before(s.request, root, first)):
        return int(root)
    return int(first)


@part
def queue_remove(s: State, queue: Any, row: int) -> None:
    """Removes any row."""
    requests = s.request
    if requests[row].height > 0:
        queue.root = heap_out(requests, queue.root, row)
    else:
        left, right = requests[row].left, requests[row].right
        if left < 0:
            queue.first = right
        else:
            requests[left].right = right
        if right < 0:
            queue.last = left
        else:
            requests[right].left = left
    requests[row].left, requests[row].right, requests[row].up = codes.NONE, codes.NONE, codes.NONE
