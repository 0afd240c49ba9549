"""The Triton front end: arguments specialised as Triton does it, bound as Python does it, laid out as PTX has it."""

from __future__ import annotations

import enum
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import create_function_from_signature

from paellapy.instrument import cache
from paellapy.instrument.arguments import of_int, param_layout, triton_dtype
from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels.triton_arguments import TypeHandlers, launch_values
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.kernels.triton_source import TritonSource, target_capability
from paellapy.instrument.ptx import assemble
from paellapy.instrument.ptx.module import Module

HANDLERS = TypeHandlers()


@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def any_two(a, b):
    pass


@triton.jit(do_not_specialize=["a"], do_not_specialize_on_alignment=["b"])
def unspecialised(a, b):
    pass


@triton.jit
def annotated(a: tl.int64, b: tl.float32, c: tl.uint8, d: tl.int1):
    pass


@triton.jit
def defaults(x, n=16, *, scale=2.0, B: tl.constexpr = 64):
    tl.store(x + tl.arange(0, B), n * scale)


@triton.jit
def shadowing(k0, v0, v1, k1, _handlers, _options, _default0=3):
    pass


@triton.jit
def keyed(B: tl.constexpr):
    pass


@triton.jit
def store_all(out, a, b, c, d, e, f):
    tl.store(out, a + b + c + d + e + f)


def bind(fn: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    return TritonSource(fn).bind(HANDLERS, *args, **kwargs)


def specialised(fn: Any, *args: Any) -> tuple[list[Any], dict[Any, Any]]:
    """Types and attributes by our code."""
    source = TritonSource(fn)
    values, key, _ = source.bind(HANDLERS, *args)
    signature, _, attrs = source.specialise(values, key)
    return list(signature.values()), attrs


def specialised_by_triton(fn: Any, *args: Any) -> tuple[list[Any], dict[Any, Any]]:
    """Types and attributes by `triton.jit` on its launch path."""
    binder = create_function_from_signature(fn.signature, fn.params, BaseBackend)
    _, specialisation, _ = binder(*args)
    attrs: dict[Any, Any] = {}

    def collect(path: tuple[int, ...], attribute: Any) -> None:
        if isinstance(attribute, tuple):
            for i, item in enumerate(attribute):
                collect((*path, i), item)
        elif isinstance(attribute, str):
            attrs[path] = BaseBackend.parse_attr(attribute)

    for i, (_, attribute) in enumerate(specialisation):
        collect((i,), attribute)
    return [kind for kind, _ in specialisation], attrs


# -- specialisation

edges = st.sampled_from([0, 1, 16, 17, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)])
integers = st.one_of(edges, st.integers(-(2**63), 2**64 - 1), st.integers(-(2**59), 2**59).map(lambda v: 16 * v))
scalars = st.one_of(integers, st.booleans(), st.floats(), st.none())
arguments = st.recursive(scalars, lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple), max_leaves=6)


@given(integers)
def test_integers_are_specialised_as_triton_does_it(value: int) -> None:
    (kind, _), attrs = specialised(any_two, value, 0)
    wanted_kind, attribute = native_specialize_impl(BaseBackend, value, False, True, True)
    assert kind == wanted_kind
    assert attrs.get((0,), []) == (BaseBackend.parse_attr(attribute) if isinstance(attribute, str) else [])


@given(integers, integers)
def test_integers_with_equal_keys_are_the_same_kernel(a: int, b: int) -> None:
    ours = of_int(a)[1] == of_int(b)[1]
    triton_says = [native_specialize_impl(BaseBackend, v, False, True, True) for v in (a, b)]
    assert ours == (triton_says[0] == triton_says[1])


@given(arguments, arguments)
@settings(max_examples=200)
def test_any_arguments_are_specialised_as_triton_does_it(a: Any, b: Any) -> None:
    for fn in (any_two, unspecialised):
        assert specialised(fn, a, b) == specialised_by_triton(fn, a, b)


@given(integers, st.floats(width=32), st.integers(0, 255), st.booleans())
def test_annotated_parameters_have_their_type(a: int, b: float, c: int, d: bool) -> None:
    ours = specialised(annotated, a, b, c, d)
    assert ours[0] == ["i64", "fp32", "u8", "u1"]
    assert ours == specialised_by_triton(annotated, a, b, c, d)


class Level(enum.IntEnum):
    LOW = 16


class Pair(NamedTuple):
    x: Any
    y: Any


def test_subclasses_of_numbers_are_numbers() -> None:
    assert specialised(any_two, Level.LOW, np.float64(0.5)) == specialised(any_two, 16, 0.5)


