"""JSON schemas of clients are compiled in other processes first: a few hundred bytes can take hours, or all memory.

The system ends a process that takes too much of either. No thread of the engine's process could be ended.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import resource
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.errors import InputError, StepError, TooManyRequestsError
from paellapy.scheduler.engine.steps import StepPool
from paellapy.scheduler.language.grammar import Grammars

if TYPE_CHECKING:
    from paellapy.scheduler.language.model import LanguageModel

CPU_S = 5  # of the processor, for a schema
MEMORY_BYTES = 2 << 30  # of a process, for a schema and a tokenizer
WORKERS, PER_SENDER = 3, 2  # schemas that are checked at a time, in all and of one sender
MOST_CHARACTERS = 1 << 16
REMEMBERED = 256

_grammars = functools.cache(Grammars)  # in another process


def _refusal(folder: str, vocabulary: int, eos: Sequence[int], text: str, cpu_s: int) -> str:
    """Why the schema cannot be used; "": it can. Runs in another process."""
    try:
        grammars = _grammars(folder, vocabulary, eos)
        used_s = math.ceil(time.process_time())
        for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CPU, used_s + cpu_s)):
            resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))
        grammars.guide(text)
    except InputError as e:
        return str(e)
    return ""


class _Checks:
    """The function that checks one model's schemas, as `StepPool` takes it."""

    def __init__(self, model: LanguageModel) -> None:
        self.name, self.workers, self.processes = model.name, WORKERS, True
        self.reads: set[str] = set()
        folder, vocabulary = str(model.codec.folder.resolve()), model.config.vocabulary
        self.functions: dict[str, Callable[..., Any]] = {
            "check": partial(_refusal, folder, vocabulary, tuple(model.eos))
        }

    def made(self, step: str, found: Any) -> Any:
        return found


class SchemaChecks:
    """Checks the schemas that one model gets."""

    def __init__(self, model: LanguageModel) -> None:
        self._checks = _Checks(model)
        self._pool: asyncio.Future[StepPool] | None = None  # made with the first schema
        self._checking: Counter[Hashable] = Counter()
        self._known: OrderedDict[str, str] = OrderedDict()  # by schema: why it is refused

    async def check(self, schema: str | Mapping[str, Any], sender: Hashable) -> None:
        """InputError: the schema cannot be used. TooManyRequestsError: the sender's others are still being checked."""
        text = _text(schema)
        refusal = self._known.get(text)
        if refusal is None:
            refusal = await self._found(text, sender)
            self._known[text] = refusal
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        if refusal:
            raise InputError(refusal, field="json_schema")

    async def _found(self, text: str, sender: Hashable) -> str:
        if self._checking[sender] >= PER_SENDER:
            said = f"{PER_SENDER} new JSON schemas of this client are being checked: try again"
            raise TooManyRequestsError(said, given=self._checking[sender], limit=PER_SENDER)
        self._checking[sender] += 1
        try:
            if self._pool is None or (self._pool.done() and self._pool.exception()):  # starting a process takes long
                self._pool = asyncio.ensure_future(asyncio.to_thread(StepPool, self._checks))
            pool = await asyncio.shield(self._pool)
            return str(await pool.run("check", {"text": text, "cpu_s": CPU_S}, NEVER))
        except StepError:
            said = f"the JSON schema cannot be used: reading it takes more than {CPU_S} s, or too much memory"
            raise InputError(said, field="json_schema", limit=CPU_S) from None
        finally:
            self._checking[sender] -= 1
            if not self._checking[sender]:
                del self._checking[sender]

    def close(self) -> None:
        if self._pool is not None and self._pool.done() and not self._pool.exception():
            self._pool.result().close()


def _text(schema: str | Mapping[str, Any]) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
    except RecursionError:
        raise InputError("the JSON schema cannot be used: it is nested too deeply", field="json_schema") from None
    if len(text) > MOST_CHARACTERS:
        said = f"the JSON schema has {len(text):,} characters: send at most {MOST_CHARACTERS:,}"
        raise InputError(said, field="json_schema", given=len(text), limit=MOST_CHARACTERS)
    return text
