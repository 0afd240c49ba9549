"""`paellapy serve` without a configuration: serves the demo models and prints a command to try them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from paellapy import demo

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
