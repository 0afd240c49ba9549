"""The models this server may serve, and whether each is loaded; clients can load and unload only these.

`Catalogue` answers handlers' questions; `Registry`, in the engine's process, loads models.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import linecache
import sys
import sysconfig
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.admission import predict_finish
from paellapy.scheduler.core.errors import ModelError, UnknownModelError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Pipeline, Served
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.models.model import Model
from paellapy.serving.errors import RefusedError, RequestError, short
from paellapy.serving.logs import log
from paellapy.serving.preflight import search_all_objects, spare_more_objects
from paellapy.serving.tensors import check_servable

if TYPE_CHECKING:  # they need packages that only language models need
    from paellapy.scheduler.engine.generation import Generation
    from paellapy.scheduler.language.model import LanguageModel
    from paellapy.scheduler.language.text import Piece, TextCodec
    from paellapy.serving.schemas import SchemaChecks

# Model factories by `package.module:name`, imported again when one of their files has changed.
#
# A model that is loaded again is built by the present code. Python caches imported modules: so when one of the user's
# own modules has changed, all of them are dropped and imported again; modules of installed packages stay.

# Errors of a user's module or factory. A script that parses its arguments at the import ends in SystemExit.
FACTORY_ERRORS = (Exception, SystemExit)

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).resolve().parents[1])
_lock = threading.RLock()
_compiling = ThreadPoolExecutor(8, thread_name_prefix="schema")  # its threads start on demand
_forgotten = [0]  # how often the modules were dropped
_stamps: dict[str, tuple[str, int, int]] = {}  # file, time and size of each module that a factory imported


def find_factory(dotted: str, folder: Path) -> Any:
    """Imports `package.module:name`, also from `folder`. Errors of the import are passed on."""
    module, _, name = dotted.partition(":")
    with _lock:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        if changed_modules():
            _forget()
        before = set(sys.modules)
        found: Any = importlib.import_module(module)
        for each in {module, *(set(sys.modules) - before)}:
            if (stamp := _stamp(sys.modules.get(each))) is not None:
                _stamps.setdefault(each, stamp)
        for part in name.split("."):
            found = getattr(found, part)
    return found


def code_number(dotted: str) -> int:
    """A number that changes whenever the factory is imported again; a model with another number is of older code."""
    return _forgotten[0] if dotted.partition(":")[0] in _stamps else 0


def changed_modules() -> list[str]:
    """Modules of factories whose file has changed since it was imported."""
    with _lock:
        return [name for name, stamp in _stamps.items() if _stamp(sys.modules.get(name), stamp[0]) != stamp]


def _forget() -> None:
    """Drops all modules of factories: one that imports a changed module would keep the old objects."""
    importlib.invalidate_caches()
    for name, (file, _, _) in _stamps.items():
        sys.modules.pop(name, None)
        # Python checks compiled files by whole seconds and size, which an edit may leave unchanged.
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(file)).unlink(missing_ok=True)
    linecache.checkcache()
    _forgotten[0] += 1
    _stamps.clear()


def _stamp(module: ModuleType | None, file: str | None = None) -> tuple[str, int, int] | None:
    """File, time and size; None: the module belongs to an installed package, or has no file."""
    file = file or getattr(module, "__file__", None)
    if not file or (name := str(Path(file).resolve())).startswith(_INSTALLED) or name.startswith(_OURS):
        return None
    try:
        found = Path(file).stat()
    except OSError:
        return file, 0, 0
    return file, found.st_mtime_ns, found.st_size


T = TypeVar("T")

VERSION = "1"  # a registry holds one version of each model

MOST_MODELS = 256  # configured models; the engine limits how many are loaded at a time

NOT_YET, ANEW = "not loaded yet", "being loaded anew"  # reasons of models that will be loaded soon

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"


@dataclass(slots=True)
class Entry:
    """One configured model. `make` builds it again at every load, so that a reload sees changed weights.

    `wanted`: the server is ready only once this model is loaded. Models loaded at the start are wanted until unloaded.
    """

    name: str
    make: Callable[[], Served | LanguageModel]
    wanted: bool = True
    state: str = UNAVAILABLE
    reason: str = NOT_YET
    model: Served | None = None
    language_model: TextModel | None = None  # in place of `model`
    row: int = -1  # in the core
    number: int = -1  # position in the configuration
    factory: str = ""  # `package.module:name`, if the configuration has one
    code: int = 0  # version number of the code that built the model
    lock: threading.Lock = field(default_factory=threading.Lock)
    schemas: SchemaChecks | None = None  # of a language model

    def close_schemas(self) -> None:
        schemas, self.schemas = self.schemas, None
        if schemas is not None:
            schemas.close()

    @property
    def loaded(self) -> Served | TextModel | None:
        return self.model or self.language_model


class TextModel(Protocol):
    """A language model, of an engine in this process or in another one."""

    @property
    def name(self) -> str: ...
    @property
    def context(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def codec(self) -> TextCodec: ...


class WrittenText(Protocol):
    """A text that such a model writes."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def unread(self) -> int:
        """Pieces that nobody has taken yet."""

    def cancel(self) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Piece: ...


