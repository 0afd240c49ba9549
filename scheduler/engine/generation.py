"""Text from language models: `engine.generate` gives a `Generation`, a `Generator` runs the steps of one model.

Prefill and decode are two models of the core, which policies order with everything else. A thread per language model
plans steps, submits them, and hands their tokens on. Two decode steps are in flight: the next one reads its tokens on
the GPU, so the GPU does not wait for the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import os
import threading
import time
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from collections.abc import Sequence as Items
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.backends.base import LoadedModel
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineClosedError,
    EngineFailedError,
    InputError,
    ModelError,
    QueueFullError,
    UnknownModelError,
)
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.engine.client import Outputs, Request, RequestClient, Slot, request_rank, request_times
from paellapy.scheduler.engine.loaded_models import LoadedModels
from paellapy.scheduler.engine.ring_calls import E_STARTED_NS
from paellapy.scheduler.engine.ring_client import (
    MOST_TEXTS,
    PER_FREE,
    Entry,
    Waiter,
    is_running,
    no_client,
    refusal_of_part,
)
from paellapy.scheduler.engine.trace import TracedText
from paellapy.scheduler.language.batcher import Batch, Batcher, Chunk, Delivery, Pace, Sequence
from paellapy.scheduler.language.decoder import tile_tokens
from paellapy.scheduler.language.model import ChunkLayout, LanguageModel, state_of, write_rows
from paellapy.scheduler.language.pages import PagePool
from paellapy.scheduler.language.sampling import OUT_WORDS, Sampling, seed_of
from paellapy.scheduler.language.text import Piece
from paellapy.scheduler.models.memory import MemoryPlan, Reservation

if TYPE_CHECKING:
    from paellapy.scheduler.language.grammar import Grammars, Guide
    from paellapy.scheduler.language.text import GrowingText

_RETRY_S = 0.001  # until a step that found the engine full is submitted again

_RECENT = 16  # chunks
_REMEMBERED, _REMEMBERED_TOKENS = 1024, 1 << 20  # of texts that have ended

# A text, its next token, why that is the last one, what the GPU says of it, and when it was there.
_Token = tuple["_Stream", int, str | None, Any, int]

_SAMPLING = frozenset(each.name for each in fields(Sampling))


class _Stream:
    """The pieces of one text on their way from the model's thread to whoever reads them."""

    def __init__(
        self, name: str, sequence: Sequence, text: GrowingText, began_ns: int, deadline_ns: int, client: Hashable
    ) -> None:
        self.sequence, self.text, self.client = sequence, text, client
        sequence.owner = self
        self.began_ns, self.deadline_ns = began_ns, deadline_ns
        self.token_ns = array("q")  # when each token was there
        self.latest_ns = began_ns  # when the latest token was there, also before it is a piece
        self.traced = TracedText(name, began_ns, self.token_ns, sequence.priority)
        self.pieces: deque[Piece] = deque()
        self.finish: str | None = None
        self.guide: Guide | None = None  # if the text has a form
        self.error: Exception | None = None
        self.ended = False
        self.waiter: Callable[[], None] | None = None  # of the reader, until it is woken
        self.delivery: Delivery | None = None  # of the latest token

    def add(self, token: int, finish: str | None, words: Any) -> bool:
        """Takes a token that was chosen, and why it is the last one, if it is. True: a stop string or the text's form
        ends the text. `words`: what the GPU says of the token.
        """
        text = self.text.add(token)
        complete = self.guide is not None and self.guide.take(token)
        stopped = self.text.stopped is not None or complete
        if stopped:
            finish = "stop"
        if finish is not None:
            text += self.text.end()
        logprob: float | None = None
        top: tuple[tuple[int, float], ...] = ()
        wanted = self.sequence.sampling.logprobs
        if wanted is not None:
            found = words[1::2].copy().view(np.float32)
            logprob = float(found[0])
            top = tuple(zip(words[2::2][:wanted].tolist(), found[1 : wanted + 1].tolist(), strict=True))
        self.pieces.append(Piece(text, token, logprob, top, finish))
        if finish is not None:
            self.finish, self.ended = finish, True
        return stopped

    def reached(self) -> None:
        """A reader who waited goes on."""
        if self.delivery is not None:
            self.delivery.reached(time.monotonic_ns())

    def end(self, error: Exception | None = None) -> None:
        """Without an error: it was cancelled."""
        if not self.ended:
            self.finish, self.error = None if error else "cancelled", error
            self.ended = True


