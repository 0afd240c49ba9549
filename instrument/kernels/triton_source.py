"""Triton front end: from a `@triton.jit` function and arguments to plain PTX, without PyTorch and without a GPU.

Arguments are specialised by Triton's own rules (its native routine is called on the slow path); `triton.compile` makes
the PTX; our passes and `ptxas` follow in compiled.py. Because the passes run outside Triton's pipeline, Triton's cache
only ever holds the plain kernel.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import triton
from triton import knobs
from triton import language as tl
from triton._C.libtriton import ir, native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, CompilationError, compiler
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from paellapy.instrument import cache
from paellapy.instrument.arguments import (
    SCALARS,
    STRUCT_CODES,
    Descriptor,
    DescriptorKey,
    Handler,
    Handlers,
    PointerKey,
    param_layout,
    triton_dtype,
)
from paellapy.instrument.cache import protect_triton
from paellapy.instrument.errors import ArgumentError, CompileError, also
from paellapy.instrument.kernels.ranges import given_with_ranges, has_ranges, marking
from paellapy.instrument.ptx.compiled import Draft, Source
from paellapy.instrument.ptx.descriptor import Exits

# --- Triton's PTX: its target, threads and exits, and how Triton calls `ptxas` for it ---------------------------------

TRITON_VERSION = tuple(int(re.sub(r"\D.*", "", part) or 0) for part in triton.__version__.split(".")[:2])


def ptx_target(ptx: str, arch: int) -> str:
    """The target that the PTX names, such as "sm_90a"."""
    found = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    return found[1] if found else f"sm_{arch}"


def block_threads(ptx: str) -> int:
    """The threads of a block if the PTX fixes them, else 0.

    >>> block_threads(".visible .entry add() .reqntid 128 { ret; }")
    128
    """
    found = re.search(r"\.reqntid\s+(\d+)", ptx)
    return int(found[1]) if found else 0


def exits_of(ptx: str) -> Exits:
    """How the end of a block is detected: Triton branches per block, never per thread.

    In a warp-specialised kernel, groups of warps exchange registers, or wait at counted barriers.
    """
    specialised = "setmaxnreg" in ptx or re.search(r"\bbar(rier)?\.sync(\.aligned)?\s+\d+\s*,\s*\d+", ptx)
    return "spare-barrier" if specialised else "barrier"


def ptxas_options(enable_fp_fusion: bool) -> tuple[str, ...]:
    """The options that Triton gives to `ptxas`."""
    flags = ["-lineinfo"]
    if not enable_fp_fusion:
        flags.append("--fmad=false")
    if TRITON_VERSION >= (3, 7):
        flags.append("--regAllocOptLevel=2")  # Triton's own setting since 3.7, because of a bug in ptxas 13
    return tuple(flags)


@functools.cache
def triton_ptxas(arch: int) -> str | None:
    """The path of the `ptxas` that Triton calls."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)


# --- arguments of Triton kernels: bound by code generated for the signature, and passed on as the PTX takes them ------

Binder = Callable[..., tuple[tuple[Any, ...], tuple[Any, ...], dict[str, Any]]]
_FLAGS = 1 if TRITON_VERSION < (3, 7) else 2  # of a descriptor in parts: NaN padding; since 3.7 rounding to tf32


