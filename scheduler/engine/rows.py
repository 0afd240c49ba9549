"""Request rows of one front end, divided among its clients: however many one of them wants, others find a free row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paellapy.scheduler.core.errors import QueueFullError, TooManyRequestsError
from paellapy.scheduler.core.state import State

# A client with requests gets another row only while it has fewer than 8 for each free row but the last. So one client
# gets about 8 of 9 rows, and k clients about 8 of 8 k + 1 each: the more of them flood the engine, the less each has.
PER_FREE = 8


class Rows:
    """Free rows, and the rows of each client. Any thread may take and give: every change is one operation on a deque
    or a set.
    """

    def __init__(self, state: State, rows: Iterable[int]) -> None:
        self._state = state
        self._free = deque(rows)
        self.total = len(self._free)
        self._of: list[set[int]] = [set() for _ in range(len(state.client))]

    def take(self, client: int) -> int:
        """A free row for a request of the client of this number."""
        mine = self._of[client]
        n = len(mine)
        if n and n >= PER_FREE * (len(self._free) - 1) and (client or self._has_names()):
            raise self._refusal(client, n)
        try:
            row = self._free.popleft()
        except IndexError:
            raise self._full() from None
        mine.add(row)
        return row

    def give(self, client: int, row: int) -> None:
        self._of[client].discard(row)
        self._free.append(row)

    def _has_names(self) -> bool:
        """Whether any client has a name. If none has, the clients without one need not leave rows free."""
        return bool(self._state.client_key.any())

    def _full(self) -> QueueFullError:
        return QueueFullError(f"the engine already holds {self.total} requests, its maximum; try again later")

    def _refusal(self, client: int, n: int) -> QueueFullError:
        clients = sum(map(bool, self._of))
        if client == 0:
            return QueueFullError(
                f"clients without a name already have {n} of the engine's {self.total} requests, and the others are "
                "kept for clients with a name; try again later, or name the client"
            )
        if n * (clients + 1) <= self.total:  # it has less than an equal part: there are many clients
            return self._full()
        return TooManyRequestsError(
            f"this client already has {n} of the engine's {self.total} requests, and the others are kept for other "
            "clients; wait for answers before you send more"
        )