class Generation:
    """A text that is being written: `async for piece in generation`, or `for piece in generation` in a thread.

    Leaving it before its end cancels it.
    """

    def __init__(self, generator: Generator, stream: _Stream) -> None:
        self._generator, self._stream = generator, stream

    @property
    def prompt_tokens(self) -> int:
        return len(self._stream.sequence.prompt)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were kept from earlier prompts."""
        return self._stream.sequence.shared_tokens

    @property
    def tokens(self) -> int:
        """Tokens chosen so far."""
        return len(self._stream.sequence.tokens)

    @property
    def unread(self) -> int:
        """Pieces that nobody has taken yet."""
        return len(self._stream.pieces)

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length" or "cancelled"; None while it goes on."""
        return self._stream.finish

    @property
    def ttft_ms(self) -> float | None:
        """Time from the request to its first token; None before it is there."""
        stream = self._stream
        return (stream.token_ns[0] - stream.began_ns) * 1e-6 if stream.token_ns else None

    def cancel(self) -> None:
        """Ends the text at the next step. Pieces that are there can still be read."""
        if not self._stream.ended:
            self._generator.cancel(self._stream)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        stream = self._stream
        loop = asyncio.get_running_loop()
        while not stream.pieces:
            if stream.ended and not stream.pieces:
                self._finish(StopAsyncIteration)
            future: asyncio.Future[None] = loop.create_future()
            stream.waiter = _Wake(loop, future)
            if stream.pieces or stream.ended:
                continue
            try:
                await future
            except asyncio.CancelledError:
                self.cancel()
                raise
            stream.reached()
        return stream.pieces.popleft()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        stream = self._stream
        while not stream.pieces:
            if stream.ended and not stream.pieces:
                self._finish(StopIteration)
            woken = threading.Event()
            stream.waiter = woken.set
            if not (stream.pieces or stream.ended):
                woken.wait()
                stream.reached()
        return stream.pieces.popleft()

    def text(self) -> str:
        """The rest of the text, when it has ended; blocks this thread."""
        return "".join(piece.text for piece in self)

    def _finish(self, end: type[Exception]) -> None:
        if self._stream.error is not None:
            raise self._stream.error
        raise end

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # `__init__` failed
            self.cancel()

    def __repr__(self) -> str:
        return f"<Generation: {self.prompt_tokens} + {self.tokens} tokens, {self.finish_reason or 'going on'}>"