def generate_binder(fn: JITFunction) -> tuple[Binder, Callable[..., dict[str, Any]]]:
    """`bind(handlers, *args, **kwargs)` → (values, key, launch options), and `named(*args, **kwargs)` → the arguments
    by name as they were given, both generated for this signature.

    They are generated because binding by `inspect` costs more than the launch itself. Our own names start with `_pp_`,
    so that no parameter hides them.
    """
    arguments, lines, values, keys = [], [], [], []
    scope: dict[str, Any] = {"_pp_simple": (int, bool, str, type(None)), "_pp_constant_key": constant_key}
    keyword_only = False
    for i, (name, param) in enumerate(fn.signature.parameters.items()):
        if param.kind is inspect.Parameter.VAR_POSITIONAL:
            arguments.append(f"*{name}")
            keyword_only = True
        else:
            if param.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
                arguments.append("*")
                keyword_only = True
            if param.default is inspect.Parameter.empty:
                arguments.append(name)
            else:
                scope[f"_pp_default{i}"] = param.default
                arguments.append(f"{name}=_pp_default{i}")
        if fn.params[i].is_constexpr:
            # 1 and True are equal, but not the same constant.
            values.append(name)
            simple = f"{name} if {name}.__class__ in _pp_simple else _pp_constant_key({name})"
            keys.append(f"({name}.__class__, {simple})")
        else:
            handler = f"(_pp_handlers.get({name}.__class__) or _pp_handlers.missing)"
            lines.append(f"    _pp_v{i}, _pp_k{i} = {handler}({name})")
            values.append(f"_pp_v{i}")
            keys.append(f"_pp_k{i}")
    body = "\n".join(lines)
    signature = ", ".join(["_pp_handlers", *arguments, "**_pp_options"])
    results = [f"({', '.join(items)}{',' if items else ''})" for items in (values, keys)]
    code = f"def bind({signature}):\n{body}\n    return {', '.join(results)}, _pp_options\n"
    pairs = ", ".join(f"{name!r}: {name}" for name in fn.signature.parameters)
    code += f"def named({', '.join([*arguments, '**_pp_options'])}):\n    return {{{pairs}}}\n"
    exec(code, scope)
    return scope["bind"], scope["named"]