def test_named_tuples_keep_their_names() -> None:
    (value, _), _, _ = bind(any_two, Pair("*fp32", 3), 0)
    assert isinstance(value, Pair)
    assert specialised(any_two, Pair(1, "*fp16"), 0)[0] == [("constexpr", "*fp16"), "i32"]


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, object(), [1], np.int32(4), np.bool_(True), "i128", "*fp99"])
def test_what_is_no_argument_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError):
        bind(any_two, value, 0)


def test_arrays_are_pointers_and_aligned_unless_said_otherwise() -> None:
    assert specialised(any_two, np.zeros(3, np.float16), "*i8:1") == (
        ["*fp16", "*i8"], {(0,): [["tt.divisibility", 16]], (1,): []}
    )  # fmt: skip


@pytest.mark.parametrize("name", ["float32", "torch.bfloat16", "uint8", "bool", "float8_e5m2", "fp32", "i64"])
def test_element_types_have_triton_names(name: str) -> None:
    assert f"*{triton_dtype(name)}" == specialised(any_two, f"*{triton_dtype(name)}", 0)[0][0]


def test_unknown_element_types_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"complex64.*float32"):
        triton_dtype(np.dtype(np.complex64))


# -- binding


def test_positions_keywords_and_defaults_bind_as_in_python() -> None:
    assert bind(defaults, "*fp32")[0] == (16, 16, 2.0, 64)
    assert bind(defaults, n=5, x="*fp32", B=32)[0] == (16, 5, 2.0, 32)
    values, _, options = bind(defaults, "*fp32", 7, scale=1.0, num_warps=8)
    assert (values, options) == ((16, 7, 1.0, 64), {"num_warps": 8})


def test_parameters_may_have_any_name() -> None:
    assert bind(shadowing, 10, 11, 12, 13, 14, 15)[0] == (10, 11, 12, 13, 14, 15, 3)


def test_constants_that_python_takes_for_equal_are_different_kernels() -> None:
    values = [1, True, 1.0, 0.0, -0.0, 0, False, None, "1", (1,), (True,), (1.0,), ((1,),), tl.constexpr(1)]
    keys = [bind(keyed, v)[1] for v in values]
    assert len(set(keys)) == len(values)
    assert bind(keyed, float("nan"))[1] == bind(keyed, float("nan"))[1]
    assert bind(keyed, tl.float32)[1] == bind(keyed, tl.float32)[1] != bind(keyed, tl.float16)[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda k: k("*fp32", "*fp32", B=64), r"'copy': missing a required argument: 'n'.*x, out, n, B"),
        (lambda k: k(), r"'copy': missing a required argument: 'x'.*x, out, n, B"),
        (lambda k: k("*fp32", "*fp32", 1, 64, 5), r"'copy': too many positional arguments.*x, out, n, B"),
        (lambda k: k("*fp32", "*fp32", 1, 64, x="*fp32"), r"'copy': multiple values for argument 'x'.*x, out, n, B"),
        (lambda k: k("*fp32", "*fp32", 1, 64, blocks=3), r"'copy'.*'blocks'.*x, out, n, B.*num_warps"),
        (lambda k: k("*fp32", "*fp32", object(), 64), r"'copy', argument 'n'.*object"),
        (lambda k: k("*fp32", "*fp32", np.int64(3), 64), r"'copy', argument 'n'.*int64.*item"),
        (lambda k: k("*fp32", "*fp32", 2**64, 64), r"'copy', argument 'n'.*64 bits"),
        (lambda k: k("*fp32", "*fp32", 1, [64]), r"'copy', argument 'B'.*constant"),
    ],
)
def test_wrong_calls_name_the_kernel_and_its_parameters(call: Callable[[Any], Any], message: str) -> None:
    kernel = TritonKernel(copy, None, "auto")
    with pytest.raises(ArgumentError, match=message):
        call(lambda *args, **kwargs: kernel.compile(*args, target="sm_80", **kwargs))


# -- options


def compiled(target: str = "sm_80", **options: Any) -> Any:
    return TritonKernel(copy, None, "auto").compile("*fp32", "*fp32", "i32", B=256, target=target, **options)


def test_launch_options_reach_the_compiler() -> None:
    assert [compiled(num_warps=w).source.threads for w in (1, 4, 8)] == [32, 128, 256]
    assert compiled(num_stages=5).source.metadata["num_stages"] == 5
    assert ".maxnreg 40" in compiled(maxnreg=40).ptx
    assert ".maxnreg" not in compiled().ptx
    assert compiled("sm_90", num_ctas=2).source.cluster == 2
    assert "--fmad=false" in compiled(enable_fp_fusion=False).source.ptxas_options
    assert "--fmad=false" not in compiled().source.ptxas_options


