"""Arguments and options of Triton kernels: bound as Python does it, laid out as PTX has it, or refused."""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_device import StandInDevice

import paellapy as pp
from paellapy.instrument.arguments import param_layout, param_offsets
from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.kernels.triton_source import TritonSource, TypeHandlers, launch_values
from paellapy.instrument.ptx.module import Module

pytestmark = pytest.mark.versions

HANDLERS = TypeHandlers()


@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


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
    ("args", "kwargs", "facts"),
    [
        (("*fp32", "*fp32"), {"B": 64}, {"field": "arguments", "argument": "n", "limit": ["x", "out", "n", "B"]}),
        ((), {}, {"field": "arguments", "argument": "x"}),
        (("*fp32", "*fp32", 1, 64, 5), {}, {"field": "arguments", "argument": None}),
        (("*fp32", "*fp32", 1, 64), {"x": "*fp32"}, {"field": "arguments", "argument": "x"}),
        (("*fp32", "*fp32", 1, 64), {"blocks": 3}, {"field": "blocks", "given": 3, "limit": ("x", "out", "n", "B")}),
        (("*fp32", "*fp32", object(), 64), {}, {"argument": "n", "given": "object"}),
        (("*fp32", "*fp32", np.int64(3), 64), {}, {"argument": "n", "given": "int64"}),
        (("*fp32", "*fp32", 2**64, 64), {}, {"argument": "n", "given": 2**64, "limit": 64}),
        (("*fp32", "*fp32", 1, [64]), {}, {"argument": "B", "field": "constant", "given": [64]}),
    ],
)
def test_wrong_calls_name_the_kernel_and_its_parameters(
    args: tuple[Any, ...], kwargs: dict[str, Any], facts: dict[str, Any]
) -> None:
    with failing(ArgumentError, kernel="copy", **facts):
        TritonKernel(copy, None, "auto").compile(*args, target="sm_80", **kwargs)


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


@given(st.lists(st.sampled_from(["B", "h", "i", "Q", "f", "d", "12s@4", "3s@1", "16s@8", "128s@64"]), max_size=8))
def test_each_parameter_is_aligned_to_its_own_size(codes: list[str]) -> None:
    wanted, at = [], 0
    for code in codes:
        plain, _, alignment = code.partition("@")
        size = struct.calcsize(f"<{plain}")
        at += -at % int(alignment or size)
        wanted.append((at, size))
        at += size
    assert places(param_layout(codes)) == wanted
    assert param_offsets(param_layout(codes)) == [offset for offset, _ in wanted]


def test_constants_do_not_travel_and_tuples_are_flattened() -> None:
    signature = {"a": "*fp32", "b": "constexpr", "c": ("i32", ("constexpr", "fp32")), "d": "u1"}
    values = (16, 5, (7, (None, 0.5)), True)
    assert launch_values(signature, [], lambda descriptor, facts: None, values) == [16, 7, 0.5, True]


@triton.jit
def annotated(out, a: tl.bfloat16, b: tl.float16, c: tl.int8, d: tl.uint64, e: tl.int1, f: tl.float64):
    tl.store(out, a + b + c + d.to(tl.float32) + e + f)


def test_scalars_of_annotated_types_are_packed_as_the_kernel_takes_them() -> None:
    with StandInDevice.make() as device:
        made = pp.kernel(annotated)
        made[(1,)]("*fp32", 1.0 + 2**-7, 0.5, -3, 2**63 + 1, True, 1 / 3)
        values = device.launches[0].values
        source = made.compile("*fp32", 1.0, 0.5, -3, 2**63 + 1, True, 1 / 3, target="sm_90").source
    assert values[1] == 0x3F81
    packed = struct.pack(source.param_format, *values, 0, 0)
    assert struct.unpack(source.param_format, packed)[1:7] == (0x3F81, 0.5, -3, 2**63 + 1, 1, 1 / 3)
    assert re.search(r"\.param \.align 2 \.b8 annotated_param_1\[2\]|\.param \.[ub]16 annotated_param_1\b", source.ptx)


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
    assert '"cuda:80"' in compiled("sm_90", arch="sm80").asm["ttgir"]
    assert '"cuda:90"' in compiled("sm_90").asm["ttgir"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_warps": 3}, {"num_warps": 0}, {"num_warps": 64}, {"num_warps": "4"}, {"num_warps": [4]},
        {"num_stages": -1}, {"num_stages": 1.5}, {"num_ctas": 3}, {"maxnreg": 0}, {"maxnreg": 1000},
        {"enable_fp_fusion": "no"}, {"debug": 2}, {"arch": 90}, {"arch": "gfx942"},
    ],
)  # fmt: skip
def test_options_no_gpu_can_run_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with failing(ArgumentError, kernel="copy", field=name, given=value):
        compiled(**options)


def test_a_wrong_number_of_warps_is_the_error_that_triton_raises() -> None:
    with failing(AssertionError, kernel="copy", field="num_warps", given=3):
        compiled(num_warps=3)


def test_options_that_do_not_fit_are_the_error_that_triton_raises() -> None:
    with failing(ValueError, kernel="copy", field="options", limit=80) as found:
        compiled(num_ctas=2)
    assert isinstance(found.value, CompileError)
