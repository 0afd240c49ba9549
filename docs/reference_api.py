"""Writes one page per public symbol into docs/reference/api/: signature, docstring, members. Called by conf.py.

The symbols are those of paellapy/__init__.pyi. Docstrings are Markdown, and so are these pages; the directives are
Sphinx's own for Python, so that the index, the search and links such as {py:class}`paellapy.Engine` work.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paellapy
from paellapy.scheduler.sim.results import COLUMNS, Results

API = Path(__file__).parent / "reference" / "api"
GROUPS: dict[str, tuple[str, ...]] = {
    "Kernels and traces": (
        "kernel", "trace", "Trace", "Kernel", "TritonKernel", "CudaKernel", "counts", "Counts", "instrument_torch",
        "range", "range_begin", "range_end", "PreemptibleLaunch", "Turnaround", "Flag",
        "rank_configs", "RankedConfig",
    ),
    "Devices and arrays": ("Device", "devices", "Array", "array", "empty", "empty_like", "zeros", "Stream", "stream"),
    "Models and engines": (
        "Engine", "Model", "Pipeline", "TensorSpec", "ModelProfile", "save_profiles", "load_profiles", "Tuning",
    ),
    "Language models": ("LanguageModel", "Generation", "Piece"),
    "Policies": ("policy", "Policy", "policy_names", "Where", "Tenant", "tune", "Tuned"),
    "Simulation": (
        "simulate", "Results", "simulate_cluster", "Poisson", "Lognormal", "ClosedLoop", "TraceWorkload", "Background",
        "training_profiles", "Chats", "ChatTrace", "language_profile", "LanguageProfile", "Failure", "Straggler",
    ),
    "Serving": ("serve",),
    "Pictures": ("compare", "live", "viz", "recordings"),
}  # fmt: skip
ERRORS, REST = "Errors", "More"
# Members that other rooms of the package call: no promise to users, so not in the reference.
INNER: dict[str, frozenset[str]] = {
    "Engine": frozenset({"sm_totals", "loaded_rows", "count", "on_fault"}),
    "Trace": frozenset({"fill"}),
    "Kernel": frozenset({"prepare_preemptible"}),
    "TritonKernel": frozenset({"prepare_preemptible"}),
    "CudaKernel": frozenset({"prepare_preemptible"}),
    "LanguageModel": frozenset({"pages", "programs"}),
    "Model": frozenset({"preserved", "place", "weight_parts", "place_over", "functions"}),
    "Pipeline": frozenset({"made", "reads", "functions"}),
    "Device": frozenset(
        {"not_in_capture", "prepare", "prepare_draft", "begin_trace", "read_trace", "end_trace", "range_events", "tile",
         "to_device_ns", "host_ns"}
    ),
    "Policy": frozenset({"plain", "timeless", "facts"}),
    "Results": frozenset({"request_columns", "occupancy_columns", "limit_ms", "jobs_of", "part_of_gpu"}),
}  # fmt: skip
_WIDTH = 100


def groups() -> dict[str, list[str]]:
    """Every public name under a title; errors, and names nobody has sorted yet, under titles of their own."""
    found = {title: [name for name in names if name in paellapy.__all__] for title, names in GROUPS.items()}
    known = {name for names in found.values() for name in names}
    rest = [name for name in paellapy.__all__ if name not in known]
    errors = [name for name in rest if _is_error(getattr(paellapy, name))]
    found[REST], found[ERRORS] = [name for name in rest if name not in errors], errors
    return {title: names for title, names in found.items() if names}


def write(folder: Path = API) -> None:
    """The pages, and index.md with a table for each group. Unchanged files keep their time, so rebuilding is quick."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"index.md": _index()} | {f"{name}.md": page(name) for name in paellapy.__all__}
    for old in folder.glob("*.md"):
        if old.name not in pages:
            old.unlink()
    for name, text in pages.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def page(name: str) -> str:
    found = getattr(paellapy, name)
    columns = _columns() if found is Results else ""
    return f"# `pp.{name}`\n\n" + "\n".join(_described(found, name)) + "\n" + columns


def _columns() -> str:
    """The tables of results, with every column."""
    parts = ["A number that does not exist is NaN: empty in CSV, null in JSON.\n"]
    for what, columns in COLUMNS.items():
        parts += [f'## `"{what}"`\n', "| column | unit | meaning |\n|---|---|---|"]
        parts += ["\n".join(f"| `{name}` | {unit} | {meaning} |" for name, (unit, meaning) in columns.items()) + "\n"]
    return "\n".join(parts)


