"""`paellapy serve` and `paellapy reload`, and the message of a server that is ready.

The message has the server's address and a command that asks its first model. Without a configuration, `serve` serves
the demo models, and the message shows a digit to classify.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import ssl
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paellapy.instrument.env import console
from paellapy.instrument.errors import PaellaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from paellapy.serving.config import Config, Source

MOST_VALUES = 64  # values that fit a command line; more are made by a command
_ANSWER_S = 2.0  # with workers their supervisor asks, and restarts none of them meanwhile
_SHADES = " ░▒▓█"

Announce = Callable[[str, list[str]], None]  # gets the URL and the loaded models


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with settings; options override it  [dim](demo models)[/dim]")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on  [dim](127.0.0.1)[/dim]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0: any free port  [dim](8000)[/dim]")] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="port for metrics, the dashboard and changes  [dim](that of --port)[/dim]")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="HTTP processes in front of the engine's; 0: one process in all  [dim](0)[/dim]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help='device: "auto", "cuda:0", "virtual:h200", …  [dim](auto)[/dim]')
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help='policy: "paella", "edf", …, or "package.module:function"  [dim](paella)[/dim]'),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="""model to add: 'package.module:factory{argument="value"}'; may be repeated"""),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="override one setting of the file, as in server.grace_s=2; may be repeated"),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="only check the settings and make the models, and show what would change")
    ] = False,
) -> None:
    """Serve models over HTTP (Open Inference Protocol v2). Ctrl-C or SIGTERM finishes requests in flight and stops."""
    from paellapy.serving.api import serve_config
    from paellapy.serving.config import load_config
    from paellapy.serving.logs import log, open_streams

    open_streams()
    named = {
        "server.host": host, "server.port": port, "server.admin_port": admin_port, "server.workers": workers,
        "device": device, "policy": policy,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + (setting or [])
    with_demo = config is None and not model
    demo = {"models": [*demo_settings()["models"], *language_settings()]} if with_demo else None
    loaded, source = load_config(config, overrides, demo, model or ())
    if check:
        _check(loaded, source)
        return
    try:
        serve_config(loaded, source, announce=announce_for(loaded, source, announce_demo if with_demo else None))
    except PaellaError as e:
        if loaded.server.log_format != "json":
            raise
        log.error("the server has ended", extra={"fields": {"error": str(e)}})
        raise typer.Exit(1) from None


def _check(config: Config, source: Source) -> None:
    from paellapy.serving.reload import FIXED, check

    names, changed = check(config, source)
    typer.echo(f"{source.name or 'the settings'}: no mistake; models: {', '.join(names)}; policy: {config.policy}")
    if changed is None:
        typer.echo("no server of this user uses this file")
    for name, (before, after) in (changed or {}).items():
        later = " (after a restart)" if name.partition(".")[0] in FIXED else ""
        typer.echo(f"{name}: {before} → {after}{later}")
    if changed == {}:
        typer.echo("nothing would change")


def reload(config: Annotated[Path, typer.Argument(help="settings file of the running server")]) -> None:
    """Make a running server read its settings, its models' code and its certificates again."""
    from paellapy.serving.config import load_config
    from paellapy.serving.errors import ConfigError
    from paellapy.serving.reload import ask_to_reload

    load_config(config)  # a wrong file is reported here, and the server is not disturbed
    told = ask_to_reload(config)
    if "error" in told:
        raise ConfigError(f"the server changed nothing: {told['error']}")
    for what, names in told.items():
        typer.echo(f"{what}: {', '.join(names) if isinstance(names, list) else names}")
    if not told:
        typer.echo("nothing has changed")


# -- a server of the demo models


def demo_settings() -> dict[str, Any]:
    """A configuration with the demo models, in the form of a parsed file."""
    from paellapy import demo

    return {
        "models": [
            {"factory": "paellapy.demo:load", "arguments": {"name": name}, "target_ms": target_ms}
            for name, target_ms in demo.TARGETS_MS.items()
        ]
    }


def language_settings() -> list[dict[str, Any]]:
    """The demo's language model, if the packages that it needs are installed."""
    from paellapy import demo

    needed = ("tokenizers", "jinja2")
    return [{"language_model": str(demo.AUSTEN)}] if all(importlib.util.find_spec(each) for each in needed) else []


def digit_request(image: NDArray[np.float32]) -> str:
    """A request that classifies one image; the answer is "score:digit"."""
    data = [round(float(value), 4) for value in image.reshape(-1)]
    body = {
        "inputs": [{"name": "image", "shape": [1, *image.shape], "datatype": "FP32", "data": data}],
        "outputs": [{"name": "scores", "parameters": {"classification": 1}}],
    }
    return json.dumps(body, separators=(",", ":")).replace(".0,", ",").replace(".0]", "]")


def picture(image: NDArray[np.float32]) -> str:
    levels = (image * len(_SHADES)).astype(int).clip(0, len(_SHADES) - 1)
    return "\n".join("  " + "".join(_SHADES[k] * 2 for k in row) for row in levels)


