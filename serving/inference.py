"""`Inference`: one request from its header to its end, whichever front end read it.

The handler `infer` below and the fast path (fast_path/) read requests and write answers. Everything in between is
here: finding the model, admission, submitting the items to the engine, errors and counters.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from aiohttp import web
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.errors import DeadlineError, EngineAwayError, SuspectError, UnknownModelError
from paellapy.scheduler.engine.callbacks import Call, ItemCall, StepsCall
from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.engine.ring_calls import E_ARRIVAL_NS, E_FINISH_NS, E_STARTED_NS, E_STATUS
from paellapy.scheduler.models.memory import Instance
from paellapy.serving.access import CLIENT, infers
from paellapy.serving.admission import Ticket
from paellapy.serving.compression import IN_THREAD_BYTES, answer_coding, body_coding, pack, unpacked
from paellapy.serving.errors import RefusedError, status_of
from paellapy.serving.limits import JSON_COPIES, MAPPED_BYTES, largest_request, read_body
from paellapy.serving.listening import Connection
from paellapy.serving.protocol import (
    HEADER_LENGTH,
    PIECE_VALUES,
    Pieces,
    Request,
    decode,
    encode,
    known_answer,
    split,
    values_in_json,
)
from paellapy.serving.registry import VERSION
from paellapy.serving.service import SERVICE, Service
from paellapy.serving.tensors import PIECE_BYTES

T = TypeVar("T")

_json = ThreadPoolExecutor(2, thread_name_prefix="json")  # its threads start on demand


class Inference(ABC):
    """One request. Its front end calls `look`, then `start`, and gets `answered` or `refused` once, or calls
    `leave`.
    """

    __slots__ = ("_address", "_arrived_ns", "_call", "_due", "_held_bytes", "_model", "_reason", "_request",
                 "_suspected", "_ticket", "client", "name", "over", "service", "started_ns", "version")  # fmt: skip

    def __init__(self, service: Service, name: str, version: str | None, client: str) -> None:
        self.service, self.name, self.version, self.client = service, name, version, client
        self._address = ""  # holds places
        self._reason: str | None = None  # why it was refused
        self.started_ns = time.monotonic_ns()
        self.over = False
        self._held_bytes = 0
        self._arrived_ns = self.started_ns  # when the body was complete; deadlines count from then on
        self._due: asyncio.TimerHandle | None = None  # ends it at its deadline
        self._model: Served
        self._request: Request
        self._ticket: Ticket | None = None
        self._call: Call | ItemCall | StepsCall | None = None
        self._suspected: Sequence[int] = ()  # digests of its items that were on the GPU when it failed
        service.counters.enter()

    @property
    @abstractmethod
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop."""

    @property
    @abstractmethod
    def peer(self) -> str | None:
        """The address of the client."""

    @abstractmethod
    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        """Sends the answer. The engine reuses the pieces' memory when this returns. Called in any thread."""

    @abstractmethod
    def refused(self, error: Exception) -> None:
        """Sends the error. Called in any thread."""

    def look(self) -> Served:
        """Finds the model and checks its room, before the body is read, which may take long."""
        service = self.service
        if service.silent:
            raise EngineAwayError("the engine does not respond; try again later")
        model = self._model = service.registry.ready(self.name, self.version)
        service.admission.check_room(model)
        return model

    def claim(self, nbytes: int) -> None:
        """Holds that many bytes of memory for the body. RefusedError: there is no room."""
        self.service.held.change(self._held_bytes, nbytes)
        self._held_bytes = nbytes

    def start(self, body: bytes | memoryview, header_length: str | None) -> None:
        """Submits the request, whose body is complete, to the engine, or refuses it."""
        self._arrived_ns = time.monotonic_ns()
        try:
            model = self.look()  # the model may have been reloaded while the body arrived
            if len(body) > PIECE_BYTES and len(split(memoryview(body), header_length)[0]) > PIECE_BYTES:
                self._start_slowly(model, body, header_length)
                return
            self.submit(model, decode(model, body, header_length, as_bytes=not model.has_steps))
        except Exception as e:
            self.fail(e)

    def _start_slowly(self, model: Served, body: bytes | memoryview, header_length: str | None) -> None:
        """Reads long JSON in one of a few threads, so that other requests go on."""
        self.claim(len(body))
        if len(body) <= MAPPED_BYTES:  # it may lie in memory that the connection uses again
            body = bytes(body)

        def read() -> Request:
            with self.service.held.holding() as claim:
                claim(JSON_COPIES * len(body))
                return decode(model, body, header_length)

        self._in_thread(read, lambda request: self.submit(model, request))

    def submit(self, model: Served, request: Request) -> None:
        """Submits a request that fits the model to the engine."""
        service = self.service
        self._model, self._request = model, request
        deadline_ms = None
        if request.timeout_us is not None:
            took_ms = (time.monotonic_ns() - self._arrived_ns) * 1e-6  # to read it
            deadline_ms = request.timeout_us * 1e-3
            if took_ms > 1:
                deadline_ms = max(deadline_ms - took_ms, 1e-6)
            self._due = self.loop.call_later(deadline_ms * 1e-3, self._end_late)
        row = service.registry.entries[self.name].row
        client: Hashable = self.client or None
        if service.places is not None and (address := self.peer) is not None:
            service.places.take(address, request.items, service.callbacks.free_places())
            self._address = address
            if client is not None:
                client = service.callbacks.as_sent_from(self.client, address)
        # Else others would be refused for the delay that its limit causes
        limited = client is not None and service.callbacks.is_limited(client)
        if row >= 0 and not limited:  # a pipeline has no row; the core knows only its models
            self._ticket = service.admission.enter(model, row, request.priority, deadline_ms)
        service.live.add(self)
        if service.quarantine:
            self._suspected = service.quarantine.check(model, request.arrays(), request.items)
        try:
            if request.tail is not None and request.repeated is not None:
                pieces = request.repeated.pieces(model.inputs, request.tail)
                self._call = service.callbacks.submit_bytes(
                    self.name, pieces, deadline_ms, request.priority, client, self, self.loop
                )
            else:
                self._call = service.callbacks.submit(
                    self.name, request.inputs, request.items, deadline_ms, request.priority, client, self,
                    request.length,
                )  # fmt: skip
        except UnknownModelError as e:
            raise _met_unload(self.name) from e

    @property
    def warning(self) -> str | None:
        """What a client should know of its answer."""
        if self._request.priority is None or self.service.reads_priority():
            return None
        return '299 paellapy "the present policy does not read priorities"'

    def facts(self, bytes_in: int, bytes_out: int) -> dict[str, Any]:
        """What the access log says of the request besides what it says of all."""
        found: dict[str, Any] = {"model": self.name, "in": bytes_in, "out": bytes_out}
        if self._reason is not None:
            found["reason"] = self._reason
        entry = getattr(self._call, "entry", None)  # a request that has not reached the engine has none
        if entry is not None and entry[E_STATUS] == OK:
            found["queue_ms"] = round((entry[E_STARTED_NS] - entry[E_ARRIVAL_NS]) * 1e-6, 3)
            found["gpu_ms"] = round((entry[E_FINISH_NS] - entry[E_STARTED_NS]) * 1e-6, 3)
        return found

    # -- the engine's answer

    def done_in(self, instance: Instance, slot: int) -> None:
        known = known_answer(self._request)
        if known is None:
            self.done({key: array[slot : slot + 1] for key, array in instance.outputs.items()})
            return
        try:
            outputs = instance.slot_bytes(slot)[1]
            pieces: Pieces = [known, *[outputs[each.name] for each in self._request.outputs]]
        except Exception as e:
            self.fail(e)
            return
        self._answer(pieces, len(known))

    def done(self, outputs: dict[str, NDArray[Any]]) -> None:
        if self.over:
            return
        try:
            if values_in_json(self._request, outputs) > PIECE_VALUES:
                self._encode_slowly(outputs)
                return
            pieces, json_length = encode(self._model, VERSION, self._request, outputs)
        except Exception as e:  # else nobody would answer
            self.fail(e)
            return
        self._answer(pieces, json_length)

    def _encode_slowly(self, outputs: dict[str, NDArray[Any]]) -> None:
        """Writes long JSON in one of a few threads, so that other requests go on."""
        model, request, held = self._model, self._request, self.service.held
        nbytes = sum(array.nbytes for array in outputs.values())
        held.change(0, nbytes)
        copied = {key: array.copy() for key, array in outputs.items()}

        def write() -> tuple[Pieces, int | None]:
            try:
                with held.holding() as claim:
                    return encode(model, VERSION, request, copied, claim)
            finally:
                held.change(nbytes, 0)

        self._in_thread(write, lambda written: self._answer(*written))

    def _in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Runs the work in one of a few threads, and then goes on in the loop, or fails with the work's error."""

        def ended(future: Future[T]) -> None:
            # Raised here, the error would refer to this function, and so to itself: a body would stay in memory
            error = future.exception()
            try:
                if isinstance(error, Exception):
                    self.fail(error)
                elif not self.over:  # else its client has left
                    then(future.result())
            except Exception as e:
                self.fail(e)

        def tell(future: Future[T]) -> None:
            if not self.loop.is_closed():
                self.loop.call_soon_threadsafe(ended, future)

        _json.submit(work).add_done_callback(tell)

    def _answer(self, pieces: Pieces, json_length: int | None) -> None:
        if self.over:
            return
        self.succeed()
        self.answered(pieces, json_length)

    def succeed(self) -> None:
        """Ends the request, whose answer follows."""
        self._end(in_time_or_late=True)
        if self._suspected:
            self.service.quarantine.clear(self._suspected)
        self.service.counters.of(self.name).note_answer(time.monotonic_ns() - self.started_ns)

    def failed(self, error: Exception) -> None:
        if isinstance(error, UnknownModelError):
            error = _met_unload(self.name)
        elif isinstance(error, SuspectError) and not self.over:
            error = self.service.quarantine.blame(error, self._model, self._request.arrays(), self._request.items)
        self.fail(error)

    # -- the end

    def fail(self, error: Exception) -> None:
        """Ends the request with an error; the front end calls it too, for a body that cannot be read."""
        if self.over:
            return
        self._end(in_time_or_late=isinstance(error, DeadlineError))
        if self.name in self.service.registry.entries:  # only configured names have counters: clients may invent others
            self._reason = status_of(error)[1] if isinstance(error, PaellaError) else None
            self.service.counters.of(self.name).note_failure(time.monotonic_ns() - self.started_ns, self._reason)
        self.refused(error)

    def leave(self) -> None:
        """The client has left: items that have not run are cancelled."""
        if self.over:
            return
        self._end(in_time_or_late=False)
        if self._call is not None:
            self._call.cancel()
        if self.name in self.service.registry.entries:
            self.service.counters.of(self.name).note_left()

    def _end_late(self) -> None:
        """The engine drops late requests too, but not those that run; and it may be busy, or silent."""
        self._due = None
        if not self.over:
            self.abandon(DeadlineError(f"model {self.name!r}: the deadline passed before the request was done"))

    def abandon(self, error: Exception) -> None:
        """Ends the request with an error because the engine does not respond."""
        if self._call is not None:
            self._call.cancel()
        self.fail(error)

    def _end(self, in_time_or_late: bool) -> None:
        self.over = True
        self.service.live.discard(self)
        if self._due is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._due.cancel)  # the present thread may be another one
            self._due = None
        if self._ticket is not None:
            self._ticket.leave(in_time_or_late)
        if self._address and self.service.places is not None:
            self.service.places.give(self._address, self._request.items)


