"""The Triton front end: arguments specialised as Triton does it, and kernels compiled for any target."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import create_function_from_signature

from paellapy.instrument import cache
from paellapy.instrument.arguments import of_int, triton_dtype
from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.kernels.triton_source import TritonSource, TypeHandlers, target_capability
from paellapy.instrument.ptx import compiled as compiled_module

pytestmark = [pytest.mark.quick, pytest.mark.versions]

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
    with failing(ArgumentError, field="dtype", given="complex64"):
        triton_dtype(np.dtype(np.complex64))


# -- compilation


def compiled(target: str = "sm_80", **options: Any) -> Any:
    return TritonKernel(copy, None, "auto").compile("*fp32", "*fp32", "i32", B=256, target=target, **options)


@triton.jit
def broken(x, B: tl.constexpr):
    tl.static_assert(B > 64, "tiles of more than 64 only")
    tl.store(x, 1)


def test_compile_errors_show_the_line() -> None:
    with failing(CompileError, kernel="broken", field="source") as raised:
        TritonKernel(broken, None, "auto").compile("*fp32", B=64, target="sm_80")
    assert 'tl.static_assert(B > 64, "tiles of more than 64 only")' in str(raised.value)


@pytest.mark.parametrize(("target", "capability"), [("sm_80", 80), ("sm_90a", 90), ("sm_100", 100), ("sm_120f", 120)])
def test_targets_have_capabilities(target: str, capability: int) -> None:
    assert target_capability(target) == capability


@pytest.mark.parametrize("target", ["hopper", "90", "sm_9", "compute_90", "sm_90b", ""])
def test_unknown_targets_are_refused(target: str) -> None:
    with failing(ArgumentError, field="target"):
        target_capability(target)


# -- caching


class RanAgain(Exception):
    pass


def never(*_: Any) -> Any:
    raise RanAgain


def test_a_specialisation_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = TritonKernel(copy, None, "auto")
    first = kernel.compile("*fp32", "*fp32", 7, B=128, target="sm_80")
    monkeypatch.setattr(triton, "compile", None)
    assert kernel.compile("*fp32", "*fp32", 9, B=128, target="sm_80").source is first.source


def test_another_process_finds_the_machine_code_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))
    first = compiled()
    assert any(path.is_file() for path in tmp_path.rglob("*"))
    monkeypatch.setattr(compiled_module, "_run", never)
    again = compiled()  # a kernel object of its own: nothing is left in memory but Triton's own cache
    assert again.cubin == first.cubin
    monkeypatch.setattr(cache, "read", lambda _: None)
    with pytest.raises(RanAgain):
        compiled()
