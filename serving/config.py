"""The configuration: one TOML file, every value of it also on the command line, and errors that point at the line.

device = "auto"                      # the GPU if there is one, else the virtual one
policy = "paella"                    # or "package.module:function"

[server]
port = 8000

[keys]
alice = "env:ALICE_KEY"

[tenants.alice]                      # requests of that key, or of the header X-Client-Id: alice
share = 3

[[models]]
factory = "paellapy.demo:load"       # a function that returns a Model, or a Model
arguments = { name = "mlp" }
target_ms = 20
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from paellapy.serving.access import ROLES, Role
from paellapy.serving.admission import Mode
from paellapy.serving.app import BODY_TIMEOUT_S, CLIENT_HEADER, MAX_BODY_BYTES
from paellapy.serving.errors import ConfigError
from paellapy.serving.logs import Format
from paellapy.serving.toml_lines import line_of

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Text = Annotated[str, Meta(min_length=1)]
Path_ = tuple[str | int, ...]  # of a value in the file


class ModelConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One model. What is left out is as the factory has it."""

    factory: Annotated[str, Meta(pattern=r"^[\w.]+:[\w.]+$")]
    arguments: dict[str, Any] = {}
    name: Text | None = None
    batch: Annotated[list[Count], Meta(min_length=1)] | None = None
    target_ms: Positive | None = None
    priority: int | None = None
    share: Positive | None = None
    lanes: Count | None = None
    params: dict[str, float] | None = None  # numbers for policies, as in params = {request = 0.3, limit = 0.6}
    resident: bool | Literal["auto"] | None = None  # whether its weights stay on the GPU, where not all fit
    load: bool = True  # at the start; otherwise it waits for POST /v2/repository/models/…/load


class ServerConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    host: Text = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    workers: Annotated[int, Meta(ge=0, le=64)] = 0  # HTTP processes before an engine of its own; 0: all in one
    max_body_bytes: Count = MAX_BODY_BYTES
    max_header_bytes: Annotated[int, Meta(ge=512)] = 8190  # of one header, and of the request's first line
    header_timeout_s: Positive = 20.0  # from a connection's opening, or a later request's first byte, to its header
    body_timeout_s: Positive = BODY_TIMEOUT_S
    send_timeout_s: Positive = 30.0  # for a client to take some of its answer
    keepalive_s: Positive = 75.0
    engine_timeout_s: Positive | None = None  # an engine silent for so long is given up; 10, or 60 on a virtual GPU
    # A second process of the engine, to take over: with models, or with compiled code only; None: by the device.
    standby: Literal["loaded", "warm", "off"] | None = None
    grace_s: NotNegative = 0.5  # after a stop signal: still there, but not ready, so that load balancers notice
    drain_s: NotNegative = 30.0  # then: what is in flight may take so long
    hosts: list[Text] = []  # names of this server, beside its addresses: others cannot change its state
    model_control: bool | None = None  # models and policy may be changed over HTTP; by default on loopback only
    admission: Mode = "targets"
    client_header: Text = CLIENT_HEADER
    access_log: bool = False
    log_format: Format = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class KeyConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """An API key with some of the roles."""

    key: Text
    roles: Annotated[list[Role], Meta(min_length=1)] = msgspec.field(default_factory=lambda: list(ROLES))
    tenant: Text | None = None  # whose the requests are; by default the key's own name


class TenantConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Requests of a key, or of a client header, with this name."""

    share: Positive = 1.0  # against other tenants, under policies that are fair
    limit: Annotated[float, Meta(gt=0, le=1)] | None = None  # part of the GPU's time that it may have


class TlsConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    certificate: Text  # PEM files; relative to the configuration
    key: Text
    client_ca: Text | None = None  # where clients must show a certificate too


class Config(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    device: Text = "auto"
    policy: Text = "paella"
    quantum_us: Annotated[float, Meta(ge=1)] | None = None  # as the engine has it
    max_active: Count | None = None  # by what the models demand
    sm_windows: Annotated[int, Meta(ge=0)] = 0  # of SMs, that launches keep to where many batches share the GPU
    memory_bytes: Count | None = None  # of the GPU; given, more models than fit can be loaded
    host_bytes: Annotated[int, Meta(ge=0)] | None = None  # for weights off the GPU; None: half of it
    max_queue: Count = 8192  # items waiting or running; more are refused
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    tls: TlsConfig | None = None
    keys: dict[str, Text | KeyConfig] = {}
    tenants: dict[str, TenantConfig] = {}
    models: list[ModelConfig] = []


class Source:
    """Where values came from, to point at them."""

    def __init__(self, name: str = "", text: str = "", overrides: Sequence[Path_] = ()) -> None:
        self.name, self.text, self.overrides = name, text, overrides
        self.again: Callable[[], tuple[Config, Source]] = self._nothing  # reads it once more

    def _nothing(self) -> tuple[Config, Source]:
        raise ConfigError("there is no configuration file to read again: the server was given its settings")

    @property
    def folder(self) -> Path:
        return Path(self.name).resolve().parent if self.name else Path.cwd()

    def error(self, path: Path_, message: str) -> ConfigError:
        """`file:line: key: what is wrong`, and the line itself."""
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        if any(path[: len(o)] == o or o[: len(path)] == path for o in self.overrides if path):
            return ConfigError(f"on the command line: {key or 'configuration'}: {message}")
        if not self.name:
            return ConfigError(f"among the settings: {key}: {message}" if key else message)
        number = line_of(self.text, path)
        shown = self.text.splitlines()[number - 1].strip() if self.text.strip() else ""
        if path[:1] == ("keys",):  # a key is shown to nobody
            shown = re.sub(r"(=\s*).*", r"\1…", shown)
        return ConfigError(f"{self.name}:{number}: {key + ': ' if key else ''}{message}\n    {shown}")


def load_config(
    file: str | Path | None = None,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    models: Sequence[str] = (),
) -> tuple[Config, Source]:
    """The file, then `overrides` such as `server.port=9000`, `models` such as `package:factory{name="mlp"}`.

    `defaults` take the place of a file where there is none.
    """
    tree, text = dict(defaults or {}), ""
    if file is not None:
        try:
            text = Path(file).read_text(encoding="utf-8")
            tree = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"{file}: {getattr(e, 'strerror', None) or e}") from None
        except tomllib.TOMLDecodeError as e:
            raise _syntax_error(str(file), text, e) from None
    if models:
        tree["models"] = [_model(each) for each in models]
    paths = [_override(tree, each) for each in overrides]
    if models:
        paths.append(("models",))
    source = Source(str(file) if file is not None else "", text, paths)
    if file is not None:
        source.again = partial(load_config, file, overrides, defaults, models)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as e:
        path, message = _where(str(e))
        raise source.error(("keys", *_bad_key(tree)) if path[:1] == ("keys",) else path, message) from None
    if config.server.access_log and config.server.log_level in ("warning", "error"):
        raise source.error(
            ("server", "access_log"),
            f'its lines are of level info, which log_level = "{config.server.log_level}" leaves out: '
            'set log_level to "info", or access_log to false',
        )
    return config, source


def _bad_key(tree: Mapping[str, Any]) -> Path_:
    """Which of the API keys is none; errors in a table of names do not say it."""
    keys = tree["keys"] if isinstance(tree["keys"], dict) else {}
    for name, value in keys.items():
        try:
            msgspec.convert(value, Text | KeyConfig)
        except msgspec.ValidationError:
            return (name,)
    return ()


def _syntax_error(file: str, text: str, error: tomllib.TOMLDecodeError) -> ConfigError:
    found = re.search(r"line (\d+)", str(error))
    lines = text.splitlines()
    number = int(found[1]) if found else max(1, len(lines))
    shown = lines[number - 1].strip() if number <= len(lines) else ""
    return ConfigError(f"{file}:{number}: this is not TOML: {error}\n    {shown}")


# What msgspec calls by the names of JSON and Python
_KINDS = {
    "object": "a table", "array": "a list", "str": "a text", "int": "a whole number", "float": "a number",
    "str | object": "a text, or a table with key and roles",
    "bool": "true or false", "int | float": "a number", "date": "a date", "time": "a time", "datetime": "a time",
}  # fmt: skip


def _where(message: str) -> tuple[Path_, str]:
    """The path and the text of one of msgspec's errors."""
    said, _, at = message.partition(" - at `$")
    path: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[`]+)|\[(\d+|\.\.\.)\]", at):
        if name:
            path.append(name)
        elif index.isdigit():
            path.append(int(index))
    if unknown := re.search(r"unknown field `(.*)`", said):
        said = "there is no such setting"
        if not path and unknown[1] in ServerConfig.__struct_fields__:
            said += f"; there is server.{unknown[1]}"
        path.append(unknown[1])
    elif missing := re.search(r"missing required field `(.*)`", said):
        said = f"{missing[1]} is missing"
    elif wrong := re.match(r"Invalid enum value (.*)", said, re.S):
        *others, last = (repr(each) for each in _choices(path))
        said = f"{wrong[1]} is none of its values: choose {', '.join(others)} or {last}"
    elif kinds := re.match(r"Expected `(.*)`, got `(\w+)`$", said):
        wanted, got = (_KINDS.get(each, each) for each in (kinds[1].removesuffix(" | null"), kinds[2]))
        if path[:1] == ["models"] and len(path) <= 2 and kinds[1] in ("array", "object"):
            wanted = "tables, each under [[models]]"
        elif kinds[1] == "object":
            wanted += f", under [{'.'.join(map(str, path))}]"
        said = f"it is {got}: give {wanted}"
    elif "matching regex" in said:  # only factories have to look like something
        said = "write package.module:name, as in paellapy.demo:load"
    return tuple(path), said.replace("`", "")


def _choices(path: Sequence[str | int]) -> tuple[str, ...]:
    """What may stand at a path where only a few words may."""
    if path[:1] == ["keys"]:
        return ROLES
    at: Any = Config
    for name in path:
        at = next(each.type for each in msgspec.structs.fields(at) if each.name == name)
    return get_args(at)


def _override(tree: dict[str, Any], text: str) -> Path_:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"on the command line: {text!r}: write key=value, as in server.port=9000")
    path: Path_ = tuple(int(p) if p.isdigit() else p for p in key.strip().split("."))
    at: Any = tree
    try:
        for here, further in pairwise(path):
            if isinstance(at, dict):
                at = at.setdefault(here, [] if isinstance(further, int) else {})
            else:
                at = at[here]
        at[path[-1]] = _value(value.strip())
    except (TypeError, IndexError, KeyError):
        raise ConfigError(f"on the command line: {key}: there is no such place in the configuration") from None
    return path


def _value(text: str) -> Any:
    """As TOML; what is none is a text, so that quotes are not needed twice."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _model(text: str) -> dict[str, Any]:
    """`package.module:factory{name="mlp"}`."""
    factory, brace, rest = text.partition("{")
    try:
        arguments = tomllib.loads(f"value = {{{rest}")["value"] if brace else {}
    except tomllib.TOMLDecodeError as e:
        raise ConfigError(f"on the command line: {text!r}: the part in braces is no TOML table: {e}") from None
    return {"factory": factory.strip(), "arguments": arguments}