def _met_unload(name: str) -> RefusedError:
    """The refusal of a request whose model was unloaded after `look` found it."""
    said = f"model {name!r} was unloaded before the request ran: try again, since it may be reloading"
    return RefusedError(said, "loading", retry_after_s=2.0)


# `POST …/infer` through aiohttp: reads the body and sends the answer.

FACTS = web.RequestKey[dict[str, Any]]("facts", dict)  # for the access log
Answer = tuple[bytes, int | None]  # the body, and the length of its JSON if binary tensors follow


class Handled(Inference):
    """An inference whose handler awaits it, in a running event loop."""

    __slots__ = ("_loop", "_peer")

    def __init__(self, service: Service, name: str, version: str | None, client: str, peer: str | None) -> None:
        super().__init__(service, name, version, client)
        self._loop, self._peer = asyncio.get_running_loop(), peer

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def peer(self) -> str | None:
        return self._peer


class _Awaited(Handled):
    """An inference whose handler awaits the answer."""

    __slots__ = ("answer", "thread")

    def __init__(self, service: Service, name: str, version: str | None, client: str, peer: str | None) -> None:
        super().__init__(service, name, version, client, peer)
        self.thread = threading.get_ident()
        self.answer: asyncio.Future[Answer] = self.loop.create_future()

    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        self._tell((b"".join(pieces), json_length))

    def refused(self, error: Exception) -> None:
        self._tell(error)

    def _tell(self, result: Answer | Exception) -> None:
        if threading.get_ident() == self.thread:
            self._set(result)
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: Answer | Exception) -> None:
        if self.answer.done():  # its handler was cancelled in the meantime
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