class _Wake:
    """Completes a future of an event loop."""

    __slots__ = ("future", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
        self.loop, self.future = loop, future

    def __call__(self) -> None:
        _complete([self.future])


def _complete(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


class _Step(Request):
    """A chunk or a decode step on its way."""

    __slots__ = ("done", "meant_ns", "planned", "result", "sent_ns", "started_ns")

    def __init__(
        self, client: RequestClient, loaded: LoadedModel, planned: Chunk | Batch, meant_ns: float, done: Any
    ) -> None:
        super().__init__(client, loaded)
        self.planned, self.meant_ns, self.done = planned, meant_ns, done
        self.result: Outputs | Exception | None = None
        self.sent_ns = self.started_ns = time.monotonic_ns()

    def finish(self, entry: Entry) -> None:
        self.started_ns = entry[E_STARTED_NS]
        super().finish(entry)

    def answer(self, result: Outputs | Exception) -> None:
        self.result = result
        self.done()


class Generator:
    """Writes the texts of one language model, in a thread of its own."""

    def __init__(
        self, client: RequestClient, model: LanguageModel, prefill: LoadedModel, decode: LoadedModel, pages: int
    ) -> None:
        self.model, self.prefill, self.decode = model, prefill, decode
        self._client, self._state = client, state_of(decode.weights)
        self._pool = PagePool(pages)
        self._batcher = Batcher(
            self._pool, sequences=model.sequences, context=model.context, chunks=model.chunk_sizes,
            tile_tokens=tile_tokens(model.config), eos=model.eos,
        )  # fmt: skip
        self._layout = ChunkLayout(model.config, model.chunk_sizes[0])
        self._coming: deque[_Stream] = deque()
        self._leaving: deque[_Stream] = deque()
        self._streams: set[_Stream] = set()
        self._places = _Places()
        self._ended: deque[TracedText] = deque(maxlen=_REMEMBERED)  # for traces
        self._ended_tokens = 0
        self._deadlines: list[tuple[int, int, _Stream]] = []  # of texts that may not have begun; a heap
        self._numbers = itertools.count()
        self._chunks: deque[_Step] = deque()  # in flight, in order
        self._steps: deque[_Step] = deque()
        self._unsent: deque[tuple[LoadedModel, Chunk | Batch]] = deque()  # the engine was full
        self._pace = Pace(model.tbt_ms)
        self._closing: Exception | None = None  # what new texts are told
        self._failure: Exception | None = None
        self._drains = False
        self.stats = GeneratorStats()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"paellapy-{model.name}", daemon=True)
        self._thread.start()
        self._ready.wait()

    # -- from any thread

    def generate(
        self, prompt: str | Items[int], deadline_ms: float | None, priority: int | None, client: Hashable,
        given: Mapping[str, Any],
    ) -> Generation:  # fmt: skip
        """Adds a text. InputError: the prompt or a sampling argument is wrong. DeadlineError: it would begin late."""
        model = self.model
        unknown = sorted(given.keys() - _SAMPLING)
        if unknown:
            raise InputError(
                f"unknown sampling arguments {', '.join(unknown)}; known: {', '.join(sorted(_SAMPLING))}",
                field=unknown[0], given=given[unknown[0]],
            )  # fmt: skip
        sampling = Sampling(**{**model.defaults, **{key: value for key, value in given.items() if value is not None}})
        tokens = self._tokens(prompt)
        rank = model.priority if priority is None else request_rank(priority)
        sequence = Sequence(tokens, sampling, seed_of(sampling, int.from_bytes(os.urandom(8), "little")), rank)
        self._batcher.check_length(len(tokens))
        began_ns, deadline_ns = request_times(deadline_ms)
        stream = _Stream(model.name, sequence, model.codec.growing(sampling.stop), began_ns, deadline_ns, client)
        if sampling.json_schema is not None:
            stream.guide = self._grammars.guide(sampling.json_schema)
        self._check_open()
        if deadline_ns < codes.NEVER and began_ns + self._wait_ns(len(tokens)) > deadline_ns:
            raise self._late(stream, "would pass before the first token: too many prompts are waiting")
        self._places.take(client, model.name)
        self._coming.append(stream)
        self._waiter.set()
        if self._closing is not None:  # looked at after it was added: the thread sees it, or this does
            stream.end(self._closing)
        return Generation(self, stream)

    def cancel(self, stream: _Stream) -> None:
        self._leaving.append(stream)
        self._waiter.set()

    def close(self, why: Exception, drains: bool) -> None:
        """Refuses new texts. `drains`: finishes the others first; otherwise they end with this error."""
        self._drains = drains
        self._closing = why
        self._waiter.set()
        self._thread.join()

    def texts_since(self, ns: int) -> list[TracedText]:
        """The texts that had a token since then, of those that are remembered."""
        found = {id(each): each for each in (*self._ended, *(each.traced for each in tuple(self._streams)))}
        return [
            each._replace(token_ns=tuple(each.token_ns))
            for each in found.values()
            if each.token_ns and each.token_ns[-1] >= ns
        ]

    def now(self) -> dict[str, Any]:
        """Counts so far."""
        return {
            "waiting": self._batcher.waiting + len(self._coming), "running": self._batcher.running,
            "pages": self._pool.count, "free_pages": self._pool.free, "kept_pages": self._pool.kept,
            **self.stats.counts(),
        }  # fmt: skip

    @cached_property
    def _grammars(self) -> Grammars:
        from paellapy.scheduler.language.grammar import Grammars

        return Grammars(self.model.codec.folder, self.model.config.vocabulary, self.model.eos)

    def _wait_ns(self, tokens: int) -> float:
        """Predicted time until a prompt of this many tokens has entered."""
        return self.stats.entry_ns * (tokens + self._batcher.waiting_tokens)

    def _late(self, stream: _Stream, why: str) -> DeadlineError:
        given = (stream.deadline_ns - stream.began_ns) * 1e-6
        return DeadlineError(f"language model {self.model.name!r}: the deadline of {given:.0f} ms {why}",
                             model=self.model.name, field="deadline_ms", given=given)  # fmt: skip

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._closing
        self._client.core.check_open()

    def _tokens(self, prompt: str | Items[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.model.codec.encode(prompt))
        most = self.model.config.vocabulary
        try:
            self._batcher.check_length(len(prompt))
            tokens = tuple(map(int, prompt))
        except (TypeError, ValueError):
            raise InputError(
                f"prompt={shortened(prompt)}: it must be a text or a list of token ids", field="prompt", given=prompt
            ) from None
        if tokens and not 0 <= min(tokens) <= max(tokens) < most:
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            raise InputError(
                f"token {wrong} of the prompt is outside the model's vocabulary of {most:,}", field="prompt",
                given=wrong, limit=most - 1,
            )  # fmt: skip
        return tokens

    # -- in its own thread

    def _run(self) -> None:
        self._waiter = Waiter()
        self._ready.set()
        try:
            while self._turn():
                full = bool(self._unsent)
                self._client.core.ring.wait(self._waiter, _RETRY_S if full else None)
        except Exception as e:
            self._fail(e)

    def _turn(self) -> bool:
        """Takes what has come and what has ended, and submits what may run; False at the end."""
        self._take()
        woken: list[_Stream] = []
        chosen: list[_Token] = []
        for steps in (self._chunks, self._steps):
            while steps and steps[0].result is not None:
                self._end(steps.popleft(), chosen, woken)
        # The GPU need not wait until texts are made, except where a text's form says what may follow.
        for each in chosen:
            if each[0].guide is not None:
                self._hand_on(each, woken)
        why = self._failure or (None if self._drains else self._closing)
        if why is None:
            self._submit()
        for each in chosen:
            if each[0].guide is None:
                self._hand_on(each, woken)
        if why is not None:
            woken += self._end_all(why)
        _wake(woken)
        return self._closing is None or bool(self._chunks or self._steps or self._coming or not self._batcher.idle)

    def _take(self) -> None:
        leaving = len(self._leaving)  # first: what leaves later may not have been taken before
        while self._coming:
            stream = self._coming.popleft()
            if not stream.ended:
                self._streams.add(stream)
                self._batcher.add(stream.sequence)
                if stream.deadline_ns < codes.NEVER:
                    heapq.heappush(self._deadlines, (stream.deadline_ns, next(self._numbers), stream))
        if len(self._deadlines) > 2 * len(self._streams) + _REMEMBERED:  # of texts that their clients have left
            self._deadlines = [each for each in self._deadlines if not each[2].ended]
            heapq.heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][0] < time.monotonic_ns():
            stream = heapq.heappop(self._deadlines)[2]
            if not stream.token_ns and not stream.ended:
                self._end_one(stream, self._late(stream, "passed before the first token"))
        for _ in range(leaving):
            stream = self._leaving.popleft()
            if not stream.ended:
                self._end_one(stream)

    def _end_one(self, stream: _Stream, error: Exception | None = None) -> None:
        self._batcher.end(stream.sequence, "cancelled")
        self._forget(stream)
        stream.end(error)
        _wake([stream])

    def _submit(self) -> None:
        while self._unsent:
            if not self._send(*self._unsent[0]):
                return
            self._unsent.popleft()
        if not self._chunks and (chunk := self._batcher.plan_chunk()) is not None:
            self._begin(self.prefill, chunk)
        while self._pace.plans(len(self._steps), self._batcher):
            batch = self._batcher.plan_step(self.model.sequences)
            if batch is None:
                break
            self._begin(self.decode, batch)

    def _begin(self, loaded: LoadedModel, planned: Chunk | Batch) -> None:
        if self._unsent or not self._send(loaded, planned):
            self._unsent.append((loaded, planned))

    def _send(self, loaded: LoadedModel, planned: Chunk | Batch) -> bool:
        """Submits a step; False if the engine holds too many requests now."""
        client, now = self._client, time.monotonic_ns()
        meant_ns: float = codes.NEVER
        if isinstance(planned, Chunk):
            sequences, n = [s for s, _ in planned.pieces], self._captured(len(planned.tokens))
            arrival = min(s.owner.began_ns for s in sequences)
        else:
            sequences, n = planned.sequences, len(planned.rows)
            waiting = [s.owner.latest_ns for s in sequences if s.in_flight == 1]
            arrival, meant_ns = self._pace.terms(waiting, now, len(self._steps))
        rank = max(s.priority for s in sequences)
        for sequence in planned.ends if isinstance(planned, Chunk) else sequences:
            if sequence.owner.guide is not None:
                self._state.mask[sequence.number].set(sequence.owner.guide.mask)
        try:
            slot = Slot(client, loaded, (0, rank, arrival, codes.NEVER), items=n)
        except QueueFullError:
            return False
        if isinstance(planned, Chunk):
            for number, first, pages in planned.entries:
                self._state.table[number][first : first + len(pages)].set(pages)
            self._layout.write(slot.inputs["words"][:n].reshape(-1), planned, n)
        else:
            write_rows(slot.inputs["rows"], planned)
        step = _Step(client, loaded, planned, meant_ns, self._waiter.set)
        (self._chunks if isinstance(planned, Chunk) else self._steps).append(step)
        slot.begin_for(step)
        return True

    def _captured(self, size: int) -> int:
        """The smallest captured size of chunks that holds this one, which is captured if it is not yet. The parts of a
        chunk lie where the program of its size looks for them.
        """
        sizes = self._client.core.state.size[self.prefill.row, : len(self.model.chunk_sizes)]
        own = sizes[self.model.chunk_sizes.index(size)]
        if own["capture"] == codes.LATER and own["segments"] == 0:
            own["capture"] = codes.WANTED
        return int(sizes["batch"][(sizes["segments"] > 0) & (sizes["batch"] >= size)].min())

    def _end(self, step: _Step, chosen: list[_Token], woken: list[_Stream]) -> None:
        """Takes the tokens that a step chose, or ends its texts with its error."""
        planned, result = step.planned, step.result
        if isinstance(result, Exception):
            if isinstance(result, EngineClosedError | EngineFailedError):
                self._closing = self._failure = result
            woken += self._drop(planned, result)
            return
        assert result is not None
        members = planned.ends if isinstance(planned, Chunk) else planned.sequences
        out = result["out"].reshape(-1)[: len(members) * OUT_WORDS].reshape(-1, OUT_WORDS)
        tokens = out[:, 0].tolist()
        now = time.monotonic_ns()
        if isinstance(planned, Chunk):
            changed, delivery = self._batcher.end_chunk(planned, tokens), None
        else:
            changed = self._batcher.end_step(planned, tokens)
            delivery = self._pace.note(step.sent_ns, step.started_ns, step.meant_ns, now)
        for k in changed:
            members[k].owner.latest_ns, members[k].owner.delivery = now, delivery
            chosen.append((members[k].owner, tokens[k], members[k].finish, out[k], now))
        self.stats.step(planned, len(changed), now - step.sent_ns)

    def _hand_on(self, chosen: _Token, woken: list[_Stream]) -> None:
        stream, token, finish, words, now = chosen
        if stream.ended:  # at an earlier one
            return
        self.stats.token(stream, now)
        if stream.add(token, finish, words):
            self._batcher.end(stream.sequence, "stop")
        if stream.ended:
            self._forget(stream)
        woken.append(stream)

    def _drop(self, planned: Chunk | Batch, error: Exception) -> list[_Stream]:
        dropped: list[_Stream] = [sequence.owner for sequence in self._batcher.drop(planned)]
        for stream in dropped:
            self._forget(stream)
            stream.end(error)
        return dropped

    def _end_all(self, error: Exception) -> list[_Stream]:
        """Ends all texts; steps that are on their way are waited for."""
        for _, planned in self._unsent:
            self._batcher.drop(planned)
        self._unsent.clear()
        left = list(self._streams)
        for stream in left:
            self._batcher.end(stream.sequence, "cancelled")
            self._forget(stream)
            stream.end(error)
        return left

    def _fail(self, error: Exception) -> None:
        """The engine is gone, or a fault of ours: everything ends with this error."""
        told = error if isinstance(error, PaellaError) else EngineClosedError(f"text generation failed: {error!r}")
        told.__cause__ = error if told is not error else error.__cause__
        self._closing = told
        left = [*self._streams, *self._coming]
        self._streams.clear()
        for stream in left:
            stream.end(told)
        _wake(left)

    def _forget(self, stream: _Stream) -> None:
        if len(self._ended) == _REMEMBERED:
            self._ended_tokens -= len(self._ended.popleft().token_ns)
        self._ended.append(stream.traced)  # first: a trace looks at both
        self._ended_tokens += len(stream.token_ns)
        while self._ended_tokens > _REMEMBERED_TOKENS:
            self._ended_tokens -= len(self._ended.popleft().token_ns)
        self._streams.discard(stream)
        self._places.give(stream.client)


def _wake(streams: Items[_Stream]) -> None:
    """Wakes those who wait for these texts: an event loop once for all of its own."""
    futures: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for stream in streams:
        waiter, stream.waiter = stream.waiter, None
        if isinstance(waiter, _Wake):
            futures.setdefault(waiter.loop, []).append(waiter.future)
        elif waiter is not None:
            waiter()
    for loop, theirs in futures.items():
        if is_running(loop):
            _complete(theirs)
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_complete, theirs)


