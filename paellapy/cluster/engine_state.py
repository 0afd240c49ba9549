"""An engine as a router sees it: its latest outlook, and the connections to it.

The outlook is corrected by the requests sent and the answers received since.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientResponse, ClientSession, ClientTimeout
from yarl import URL

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.admission import PREDICTED_WEIGHT, SLOW
from paellapy.serving.fast_path.client import Pool
from paellapy.serving.load_report import ModelOutlook, Outlook
from paellapy.serving.logs import log
from paellapy.serving.registry import READY

LEARN = 0.05  # weight of the newest answer in an engine's learned speed
FORGET = 0.005  # part forgotten with every line while no request is there, so that an avoided engine is tried again
LEAST_MS = 1e-3  # predictions are GPU time; with shorter ones only the host's time would count
CONNECT_S = 2.0
AGAIN_S = 0.1  # pause after a stream of outlooks has ended or could not be opened
LONGEST_LINE = 1 << 20

_decode = msgspec.json.Decoder(Outlook).decode


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    url: str

    @property
    def address(self) -> tuple[str, int, bool]:
        """Host, port, and whether it uses TLS."""
        with contextlib.suppress(ValueError):
            url = URL(self.url)
            if url.scheme in ("http", "https") and url.host and url.port:
                return url.host, url.port, url.scheme == "https"
        said = f"engine {self.name!r} has the address {self.url!r}: give http://HOST:PORT"
        raise ArgumentError(said, field="url", given=self.url)


def members_of(engines: Mapping[str, str]) -> dict[str, Member]:
    """Engines by name; `engines` has their addresses."""
    found = {name: Member(name, url) for name, url in engines.items()}
    if len({each.address for each in found.values()}) < len(found):
        raise ArgumentError("two engines have the same address: list each engine once", field="engines")
    return found


@dataclass(slots=True)
class Learned:
    """How long one engine's answers for one model take, relative to its predictions."""

    actual_ms: float = 1.0
    predicted_ms: float = 1.0

    @property
    def factor(self) -> float:
        """Actual time / predicted time. Long answers weigh more than short ones, which are mostly the host's time."""
        return self.actual_ms / self.predicted_ms

    def note(self, predicted_ms: float, actual_ms: float) -> None:
        self.actual_ms += LEARN * (actual_ms - self.actual_ms)
        self.predicted_ms += LEARN * (predicted_ms - self.predicted_ms)

    def forget(self) -> None:
        self.actual_ms += FORGET * (self.predicted_ms - self.actual_ms)


