"""`Pipeline`: models and Python functions, one after the other, as one model with one deadline.

Values have names. A step is given those that it takes, from the request and from all earlier steps, and adds its own.
A function that returns a list fans out: each element, a dict, goes through the following models by itself, until the
next function gets all elements together, each name with a list of values.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import DeadlineError, InputError, ModelError, StepError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.engine.request_values import Values, check_taken, checked
from paellapy.scheduler.engine.ring_client import Terms
from paellapy.scheduler.engine.steps import Steps, late
from paellapy.scheduler.models.joined import can_follow, joined
from paellapy.scheduler.models.model import MOST_WORKERS, Model, specs

AT_ONCE = 32  # elements of one request that a model works on
_REMEMBERED = 1024  # requests that have ended, for traces

_log = logging.getLogger("paellapy.load")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step: a loaded model, or a function and the names of the values that it takes (None: all)."""

    name: str
    function: Callable[..., Any] | None = None
    names: tuple[str, ...] | None = None


class Pipeline:
    """Models and functions that answer a request one after the other: `pp.Pipeline("ocr", [detect, crop, read, join])`.

    Requests and answers are those of a model: `engine.load(pipeline)`, `engine.infer("ocr", …)`. Loading it loads the
    models that are not loaded yet. `takes` and `gives`, `workers` and `processes` are as for `Model`; the first two are
    by default those of the first and the last step, if they are models.

    >>> from paellapy.scheduler.models.tensors import TensorSpec
    >>> double = Model("double", print, inputs={"x": TensorSpec((4,))}, outputs={"y": TensorSpec((4,))})
    >>> Pipeline("twice", [double, lambda y: {"x": y}, double]).stages[2].name
    'double'
    """

    # as of a model whose own inputs are what requests have
    before = after = lengths = task = target_ms = None
    has_steps, whole_batches = True, False
    ranges: Mapping[str, Any] = {}

    def __init__(
        self,
        name: str,
        steps: Sequence[Model | Callable[..., Any]],
        *,
        takes: Mapping[str, Any] | None = None,
        gives: Mapping[str, Any] | None = None,
        priority: int = 0,
        workers: int = 4,
        processes: bool = False,
    ) -> None:
        self.name, self.priority, self.workers, self.processes = name, priority, workers, processes
        if not isinstance(name, str) or not name:
            raise _wrong(name, "name", name, "the name must be a non-empty string")
        if not isinstance(workers, int) or not 1 <= workers <= MOST_WORKERS:
            raise _wrong(name, "workers", workers, f"workers must be an integer from 1 to {MOST_WORKERS}")
        self.stages = tuple(_stage(name, k, each) for k, each in enumerate(steps))
        self.models = list({id(each): each for each in steps if isinstance(each, Model)}.values())
        if not self.models:
            raise _wrong(name, "steps", steps, "no step is a pp.Model: give at least one")
        first, last = steps[0], steps[-1]
        if takes is None and not isinstance(first, Model):
            raise _wrong(name, "takes", None, "its first step is a function: give takes")
        if gives is None and not isinstance(last, Model):
            raise _wrong(name, "gives", None, "its last step is a function: give gives")
        self.takes = self.inputs = specs(name, "takes", getattr(first, "takes", {}) if takes is None else takes)
        self.gives = self.outputs = specs(name, "gives", getattr(last, "gives", {}) if gives is None else gives)
        self.batch, self.share = self.models[0].batch, self.models[0].share

    @property
    def max_batch(self) -> int:
        """Items that a request may have over HTTP."""
        return self.batch[-1]

    def open_shape(self, kind: str, key: str) -> list[int]:
        """The shape of a request's tensor; `kind`: "inputs" or "outputs"."""
        return list((self.takes if kind == "inputs" else self.gives)[key].shape)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        return {stage.name: stage.function for stage in self.stages if stage.function is not None}

    @property
    def reads(self) -> set[str]:
        """The functions before the first model: their ValueError refuses the request."""
        count = next(k for k, stage in enumerate(self.stages) if stage.function is None)
        return {stage.name for stage in self.stages[:count]}

    def made(self, step: str, found: Any) -> Any:
        """A function's result: values by name, or a list of them."""
        each = found if isinstance(found, list | tuple) else [found]
        if not all(isinstance(one, Mapping) and all(isinstance(key, str) for key in one) for one in each):
            raise StepError(
                f"pipeline {self.name!r}: `{step}` returned a {type(found).__name__}; a function must return a dict of "
                "values by name, or a list of such dicts", model=self.name, step=step,
            )  # fmt: skip
        return found if isinstance(found, Mapping) else list(found)

    def profile(self, profiles: Mapping[str, ModelProfile], elements: int = 1) -> ModelProfile:
        """The pipeline as one model for simulations: the segments of its models one after the other. Behind a function
        that fans out there are as many elements. Functions take no time.
        """
        segments: list[SegmentProfile] = []
        count = 1
        for k, stage in enumerate(self.stages):
            if stage.function is not None:
                count = elements if k and count == 1 and elements > 1 else 1
                continue
            sizes = profiles[stage.name].sizes
            left = count
            while left > 0:
                size = max((n for n in sizes if n <= left), default=min(sizes))
                segments += sizes[size]
                left -= size
        return ModelProfile(self.name, {1: segments}, priority=self.priority, share=self.share)