@pytest.mark.parametrize(
    "options",
    [
        {"num_warps": 3}, {"num_warps": 0}, {"num_warps": 64}, {"num_warps": "4"}, {"num_warps": [4]},
        {"num_stages": -1}, {"num_stages": 1.5}, {"num_ctas": 3}, {"maxnreg": 0}, {"maxnreg": 1000},
        {"enable_fp_fusion": "no"}, {"debug": 2},
    ],
)  # fmt: skip
def test_options_no_gpu_can_run_are_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=f"'copy': {name} must be"):
        compiled(**options)


def test_what_a_target_cannot_do_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match=r"'copy' does not compile for sm_80[^$]*num_ctas"):
        compiled(num_ctas=2)


@triton.jit
def broken(x, B: tl.constexpr):
    tl.static_assert(B > 64, "tiles of more than 64 only")
    tl.store(x, 1)


def test_compile_errors_show_the_line() -> None:
    with pytest.raises(CompileError, match=r"'broken' does not compile[^$]*static_assert[^$]*more than 64 only"):
        TritonKernel(broken, None, "auto").compile("*fp32", B=64, target="sm_80")


@pytest.mark.parametrize(("target", "capability"), [("sm_80", 80), ("sm_90a", 90), ("sm_100", 100), ("sm_120f", 120)])
def test_targets_have_capabilities(target: str, capability: int) -> None:
    assert target_capability(target) == capability


@pytest.mark.parametrize("target", ["hopper", "90", "sm_9", "compute_90", "sm_90b", ""])
def test_unknown_targets_are_refused(target: str) -> None:
    with pytest.raises(ArgumentError, match="sm_90"):
        target_capability(target)


# -- the parameter buffer


def places(layout: str) -> list[tuple[int, int]]:
    """Offset and size of every parameter of a `struct` format."""
    found, at = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", layout):
        size = struct.calcsize(f"<{count}{code}")
        if code != "x":
            found.append((at, size))
        at += size
    return found


def places_in_ptx(ptx: str) -> list[tuple[int, int]]:
    """Offset and size of every parameter the PTX declares: each is aligned to its own size."""
    found, at = [], 0
    for param in Module.parse(ptx).entry().params:
        size = next(int(t.text[2:]) // 8 for t in param if re.fullmatch(r"\.[usbf]\d+", t.text))
        at += -at % size
        found.append((at, size))
        at += size
    return found


FIELD = st.sampled_from(["i32", "i64", "u64", "fp32", "u1"])


@given(st.tuples(FIELD, FIELD, FIELD, FIELD, FIELD, FIELD))
@settings(max_examples=8, deadline=None)
def test_parameters_lie_where_the_ptx_has_them(kinds: tuple[str, ...]) -> None:
    kernel = TritonKernel(store_all, None, "auto")
    source = kernel.compile("*fp32", *kinds, target="sm_80").source
    assert places(source.param_format) == places_in_ptx(source.ptx)


@given(st.lists(st.sampled_from(["B", "h", "i", "Q", "f", "d", "12s@4", "3s@1", "16s@8"]), max_size=8))
def test_each_parameter_is_aligned_to_its_own_size(codes: list[str]) -> None:
    wanted, at = [], 0
    for code in codes:
        plain, _, alignment = code.partition("@")
        size = struct.calcsize(f"<{plain}")
        at += -at % int(alignment or size)
        wanted.append((at, size))
        at += size
    assert places(param_layout(codes)) == wanted


def test_constants_do_not_travel_and_tuples_are_flattened() -> None:
    signature = {"a": "*fp32", "b": "constexpr", "c": ("i32", ("constexpr", "fp32")), "d": "u1"}
    values = (16, 5, (7, (None, 0.5)), True)
    assert launch_values(signature, [], lambda descriptor, facts: None, values) == [16, 7, 0.5, True]


# -- caching


def test_a_specialisation_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(copy, None, "auto")
    first = kernel.compile("*fp32", "*fp32", 7, B=128, target="sm_80")
    monkeypatch.setattr(triton, "compile", None)
    assert kernel.compile("*fp32", "*fp32", 9, B=128, target="sm_80").source is first.source


def test_another_process_finds_the_machine_code_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))
    first = compiled()
    assert any(path.is_file() for path in tmp_path.rglob("*"))

    def never(*_: Any) -> Any:
        raise AssertionError("ptxas ran again")

    monkeypatch.setattr(assemble, "_run", never)
    again = compiled()  # a kernel object of its own: nothing is left in memory but Triton's own cache
    assert again.cubin == first.cubin
    monkeypatch.setattr(cache, "read", lambda _: None)
    with pytest.raises(AssertionError, match="ptxas ran again"):
        compiled()
