"""Texts of language models over HTTP: the addresses of OpenAI's API and Triton's `generate`.

`openai` reads requests and forms answers. Here is one request from its header to its end: tokens, generations of the
engine, chunks. A client that leaves cancels its generations; one that reads slowly makes only its own connection wait,
and what it has not read is at most one text of its model's context.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import DeadlineError, EngineAwayError
from paellapy.scheduler.engine.ring_client import MOST_TEXTS
from paellapy.serving.access import CLIENT, infers, open_to_all
from paellapy.serving.counters import ModelCounters
from paellapy.serving.errors import EVENTS, NUMBER, RequestError, error_answer, json_response, status_of
from paellapy.serving.inference import read
from paellapy.serving.limits import BESIDE_BYTES, JSON_COPIES
from paellapy.serving.openai import (
    Answer,
    Asked,
    Choice,
    GenerateAnswer,
    Usage,
    check_values,
    error_body,
    model_about,
    models_list,
    read_chat,
    read_completion,
    read_generate,
)
from paellapy.serving.protocol import engine_priority
from paellapy.serving.registry import VERSION
from paellapy.serving.service import SERVICE, Service
from paellapy.serving.tensors import PIECE_BYTES

if TYPE_CHECKING:
    from paellapy.scheduler.language.text import Piece
    from paellapy.serving.registry import TextModel, WrittenText

TOKEN_BYTES = 256  # of a body, per token of the longest context: a token has about 5 characters, most have fewer
INLINE = 1000  # characters: up to this length a text becomes tokens within a millisecond, in the event loop
MOST_CHARACTERS = 16  # of a prompt, for each token of the model's context; texts have about five
PROMPT_BYTES = 40  # of memory, for each token of a prompt
UNREAD_BYTES, LOGPROB_BYTES = 250, 110  # of memory, for a token that waits to be sent, and for each log probability
SLOW_BYTES = 1 << 16  # more of them than this are counted, for one request
LOOK_S = 0.1

Form = Answer | GenerateAnswer
Read = Callable[[bytes | memoryview], Asked]

_reading = ThreadPoolExecutor(2, thread_name_prefix="text")  # its threads start on demand


class Writing:
    """The texts of one request, from their submission to their end. `async with` cancels what has not ended."""

    def __init__(
        self, service: Service, model: TextModel, asked: Asked, client: str, request: web.Request,
        claim: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`claim` sets the bytes that the request holds."""
        self._service, self._model, self._asked, self._client = service, model, asked, client
        self._request, self._claim = request, claim
        self._kept_bytes = self._claimed_bytes = 0
        self._address = ""  # holds places
        self.name = model.name
        self._error: Exception | None = None
        self._until = asyncio.timeout(None if asked.timeout_us is None else asked.timeout_us * 1e-6)
        self._generations: list[WrittenText] = []
        self.choices: list[Choice] = []
        self.usage = Usage()

    async def __aenter__(self) -> Writing:
        self._service.live.add(self)
        await self._until.__aenter__()
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._service.live.discard(self)
        self._service.unsent.end(self.cut_off)
        for each in self._generations:
            each.cancel()
        if self._address and self._service.texts is not None:
            self._service.texts.give(self._address, self._asked.choices)
        try:
            await self._until.__aexit__(kind, error, trace)
        except TimeoutError:
            late = f"model {self.name!r}: the deadline passed before the text was complete"
            raise self._error or DeadlineError(late) from None

    async def begin(self, prompts: Sequence[Sequence[int]], length: int) -> None:
        """Submits all texts to the engine; `length` is that of the body."""
        asked, sampling, service = self._asked, self._asked.sampling, self._service
        self._grow(length + (PROMPT_BYTES + 8 * asked.n) * sum(map(len, prompts)))
        client: Hashable = self._client or None
        if service.texts is not None and (address := self._request.remote) is not None:
            service.texts.take(address, asked.choices, MOST_TEXTS - service.texts.held)
            self._address = address
            if client is not None:
                client = service.callbacks.as_sent_from(self._client, address)
        options: dict[str, Any] = {
            "deadline_ms": None if asked.timeout_us is None else asked.timeout_us * 1e-3,
            "priority": engine_priority(self._model.priority, asked.level),
            "client": client,
            "sender": self._address or client,
        }
        if asked.sooner:
            options["priority"] = self._model.priority + asked.sooner
        for tokens in prompts:
            begin = self._model.codec.decode(tokens) if asked.echo else ""
            for k in range(asked.n):
                if k and "seed" in sampling:
                    sampling = {**sampling, "seed": sampling["seed"] + 1}
                if self.choices and len(tokens) > INLINE:
                    await asyncio.sleep(0)  # other requests go on
                made = await service.registry.generate(self.name, tokens, options, sampling)
                self._generations.append(made)
                self.choices.append(Choice(len(self.choices), begin))
            self.usage.prompt += len(tokens)

    async def pieces(self) -> AsyncIterator[tuple[Choice, str]]:
        """Each piece of any of the texts, once its choice has taken it."""
        async for k, piece in _merged(self._generations):
            choice = self.choices[k]
            if not choice.count and k % self._asked.n == 0:
                self.usage.cached += self._generations[k].cached_tokens
            self.usage.answer += 1
            yield choice, choice.add(piece)

    # -- what it holds

    def keep(self, nbytes: int) -> None:
        """Counts a part of the answer that is kept until its end."""
        self._kept_bytes += nbytes
        if self._kept_bytes > SLOW_BYTES:
            self._grow(self._kept_bytes)
            self._kept_bytes = 0

    def _grow(self, nbytes: int) -> None:
        self._claimed_bytes += nbytes
        self._claim(self._claimed_bytes)

    async def until_read(self) -> None:
        """Waits until the client has taken what was sent, and counts what is written meanwhile."""
        each = UNREAD_BYTES + LOGPROB_BYTES * (self._asked.sampling.get("logprobs") or 0)
        taking = asyncio.ensure_future(self._request.writer.drain())
        try:
            while not taking.done():
                unread = each * sum(made.unread for made in self._generations)
                if unread > SLOW_BYTES:
                    self._service.unsent.begin(self.cut_off, unread)
                await asyncio.wait({taking}, timeout=LOOK_S)
            taking.result()
        finally:
            taking.cancel()
            self._service.unsent.end(self.cut_off)

    def cut_off(self) -> None:
        """Ends the connection, since answers that nobody reads take too much memory."""
        if self._request.transport is not None:
            self._request.transport.abort()

    # -- the engine is silent

    def abandon(self, error: Exception) -> None:
        self._error = error
        self._until.reschedule(asyncio.get_running_loop().time())