def constant_key(value: Any) -> Any:
    """A constant as part of a key: values that Python considers equal (0.0 and -0.0, (1,) and (True,)) may differ."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, tuple):
        return tuple((v.__class__, constant_key(v)) for v in value)
    if isinstance(value, tl.constexpr):
        return value.value.__class__, constant_key(value.value)
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"a constant must be a number, string, tuple, type or function, not {value!r:.60}",
            field="constant", given=value,
        ) from None
    return value


class TypeHandlers(Handlers):
    """Arguments given as types, for compiling without arrays: "*fp32" is an aligned pointer, "*fp32:1" an unaligned
    one, "i32" and "fp32" are numbers. NumPy arrays stand for their type."""

    def __init__(self) -> None:
        super().__init__({**SCALARS, str: self._of_text}, self._find)

    @staticmethod
    def _of_text(text: str) -> tuple[Any, Any]:
        kind, _, alignment = text.partition(":")
        if kind.startswith("*"):
            return 16, PointerKey.of(triton_dtype(kind[1:]), alignment in ("", "16"))
        if kind in ("i32", "i64", "u64"):
            return {"i32": (2, 2), "i64": (1 << 40 | 1, 4), "u64": (1 << 63 | 1, 6)}[kind]
        if kind in ("fp32", "u1"):
            return (0.5, kind) if kind == "fp32" else (False, kind)
        raise ArgumentError(
            f"unknown argument type {text!r}; use '*fp32', 'i32', 'fp32' or similar", field="type", given=text
        )

    @staticmethod
    def _find(kind: type) -> Handler | None:
        def of_array(a: Any) -> tuple[Any, Any]:
            return 16, PointerKey.of(triton_dtype(a.dtype), True)

        return of_array if hasattr(kind, "dtype") and not issubclass(kind, np.generic) else None


def struct_codes(types: Sequence[Any], tiles: bool) -> list[str]:
    """The struct codes. `tiles`: descriptors are passed as the 128 bytes of a CUtensorMap; before sm_90 in parts."""
    codes: list[str] = []
    for kind in types:
        if isinstance(kind, (tuple, list)):
            codes += struct_codes(kind, tiles)
        elif kind.startswith("tensordesc"):
            rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
            codes += ["128s@64"] if tiles else ["Q", *"q" * (2 * rank), *"B" * _FLAGS]
            codes += [*"i" * rank, *"q" * rank]
        elif kind == "constexpr":
            continue
        elif kind.startswith("*"):
            codes.append("Q")
        elif kind in STRUCT_CODES:
            codes.append(STRUCT_CODES[kind])
        else:
            raise ArgumentError(
                f"kernel parameters of type {kind} are not supported: pass arrays, numbers, tuples or tensor "
                "descriptors", field="type", given=str(kind)
            )
    return codes


def launch_values(
    signature: dict[str, Any], tiles: Sequence[Any], tile: Callable[[Descriptor, Any], Any], values: Sequence[Any]
) -> list[Any]:
    """The values that are passed to the kernel: without constants, with tuples flattened and descriptors in parts.

    `tile` converts a descriptor, with the compiler's facts about it, to the form that the device's kernels take.
    """
    facts = iter(tiles)

    def walk(kind: Any, value: Any) -> list[Any]:
        if isinstance(kind, (tuple, list)):
            return [leaf for k, v in zip(kind, value, strict=True) for leaf in walk(k, v)]
        if isinstance(value, Descriptor):
            parts = [*value.shape, *value.strides]
            if tiles:
                return [tile(value, next(facts)), *parts]
            return [value.base, *parts, *(value.nan_padding, value.tf32)[:_FLAGS], *parts]
        return [] if kind == "constexpr" else [value]

    return [leaf for k, v in zip(signature.values(), values, strict=True) for leaf in walk(k, v)]


# --- runs Triton's compiler only as far as needed: to TTIR, which the virtual GPU evaluates, or to PTX ----------------
# `triton.compile` goes all the way to machine code. Ours comes from `ptxas` after the passes, so that last stage would
# run twice; and where only results are needed, all stages after the first are unnecessary. Results are kept on disk.

Stage = Literal["ttir", "ptx"]
# Facts about a kernel that a launcher needs, by the names of Triton's metadata, with defaults for missing ones.
_FACTS = {
    "name": "", "num_warps": 4, "num_stages": 3, "num_ctas": 1, "shared": 0, "global_scratch_size": 0,
    "global_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False, "tensordesc_meta": None,
}  # fmt: skip


_TMA_GATHER = re.compile(r"\btt\.descriptor_(?:gather|scatter)\b")


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
    # Triton's hash of a kernel leaves out its file, which the text names.
    file = source.fn.fn.__code__.co_filename
    what = file, source.hash(), str(target), parsed.hash(), str(environment)
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


T = TypeVar("T")

# Our own kernels are compiled plain even while torch_hook instruments all others; this thread then sets a flag here.
compiling = threading.local()


@dataclass(frozen=True, slots=True)
class _Array:
    """The attributes of an array that Triton's specialisation reads."""

    dtype: str
    aligned: bool

    def data_ptr(self) -> int:
        return 16 if self.aligned else 1


