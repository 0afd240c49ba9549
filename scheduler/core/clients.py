"""Numbers of clients in the core's tables. A number follows from the client's name, so all processes find the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np

from paellapy.instrument.jit import compiled
from paellapy.scheduler.core.atomics import exchange_at, load_at, store_at
from paellapy.scheduler.core.tables import Words

_ZERO = np.uint64(0)


def client_key(client: Hashable) -> int:
    """A hash of the client's name, never 0."""
    text = client if isinstance(client, str) else repr(client)
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") >> 1 | 1


def client_numbers(names: Iterable[Hashable], clients: int) -> dict[Hashable, int]:
    """The numbers that an empty table with room for `clients` gives to these names, in this order.

    >>> client_numbers(["alice", "bob"], 256)
    {'alice': 221, 'bob': 13}
    """
    found: dict[Hashable, int] = {}
    taken = set()
    for name in dict.fromkeys(names):
        number = client_key(name) % (clients - 1)
        while number in taken:
            number = (number + 1) % (clients - 1)
        taken.add(number)
        found[name] = 1 + number
    return found


@compiled
def find_client(keys: Words, clients: Any, key: int) -> int:
    """The number of a client, which all front ends derive from a hash of its name; 0 stands for no particular client.

    When all numbers are in use, a new client takes the number of a client without requests, or shares a number.
    """
    n = keys.shape[0] - 1
    home = np.int64(np.uint64(key) % np.uint64(n))
    for k in range(n):
        i = 1 + (home + k) % n
        where = keys[i:].ctypes.data
        known = load_at(where)
        if known == np.uint64(key) or (known == _ZERO and exchange_at(where, _ZERO, np.uint64(key))):
            return int(i)
    for _ in range(n):  # a tenant keeps its number for itself
        if clients[1 + home].tenant == 0:
            break
        home = (home + 1) % n
    if clients[1 + home].live == 0 and clients[1 + home].tenant == 0:
        store_at(keys[1 + home :].ctypes.data, np.uint64(key))
    return int(1 + home)