class Catalogue(ABC):
    """Configured models by name."""

    engine: Engine | RemoteEngine

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.by_row: dict[int, Served] = {}  # keys are rows in the core; replaced, not modified, at every change
        self.changed: list[Callable[[], None]] = []  # called after every change, in the thread that made it

    @abstractmethod
    async def load_async(self, name: str) -> float:
        """Loads a configured model; the load continues if the caller is cancelled."""

    @abstractmethod
    async def unload_async(self, name: str) -> None: ...

    @abstractmethod
    async def generate(
        self, name: str, tokens: Sequence[int], options: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> WrittenText:
        """Submits a text to a language model. `options`: deadline_ms, priority, client, and `sender`, who sent it,
        whatever name it gave itself.
        """

    def tell(self) -> None:
        """Calls the listeners after a change."""
        for each in self.changed:
            each()

    def find(self, name: str, version: str | None = None) -> Entry:
        """The entry, whether it is loaded or not."""
        entry = self.entries.get(name)
        if entry is None:
            raise UnknownModelError(f"no model is named {short(name)}; there are {', '.join(self.entries) or 'none'}")
        if version is not None and version != VERSION:
            raise UnknownModelError(f"model {name!r} has no version {short(version)}; its only version is {VERSION}")
        return entry

    def ready(self, name: str, version: str | None = None) -> Served:
        """The model; an error if it is not loaded."""
        known = self.entries.get(name)
        if known is not None and known.state == READY and known.model is not None and version is None:
            return known.model  # most requests; `find` would look it up once more
        entry = self.loaded(name, version)
        if entry.model is not None:
            return entry.model
        said = f"model {name!r} writes texts: send the request to /v2/models/{name}/generate or /v1/completions"
        raise RequestError(said, field="model", given=name)

    def language_model(self, name: str, version: str | None = None) -> TextModel:
        """As `ready`, for a language model."""
        entry = self.loaded(name, version)
        if entry.language_model is not None:
            return entry.language_model
        said = f"model {name!r} is no language model: send the request to /v2/models/{name}/infer"
        raise RequestError(said, field="model", given=name, limit=list(self.language_models))

    @property
    def language_models(self) -> dict[str, TextModel]:
        """Those that are loaded."""
        entries = list(self.entries.items())
        return {name: e.language_model for name, e in entries if e.state == READY and e.language_model is not None}

    def loaded(self, name: str, version: str | None = None) -> Entry:
        """The entry; an error if it is not loaded."""
        entry = self.find(name, version)
        if entry.state == READY and entry.loaded is not None:
            return entry
        if entry.state == LOADING or (entry.wanted and entry.reason in (NOT_YET, ANEW)):
            raise RefusedError(f"model {name!r} is being loaded; try again later", "loading", retry_after_s=2.0)
        raise UnknownModelError(f"model {name!r} is not loaded: {entry.reason or entry.state.lower()}")


def check_name(name: str, others: Collection[str]) -> None:
    """Raises ModelError if a model of this name cannot be served beside the others."""
    if name == "stats" or not name or "/" in name:
        raise ModelError(f"{name!r} cannot name a served model: give a name without '/' other than 'stats'")
    if name in others:
        raise ModelError(f"two models are named {name!r}: give one of them another name")
    if len(others) == MOST_MODELS:
        raise ModelError(f"a server takes at most {MOST_MODELS} models: start another server for more")


class Registry(Catalogue):
    """The models of an engine in this process."""

    engine: Engine

    def __init__(self, engine: Engine, entries: Iterable[Entry] = ()) -> None:
        super().__init__()
        self.engine = engine
        engine.on_fault(_tell_of_fault)
        self.tried_ns: dict[str, float] = {}  # durations of full batches that an earlier engine process found
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        check_name(entry.name, self.entries)
        entry.number = len(self.entries)
        self.entries[entry.name] = entry
        if entry.model is not None and entry.row >= 0:
            self.by_row = {**self.by_row, entry.row: entry.model}

    def remove(self, name: str) -> None:
        """Takes back the latest `add`. The model must not be loaded."""
        del self.entries[name]
        self.tell()

    def load(self, name: str, model: Any = None) -> float:
        """Loads or reloads a configured model. Returns the milliseconds that one request takes alone on the GPU.

        `model`: what its factory has returned already.
        """
        entry = self.find(name)
        with entry.lock:
            if entry.state == READY:
                model = model or made(entry)  # if the factory fails, the loaded model stays
                self._unload(entry, ANEW, ANEW)
            entry.state, entry.reason = LOADING, ""
            self.tell()
            try:
                model = model or made(entry)
                self.engine.load(model)
                if isinstance(model, Pipeline):  # its models have been tried
                    entry.model = model
                    alone_ns = sum(self.engine.client.pipelines[name].alone_ns)
                else:
                    alone_ns = self._try(entry, model) if isinstance(model, Model) else self._try_text(entry, model)
            except Exception as e:
                error = e if isinstance(e, PaellaError) else ModelError(f"model {name!r}: {type(e).__name__}: {e}")
                with contextlib.suppress(PaellaError):  # mostly, it was not loaded
                    self.engine.unload(name)
                entry.state, entry.reason = UNAVAILABLE, str(error)
                self.tell()
                raise error from e
            entry.state, entry.wanted = READY, True
            self.tell()
        spare_more_objects()
        return round(alone_ns * 1e-6, 3)

    def unload(self, name: str) -> None:
        """Unloads a model once its requests are done, and frees its memory."""
        entry = self.find(name)
        with entry.lock:
            entry.wanted = False
            self.tell()
            if entry.state == READY:
                self._unload(entry, "being unloaded", "unloaded")

    def _unload(self, entry: Entry, meanwhile: str, reason: str) -> None:
        entry.state, entry.reason = UNLOADING, meanwhile
        self.tell()
        try:
            self.engine.unload(entry.name)
        finally:
            self.by_row = {row: model for row, model in self.by_row.items() if row != entry.row}
            entry.model = entry.language_model = None
            entry.close_schemas()
            entry.state, entry.reason = UNAVAILABLE, reason
            search_all_objects()
            self.tell()

    def _try(self, entry: Entry, model: Model) -> float:
        """Runs a request of zeros through the whole path, so that everything is compiled before the first client's.

        Full batches then measure how many requests the model can take. Returns a request's time alone.
        """
        row = _row(self.engine, model)
        predict_finish(self.engine.state, row, time.monotonic_ns())
        slot = self.engine.reserve(model.name)
        for key, array in slot.inputs.items():
            array[...] = model.inputs[key].neutral
        slot.submit_sync()
        known_ns = self.tried_ns.pop(model.name, 0.0)
        for _ in range(1 if known_ns else 2):  # the second is as fast as later ones
            self.engine.try_batch(model.name, known_ns)
        entry.row, entry.model = row, model
        self.by_row = {**self.by_row, row: model}
        return float(self.engine.profile(model.name)[0].whole_ns)

    def _try_text(self, entry: Entry, model: LanguageModel) -> float:
        """Writes two tokens, twice: the first time compiles and captures. Returns the time to the first token."""
        for _ in range(2):
            began = time.monotonic_ns()
            generation = self.engine.generate(model.name, [0], max_tokens=2, ignore_eos=True)
            next(generation)
            took_ns = time.monotonic_ns() - began
            generation.text()
        entry.language_model = model
        return float(took_ns)

    async def generate(
        self, name: str, tokens: Sequence[int], options: Mapping[str, Any], sampling: Mapping[str, Any]
    ) -> Generation:
        options = dict(options)
        sender = options.pop("sender", options.get("client"))
        if "json_schema" not in sampling:
            return self.engine.generate(name, tokens, **options, **sampling)
        entry = self.loaded(name)
        if entry.schemas is None:
            from paellapy.serving.schemas import SchemaChecks

            entry.schemas = SchemaChecks(self.engine.language_models[name])
        await entry.schemas.check(sampling["json_schema"], sender)
        work = partial(self.engine.generate, name, tokens, **options, **sampling)
        return await asyncio.get_running_loop().run_in_executor(_compiling, work)

    def close(self) -> None:
        """Ends the processes that check schemas."""
        for entry in self.entries.values():
            entry.close_schemas()

    def load_by_hand(self, name: str) -> float:
        """Loads a model on a client's request, and logs it."""
        began = time.monotonic()
        try:
            alone_ms = self.load(name)
        except PaellaError as e:
            if name in self.entries:
                log.error("a model could not be loaded", extra={"fields": {"model": name, "error": str(e)}})
            raise
        took_s = round(time.monotonic() - began, 2)
        log.info("loaded on request", extra={"fields": {"model": name, "s": took_s, "alone_ms": alone_ms}})
        return alone_ms

    def unload_by_hand(self, name: str) -> None:
        self.unload(name)
        log.info("unloaded on request", extra={"fields": {"model": name}})

    async def load_async(self, name: str) -> float:
        """Loads in a thread, since that compiles; the load continues if the caller is cancelled."""
        return await asyncio.shield(_background(self.load_by_hand, name))

    async def unload_async(self, name: str) -> None:
        await asyncio.shield(_background(self.unload_by_hand, name))


def _tell_of_fault(model: str, error: BaseException) -> None:
    """Logs in the engine's process why a model failed; the client is told to look in the log."""
    said = f"{type(error).__name__}: {error}"
    log.error("a model failed on the values of one request", extra={"fields": {"model": model, "error": said}})


def registry_of(engine: Engine) -> Registry:
    """A registry of the models that an engine has already loaded."""
    registry = Registry(engine)
    for name, model in engine.models.items():
        check_servable(model)
        entry = Entry(name, partial(_same, model), state=READY, reason="", model=model, row=_row(engine, model))
        registry.add(entry)
    for name, pipeline in engine.pipelines.items():
        check_servable(pipeline)
        registry.add(Entry(name, partial(_same, pipeline), state=READY, reason="", model=pipeline))
    for name, language_model in engine.language_models.items():
        make = partial(_same, language_model)
        registry.add(Entry(name, make, state=READY, reason="", language_model=language_model))
    return registry


def made(entry: Entry) -> Served | LanguageModel:
    """Calls the model's factory. Exceptions of the factory become ModelError."""
    try:
        model = entry.make()
    except PaellaError:
        raise
    except FACTORY_ERRORS as e:
        raise ModelError(f"model {entry.name!r} could not be built by its factory: {type(e).__name__}: {e}") from e
    if model.name != entry.name:
        raise ModelError(f"the factory of model {entry.name!r} returned a model named {model.name!r}")
    if isinstance(model, Served):
        check_servable(model)
    entry.code = code_number(entry.factory)
    return model


def entry_of(model: Served | LanguageModel) -> Entry:
    """An entry for a model that already exists."""
    return Entry(model.name, partial(_same, model))


def _background(work: Callable[[str], T], name: str) -> asyncio.Task[T]:
    """Runs the work in a thread to its end. Its error is kept in the entry's reason, even if nobody waits for it."""
    task = asyncio.create_task(asyncio.to_thread(work, name))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


def _same(model: T) -> T:
    return model


def _row(engine: Engine, model: Model) -> int:
    return next(row for row, loaded in engine.loaded_rows().items() if loaded.model is model)
