"""`paellapy serve` without a configuration: serves the demo models and prints a command to try them."""

from __future__ import annotations

import json
import ssl
import sys
import threading
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from paellapy import demo
from paellapy.instrument.errors import PaellaError
from paellapy.serving.build import build_keys
from paellapy.serving.config import Config, Source

TARGETS_MS = {"mlp": 50.0, "cnn": 100.0, "transformer": 200.0}  # within reach of a virtual GPU on a laptop's CPU
_SHADES = " ░▒▓█"


def settings() -> dict[str, Any]:
    """A configuration, in the form of a parsed file."""
    return {
        "models": [
            {"factory": "paellapy.demo:load", "arguments": {"name": name}, "target_ms": TARGETS_MS[name]}
            for name in demo.names()
        ]
    }


def digit_request(image: NDArray[np.float32]) -> str:
    """A request that classifies one image; the answer is "score:digit"."""
    data = [round(float(value), 4) for value in image.reshape(-1)]
    body = {
        "inputs": [{"name": "image", "shape": [1, *image.shape], "datatype": "FP32", "data": data}],
        "outputs": [{"name": "scores", "parameters": {"classification": 1}}],
    }
    return json.dumps(body, separators=(",", ":")).replace(".0,", ",").replace(".0]", "]")


def curl_line(url: str, image: NDArray[np.float32]) -> str:
    return f"curl -s {url}/v2/models/cnn/infer -d '{digit_request(image)}'"


def picture(image: NDArray[np.float32]) -> str:
    levels = np.clip((image * len(_SHADES)).astype(int), 0, len(_SHADES) - 1)
    return "\n".join("  " + "".join(_SHADES[k] * 2 for k in row) for row in levels)


def announce(url: str, loaded: Sequence[str]) -> None:
    """Prints how to use a demo server that is ready, with its loaded models."""
    images, labels = demo.held_out()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"\nServing {', '.join(loaded)} at [bold]{url}/v2[/bold]")
    for what, path in (("dashboard", "/"), ("documentation", "/docs"), ("metrics", "/metrics")):
        console.print(f"  {what:14s} {url}{path}")
    if "cnn" not in loaded:
        return
    console.print()
    console.print(f"A handwritten {labels[0]} that no model has seen:\n{picture(images[0])}")
    console.print("Classify it (the answer is score:digit):\n")
    console.print(curl_line(url, images[0]), markup=False)
    console.print("\nCtrl-C finishes requests in flight and stops.")


# The message of `paellapy serve config.toml` once it is ready: its address, and a command that asks its
# first model.


SHORT = 64  # most values that fit a command line
_ANSWER_S = 2.0  # with workers their supervisor asks, and restarts none of them meanwhile


Told = Callable[[str, list[str]], None]  # gets the URL and the loaded models


def announce_for(config: Config, source: Source, told: Told | None = None) -> Callable[[str], None]:
    """Prints the message. It asks the server itself for its models, since with workers no other process knows them.

    `told` prints another message instead.
    """

    def announce(url: str) -> None:
        if config.server.workers:
            _tell(url, config, source, told)
        else:  # in the event loop's thread, which has to answer
            threading.Thread(target=_tell, args=(url, config, source, told), daemon=True).start()

    return announce


def _tell(url: str, config: Config, source: Source, told: Told | None) -> None:
    key, flags = "", ""
    for each in build_keys(config, source).values():
        if "infer" in each.roles:
            key, flags = each.secret, ' -H "X-API-Key: $KEY"'
            break
    if config.tls is not None:
        flags += f" --cacert {source.folder / config.tls.certificate}"
    console = Console(soft_wrap=True, highlight=False)
    try:
        index = _get(f"{url}/v2/repository/index", key, b"{}")
        names = [each["name"] for each in index if each["state"] == "READY"]
        if told is not None:
            told(url, names)
            return
        command = request_line(url, _get(f"{url}/v2/models/{names[0]}", key), flags)
        console.print(f"\nServing {', '.join(names)} at [bold]{url}/v2[/bold]; dashboard {url}/, API {url}/docs")
        console.print(command, markup=False)
    except (OSError, PaellaError, ValueError, LookupError):  # the server is ready in any case
        console.print(f"\nServing at [bold]{url}/v2[/bold]")
    sys.stdout.flush()


def request_line(url: str, model: dict[str, Any], flags: str = "") -> str:
    """A command that sends a request of zeros to a model described by its metadata.

    >>> curl_line("http://h", {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})
    'curl -s http://h/v2/models/m/infer -d \\'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[0,0]}]}\\''
    """
    tensors, count = [], 0
    for each in model["inputs"]:
        shape = [1 if extent < 0 else extent for extent in each["shape"]]
        n = 1
        for extent in shape:
            n *= extent
        count += n
        zero = "false" if each["datatype"] == "BOOL" else "0"
        told = json.dumps({"name": each["name"], "shape": shape, "datatype": each["datatype"]}, separators=(",", ":"))
        tensors.append((told[:-1] + ',"data":[', zero, n))
    where = f"curl -s{flags} {url}/v2/models/{model['name']}/infer -d"
    if count <= SHORT:
        body = ",".join(head + ",".join([zero] * n) + "]}" for head, zero, n in tensors)
        return f"""{where} '{{"inputs":[{body}]}}'"""
    parts = ",".join(f"""{head}'"$(yes {zero} | head -{n} | paste -sd,)"']}}""" for head, zero, n in tensors)
    return f"""echo '{{"inputs":[{parts}]}}' | {where} @-"""


def _get(url: str, key: str, body: bytes | None = None) -> Any:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # no check: it is our own server
    request = urllib.request.Request(url, body, {"X-API-Key": key} if key else {})
    with urllib.request.urlopen(request, timeout=_ANSWER_S, context=trusting) as answer:
        return json.loads(answer.read())
