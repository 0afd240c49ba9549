"""The configuration: one TOML file whose values can also be given on the command line; errors name the line.

device = "auto"                      # the GPU if there is one, else the virtual GPU
policy = "paella"                    # or "package.module:function"

[server]
port = 8000

[keys]
alice = "env:ALICE_KEY"

[tenants.alice]                      # requests with that key, or with the header X-Client-Id: alice
share = 3

[[models]]
factory = "paellapy.demo:load"       # a Model, or a function that returns one
arguments = { name = "mlp" }
target_ms = 20

[[models]]
language_model = "models/Qwen3-0.6B" # a folder with config.json, *.safetensors and tokenizer.json
ttft_ms = 200
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from paellapy.serving.access import CLIENT_HEADER, ROLES, Role
from paellapy.serving.admission import Mode
from paellapy.serving.errors import ConfigError
from paellapy.serving.limits import BODY_TIMEOUT_S, DEFAULTS, ConnectionLimits
from paellapy.serving.logs import Format

# The line of a value in a TOML file, which the standard library's parser does not report.

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")


def line_of(text: str, path: tuple[str | int, ...]) -> int:
    """The line, from 1, of the value at a path, or of the nearest part of the path that exists.

    >>> line_of("a = 1\\n[[m]]\\nx = 2\\n[[m]]\\nx = 3", ("m", 1, "x"))
    5
    """
    best, best_length = 1, -1
    counts: dict[tuple[str, ...], int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            names = _names(header[2])
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
                for inner in [each for each in counts if len(each) > len(names) and each[: len(names)] == names]:
                    del counts[inner]  # counts start again in every element
            table = _with_indices(names, counts)
            here = table
        elif key := _KEY.match(line):
            here = (*table, *_names(key[1]))
        else:
            continue
        if here == path[: len(here)] and len(here) > best_length:
            best, best_length = number, len(here)
    return best


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in _PART.findall(dotted))


def _with_indices(names: tuple[str, ...], counts: dict[tuple[str, ...], int]) -> tuple[str | int, ...]:
    """Adds to each array of tables in the path the index of its latest element."""
    path: list[str | int] = []
    for k, name in enumerate(names):
        path.append(name)
        if names[: k + 1] in counts:
            path.append(counts[names[: k + 1]])
    return tuple(path)


HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Headers with a meaning of their own: a client named by one of them would be another one with each request.
TAKEN_HEADERS = {
    "accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-length", "content-type",
    "cookie", "date", "expect", "host", "inference-header-content-length", "origin", "te", "traceparent", "tracestate",
    "trailer", "transfer-encoding", "upgrade", "x-api-key", "x-request-id",
}  # fmt: skip
MOST = 1e9  # as much as no time or size needs; TOML also has an infinity, which no timer takes
Positive = Annotated[float, Meta(gt=0, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
Path_ = tuple[str | int, ...]  # of a value in the file


Function = Annotated[str, Meta(pattern=r"^[\w.]+:[\w.]+$")]


class TensorConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A value of a request or of an answer."""

    shape: list[Count] = []
    dtype: Text = "float32"


class ModelConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One model, from a factory or from a folder. A setting that is left out keeps the factory's value."""

    factory: Function | None = None
    arguments: dict[str, Any] = {}
    language_model: Text | None = None  # in place of `factory`: a folder as the hub has it
    name: Text | None = None
    batch: Annotated[list[Count], Meta(min_length=1)] | None = None
    target_ms: Positive | None = None
    priority: int | None = None
    share: Positive | None = None
    instances: Count | None = None
    params: dict[str, float] | None = None  # parameters for policies, as in params = {request = 0.3, limit = 0.6}
    resident: bool | Literal["auto"] | None = None  # whether its weights stay on the GPU when not all models fit
    capture: Literal["ahead", "on_demand"] | None = None  # when sizes of batches, or of steps, are captured
    before: Function | None = None  # functions before and after the model
    after: Function | None = None
    takes: dict[str, str | TensorConfig] | None = None  # values of requests and of answers, by name
    gives: dict[str, str | TensorConfig] | None = None
    workers: Count | None = None  # threads of before and after
    processes: bool | None = None  # whether each of them has a process
    load: bool = True  # False: the model waits for POST /v2/repository/models/…/load
    # Of language models: see pp.LanguageModel
    ttft_ms: Positive | None = None
    tbt_ms: Positive | None = None
    kv_gb: Positive | None = None
    context: Count | None = None
    sequences: Count | None = None
    chunk: Count | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None

    @property
    def source(self) -> str:
        return self.factory or self.language_model or ""

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """The settings of these names that are given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


# Settings of models from factories only, and of language models only; both have the others.
_OF_FACTORIES = (
    "batch", "target_ms", "instances", "resident", "before", "after", "takes", "gives", "workers", "processes",
)  # fmt: skip
OF_LANGUAGE_MODELS = ("ttft_ms", "tbt_ms", "kv_gb", "context", "sequences", "chunk", "dtype")


class PipelineConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Models and functions that answer a request one after the other, as one model."""

    name: Text
    steps: Annotated[list[Text], Meta(min_length=1)]  # names of models, and "package.module:function"
    takes: dict[str, str | TensorConfig] | None = None
    gives: dict[str, str | TensorConfig] | None = None
    priority: int = 0
    workers: Count = 4
    processes: bool = False


class ServerConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    # Where health is answered too, and metrics, the dashboard and changes of the server only; None: at `port`
    admin_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    workers: Annotated[int, Meta(ge=0, le=64)] = 0  # HTTP processes in front of an engine process; 0: a single process
    # What bounds a connection: see ConnectionLimits.
    max_body_bytes: Count = DEFAULTS.max_body_bytes
    max_header_bytes: Annotated[int, Meta(ge=512)] = DEFAULTS.max_header_bytes
    header_timeout_s: Positive = DEFAULTS.header_timeout_s
    held_mb: Positive = DEFAULTS.max_held_bytes / 1e6
    body_timeout_s: Positive = BODY_TIMEOUT_S
    send_timeout_s: Positive = DEFAULTS.send_timeout_s
    keepalive_s: Positive = DEFAULTS.keepalive_s
    engine_timeout_s: Positive | None = None  # an engine silent this long is given up; None: 10, virtual GPU: 60
    factory_timeout_s: Positive = 600.0  # a factory that has not returned within this time has failed
    # A second engine process that takes over: with models loaded, or only compiled code; None: the device decides.
    standby: Literal["loaded", "warm", "off"] | None = None
    grace_s: NotNegative = 0.5  # after a stop signal: answers but is not ready, so that load balancers notice
    drain_s: NotNegative = 30.0  # after grace_s: time for requests in flight to finish
    hosts: list[Text] = []  # further host names under which clients may change the server's state
    model_control: bool | None = None  # whether HTTP may change models and policy; None: on loopback only
    admission: Mode = "targets"
    client_header: Text = CLIENT_HEADER
    access_log: bool = False
    log_format: Format = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_file: Text | None = None  # None: standard error

    @property
    def limits(self) -> ConnectionLimits:
        return ConnectionLimits(
            header_timeout_s=self.header_timeout_s,
            body_timeout_s=self.body_timeout_s,
            send_timeout_s=self.send_timeout_s,
            keepalive_s=self.keepalive_s,
            max_header_bytes=self.max_header_bytes,
            max_body_bytes=self.max_body_bytes,
            max_held_bytes=round(self.held_mb * 1e6),
        )


class KeyConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An API key with only some roles."""

    key: Text
    roles: Annotated[list[Role], Meta(min_length=1)] = msgspec.field(default_factory=lambda: list(ROLES))
    tenant: Text | None = None  # owner of the requests; None: the key's own name


class TenantConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tenant: the requests of a key, or of a client header, with this name."""

    share: Positive = 1.0  # weight against other tenants, under fair policies
    limit: Annotated[float, Meta(gt=0, le=1)] | None = None  # largest part of the GPU's time


class TlsConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    certificate: Text  # a PEM file; paths are relative to the configuration
    key: Text
    client_ca: Text | None = None  # if set, clients must present a certificate that it signed


class Config(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    device: Text = "auto"
    policy: Text = "paella"
    quantum_us: Annotated[float, Meta(ge=1, le=MOST)] | None = None  # None: the engine's default
    max_active: Count | None = None  # jobs that may run at once; None: from the models' demand
    sm_partitions: Annotated[int, Meta(ge=0)] = 0  # SM partitions that confine launches when many batches run
    memory_bytes: Count | None = None  # budget on the GPU; if set, models that do not fit may be loaded too
    host_bytes: Annotated[int, Meta(ge=0)] | None = None  # host memory for weights off the GPU; None: half of it
    max_queue: Annotated[int, Meta(ge=1, le=1 << 20)] = 8192  # items waiting or running; further ones are refused
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    tls: TlsConfig | None = None
    keys: dict[str, Text | KeyConfig] = {}
    tenants: dict[str, TenantConfig] = {}
    models: list[ModelConfig] = []
    pipelines: list[PipelineConfig] = []


class Source:
    """The file that the values came from, so that errors can point at it. Values at `overrides` came from elsewhere:
    from the command line, or from a Python call.
    """

    def __init__(
        self, name: str = "", text: str = "", overrides: Sequence[Path_] = (), elsewhere: str = "on the command line"
    ) -> None:
        self.name, self.text, self.overrides, self._elsewhere = name, text, overrides, elsewhere
        self.again: Callable[[], tuple[Config, Source]] = self._nothing  # reads the configuration again

    def _nothing(self) -> tuple[Config, Source]:
        raise ConfigError("this server has no configuration file to read again: start it with one to reload it")

    @property
    def digest(self) -> str:
        """Equal for equal files."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def folder(self) -> Path:
        return Path(self.name).resolve().parent if self.name else Path.cwd()

    def error(self, path: Path_, message: str) -> ConfigError:
        """An error `file:line: key: message`, followed by the line itself."""
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        if any(path[: len(o)] == o or o[: len(path)] == path for o in self.overrides if path):
            return ConfigError(f"{self._elsewhere}: {key or 'configuration'}: {message}", field=key)
        if not self.name:
            return ConfigError(f"in the options: {key}: {message}" if key else message, field=key)
        number = line_of(self.text, path)
        shown = self.text.splitlines()[number - 1].strip() if self.text.strip() else ""
        if path[:1] == ("keys",):  # secrets are never shown
            shown = re.sub(r"(=\s*).*", r"\1…", shown)
        said = f"{self.name}:{number}: {key + ': ' if key else ''}{message}\n    {shown}"
        return ConfigError(said, field=key, line=number)


def load_config(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
) -> tuple[Config, Source]:
    """Reads the file, merges `options` into it, applies `overrides` such as `server.port=9000`, and adds `models`.

    A model is given as `package:factory{name="mlp"}`. Of `options`, tables are merged, and any other value replaces the
    file's.
    """
    tree, text = dict[str, Any](), ""
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file}: {getattr(e, 'strerror', None) or e}") from None
        except (ValueError, RecursionError) as e:  # also numbers of thousands of digits, and endless nesting
            raise _syntax_error(str(file), text, e) from None
    tree = _merged(tree, options or {})
    if models:
        tree["models"] = [_model(each) for each in models]
    paths = [_override(tree, each) for each in overrides]
    if models:
        paths.append(("models",))
    if file is None:
        source = Source(overrides=paths)
    else:
        elsewhere = "in the options" if options else "on the command line"
        source = Source(str(file), text, [*paths, *_leaves(options or {})], elsewhere)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        path, message = _where(str(e))
        raise source.error(_with_name(tree, path), message) from None
    if config.server.log_file is not None:
        config.server.log_file = str(source.folder / config.server.log_file)
    if file is not None:
        source.again = partial(_load_again, config, file, overrides, options, models)
    for k, each in enumerate(config.models):
        _check_kind(k, each, source)
    name = config.server.client_header
    if not HEADER_NAME.fullmatch(name) or name.lower() in TAKEN_HEADERS:
        said = f"{name!r} cannot name clients: give a header's name of its own, such as {CLIENT_HEADER}"
        raise source.error(("server", "client_header"), said)
    if config.pipelines and config.server.workers:
        raise source.error(("pipelines",), "pipelines are served by one process: set server.workers to 0")
    if config.server.access_log and config.server.log_level in ("warning", "error"):
        raise source.error(
            ("server", "access_log"),
            f'its lines have the level info, which log_level = "{config.server.log_level}" suppresses: '
            'set log_level to "info", or access_log to false',
        )
    return config, source


def _check_kind(k: int, model: ModelConfig, source: Source) -> None:
    """A model comes from a factory or from a folder, and has settings of its own kind only."""
    kinds = [name for name in ("factory", "language_model") if getattr(model, name) is not None]
    if len(kinds) != 1:
        said = "give factory or language_model, not both" if kinds else "factory, or language_model, is missing"
        raise source.error(("models", k), said)
    if kinds == ["factory"]:
        wrong = [*model.given(OF_LANGUAGE_MODELS)]
    else:
        wrong = [*(["arguments"] if model.arguments else []), *model.given(_OF_FACTORIES)]
    if wrong:
        others = ", ".join(OF_LANGUAGE_MODELS if kinds == ["language_model"] else _OF_FACTORIES)
        said = f"a model from {kinds[0]} has no such setting; it has {others}"
        raise source.error(("models", k, wrong[0]), said)


def _load_again(before: Config, *arguments: Any) -> tuple[Config, Source]:
    """`load_config` for a server that runs. A file that lost its models was cut short: it would unload them all."""
    config, source = load_config(*arguments)
    if before.models and not config.models:
        said = "the file has no [[models]] any more: write it again, or stop the server if it should serve none"
        raise source.error(("models",), said)
    return config, source


def _with_name(tree: Mapping[str, Any], path: Path_) -> Path_:
    """The path with the name of the first invalid key or tenant: msgspec's errors in a table of names lack it."""
    kind: Any = {"keys": Text | KeyConfig, "tenants": TenantConfig}.get(str(path[0])) if path else None
    named = tree[str(path[0])] if kind is not None else None
    for name, value in named.items() if isinstance(named, dict) else ():
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            return path[0], name, *(path[1:] if path[0] == "tenants" else ())
    return path


def _syntax_error(file: str, text: str, error: Exception) -> ConfigError:
    if not isinstance(error, tomllib.TOMLDecodeError):  # its line is unknown
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return ConfigError(f"{file}: this is not TOML: {why}")
    found = re.search(r"line (\d+)", str(error))
    lines = text.splitlines()
    number = int(found[1]) if found else max(1, len(lines))
    shown = lines[number - 1].strip() if number <= len(lines) else ""
    if re.search(r"^\s*\[?\s*keys\b", text, re.M):  # the line may hold a secret
        shown = f"{shown.partition('=')[0]}…" if "=" in shown else "…"
    return ConfigError(f"{file}:{number}: this is not TOML: {error}\n    {shown}", line=number)


# msgspec's names of types, as a reader of TOML knows them
_KINDS = {
    "object": "a table", "array": "a list", "str": "a text", "int": "a whole number", "float": "a number",
    "str | object": "a text, or a table with key and roles",
    "bool": "true or false", "bool | str": "true, false or 'auto'", "int | float": "a number",
    "date": "a date", "time": "a time", "datetime": "a time",
}  # fmt: skip


def _where(message: str) -> tuple[Path_, str]:
    """The path and the text of a msgspec error."""
    said, _, at = message.partition(" - at `$")
    path: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]", at):
        if name:
            path.append(name)
        elif index.isdigit():
            path.append(int(index))
    if unknown := re.search(r"unknown field `(.*)`", said):
        said = "no setting has this name"
        if not path and unknown[1] in ServerConfig.__struct_fields__:
            said += f"; did you mean server.{unknown[1]}?"
        path.append(unknown[1])
    elif missing := re.search(r"missing required field `(.*)`", said):
        said = f"{missing[1]} is missing"
    elif wrong := re.match(r"Invalid enum value (.*)", said, re.S):
        *others, last = _choices(path)
        said = f"{wrong[1]} is not allowed: choose {', '.join(others)} or {last}"
    elif kinds := re.match(r"Expected `(.*)`, got `(\w+)`$", said):
        wanted, got = (_KINDS.get(each, each) for each in (kinds[1].removesuffix(" | null"), kinds[2]))
        if path[:1] == ["models"] and len(path) <= 2 and kinds[1] in ("array", "object"):
            wanted = "tables, each under [[models]]"
        elif kinds[1] == "object":
            wanted += f", under [{'.'.join(map(str, path))}]"
        said = f"the value is {got}: give {wanted}"
    elif "matching regex" in said:  # only factories have a pattern
        said = "write package.module:name, as in paellapy.demo:load"
    return tuple(path), said.replace("`", "")