@infers
async def infer(request: web.Request) -> web.StreamResponse:
    service, where = request.app[SERVICE], request.match_info
    work = _Awaited(service, where["model"], where.get("version"), request[CLIENT], request.remote)
    try:
        try:
            body = await read(request, service, largest_request(work.look()), work.claim)
        except Exception as e:
            work.fail(e)
        else:
            work.start(body, request.headers.get(HEADER_LENGTH))
            del body
        answer, json_length = await work.answer
    except asyncio.CancelledError:
        work.leave()
        raise
    finally:
        request[FACTS] = work.facts(request.content_length or 0, 0)
        work.claim(0)
        service.counters.leave()
    binary = json_length is not None
    headers = {"Content-Type": "application/octet-stream" if binary else "application/json"}
    if binary:
        headers[HEADER_LENGTH] = str(json_length)
    if warning := work.warning:
        headers["Warning"] = warning
    coding = answer_coding(request.headers.get("Accept-Encoding"), len(answer), binary)
    if coding is not None:
        headers["Content-Encoding"] = coding
        size = len(answer)
        answer = pack(answer, coding) if size < IN_THREAD_BYTES else await asyncio.to_thread(pack, answer, coding)
    return web.Response(body=answer, headers=headers)


async def read(
    request: web.Request, service: Service, most_bytes: int, claim: Callable[[int], None] = lambda nbytes: None
) -> bytes | memoryview:
    """The decompressed body: at most `most_bytes` and `max_body_bytes`. `claim` is called with its size as it grows.

    A body whose Content-Length is too large is not read, and a body that arrives too slowly is not waited for. Handlers
    call this function once the key is checked, so that nothing is decompressed for a client without a key.
    """
    most = min(most_bytes, service.limits.max_body_bytes)
    # Inside another application, the outer server has already decompressed the body.
    coding = body_coding(request.headers.get("Content-Encoding")) if isinstance(request.protocol, Connection) else None
    body = memoryview(await read_body(request, most, service.limits.body_timeout_s, claim))
    if coding is None:
        return body
    whole = await unpacked(bytes(body), coding, most, service.held)
    claim(len(whole))
    return whole
