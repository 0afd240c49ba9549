"""An engine that hangs is noticed: its core is asked for a sign of life, and requests are answered without it.

The core reads what front ends post to their rings in shared memory. Every worker posts something now and then and looks
whether it was read. While it is not, the worker itself keeps its requests' deadlines; after a while the server is not
ready and refuses what comes; and after `engine_timeout_s` the engine is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paellapy.scheduler.core.errors import DeadlineError, EngineAwayError
from paellapy.scheduler.engine.door import Pulse
from paellapy.serving.logs import log
from paellapy.serving.service import Service

TICK_S = 0.25
DOUBTFUL_S = 2.0  # without a sign: not ready, and nothing new is taken
SILENT = "the engine has given no sign of life for a while; try again later"


class Heartbeat:
    """`give_up` is called once for an engine that has given no sign for `timeout_s`."""

    def __init__(self, service: Service, timeout_s: float, give_up: Callable[[], None]) -> None:
        self._service, self._timeout_s, self._give_up = service, timeout_s, give_up
        self._pulse = Pulse(service.engine)
        self._silent_s, self._given_up = 0.0, False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """One tick. Time is counted in ticks: where this process itself stood still, the engine may have too."""
        service = self._service
        if self._pulse.beats():
            if service.silent:
                log.warning("the engine gives signs of life again")
            self._silent_s, self._given_up, service.silent = 0.0, False, False
            return
        self._silent_s += TICK_S
        for work in list(service.live):
            if work.is_past_deadline():
                work.abandon(DeadlineError(f"model {work.name!r}: the deadline has passed, and the engine is silent"))
        if self._silent_s >= DOUBTFUL_S and not service.silent:
            service.silent = True
            log.error("the engine gives no sign of life", extra={"fields": {"s": self._silent_s}})
        if self._silent_s >= (DOUBTFUL_S if service.draining else self._timeout_s) and not self._given_up:
            self._given_up = True
            for work in list(service.live):
                work.abandon(EngineAwayError(SILENT))
            self._give_up()
