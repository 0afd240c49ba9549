"""Runs Triton's compiler only as far as needed: to TTIR, which the virtual GPU evaluates, or to PTX.

`triton.compile` goes all the way to machine code. Ours comes from `ptxas` after the passes, so that last stage would
run twice; and where only results are needed, all stages after the first are unnecessary. Results are kept on disk.
"""

from __future__ import annotations

import atexit
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler

from paellapy.instrument import cache
from paellapy.instrument.library_caches import protect_triton

Stage = Literal["ttir", "ptx"]
# Facts about a kernel that a launcher needs, by the names of Triton's metadata, with defaults for missing ones.
_FACTS = {
    "name": "", "num_warps": 4, "num_stages": 3, "num_ctas": 1, "shared": 0, "global_scratch_size": 0,
    "global_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Translated:
    """A kernel as text; `ptx` and most facts exist only if the compiler went that far."""

    ttir: str
    ptx: str
    facts: dict[str, Any]


def translate(source: Any, arch: int, options: dict[str, Any], last: Stage, variant: str = "") -> Translated:
    """Runs the stages up to `last` on an `ASTSource`, or takes the result of an earlier run from disk.

    `variant` distinguishes results that differ although source and options are equal.
    """
    target = GPUTarget("cuda", arch, 32)
    if _wanted_by_others(options) and not variant:
        return _by_triton(source, target, options)
    backend = compiler.make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    environment = sorted(compiler.get_cache_invalidating_env_vars().items())
    what = source.hash(), str(target), parsed.hash(), str(environment)
    work = cache.digest("triton", installed(), *what, variant)
    key = cache.digest(work, last)
    if stored := cache.read(key):
        return Translated(**json.loads(stored))
    stages = _begun.pop(work, None) or _run(source, target, backend, parsed)
    made = next(made for stage, made in stages if stage == last)
    cache.write(key, json.dumps(asdict(made)).encode())
    if last == "ttir":
        _begun[work] = stages
        while len(_begun) > _MOST_BEGUN:
            _begun.pop(next(iter(_begun)), None)
    return made


def text_of(source: Any, arch: int, options: dict[str, Any], stage: str) -> str:
    """The kernel after a stage that is not kept: compiled again up to there."""
    target = GPUTarget("cuda", arch, 32)
    if _wanted_by_others(options):
        protect_triton()
        return str(triton.compile(source, target=target, options=options).asm[stage])
    backend = compiler.make_backend(target)
    parsed = backend.parse_options({**options, **source.parse_options()})
    return next(text for name, text, _ in _stages(source, target, backend, parsed, (stage,)) if name == stage)


@functools.cache
def installed() -> str:
    """Identifies this installation of Triton.

    Triton's own key is a hash of its library of several hundred megabytes, which takes a second or two.
    """
    root = Path(triton.__file__).parent
    files = [*(root / "_C").glob("libtriton*"), *(f for d in ("compiler", "backends", "language", "runtime")
                                                   for f in (root / d).rglob("*.py"))]  # fmt: skip
    facts = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(files)]
    return f"{triton.__version__} {facts}"


def _wanted_by_others(options: dict[str, Any]) -> bool:
    """Whether intermediate results are to be dumped or overridden, which only `triton.compile` can do."""
    asked = knobs.compilation
    return bool(asked.override or asked.dump_ir or asked.always_compile or asked.listener or options.get("ir_override"))


def _by_triton(source: Any, target: GPUTarget, options: dict[str, Any]) -> Translated:
    protect_triton()
    built = triton.compile(source, target=target, options=options)
    return Translated(built.asm["ttir"], built.asm["ptx"], _facts(built.metadata._asdict()))


# Kernels compiled as far as TTIR: the virtual GPU evaluates it, and requests the rest when it places the blocks.
_begun: dict[str, Iterator[tuple[str, Translated]]] = {}
atexit.register(_begun.clear)  # Triton's library prints a list of its objects that are still there at the end
_MOST_BEGUN = 32


def _run(source: Any, target: GPUTarget, backend: Any, options: Any) -> Iterator[tuple[str, Translated]]:
    """Runs the stages of Triton's compiler, and yields the kernel after each stage that is kept."""
    texts = {"ttir": "", "ptx": ""}
    for stage, text, facts in _stages(source, target, backend, options, tuple(texts)):
        texts[stage] = text
        yield stage, Translated(texts["ttir"], texts["ptx"], facts)


def _stages(
    source: Any, target: GPUTarget, backend: Any, options: Any, wanted: tuple[str, ...]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Runs one stage after the other; yields the text and the facts after those that are wanted."""
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata: dict[str, Any] = {"target": target, **options.__dict__, "name": source.name}
    for stage, run in stages.items():
        module = run(module, metadata)
        if stage in wanted:
            yield stage, str(module), _facts(metadata)


def _facts(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: metadata.get(name, default) for name, default in _FACTS.items()}