def show_addresses(screen: Any, url: str, names: Sequence[str]) -> None:
    """Prints what is served where, each address by itself, so that it can be copied for curl."""
    flag = ""
    if url.startswith("unix:"):
        flag, url = f"--unix-socket {url.removeprefix('unix:')} ", "http://localhost"
    said = " ".join(["Serving", *filter(None, [", ".join(names)])])
    screen.print(f"\n{said} at {flag}{url}/v2", markup=False)
    for what, path in (("dashboard", "/"), ("documentation", "/docs"), ("metrics", "/metrics")):
        screen.print(f"  {what:14s} {flag}{url}{path}", markup=False)


def announce_demo(url: str, loaded: Sequence[str]) -> None:
    """Prints how to use a demo server that is ready, with its loaded models."""
    from paellapy import demo

    screen = console(soft_wrap=True, highlight=False)
    show_addresses(screen, url, loaded)
    if "cnn" in loaded:
        images, labels = demo.held_out()
        screen.print(f"\nA handwritten {labels[0]} that no model has seen:\n{picture(images[0])}")
        screen.print("Classify it (the answer is score:digit):\n")
        screen.print(f"curl -s {url}/v2/models/cnn/infer -d '{digit_request(images[0])}'", markup=False)
    if demo.AUSTEN.name in loaded:
        screen.print("\nLet a small model, trained on Jane Austen's novels, go on with a text:\n")
        body = json.dumps({"model": demo.AUSTEN.name, "prompt": "It is a truth", "max_tokens": 60})
        screen.print(f"curl -s {url}/v1/completions -d '{body}'", markup=False)
    screen.print("\nCtrl-C finishes requests in flight and stops.")


# -- the message of a server that is ready


def announce_for(config: Config, source: Source, instead: Announce | None = None) -> Callable[[str], None]:
    """Prints the message. It asks the server itself for its models, since with workers no other process knows them.

    `instead` prints another message.
    """

    def announce(url: str) -> None:
        if config.server.workers:
            _announce(url, config, source, instead)
        else:  # in the event loop's thread, which has to answer
            threading.Thread(target=_announce, args=(url, config, source, instead), daemon=True).start()

    return announce


def _announce(url: str, config: Config, source: Source, instead: Announce | None) -> None:
    from paellapy.serving.build import build_keys

    keys = build_keys(config, source)
    name, key = next(((name, each.secret) for name, each in keys.items() if "infer" in each.roles), ("", None))
    flags = "" if key is None else ' -H "X-API-Key: $KEY"'
    if config.tls is not None:
        flags += f" --cacert {source.folder / config.tls.certificate}"
    screen = console(soft_wrap=True, highlight=False)
    try:
        index = _get(f"{url}/v2/repository/index", key, b"{}")
        names = [each["name"] for each in index if each["state"] == "READY"]
        if instead is not None:
            instead(url, names)
            return
        command = request_line(url, _get(f"{url}/v2/models/{names[0]}", key), flags)
        show_addresses(screen, url, names)
        if key is not None:
            screen.print(f"with the key of {name} in KEY:", markup=False)
        screen.print(command, markup=False)
        sys.stdout.flush()
    except (OSError, PaellaError, ValueError, LookupError):  # the server is ready in any case
        with contextlib.suppress(OSError):  # a full device, or a reader that is gone
            show_addresses(screen, url, ())
            sys.stdout.flush()


def request_line(url: str, model: dict[str, Any], flags: str = "") -> str:
    """A command that sends a request of zeros to a model described by its metadata.

    >>> request_line("http://h", {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})
    'curl -s http://h/v2/models/m/infer -d \\'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0,0]}]}\\''
    """
    if model["inputs"][0]["name"] == "text_input":
        return f"""curl -s{flags} {url}/v2/models/{model["name"]}/generate -d '{{"text_input":"Once upon a time"}}'"""
    tensors, count = [], 0
    for each in model["inputs"]:
        shape = [1 if extent < 0 else extent for extent in each["shape"]]
        n = math.prod(shape)
        count += n
        zero = "false" if each["datatype"] == "BOOL" else "0"
        about = json.dumps({"name": each["name"], "shape": shape, "datatype": each["datatype"]}, separators=(",", ":"))
        tensors.append((about[:-1] + ',"data":[', zero, n))
    where = f"curl -s{flags} {url}/v2/models/{model['name']}/infer -d"
    if count <= MOST_VALUES:
        body = ",".join(head + ",".join([zero] * n) + "]}" for head, zero, n in tensors)
        return f"""{where} '{{"inputs":[{body}]}}'"""
    parts = ",".join(f"""{head}'"$(yes {zero} | head -{n} | paste -sd,)"']}}""" for head, zero, n in tensors)
    return f"""echo '{{"inputs":[{parts}]}}' | {where} @-"""


def _get(url: str, key: str | None, body: bytes | None = None) -> Any:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # no check: it is our own server
    request = urllib.request.Request(url, body, {} if key is None else {"X-API-Key": key})
    with urllib.request.urlopen(request, timeout=_ANSWER_S, context=trusting) as answer:
        return json.loads(answer.read())