def _index() -> str:
    lines = ["# Python", "", "Everything that `import paellapy as pp` offers. Each name has a page.", ""]
    for title, names in groups().items():
        lines += [f"## {title}", "", "| name | |", "|---|---|"]
        lines += [f"| [`pp.{name}`]({name}.md) | {_cell(getattr(paellapy, name))} |" for name in names]
        lines.append("")
    pages = "\n".join(name for names in groups().values() for name in names)
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", pages, "```", ""])


def _cell(found: Any) -> str:
    return _first_sentence(found).replace("|", "\\|")


def _first_sentence(found: Any) -> str:
    text = " ".join((inspect.getdoc(found) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0].rstrip(":")


def _described(found: Any, name: str) -> Iterator[str]:
    if isinstance(found, types.ModuleType):
        yield from _module(found, name)
    elif inspect.isclass(found):
        yield from _class(found, name)
    else:
        yield from _directive("function", [name + _signature(found)], _docstring(found), ":module: paellapy")


def _module(module: types.ModuleType, name: str) -> Iterator[str]:
    yield from _directive("module", [f"paellapy.{name}"], "")
    yield _docstring(module) + "\n"
    for each in sorted(module.__all__):
        found = getattr(module, each)
        if each in paellapy.__all__:
            yield f"- [`pp.{each}`]({each}.md)\n"
        elif inspect.isroutine(found):
            called = f"{name}.{each}{_signature(found)}"
            yield from _directive("function", [called], _docstring(found), ":module: paellapy")


def _class(found: type, name: str) -> Iterator[str]:
    kind = "exception" if _is_error(found) else "class"
    called = name if kind == "exception" or inspect.isabstract(found) else name + _signature(found)
    members = "\n".join(line for member in _members(found) for line in member)
    bases = [base.__name__ for base in found.__bases__ if base.__name__ in paellapy.__all__]
    above = f"A kind of {', '.join(f'{{py:class}}`~paellapy.{base}`' for base in bases)}.\n\n" if bases else ""
    made = found.__dict__.get("__init__")
    options = _docstring(made) if made is not None and (made.__doc__ or "").strip() else ""
    if options.startswith("Initialize self"):  # Python's own
        options = ""
    parts = "\n\n".join(filter(None, (_docstring(found), options, above + members)))
    yield from _directive(kind, [called], parts, ":module: paellapy")


def _members(owner: type) -> Iterator[list[str]]:
    """Public methods, properties and fields that the class or one of its bases here defines."""
    if _is_error(owner):
        return
    fields = {each.name: each for each in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
    seen = set()
    for base in owner.__mro__:
        if not base.__module__.startswith("paellapy"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen or name in INNER.get(owner.__name__, ()):
                continue
            seen.add(name)
            if name not in fields and (lines := list(_member(owner, name, value))):
                yield lines


def _member(owner: type, name: str, value: Any) -> Iterator[str]:
    found = getattr(owner, name, None)
    if isinstance(value, property | functools.cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        text = _docstring(getter)
        kind = inspect.signature(getter).return_annotation
        if text:
            shown = f":type: {_annotation(kind)}" if kind is not inspect.Signature.empty else ""
            yield from _directive("property", [name], text, shown, fence="````")
    elif inspect.isroutine(found) and (text := _docstring(found)):
        plain = isinstance(value, staticmethod | classmethod) or inspect.ismethod(found)
        signature = _signature(found, bound=not plain)
        option = ":classmethod:" if isinstance(value, classmethod) else ""
        option = ":staticmethod:" if isinstance(value, staticmethod) else option
        yield from _directive("method", [name + signature], text, option, fence="````")


def _directive(kind: str, heads: list[str], text: str, *options: str, fence: str = "`````") -> Iterator[str]:
    yield f"{fence}{{py:{kind}}} " + "\n".join(heads)
    yield from (option for option in options if option)
    if text.strip():
        yield ""
        yield text.rstrip()
    yield fence + "\n"


def _docstring(found: Any) -> str:
    """As Markdown: examples of doctest in fences of their own."""
    text = inspect.getdoc(found) or ""
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not inside:
            out += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)


def _signature(found: Any, bound: bool = False) -> str:
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return "()"
    parameters = list(signature.parameters.values())
    if bound and parameters:  # self; a function that a class above lends has another name for it
        parameters = parameters[1:]
    shown = [each.replace(annotation=_as_text(each.annotation), default=_default(each.default)) for each in parameters]
    returns = signature.return_annotation
    if inspect.isclass(found):
        returns = inspect.Signature.empty
    text = str(signature.replace(parameters=shown, return_annotation=_as_text(returns)))
    return re.sub(r"'([^']*)'", r"\1", text) if "Literal" not in text else text.replace('"', "")


class _Raw:
    """Prints as the text it is given."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _as_text(annotation: Any) -> Any:
    return annotation if annotation is inspect.Signature.empty else _Raw(_annotation(annotation))


def _annotation(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text).replace("NoneType", "None")


def _default(default: Any) -> Any:
    if default is inspect.Parameter.empty or default is None or isinstance(default, str | int | float | bool | tuple):
        return _Raw(repr(default).replace("'", '"')) if isinstance(default, str) else default
    return _Raw("…")


def _is_error(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, BaseException)