def _choices(path: Sequence[str | int]) -> list[str]:
    """The values allowed at a path, where only a few are."""
    if path[:1] == ["keys"]:
        return [repr(role) for role in ROLES]
    at: Any = ModelConfig if path[:1] == ["models"] else Config
    for name in path[2:] if at is ModelConfig else path:
        at = next(each.type for each in msgspec.structs.fields(at) if each.name == name)
    words = ["true", "false"] if bool in get_args(at) else []
    return words + [repr(word) for each in (at, *get_args(at)) for word in get_args(each) if isinstance(word, str)]


def _override(tree: dict[str, Any], text: str) -> Path_:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"on the command line: {text!r}: write key=value, as in server.port=9000")
    path: Path_ = tuple(int(p) if p.isdecimal() else p for p in key.strip().split("."))
    at: Any = tree
    try:
        for here, further in pairwise(path):
            if isinstance(at, dict):
                at = at.setdefault(here, [] if isinstance(further, int) else {})
            else:
                at = at[here]
        at[path[-1]] = _value(value.strip())
    except (TypeError, IndexError, KeyError):
        raise ConfigError(f"on the command line: {key}: the configuration has no such key", field=key.strip()) from None
    return path


def _value(text: str) -> Any:
    """The value as TOML; text that is not TOML counts as a string, so that quotes are not needed twice."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _model(text: str) -> dict[str, Any]:
    """Reads `package.module:factory{name="mlp"}`."""
    factory, brace, rest = text.partition("{")
    try:
        arguments = tomllib.loads(f"value = {{{rest}")["value"] if brace else {}
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"on the command line: {text!r}: the part in braces is not a TOML table: {e}") from None
    return {"factory": factory.strip(), "arguments": arguments}


def _merged(file: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> _merged({"policy": "edf", "server": {"port": 1, "host": "::1"}}, {"server": {"port": 2}})
    {'policy': 'edf', 'server': {'port': 2, 'host': '::1'}}
    """
    found = dict(file)
    for key, value in options.items():
        ours = found.get(key)
        found[key] = _merged(ours, value) if isinstance(ours, Mapping) and isinstance(value, Mapping) else value
    return found


def _leaves(options: Mapping[str, Any], under: Path_ = ()) -> Iterator[Path_]:
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*under, key))
        else:
            yield (*under, key)
