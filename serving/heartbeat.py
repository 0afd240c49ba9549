"""Notices an engine that hangs: its core is asked for signs of life, and requests are answered without it.

The core reads messages that front ends post to rings in shared memory. Every worker posts one now and then and checks
that it was read. While it is not, the worker enforces deadlines itself; after DOUBTFUL_S the server is not ready and
refuses new requests; after `engine_timeout_s` the engine is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paellapy.scheduler.core.errors import DeadlineError, EngineAwayError
from paellapy.scheduler.engine.door import Pulse
from paellapy.serving.logs import log
from paellapy.serving.service import Service

TICK_S = 0.25
DOUBTFUL_S = 2.0  # seconds without a sign of life until the server is not ready and refuses requests
SILENT = "the engine does not respond; try again later"


class Heartbeat:
    """Watches one engine. `give_up` is called once when the engine has not responded for `timeout_s`."""

    def __init__(self, service: Service, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._service, self._timeout_s, self._give_up = service, timeout_s, give_up
        self._pulse = Pulse(service.engine)
        self._silent_s, self._given_up = 0.0, False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """One tick. Ticks are counted instead of time: while this process was suspended, the engine may have
        been too.
        """
        service = self._service
        if self._pulse.beats():
            if service.silent:
                log.warning("the engine responds again")
            self._silent_s, self._given_up, service.silent = 0.0, False, False
            return
        self._silent_s += TICK_S
        for work in list(service.live):
            if work.is_past_deadline():
                work.abandon(DeadlineError(f"model {work.name!r}: the deadline passed while the engine was silent"))
        if self._silent_s >= DOUBTFUL_S and not service.silent:
            service.silent = True
            log.error("the engine does not respond", extra={"fields": {"s": self._silent_s}})
        if self._silent_s >= (DOUBTFUL_S if service.draining else self._timeout_s) and not self._given_up:
            self._given_up = True
            for work in list(service.live):
                work.abandon(EngineAwayError(SILENT))
            self._give_up()
