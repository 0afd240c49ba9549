"""Triton front end: from a `@triton.jit` function and arguments to plain PTX, without PyTorch and without a GPU.

Arguments are specialised by Triton's own rules (its native routine is called on the slow path); `triton.compile` makes
the PTX; our passes and `ptxas` follow in compiled.py. Because the passes run outside Triton's pipeline, Triton's cache
only ever holds the plain kernel.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import BaseBackend
from triton.compiler import ASTSource, CompilationError
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from paellapy.instrument.arguments import DescriptorKey, Handlers, PointerKey, param_layout
from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels.ranges import given_with_ranges, has_ranges, marking
from paellapy.instrument.kernels.triton_arguments import constant_key, generate_binder, struct_codes
from paellapy.instrument.kernels.triton_ptx import block_threads, exits_of, ptx_target, ptxas_options, triton_ptxas
from paellapy.instrument.kernels.triton_stages import Stage, Translated, text_of, translate
from paellapy.instrument.ptx.compiled import Draft, Source
from paellapy.instrument.triton_errors import also

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

    def misuse(self, handlers: Handlers, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """The error for a call that `bind` refused, in the kernel's own terms."""
        named = {n: v for n, v in kwargs.items() if n in self.arg_names}
        takes = f"it takes {', '.join(self.arg_names) or 'no arguments'}"
        try:
            bound = self.fn.signature.bind(*args, **named).arguments
        except TypeError as e:
            return f"kernel {self.name!r}: {e}; {takes}"
        for param in self.fn.params:
            try:
                value = bound.get(param.name)
                constant_key(value) if param.is_constexpr else (handlers.get(type(value)) or handlers.missing)(value)
            except ArgumentError as e:
                return f"kernel {self.name!r}, argument {param.name!r}: {e}"
        return f"kernel {self.name!r} cannot be called like this; {takes}"

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
                kind, attribute = native_specialize_impl(BaseBackend, stand_in, param.is_const, special, align)
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

        return replace(_source_of(self._translate(work, "ptx"), work), stage=stage)

    def _translate(self, work: _Work, last: Stage) -> Translated:
        variant = "ranges" if work.marked else ""
        return self._compiled(work, lambda source: translate(source, work.arch, work.options, last, variant))

    def _compiled(self, work: _Work, compile: Callable[[ASTSource], T]) -> T:
        """The result of a run of Triton's compiler; its errors name the kernel."""
        compiling.plain = True
        source = ASTSource(fn=self.fn, signature=work.signature, constexprs=work.constants, attrs=work.attrs)
        try:
            with marking(work.marked):
                return compile(source)
        except CompilationError as e:
            refused = CompileError(f"kernel {self.name!r} does not compile:\n{e}{_reason(e)}")
            raise also(refused, type(e), **e.__dict__) from e.__cause__
        except Exception as e:  # any error of Triton's passes; options that do not fit are a ValueError
            failed = CompileError(
                f"kernel {self.name!r} does not compile for sm_{work.arch} with {work.options}:\n{e}"
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
        raise ArgumentError(f"unknown target {target!r}; it must have the form 'sm_90'")
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
                "unset the variable; the virtual GPU needs no GPU either"
            )
        raise ArgumentError(
            f"pp.kernel takes a @triton.jit function or CUDA source, not {type(fn).__name__}; "
            "put @pp.kernel above @triton.jit, or pass source=… and name=…"
        )
    if fn.is_gluon():
        raise ArgumentError(
            f"{fn.__name__!r} is a Gluon kernel, but pp.kernel takes Triton kernels: on a real GPU, "
            "pp.instrument_torch() traces Gluon kernels that PyTorch code launches"
        )
    return fn, wrappers