def _stage(name: str, k: int, step: Any) -> Stage:
    if isinstance(step, Model):
        return Stage(step.name)
    if not callable(step):
        raise _wrong(name, "steps", step, f"step {k} is a {type(step).__name__}: give a pp.Model or a function")
    parameters = inspect.signature(step).parameters.values()
    named = tuple(each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD))
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return Stage(f"{getattr(step, '__name__', 'step')}:{k}", step, None if everything else named)


def _wrong(name: str, field: str, given: Any, why: str) -> ModelError:
    return ModelError(f"pipeline {name!r}: {why}", model=name, field=field, given=given)


# Requests of pipelines.


class Client(Protocol):
    """The parts of a RequestClient that pipelines use."""

    steps: Steps

    def find(self, name: str) -> Any: ...

    async def infer_given(self, loaded: Any, values: Values, terms: Terms) -> dict[str, Any]:
        """Runs a request of a model, with its functions if it has any."""


class Loaders(Protocol):
    """The part of LoadedModels that pipelines use."""

    weight_cache: Any

    def find(self, name: str) -> Any: ...
    def load_beside(self, model: Model) -> Any: ...
    def close(self, loaded: Any) -> None: ...


@dataclass(slots=True, eq=False)
class LoadedPipeline:
    """A pipeline that takes requests. `alone_ns` are its stages' times: of models with the GPU to themselves, of
    functions the shortest that was seen.
    """

    model: Pipeline
    own: list[Model] = field(default_factory=list)  # loaded with it, and unloaded with it
    alone_ns: list[float] = field(default_factory=list)
    # Models in a row as one program, by their first stage: with the stage behind them; replaced as a whole
    joined: dict[int, tuple[int, Any]] = field(default_factory=dict)
    ended: deque[tuple[int, list[int], int]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def join(self, loaders: Loaders) -> None:
        """Loads models in a row that fit each other as one program, in which values stay on the GPU."""
        if loaders.weight_cache is not None:  # the segments of a program wait for the weights of one model
            return
        for first, end in self._rows(loaders):
            names = [stage.name for stage in self.model.stages[first:end]]
            parts = [loaders.find(name) for name in names]
            made = joined(
                f"{self.model.name}[{'+'.join(names)}]", [each.model for each in parts],
                [each.weights for each in parts], self.model.priority, self.model.share,
            )  # fmt: skip
            try:
                self.joined = {**self.joined, first: (end, loaders.load_beside(made))}
            except PaellaError as e:
                _log.warning("%s: its values go through host memory: %s", made.name, e)

    def _rows(self, loaders: Loaders) -> list[tuple[int, int]]:
        """First stage and stage behind the last, where two or more models fit each other."""
        models = [None if each.function else loaders.find(each.name).model for each in self.model.stages]
        read = Counter(list(self.model.gives))  # by name: how many steps read its values, the answer included
        everything = 0
        for stage, model in zip(self.model.stages, models, strict=True):
            read.update(list(model.takes if model is not None else stage.names or ()))
            everything += model is None and stage.names is None
        found: list[tuple[int, int]] = []
        row: list[Model] = []
        for k, model in enumerate([*models, None]):
            if model is not None and row and can_follow(row, model, lambda name: read[name] + everything):
                row.append(model)
                continue
            if len(row) > 1:
                found.append((k - len(row), k))
            row = [] if model is None else [model]
        return found

    def part(self, loaders: Loaders) -> None:
        """Its models run one by one from now on."""
        before, self.joined = self.joined, {}
        for _, loaded in before.values():
            loaders.close(loaded)

    async def run(self, client: Client, values: Values, terms: Terms) -> dict[str, Any]:
        """One request. Cancelling the task withdraws whatever runs or waits."""
        pipeline, deadline_ns = self.model, terms[3]
        left_s = None if deadline_ns == codes.NEVER else max(0.0, (deadline_ns - time.monotonic_ns()) * 1e-9)
        runner = client.steps.of(pipeline) if pipeline.functions else None
        with contextlib.nullcontext() if runner is None else runner.request():
            try:
                async with asyncio.timeout(left_s):
                    ends: list[int] = []
                    found = await self._stages(client, runner, dict(values), terms, ends)
                    self.ended.append((terms[2], ends, terms[1]))
                    return found
            except DeadlineError:
                raise
            except TimeoutError:
                raise late(pipeline.name) from None

    async def _stages(
        self, client: Client, runner: Any, values: dict[str, Any], terms: Terms, ends: list[int]
    ) -> dict[str, Any]:
        """`ends` gets the time at which each stage ended."""
        pipeline, elements = self.model, None
        columns: dict[str, list[Any]] = {}  # each name with the values of all elements
        end = 0
        while (k := end) < len(pipeline.stages):
            stage = pipeline.stages[k]
            end, loaded = self.joined.get(k, (k + 1, None))
            # A stage must end so early that the others can still meet the deadline
            until = terms[3] if terms[3] == codes.NEVER else terms[3] - int(sum(self.alone_ns[end:]))
            if stage.function is not None:
                began = time.monotonic_ns()
                given = {**values, **columns}
                names = given if stage.names is None else stage.names
                found = await runner.run(stage.name, self._picked(stage, names, given, elements == []), until)
                took = float(time.monotonic_ns() - began)
                self.alone_ns[k] = min(took, self.alone_ns[k] or took)
                elements = found if isinstance(found, list) else None
                columns = _columns(elements or [])
                values |= found if elements is None else {}
            else:
                loaded = loaded or client.find(stage.name)
                ask = functools.partial(self._ask, client, stage, loaded, terms=(*terms[:3], until), direct=k == 0)
                if elements is None:
                    values |= await ask(values)
                else:
                    elements = await self._ask_all(ask, values, elements)
                    nothing: dict[str, list[Any]] = {name: [] for name in loaded.model.gives}
                    columns = _columns(elements) if elements else {**columns, **nothing}
            ends.append(time.monotonic_ns())
        if elements is not None:
            raise StepError(
                f"pipeline {pipeline.name!r}: its last step has {len(elements)} answers: end it with a function that "
                "makes one of them", model=pipeline.name, step=pipeline.stages[-1].name,
            )  # fmt: skip
        last = pipeline.stages[-1]
        try:
            return checked(pipeline.name, pipeline.gives, self._picked(last, pipeline.gives, values, False))
        except InputError as e:
            raise StepError(f"`{last.name}` returned a wrong value: {e}", model=pipeline.name, step=last.name) from e

    async def _ask(
        self, client: Client, stage: Stage, loaded: Any, values: Values, terms: Terms, direct: bool
    ) -> dict[str, Any]:
        model: Model = loaded.model
        try:
            given = check_taken(model, self._picked(stage, model.takes, values, False))
        except InputError as e:
            if direct:  # the request's own values
                raise
            raise StepError(f"pipeline {self.model.name!r}: {e}", model=self.model.name, step=stage.name) from e
        return await client.infer_given(loaded, given, terms)

    async def _ask_all(
        self, ask: Callable[[Values], Awaitable[dict[str, Any]]], values: Values, elements: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The elements with the model's answers; batches form as requests meet in the engine."""
        made: list[dict[str, Any]] = [{}] * len(elements)
        left = iter(enumerate(elements))

        async def some() -> None:
            for k, element in left:
                made[k] = {**element, **await ask({**values, **element})}

        tasks = [asyncio.create_task(some()) for _ in range(min(AT_ONCE, len(elements)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return made

    def _picked(self, stage: Stage, names: Any, values: Values, none: bool) -> dict[str, Any]:
        """The values of these names; where there are no elements, each of their names has an empty list."""
        missing = [] if none else [name for name in names if name not in values]
        if missing:
            raise StepError(
                f"pipeline {self.model.name!r}: {stage.name} needs {', '.join(missing)}; earlier steps and the request "
                f"have {', '.join(values)}", model=self.model.name, step=stage.name, missing=missing,
            )  # fmt: skip
        return {name: values.get(name, []) for name in names}


def _columns(elements: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each name with the values of all elements."""
    return {name: [each.get(name) for each in elements] for name in (elements[0] if elements else ())}


class BackgroundLoop:
    """An event loop in a thread, for callers that block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def call(self, coroutine: Any) -> Any:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="pipelines", daemon=True).start()
            future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # for example KeyboardInterrupt
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the thread once all callers have their answers."""
        with self._lock:
            if self._loop is not None:
                asyncio.run_coroutine_threadsafe(self._end(), self._loop)
                self._loop = None

    @staticmethod
    async def _end() -> None:
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
        asyncio.get_running_loop().stop()

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        loop.run_forever()
        loop.close()


Served = Model | Pipeline  # what requests name