class EngineView:
    """One engine. `up`: it is heard, takes requests, and its last connection did not break."""

    def __init__(self, member: Member) -> None:
        self.member, self.name = member, member.name
        host, port, tls = member.address
        self.pool = Pool(host, port, ssl.create_default_context() if tls else None, CONNECT_S)
        self.why = "not reached yet"  # why it is away
        self.outlook: Outlook | None = None
        self.up = False
        self.quiet_ticks = 0
        self.silent = False  # given up, until it is heard again
        self.added_ms = 0.0  # work sent since its latest line
        self.added = 0  # requests sent since then
        self.outstanding = 0  # this router's requests in flight there
        self.sent = 0
        self.learned: dict[str, Learned] = {}

    def hear(self, outlook: Outlook) -> bool:
        """Takes a new line; returns whether the models it offers have changed."""
        before = self.offers() if self.up else None
        if self.outlook is None or self.outlook.since != outlook.since:
            self.learned.clear()
        self.outlook, self.added_ms, self.added = outlook, 0.0, 0
        self.quiet_ticks, self.silent = 0, False
        self.up = not outlook.draining
        if not self.outstanding:
            for each in self.learned.values():
                each.forget()
        return (self.offers() if self.up else None) != before

    @property
    def models(self) -> dict[str, ModelOutlook]:
        return {} if self.outlook is None else self.outlook.models

    def offers(self) -> frozenset[str]:
        return frozenset(name for name, each in self.models.items() if each.state == READY)

    def wants(self) -> frozenset[str]:
        """Models that should be loaded, by its latest line."""
        return frozenset(name for name, each in self.models.items() if each.wanted or each.state == READY)

    @property
    def knows_models(self) -> bool:
        """Whether it has said which models it should have; a server that starts may not know yet."""
        return self.outlook is not None and (self.outlook.ready or bool(self.models))

    def predicted_ms(self, model: str) -> float | None:
        """Time that a request sent now would take, by the engine's outlook; None: it does not have the model."""
        found = self.models.get(model) if self.up else None
        return None if found is None or found.state != READY else found.predicted_ms + self.added_ms

    def estimate_ms(self, model: str) -> float | None:
        """The same, corrected by the times of its answers."""
        predicted_ms = self.predicted_ms(model)
        if predicted_ms is None:
            return None
        learned = self.learned.get(model)
        return predicted_ms if learned is None else max(predicted_ms, LEAST_MS) * learned.factor

    def cost_ms(self, model: str) -> float | None:
        """What a router minimizes: the work there, as if all requests took as long as this one, and a part of the
        estimate. None: it does not have the model.
        """
        estimate_ms = self.estimate_ms(model)
        if estimate_ms is None or self.outlook is None:
            return None
        slow = max(1.0, self.learned[model].factor / SLOW) if model in self.learned else 1.0
        work_ms = (self.outlook.live + self.added + 1) * self.outlook.models[model].step_ms * slow
        return work_ms + PREDICTED_WEIGHT * estimate_ms

    def note_sent(self, model: str) -> None:
        self.outstanding += 1
        self.added += 1
        self.sent += 1
        if (found := self.models.get(model)) is not None:
            self.added_ms += found.step_ms

    def note_answer(self, model: str, predicted_ms: float, actual_ms: float) -> None:
        """Texts have no prediction: nothing is learned from them."""
        if predicted_ms > 0:
            predicted_ms = max(predicted_ms, LEAST_MS)
            self.learned.setdefault(model, Learned(actual_ms, predicted_ms)).note(predicted_ms, actual_ms)


# -- its outlooks


async def listen(
    view: EngineView, heard: Callable[[EngineView, Outlook], None], every_ms: float, key: str | None = None
) -> None:
    """Reads an engine's outlooks over one connection, and opens it again whenever it ends. Runs until it is cancelled.

    `heard` is called with every outlook. Between connections the engine gets no requests.
    """
    url = f"{view.member.url.rstrip('/')}/v2/outlook?every_ms={every_ms:g}"
    headers = {} if key is None else {"X-API-Key": key}
    async with ClientSession(headers=headers, timeout=ClientTimeout(sock_connect=CONNECT_S)) as session:
        while True:
            before = view.why
            try:
                async with session.get(url, allow_redirects=False) as answer:
                    view.why = await _read_outlooks(view, heard, answer)
            except (ClientError, OSError, TimeoutError) as e:
                view.why = _why_away(view, e)
            view.up = False  # it may still answer earlier requests
            if view.why != before:
                log.info("engine away", extra={"fields": {"engine": view.name, "why": view.why}})
            await asyncio.sleep(AGAIN_S)


async def _read_outlooks(view: EngineView, heard: Callable[[EngineView, Outlook], None], answer: ClientResponse) -> str:
    """Returns why the stream has ended. Of several lines that arrive at once only the last is used."""
    if answer.status != 200:
        return f"it answers {answer.status} {answer.reason}"
    held = b""
    async for data in answer.content.iter_any():
        *lines, held = (held + data).split(b"\n")
        if len(held) > LONGEST_LINE:
            return "it sent a line without an end"
        if lines:
            try:
                heard(view, _decode(lines[-1]))
            except msgspec.DecodeError as e:
                return f"it is not an engine of this version of paellapy: {e}"
    return "the connection ended"


def _why_away(view: EngineView, error: Exception) -> str:
    if isinstance(error, ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "starting: it does not listen yet" if view.outlook is None else "ended: nothing listens at its address"
    return f"it cannot be reached: {str(error) or 'no answer'}"
