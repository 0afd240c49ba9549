"""A producer of another process, one instruction at a time: it may die between any two."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from core_bench import LIMITS, Bench

from paellapy.scheduler.core import codes
from paellapy.scheduler.core import state as st
from paellapy.scheduler.core.rings import SLOTS, STAGED, Message
from paellapy.scheduler.engine import ring_calls as calls

PRODUCERS = replace(LIMITS, producers=3)


class Producer:
    """`holder` stands for the inputs in the slots: it is shared by all producers of a bench."""

    def __init__(self, bench: Bench, number: int, holder: dict[tuple[int, int], int] | None = None) -> None:
        self.bench, self.number, self.holder = bench, number, {} if holder is None else holder
        self.held = calls.Line(bench.state, number, 0)  # nobody arms the bell
        self.line = self.held.address
        self.rows = list(st.producer_rows(PRODUCERS, number))
        self.serial = number << 20
        self.claimed: list[tuple[int, int]] = []
        self.unwritten: list[tuple[tuple[int, int], int]] = []
        self.posted: dict[int, tuple[int, tuple[int, int] | None]] = {}  # serial → row, place
        self.unread: list[tuple[int, int]] = []
        self.ended: Counter[int] = Counter()  # serial → answers
        self.statuses: Counter[int] = Counter()
        self._taken = np.zeros((64, calls.COMPLETION_WORDS), np.int64)

    def claim(self, client: int = 0) -> None:
        found = calls.claim(self.line, 0, client)
        if found != STAGED:
            self.claimed.append(divmod(found, SLOTS))

    def post(self, written: bool = True, **values: int) -> None:
        """Posts a claimed slot, or a request that has no slot yet."""
        place = self.claimed.pop(0) if self.claimed else None
        self.serial += 1
        row = self.rows.pop()
        instance, slot = place or (codes.NONE, codes.NONE)
        self.posted[self.serial] = row, place
        message = Message(
            kind=codes.SUBMIT, request=row, serial=self.serial, instance=instance, slot=slot,
            arrival_ns=self.bench.now, **values,
        )  # fmt: skip
        if place is not None:
            self.holder[place] = self.serial
        if place is not None and written:
            assert calls.post_written(self.line, message.address, *place)
        else:
            assert calls.post(self.line, message.address)
            if place is not None:
                self.unwritten.append((place, self.serial))

    def submit(self, upto: str = "write", client: int = 0) -> None:
        """Submits one request, up to this step."""
        self.claim(client)
        if upto != "claim":
            self.post(upto != "post", client=client)

    def write(self) -> None:
        place, serial = self.unwritten.pop(0)
        assert self.holder[place] == serial, "a slot was given to another before it was written"
        calls.ready(self.line, *place)

    def cancel(self, serial: int) -> None:
        row, _ = self.posted[serial]
        assert calls.post(self.line, Message(kind=codes.CANCEL, request=row, serial=serial).address)

    def take(self) -> list[list[int]]:
        n = calls.take(self.line, self._taken)
        found: list[list[int]] = self._taken[:n].tolist()
        for entry in found:
            row = entry[calls.E_REQUEST]
            serial = next(s for s, (r, _) in self.posted.items() if r == row)
            _, place = self.posted.pop(serial)
            self.ended[serial] += 1
            self.statuses[entry[calls.E_STATUS]] += 1
            assert self.ended[serial] == 1
            self.rows.append(row)
            if entry[calls.E_STATUS] == codes.OK:
                where = entry[calls.E_INSTANCE], entry[calls.E_SLOT]
                if place is not None:
                    assert place == where
                    assert self.holder[where] == serial, "its slot was given to another before its answer was read"
                self.unread.append(where)
        return found

    def read(self) -> None:
        calls.release(self.line, *self.unread.pop(0))

    def die_publishing(self) -> None:
        """Dies after it took a cell of the ring and before it published it: the core sees a gap."""
        self.bench.state.ring[self.number, codes.SUBMIT_TAIL, 0] += np.uint64(1)


def finish_all(bench: Bench, *producers: Producer) -> list[list[int]]:
    """All living producers finish their requests; returns the completions."""
    found: list[list[int]] = []
    for producer in producers:
        while producer.claimed and producer.rows:
            producer.post()
        while producer.unwritten:
            producer.write()
    for _ in range(100):
        before = len(found)
        running = bench.running
        bench.finish(1000)
        for producer in producers:
            found += producer.take()
            while producer.unread:
                producer.read()
        if not running and len(found) == before and not bench.state.core["live"][0]:
            break
    bench.step()
    return found
