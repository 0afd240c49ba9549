"""Asks a demo server for one answer from every address and keeps them for docs/reference/http.md.

    python docs/record_http.py
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp.test_utils import TestClient, TestServer

import paellapy as pp
from paellapy import demo
from paellapy.serving import openapi
from paellapy.serving.app import create_app

KEPT = Path(__file__).parent / "http_examples.json"
SHOWN = 40  # lines of an answer
INFER = {"inputs": [{"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": [0.0] * 64}]}
TEXT = {"model": demo.AUSTEN.name, "max_tokens": 8, "temperature": 0}
GENERATE = {"text_input": "It is a truth", "parameters": {"max_tokens": 4, "temperature": 0}}
BODIES: dict[str, Any] = {
    "/v2/models/{model}/infer": INFER, "/v2/repository/index": {}, "/v2/models/{model}/generate": GENERATE,
    "/v2/models/{model}/generate_stream": GENERATE, "/v1/completions": {**TEXT, "prompt": "It is a truth"},
    "/v1/chat/completions": {**TEXT, "messages": [{"role": "user", "content": "It is a truth"}]},
}  # fmt: skip
# Pages, streams without an end, addresses of encoders, and what changes the server.
LEFT_OUT = ("/", "/dashboard/events", "/dashboard/policy", "/v1/embeddings", "/v1/rerank", "/load", "/unload")


def asked() -> list[tuple[str, str]]:
    """Method and path of every address that has an answer to show."""
    return [
        (method.upper(), path)
        for path, methods in openapi.document()["paths"].items()
        for method in methods
        if "/versions/" not in path and not (path in LEFT_OUT or path.endswith(LEFT_OUT[-2:]))
    ]


def _with_model(path: str) -> str:
    writes = path.startswith("/v1") or "/generate" in path
    return path.replace("{model}", demo.AUSTEN.name if writes else "mlp")


async def answers() -> dict[str, str]:
    """"METHOD path" → the body of the answer."""
    found = {}
    with pp.Engine("virtual:h200") as engine:
        for model in (demo.load("mlp"), pp.LanguageModel(demo.AUSTEN)):
            await asyncio.to_thread(engine.load, model)
        async with TestClient(TestServer(create_app(engine))) as client:
            for method, path in asked():
                answer = await client.request(method, _with_model(path), json=BODIES.get(path))
                assert answer.status == 200, (method, path, await answer.text())
                found[f"{method} {path}"] = await answer.text()
    return found


def shown(what: str, answer: str) -> dict[str, str]:
    method, path = what.split()
    command = f"curl http://127.0.0.1:8000{_with_model(path)}"
    if method == "POST":
        body = json.dumps(BODIES.get(path, {})).replace("0.0, " * 62, "…, ")
        command += f" -d '{body}'"
    try:
        text, language = json.dumps(json.loads(answer), indent=1), "json"
    except ValueError:
        text, language = answer, "text"
    lines = text.splitlines()
    if len(lines) > SHOWN:
        lines, language = [*lines[:SHOWN], "…"], "text"
    return {"command": command, "answer": "\n".join(lines), "language": language}


def main() -> None:
    found = asyncio.run(answers())
    KEPT.write_text(json.dumps({what: shown(what, answer) for what, answer in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
