"""Texts of language models for workers: a worker sends tokens, and the engine's process sends pieces as they come.

A worker numbers its texts. All pieces of one turn of the event loop travel in one message.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.remote import AWAY
from paellapy.serving.logs import log
from paellapy.serving.registry import Registry
from paellapy.serving.workers.channel import Channel, raised, told

if TYPE_CHECKING:  # they need packages that only language models need
    from paellapy.scheduler.engine.generation import Generation
    from paellapy.scheduler.language.text import Piece, TextCodec

GENERATE = "generate"  # a worker's call: it begins a text
CANCEL = "cancel_text"  # a worker's event
PIECES = "pieces"  # the engine's event: of each piece its text's number, and what it is; or the text's end


class WorkersTexts:
    """The texts that one worker asked for, in the engine's process."""

    def __init__(self, registry: Registry, channel: Channel) -> None:
        self._registry, self._channel = registry, channel
        self._texts: dict[int, Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsent: list[Any] = []

    async def begin(self, data: Sequence[Any]) -> int:
        """Begins a text; returns the number of its prompt's tokens."""
        number, name, tokens, options, sampling = data
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in sampling.items()}
        made = self._texts[number] = await self._registry.generate(name, tokens, options, given)
        task = asyncio.create_task(self._forward(number, made))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return made.prompt_tokens

    def cancel(self, number: int) -> None:
        if (found := self._texts.get(number)) is not None:
            found.cancel()

    def close(self) -> None:
        """The worker is gone."""
        for each in self._texts.values():
            each.cancel()

    async def _forward(self, number: int, text: Generation) -> None:
        error: list[Any] | None = None
        try:
            async for p in text:
                self._tell([number, [p.text, p.token, p.logprob, p.top, p.finish_reason], text.cached_tokens])
        except PaellaError as e:
            error = told(e)
        except Exception as e:
            log.error("a text failed", exc_info=e)
            error = told(PaellaError(f"{type(e).__name__}: {e}"))
        finally:
            del self._texts[number]
        self._tell([number, None, error])

    def _tell(self, what: list[Any]) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(what)

    def _flush(self) -> None:
        found, self._unsent = self._unsent, []
        if not self._channel.closed:
            self._channel.event(PIECES, found)


# -- in the worker


@dataclass
class RemoteLanguageModel:
    """What a worker needs of a language model: prompts become tokens here."""

    name: str
    path: str
    context: int
    priority: int

    @cached_property
    def codec(self) -> TextCodec:
        from paellapy.scheduler.language.text import TextCodec

        return TextCodec(self.path)

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> RemoteLanguageModel:
        """Reads its tokenizer in a thread, since that takes up to a second."""
        made = cls(name, **facts)
        asyncio.get_running_loop().run_in_executor(None, lambda: made.codec)
        return made


def language_model_facts(model: Any) -> dict[str, Any]:
    return {"path": str(model.path.resolve()), "context": model.context, "priority": model.priority}


class RemoteGeneration:
    """A text that the engine's process writes: as `Generation`, for event loops."""

    def __init__(self, cancel: Callable[[], None]) -> None:
        from paellapy.scheduler.language.text import Piece

        self._cancel, self._piece = cancel, Piece
        self.prompt_tokens = self.cached_tokens = 0
        self._pieces: deque[Piece] = deque()
        self._over = False
        self._error: PaellaError | None = None
        self._news = asyncio.Event()

    @property
    def unread(self) -> int:
        return len(self._pieces)

    def add(self, piece: Sequence[Any], cached_tokens: int) -> None:
        text, token, logprob, top, finish = piece
        self.cached_tokens = cached_tokens
        self._pieces.append(self._piece(text, token, logprob, tuple(map(tuple, top)), finish))
        self._news.set()

    def end(self, error: PaellaError | None) -> None:
        self._over, self._error = True, error
        self._news.set()

    def cancel(self) -> None:
        """Ends the text at the next step."""
        if not self._over:
            self._cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        while not self._pieces:
            if self._over:
                raise self._error or StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._pieces.popleft()


class RemoteTexts:
    """The texts of a worker that have not ended."""

    def __init__(self, call: Callable[[str, Any], Awaitable[Any]], tell: Callable[[str, Any], None]) -> None:
        self._call, self._tell = call, tell
        self._texts: dict[int, RemoteGeneration] = {}
        self._number = 0

    async def generate(
        self, name: str, tokens: Sequence[int], options: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> RemoteGeneration:
        self._number += 1
        number = self._number

        def cancel() -> None:
            self._tell(CANCEL, number)

        made = self._texts[number] = RemoteGeneration(cancel)
        try:
            made.prompt_tokens = await self._call(GENERATE, [number, name, tokens, options, sampling])
        except BaseException:
            made.cancel()
            self._texts.pop(number, None)
            raise
        return made

    def told(self, pieces: Sequence[Sequence[Any]]) -> None:
        """Takes a message of the engine's process."""
        for number, piece, more in pieces:
            text = self._texts.get(number)
            if text is None:
                if piece is not None:  # who asked for it had left before it began
                    self._tell(CANCEL, number)
            elif piece is not None:
                text.add(piece, more)
            else:
                del self._texts[number]
                text.end(None if more is None else raised(*more))

    def lost(self) -> None:
        """The engine's process is gone."""
        texts, self._texts = self._texts, {}
        for each in texts.values():
            each.end(EngineAwayError(AWAY))