class TritonSource:
    """A `@triton.jit` function as a source of kernels."""

    def __init__(self, fn: JITFunction) -> None:
        self.fn = fn
        self.name: str = fn.__name__
        self.arg_names: list[str] = list(fn.arg_names)
        self.bind, self.named = generate_binder(fn)
        self._sources: dict[Any, Source] = {}

    def has_ranges(self, values: Sequence[Any]) -> bool:
        """Whether the kernel, or a function among its arguments, has ranges."""
        return self._has_ranges or given_with_ranges(values)

    @functools.cached_property
    def _has_ranges(self) -> bool:
        return has_ranges(self.fn)

    def source(
        self, values: Sequence[Any], key: tuple[Any, ...], options: dict[str, Any], target: str, marked: bool = False
    ) -> Source:
        """The plain kernel for one specialisation, compiled once; `marked`: with the markers of its ranges."""
        cache_key = (key, target, marked)
        if cache_key not in self._sources:
            self._sources[cache_key] = self._finished(self._specialised(values, key, options, target, marked))
        return self._sources[cache_key]

    def misuse(self, handlers: Handlers, args: Sequence[Any], kwargs: dict[str, Any]) -> ArgumentError:
        """The error for a call that `bind` refused, in the kernel's own terms. `argument` is the parameter's name."""
        named = {n: v for n, v in kwargs.items() if n in self.arg_names}
        takes = f"it takes {', '.join(self.arg_names) or 'no arguments'}"
        try:
            bound = self.fn.signature.bind(*args, **named).arguments
        except TypeError as e:
            found = re.search(r"'(\w+)'", str(e))
            return ArgumentError(
                f"kernel {self.name!r}: {e}; {takes}",
                kernel=self.name, field="arguments", argument=found[1] if found else None, limit=self.arg_names,
            )
        for param in self.fn.params:
            try:
                value = bound.get(param.name)
                constant_key(value) if param.is_constexpr else (handlers.get(type(value)) or handlers.missing)(value)
            except ArgumentError as e:
                text = f"kernel {self.name!r}, argument {param.name!r}: {e}"
                return ArgumentError(text, **e.__dict__, kernel=self.name, argument=param.name)
        return ArgumentError(
            f"kernel {self.name!r} cannot be called like this; {takes}", kernel=self.name, field="arguments"
        )

    def specialise(self, values: Sequence[Any], key: Sequence[Any]) -> tuple[dict[str, Any], dict[Any, Any], Any]:
        """Signature, constants and attributes as `triton.jit` would give them to its compiler."""
        types, attributes, plain = [], [], []
        for param, value, fact in zip(self.fn.params, values, key, strict=True):
            if param.is_constexpr:
                kind: Any = "constexpr"
                attribute: Any = None
            else:
                stand_in = _stand_in(value, fact)
                special, align = not param.do_not_specialize, not param.do_not_specialize_on_alignment
                kind, attribute = _native()(BaseBackend, stand_in, param.is_const, special, align)
                annotated = param.annotation_type
                if annotated:
                    if annotated == "u1" or annotated[:2] in ("fp", "bf") or not special:
                        kind, attribute = annotated, None
                    else:
                        kind = annotated
            types.append(kind)
            attributes.append(attribute if kind != "constexpr" else None)
            plain.append(value)
        signature = dict(zip(self.arg_names, types, strict=True))
        constants = {
            path: get_iterable_path(plain, path) for path in find_paths_if(types, lambda _, t: t == "constexpr")
        }
        marked = find_paths_if(attributes, lambda _, a: isinstance(a, str))
        attrs = {path: BaseBackend.parse_attr(get_iterable_path(attributes, path)) for path in marked}
        return signature, constants, attrs

    def draft(
        self, values: Sequence[Any], key: tuple[Any, ...], options: dict[str, Any], target: str, marked: bool = False
    ) -> Draft:
        """The kernel as TTIR, and a function that compiles the rest."""
        cache_key = (key, target, marked)
        if cache_key in self._sources:
            return Draft.of(self._sources[cache_key])
        work = self._specialised(values, key, options, target, marked)
        made = self._translate(work, "ttir")

        def finish() -> Source:
            if cache_key not in self._sources:
                self._sources[cache_key] = self._finished(work)
            return self._sources[cache_key]

        descriptors = made.ttir.partition("tt.func public")[2].partition("\n")[0].count("!tt.tensordesc")
        facts = {"signature": work.signature, "tiles": [None] * descriptors}
        return Draft(made.facts["name"], made.ttir, facts, finish)

    def _specialised(
        self, values: Sequence[Any], key: tuple[Any, ...], options: dict[str, Any], target: str, marked: bool
    ) -> _Work:
        try:
            signature, constants, attrs = self.specialise(values, key[: len(self.arg_names)])
        except (TypeError, OverflowError) as e:
            raise ArgumentError(f"kernel {self.name!r}: {e}") from None
        # Naming the default keeps Triton 3.9 from warning that 3.10 will change it.
        options = {"enable_fp_fusion": True, **options}
        # As in `triton.jit`: @triton.jit(debug=True) and TRITON_DEBUG=1 enable device_assert.
        options["debug"] = bool(options.get("debug", self.fn.debug) or knobs.runtime.debug)
        return _Work(signature, constants, attrs, options, target_capability(target), marked)

    def _finished(self, work: _Work) -> Source:
        def stage(name: str) -> str:
            return self._compiled(work, lambda source: text_of(source, work.arch, work.options, name))

        return replace(_source_of(self._translate(work, "ptx"), work), stage=stage, src=self._ast(work))

    def _ast(self, work: _Work) -> ASTSource:
        return ASTSource(fn=self.fn, signature=work.signature, constexprs=work.constants, attrs=work.attrs)

    def _translate(self, work: _Work, last: Stage) -> Translated:
        variant = "ranges" if work.marked else ""
        made = self._compiled(work, lambda source: translate(source, work.arch, work.options, last, variant))
        op = _TMA_GATHER.search(made.ttir)
        if op and 90 <= work.arch < 100:  # older parts have no TMA unit, and Triton uses plain accesses there
            raise CompileError(
                f"kernel {self.name!r} gathers or scatters rows through a tensor descriptor ({op[0]}), which needs a "
                f"GPU of sm_100 or newer; the target is sm_{work.arch}. Use tl.load or tl.store with addresses.",
                kernel=self.name, field="target", given=f"sm_{work.arch}", limit="sm_100", op=op[0],
            )
        return made

    def _compiled(self, work: _Work, compile: Callable[[ASTSource], T]) -> T:
        """The result of a run of Triton's compiler; its errors name the kernel."""
        compiling.plain = True
        try:
            with marking(work.marked):
                return compile(self._ast(work))
        except CompilationError as e:
            text = f"kernel {self.name!r} does not compile:\n{e}{_reason(e)}"
            refused = CompileError(text, kernel=self.name, field="source")
            raise also(refused, type(e), **e.__dict__) from e.__cause__
        except Exception as e:  # any error of Triton's passes; options that do not fit are a ValueError
            failed = CompileError(
                f"kernel {self.name!r} does not compile for sm_{work.arch} with {work.options}:\n{e}",
                kernel=self.name, field="options", given=work.options, limit=work.arch,
            )
            raise (also(failed, ValueError) if isinstance(e, ValueError) else failed) from e
        finally:
            compiling.plain = False