async def _merged(generations: Sequence[WrittenText]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several generations as they come, each with the number of its generation."""
    if len(generations) == 1:
        async for piece in generations[0]:
            yield 0, piece
        return
    waiting = {asyncio.ensure_future(_next(each)): k for k, each in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                k = waiting.pop(task)
                if (found := task.result()) is not None:
                    waiting[asyncio.ensure_future(_next(generations[k]))] = k
                    yield k, found
    finally:
        for task in waiting:
            task.cancel()


async def _next(generation: WrittenText) -> Piece | None:
    return await anext(generation, None)


# ---- one request -----------------------------------------------------------------------------------------------------


async def _respond(
    request: web.Request, read_asked: Read, form_of: Callable[[Asked, TextModel], Form]
) -> web.StreamResponse:
    service, started_ns = request.app[SERVICE], time.monotonic_ns()
    counters: ModelCounters | None = None
    stream = web.StreamResponse(headers={**EVENTS, "X-Request-Id": request[NUMBER]})
    service.counters.enter()
    try:
        if service.silent:
            raise EngineAwayError("the engine does not respond; try again later")
        with service.held.holding() as claim:
            asked, length = await _asked(request, service, read_asked, claim)
            model = service.registry.language_model(asked.model)
            counters = service.counters.of(model.name)
            form = form_of(asked, model)
            prompts = await _tokens(model, asked, length)
            async with Writing(service, model, asked, request[CLIENT], request, claim) as work:
                await work.begin(prompts, length)
                pieces = work.pieces()
                if asked.stream:
                    await _send(request, stream, pieces, form, work)
                    response: web.StreamResponse = stream
                else:
                    async for choice, text in pieces:
                        work.keep(form.keep(choice, text))
                    response = json_response(form.whole(work.choices, work.usage))
        counters.note_answer(time.monotonic_ns() - started_ns)
    except (asyncio.CancelledError, ConnectionError) as e:
        if counters is not None:
            counters.note_left()
        if isinstance(e, asyncio.CancelledError) or not stream.prepared:
            raise
        return stream
    except Exception as e:
        if counters is not None:
            reason = status_of(e)[1] if isinstance(e, PaellaError) else None
            counters.note_failure(time.monotonic_ns() - started_ns, reason)
        if not stream.prepared:
            raise
        found = error_answer(e, request[NUMBER], request.path)
        with contextlib.suppress(ConnectionError):
            await stream.write(form.failed(found.status, found.said, getattr(e, "field", None)))
        return stream
    finally:
        service.counters.leave()
    return response


async def _send(
    request: web.Request, stream: web.StreamResponse, pieces: AsyncIterator[tuple[Choice, str]], form: Form,
    work: Writing,
) -> None:  # fmt: skip
    """Sends each piece as it comes. Until the first, an error still has a status of its own."""
    async for choice, text in pieces:
        if not stream.prepared:
            await stream.prepare(request)
        await stream.write(form.chunk(choice, text, work.usage))
        if request.protocol.writing_paused:
            await work.until_read()
    await stream.write(form.end(work.usage))


async def _asked(
    request: web.Request, service: Service, read_asked: Read, claim: Callable[[int], None]
) -> tuple[Asked, int]:
    """The request, and its length; long JSON is read in a thread, so that other requests go on."""
    contexts = [each.context for each in service.registry.language_models.values()]
    context = max(contexts, default=0)
    body = await read(request, service, BESIDE_BYTES + TOKEN_BYTES * context, claim)
    check_values(body, context)
    if len(body) <= PIECE_BYTES:
        return read_asked(body), len(body)
    claim(len(body) * (1 + JSON_COPIES))
    return await asyncio.get_running_loop().run_in_executor(_reading, read_asked, body), len(body)


async def _tokens(model: TextModel, asked: Asked, length: int) -> list[Sequence[int]]:
    """The prompts as ids of tokens."""

    def encode() -> list[Sequence[int]]:
        if asked.messages is not None:
            return [model.codec.encode_chat(asked.messages, **asked.template)]
        return [each if isinstance(each, list) else model.codec.encode(each) for each in asked.prompts]

    most = MOST_CHARACTERS * model.context
    longest = max((len(each) for each in asked.prompts if isinstance(each, str)), default=0)
    longest = max(longest, sum(len(each["content"]) for each in asked.messages or ()))
    if longest > most:
        said = f"the prompt has {longest:,} characters, and model {model.name!r} a context of {model.context:,} tokens"
        raise RequestError(f"{said}: send at most {most:,} characters", field="prompt", given=longest, limit=most)
    if length <= INLINE:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_reading, encode)


# ---- the addresses ---------------------------------------------------------------------------------------------------


def _as_openai(asked: Asked, model: TextModel) -> Form:
    return Answer(asked, model.codec.token_text)


def _as_triton(asked: Asked, model: TextModel) -> Form:
    return GenerateAnswer(asked, VERSION)


@infers
async def completions(request: web.Request) -> web.StreamResponse:
    return await _respond(request, read_completion, _as_openai)


@infers
async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _respond(request, read_chat, _as_openai)


@infers
async def generate(request: web.Request) -> web.StreamResponse:
    return await _generate(request, stream=False)


@infers
async def generate_stream(request: web.Request) -> web.StreamResponse:
    return await _generate(request, stream=True)


async def _generate(request: web.Request, stream: bool) -> web.StreamResponse:
    where = request.match_info
    request.app[SERVICE].registry.language_model(where["model"], where.get("version"))
    return await _respond(request, partial(read_generate, where["model"], stream=stream), _as_triton)


async def models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    contexts = {name: each.context for name, each in service.registry.language_models.items()}
    return json_response(models_list(contexts, service.since))


async def model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    found = service.registry.language_model(request.match_info["model"])
    return json_response(model_about(found.name, found.context, service.since))


@open_to_all  # probes carry no key
async def health(request: web.Request) -> web.Response:
    """Whether the server is ready, at the address that load generators for language models ask."""
    is_ready = request.app[SERVICE].ready
    return json_response({"ready": is_ready}, 200 if is_ready else 503)


for _each in (completions, chat_completions, models, model):
    _each.error_body = error_body  # type: ignore[attr-defined]


def add_generation(app: web.Application) -> None:
    router = app.router
    router.add_get("/health", health)
    for root in ("/v1", "/openai/v1"):  # the second is KServe's
        router.add_get(f"{root}/models", models)
        router.add_get(f"{root}/models/{{model}}", model)
        router.add_post(f"{root}/completions", completions)
        router.add_post(f"{root}/chat/completions", chat_completions)
    for path in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        router.add_post(f"{path}/generate", generate)
        router.add_post(f"{path}/generate_stream", generate_stream)
