"""Writes the pages of docs/reference/ that are made from the code: command line, HTTP addresses, metrics."""

from __future__ import annotations

import ast
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from paellapy.serving import openapi

DOCS = Path(__file__).parent
FOLDER = DOCS / "reference"
SERVING = DOCS.parent / "serving"
EXAMPLES = DOCS / "http_examples.json"


def write(folder: Path = FOLDER) -> None:
    pages = {"cli.md": command_line(), "http.md": addresses(), "metrics.md": metrics()}
    for name, text in pages.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """Typer's own description of the commands."""
    command = [sys.executable, "-m", "typer", "paellapy.cli", "utils", "docs", "--name", "paellapy"]
    path = os.pathsep.join(filter(None, (str(DOCS.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    made = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"</?span[^>]*>", "", made)
    return html.unescape(text.replace("# `paellapy`", "# Command line", 1)).replace("```console", "```text")


def addresses() -> str:
    """From the server's own OpenAPI document, with answers that a demo server gave."""
    spec = openapi.document()
    recorded: dict[str, Any] = json.loads(EXAMPLES.read_text()) if EXAMPLES.exists() else {}
    parts = [
        "# HTTP addresses\n",
        "The server speaks the Open Inference Protocol v2. A running server has this list at `/docs`, and as OpenAPI "
        "3.1 at `/openapi.json`. Every address under `/v2/models/{model}` also exists under "
        "`/v2/models/{model}/versions/{version}`; the only version is `1`. Errors are JSON: "
        '`{"error": "…"}`. The examples are answers of a demo server (`make serve`).\n',
    ]
    for path, methods in spec["paths"].items():
        if "/versions/" in path:
            continue
        for method, each in methods.items():
            parts += _address(method.upper(), path, each, recorded.get(f"{method.upper()} {path}"))
    parts.append("## Schemas\n")
    for name, schema in spec["components"]["schemas"].items():
        parts.append(f"### {name}\n\n{_schema(schema)}")
    return "\n".join(parts)


def _address(method: str, path: str, each: dict[str, Any], example: dict[str, Any] | None) -> list[str]:
    parts = [f"## `{method} {path}`\n", f"{each['summary']}. {each.get('description', '')}".strip() + "\n"]
    if parameters := each.get("parameters"):
        rows = [(f"`{p['name']}`", p["in"], p.get("description", "")) for p in parameters]
        parts.append(table(("parameter", "in", "meaning"), rows))
    rows = [(status, answer["description"]) for status, answer in sorted(each["responses"].items())]
    parts.append(table(("status", "meaning"), rows))
    if example:
        parts.append(f"```text\n{example['command']}\n```\n")
        parts.append(f"```{example.get('language', 'json')}\n{example['answer']}\n```\n")
    return parts


def _schema(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (f"`{name}`", _kind(each), "yes" if name in required else "", each.get("description", ""))
        for name, each in schema.get("properties", {}).items()
    ]
    return table(("field", "type", "required", "meaning"), rows)


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}" if "items" in schema else "list"
    kinds = schema.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


_TYPES = {"Counter": "counter", "Gauge": "gauge", "Histogram": "histogram", "Unknown": "untyped"}


def metric_names() -> dict[str, tuple[str, str]]:
    """Name → type and help of every family that serving/ makes, read from its source."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(SERVING.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            pair = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else ()
            texts = [text for each in pair[:2] if (text := _text(each, tree))]
            if len(texts) == 2 and re.match(r"(paellapy|nv)_", texts[0]):
                kind = _family(node, tree)
                name = texts[0] + ("_total" if kind == "counter" else "")
                found.setdefault(name, (kind, texts[1]))
    return found


def _text(node: ast.AST, tree: ast.Module) -> str:
    """A text, or the text that a name stands for."""
    if isinstance(node, ast.Name):
        for outer in ast.walk(tree):
            if isinstance(outer, ast.Assign) and any(getattr(each, "id", "") == node.id for each in outer.targets):
                return _text(outer.value, tree)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _family(node: ast.AST, tree: ast.Module) -> str:
    """A family's type: its own call's, or that of the table or loop it stands in."""
    if isinstance(node, ast.Call):
        return _TYPES.get(getattr(node.func, "id", "").removesuffix("MetricFamily"), "untyped")
    for outer in ast.walk(tree):
        if isinstance(outer, ast.For) and node in ast.walk(outer.iter):
            inner = (each for line in outer.body for each in ast.walk(line) if isinstance(each, ast.Call))
            names = [getattr(each.func, "id", "").removesuffix("MetricFamily") for each in inner]
            return next((_TYPES[name] for name in names if name in _TYPES), "untyped")
        if isinstance(outer, ast.AnnAssign) and outer.value is not None and node in ast.walk(outer.value):
            title = getattr(outer.target, "id", "").strip("_")
            return {"COUNTERS": "counter", "HISTOGRAMS": "histogram"}.get(title, "untyped")
    return "untyped"


def metrics() -> str:
    found = metric_names()
    parts = [
        "# Metrics\n",
        "`GET /metrics` answers in Prometheus' text format. Families of a model have the labels `model` and `version`. "
        "[Serving](../serving.md#metrics) says which of them to watch.\n",
    ]
    for title, prefix in (("Metrics of paellapy", "paellapy_"), ("Names of NVIDIA Triton", "nv_")):
        rows = [(f"`{n}`", kind, text) for n, (kind, text) in sorted(found.items()) if n.startswith(prefix)]
        parts += [f"## {title}\n", table(("metric", "type", "meaning"), rows)]
    return "\n".join(parts)