@dataclass(frozen=True, slots=True)
class _Work:
    """One specialisation, in the form that Triton's compiler takes."""

    signature: dict[str, Any]
    constants: dict[Any, Any]
    attrs: Any
    options: dict[str, Any]
    arch: int
    marked: bool = False


def target_capability(target: str) -> int:
    """ "sm_90" → 90."""
    found = re.fullmatch(r"sm_(\d{2,3})[af]?", target)
    if found is None:
        raise ArgumentError(f"unknown target {target!r}; it must have the form 'sm_90'", field="target", given=target)
    return int(found[1])


def _source_of(made: Translated, work: _Work) -> Source:
    meta, ptx = made.facts, made.ptx
    tiles = list(meta["tensordesc_meta"] or ())
    # the last two: global_scratch, profile_scratch
    codes = [*struct_codes(list(work.signature.values()), bool(tiles)), "Q", "Q"]
    return Source(
        name=meta["name"],
        ptx=ptx,
        arch=ptx_target(ptx, work.arch),
        param_format=param_layout(codes),
        threads=block_threads(ptx) or 32 * meta["num_warps"],
        dynamic_shared_bytes=meta["shared"],
        cluster=meta["num_ctas"],
        exits=exits_of(ptx),
        ptxas_options=ptxas_options(work.options["enable_fp_fusion"]),
        ptxas_path=triton_ptxas(work.arch),
        scratch_bytes=meta["global_scratch_size"],
        scratch_align=meta["global_scratch_align"],
        cooperative=bool(meta["launch_cooperative_grid"]),
        dependent=bool(meta["launch_pdl"]),
        ttir=made.ttir,
        metadata={
            "num_warps": meta["num_warps"],
            "num_stages": meta["num_stages"],
            "signature": work.signature,
            "tiles": tiles,
            "label": _label(meta, work.signature, work.constants),
        },
    )