class _Places:
    """The places of one model's texts, divided among clients by the rule of requests' rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Counter[Hashable] = Counter()
        self._total, self._has_names = 0, False

    def take(self, client: Hashable, model: str) -> None:
        """QueueFullError: there is no place. TooManyRequestsError: the client has its part of them."""
        full = f"language model {model!r} already has {MOST_TEXTS} texts to write; try again later"
        with self._lock:
            try:
                n = self._held[client]
            except TypeError:
                raise no_client(client) from None
            self._has_names |= client is not None
            free = MOST_TEXTS - self._total
            has_part = n and n >= PER_FREE * (free - 1) and self._has_names
            if has_part or free <= 0:
                what = f"the {MOST_TEXTS} texts that language model {model!r} may have to write"
                refusal = refusal_of_part(client is not None, n, MOST_TEXTS, len(self._held), what)
                raise (refusal if has_part else None) or QueueFullError(full, model=model, limit=MOST_TEXTS)
            self._held[client] += 1
            self._total += 1

    def give(self, client: Hashable) -> None:
        with self._lock:
            self._held[client] -= 1
            self._total -= 1
            if not self._held[client]:
                del self._held[client]


class GeneratorStats:
    """Counts and latencies of a language model."""

    def __init__(self) -> None:
        self.prompt_tokens = self.shared_tokens = self.tokens = self.texts = self.chunks = self.steps = 0
        self.batched = 0  # tokens of decode steps
        self.entry_ns = 0.0  # for a prompt's token to enter, in recent chunks
        self.ttft, self.tbt = Latencies(), Latencies()

    def token(self, stream: _Stream, now: int) -> None:
        self.tokens += 1
        if stream.token_ns:
            self.tbt.note(now - stream.token_ns[-1])
        else:
            self.texts += 1
            self.prompt_tokens += len(stream.sequence.prompt)
            self.shared_tokens += stream.sequence.shared_tokens
            self.ttft.note(now - stream.began_ns)
        stream.token_ns.append(now)

    def step(self, planned: Chunk | Batch, tokens: int, took_ns: int) -> None:
        if isinstance(planned, Chunk):
            self.chunks += 1
            entry_ns = took_ns / sum(count for _, count in planned.pieces)
            self.entry_ns += (entry_ns - self.entry_ns) / min(self.chunks, _RECENT)
        else:
            self.steps += 1
            self.batched += tokens

    def counts(self) -> dict[str, Any]:
        whole = {key: value for key, value in vars(self).items() if isinstance(value, int)}
        return {**whole, "ttft": self.ttft.now(), "tbt": self.tbt.now()}


class Latencies:
    """Counts of times by upper bound, and their sum."""

    BOUNDS_S = (
        0.5e-3, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3, 10e-3, 15e-3, 20e-3, 30e-3, 50e-3, 75e-3, 0.1, 0.15, 0.2, 0.3,
        0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
    )  # fmt: skip

    def __init__(self) -> None:
        self._counts, self._total_ns = [0] * (len(self.BOUNDS_S) + 1), 0

    def note(self, ns: int) -> None:
        self._counts[bisect_left(_BOUNDS_NS, ns)] += 1
        self._total_ns += ns

    def now(self) -> dict[str, Any]:
        return {"bounds_s": [*self.BOUNDS_S], "counts": list(self._counts), "total_s": self._total_ns * 1e-9}


_BOUNDS_NS = [round(each * 1e9) for each in Latencies.BOUNDS_S]


class Generators:
    """The language models of an engine."""

    def __init__(self, client: RequestClient, loaded_models: LoadedModels, memory: MemoryPlan) -> None:
        self._client, self._loaded, self._memory = client, loaded_models, memory
        self.by_name: dict[str, Generator] = {}

    def add(self, model: LanguageModel) -> None:
        """Loads a language model, which takes requests by its name."""
        if not isinstance(model, LanguageModel):
            raise ModelError(
                f"load() takes a pp.Model or a pp.LanguageModel, not a {type(model).__name__}", field="model",
                given=model,
            )  # fmt: skip
        with self._loaded.lock, contextlib.ExitStack() as undo:
            self._client.core.check_open()
            self._loaded.check_name(model.name, "unload it first", leases_too=True)
            self.check_name(model.name)
            pages = model.pages(self._memory.budget_bytes - self._memory.held_bytes)
            made = []
            cache = self._loaded.weight_cache
            if cache is not None:  # weights come and go, texts stay
                cache.budget.claim(model.name, model.state_bytes(pages), model.priority)
                undo.callback(cache.budget.give, model.name)
            for program in reversed(model.programs(pages)):  # the one that counts the memory first
                with self._loaded.core.outside(repr(program.name)):
                    made.append(self._loaded.load(program))
                made[-1].kind = "language model"
                undo.callback(self._loaded.close, made[-1])
            decode, prefill = made
            if cache is not None:
                self._memory.note(model.name, Reservation(model.state_bytes(pages), 0, 0))
                cache.share(decode, prefill)
            self.by_name[model.name] = Generator(self._client, model, prefill, decode, pages)
            undo.pop_all()

    @property
    def models(self) -> dict[str, LanguageModel]:
        return {name: each.model for name, each in self.by_name.items()}

    def texts_since(self, ns: int) -> list[TracedText]:
        return [text for each in self.by_name.values() for text in each.texts_since(ns)]

    def stats(self) -> dict[str, Any]:
        return {name: each.now() for name, each in self.by_name.items()}

    def find(self, name: str) -> Generator:
        self._client.core.check_open()
        found = self.by_name.get(name)
        if found is None:
            known = ", ".join(map(repr, self.by_name)) or "none"
            raise UnknownModelError(f"no language model {name!r} is loaded; loaded: {known}", model=name)
        return found

    def check_name(self, name: str) -> None:
        """Raises if the name belongs to a language model."""
        if name in self.by_name:
            raise ModelError(f"a language model named {name!r} is loaded already; unload it first", field="name",
                             given=name)  # fmt: skip

    def remove(self, name: str) -> None:
        """Finishes the model's texts, refuses new ones, and frees its memory."""
        generator = self.by_name.pop(name)
        generator.close(UnknownModelError(f"language model {name!r} is being unloaded", model=name), drains=True)
        with self._loaded.lock:
            for loaded in (generator.prefill, generator.decode):
                self._loaded.close(loaded)
            if self._loaded.weight_cache is not None:
                self._memory.release(name)
                self._loaded.weight_cache.budget.give(name)

    def end(self) -> None:
        """Ends all texts: the engine closes."""
        for name, generator in list(self.by_name.items()):
            why = EngineClosedError(f"the engine was closed while language model {name!r} wrote this text", model=name)
            generator.close(why, drains=False)
        self.by_name.clear()