def _label(meta: dict[str, Any], signature: dict[str, Any], constants: dict[Any, Any]) -> str:
    """A name for a specialisation, from the facts that decide a block's duration; equal under every version of Triton.
    """
    types = [t for t in signature.values() if isinstance(t, str) and t.startswith("*")]
    values = [repr(v) for path, v in sorted(constants.items()) if v is not None and v != 1]
    return f"{meta['name']}[{','.join(types)}][{','.join(values)}]x{meta['num_warps']}"


def _reason(failure: BaseException) -> str:
    """The error in a function that the kernel calls, which Triton gives as a cause only."""
    first = failure
    while isinstance(first.__cause__, CompilationError):
        first = first.__cause__
    return "" if first is failure else f"\n{first}"


@functools.cache
def _native() -> Callable[..., tuple[Any, Any]]:
    """Triton's native routine. Before Triton 3.8 its first call imports PyTorch if it is installed, to know its tensors
    by their class: two seconds of CPU time in each process. It knows them by their attributes, too.
    """
    if TRITON_VERSION < (3, 8) and "torch" not in sys.modules:
        importlib.import_module("triton.experimental.gluon.nvidia.hopper")  # it would, while PyTorch is hidden
        sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            native_specialize_impl(BaseBackend, 1, False, True, True)
        finally:
            del sys.modules["torch"]
    return native_specialize_impl  # type: ignore[no-any-return]


def _stand_in(value: Any, fact: Any) -> Any:
    if isinstance(fact, PointerKey):
        return _Array(fact.dtype, fact.aligned)
    if isinstance(fact, DescriptorKey):
        # Triton's own class, because its specialisation checks for it; created without its checks, which need a tensor.
        stand_in = object.__new__(TensorDescriptor)
        stand_in.base, stand_in.block_shape = _Array(fact.dtype, True), list(fact.block_shape)
        stand_in.shape, stand_in.strides = list(value.shape), list(value.strides)
        stand_in.padding, stand_in.round_f32_to_tf32 = "zero", False
        return stand_in
    if isinstance(value, tuple) and isinstance(fact, tuple):
        items = [_stand_in(v, f) for v, f in zip(value, fact, strict=True)]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def unwrap(fn: Any) -> tuple[JITFunction, list[Any]]:
    """The `JITFunction` inside `@triton.autotune` and `@triton.heuristics`, and these wrappers, outermost first."""
    wrappers: list[Any] = []
    while issubclass(type(fn), (Autotuner, Heuristics)):  # isinstance would also take kernels of ours
        wrappers.append(fn)
        fn = fn.fn
    if not issubclass(type(fn), JITFunction):
        if type(fn).__name__ == "InterpretedFunction":
            raise ArgumentError(
                f"TRITON_INTERPRET=1 gives {fn.__name__!r} to Triton's interpreter, so pp.kernel cannot compile it: "
                "unset the variable; the virtual GPU needs no GPU either", kernel=fn.__name__, field="TRITON_INTERPRET"
            )
        raise ArgumentError(
            f"pp.kernel takes a @triton.jit function or CUDA source, not {type(fn).__name__}; "
            "put @pp.kernel above @triton.jit, or pass source=… and name=…", field="fn", given=type(fn).__name__
        )
    if fn.is_gluon():
        raise ArgumentError(
            f"{fn.__name__!r} is a Gluon kernel, but pp.kernel takes Triton kernels: on a real GPU, "
            "pp.instrument_torch() traces Gluon kernels that PyTorch code launches",
            kernel=fn.__name__, field="fn", given="gluon",
        )
    return fn, wrappers
