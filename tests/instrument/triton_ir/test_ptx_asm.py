"""PTX that kernels write by hand, against plain arithmetic; forms that are not evaluated are refused by name."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

import paellapy as pp
from paellapy.instrument.errors import LaunchError
from paellapy.instrument.triton_ir.parse import unescaped
from paellapy.instrument.triton_ir.ptx_asm import Assembly, UnknownPtx

INT32 = st.integers(-(2**31), 2**31 - 1)


@pytest.fixture(autouse=True)
def device() -> Any:
    with pp.Device("virtual:h200") as opened, np.errstate(all="ignore"):
        yield opened


def of(text: str, constraints: str, *values: Any) -> Any:
    """The first result of a piece of PTX over numbers, as its bits."""
    inputs = [np.array([v]).view(f"u{v.itemsize}") for v in values]
    return Assembly.of(text, constraints).run(*inputs)[0]


# ---- text ------------------------------------------------------------------------------------------------------------


@triton.jit
def in_lines(x, out):
    i = tl.arange(0, 16)
    v = tl.inline_asm_elementwise(
        """
        {   // adds one; then
            .reg .b32 t;
            add.s32 t, $1, 1;  /* two
                                  lines */
            mov.b32\t$0, t;
        }
        """,
        "=r,r", [tl.load(x + i)], tl.int32, True, 1,
    )  # fmt: skip
    tl.store(out + i, v)


def test_ptx_of_several_lines_with_comments():
    x, out = np.arange(16, dtype=np.int32), np.zeros(16, np.int32)
    pp.kernel(in_lines)[1,](x, out)
    assert out.tolist() == list(range(1, 17))


@triton.jit(debug=True)
def says(x):
    tl.device_assert(tl.load(x) == 0, 'not "zero"\nbut more')


def test_messages_keep_their_lines_and_quotation_marks():
    with failing(LaunchError, kernel="says", given='not "zero"\nbut more'):
        pp.kernel(says)[1,](np.ones(1, np.float32))


@pytest.mark.parametrize(("written", "meant"), [
    (r"a\0Ab\09c", "a\nb\tc"), (r"\22x\22", '"x"'), (r"\\0A", r"\0A"), (r"\n\t", "\n\t"), ("plain", "plain"),
])  # fmt: skip
def test_escapes_of_mlir(written: str, meant: str):
    assert unescaped(written) == meant


# ---- integers --------------------------------------------------------------------------------------------------------


@given(INT32, INT32.filter(bool))
def test_signed_division_truncates(a: int, b: int):
    if (a, b) == (-(2**31), -1):
        return
    q = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    for name, wanted in (("div", q), ("rem", a - q * b)):
        found = of(f"{name}.s32 $0, $1, $2;", "=r,r,r", np.int32(a), np.int32(b))
        assert found.view(np.int32)[0] == wanted, name


@given(INT32, INT32, st.integers(-(2**62), 2**62))
def test_wide_products_add_at_twice_the_width(a: int, b: int, c: int):
    found = of("mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", np.int32(a), np.int32(b), np.int64(c))
    assert found.view(np.int64)[0] == (a * b + c + 2**63) % 2**64 - 2**63


@given(INT32)
def test_a_short_signed_result_fills_its_register(a: int):
    found = of("cvt.s8.s32 $0, $1;", "=r,r", np.int32(a))
    assert found.view(np.int32)[0] == (a + 128) % 256 - 128
    clamped = of("cvt.sat.s8.s32 $0, $1;", "=r,r", np.int32(a))
    assert clamped.view(np.int32)[0] == max(-128, min(127, a))


# ---- floats ----------------------------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -2.5, 0.5, 1.5, 2.5, -0.5, math.nan, math.inf, -math.inf, 3e38]


@pytest.mark.parametrize(("mode", "wanted"), [
    ("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil),
])  # fmt: skip
def test_floats_become_whole_floats(mode: str, wanted: Any):
    for v in map(np.float32, [*SPECIAL, 1e9 + 0.5, -7.499]):
        found = of(f"cvt.{mode}.f32.f32 $0, $1;", "=f,f", v).view(np.float32)[0]
        np.testing.assert_array_equal(found, wanted(v))


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_with_nan_are_false_or_with_a_u_true(name: str):
    plain = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[name]
    for a in SPECIAL:
        for b in SPECIAL:
            unordered = math.isnan(a) or math.isnan(b)
            holds = bool(eval(f"a {plain} b", {"a": a, "b": b}))
            for suffix, wanted in (("", holds and not unordered), ("u", holds or unordered)):
                text = f"{{ .reg .pred p; setp.{name}{suffix}.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }}"
                assert of(text, "=r,f,f", np.float32(a), np.float32(b))[0] == wanted, (text, a, b)


def test_predicates_are_combined():
    text = """{ .reg .pred p, q, r; setp.gt.s32 p, $1, 2; setp.lt.s32 q, $1, 5; and.pred r, p, q; not.pred q, r;
                selp.b32 $0, 1, 0, r; @q mov.b32 $0, 7; }"""
    assert [int(of(text, "=r,r", np.int32(v))[0]) for v in range(7)] == [7, 7, 7, 1, 1, 7, 7]


def test_maxima_keep_nan_where_they_say_so():
    one, nan = np.float32(1), np.float32(math.nan)
    assert of("max.f32 $0, $1, $2;", "=f,f,f", one, nan).view(np.float32)[0] == 1
    assert np.isnan(of("max.NaN.f32 $0, $1, $2;", "=f,f,f", one, nan).view(np.float32)[0])


def test_tf32_has_ten_bits_of_fraction():
    for v, away, even, zero in (
        (1 + 2**-11, 1 + 2**-10, 1.0, 1.0), (-1 - 2**-11, -1 - 2**-10, -1.0, -1.0),
        (1 + 3 * 2**-11, 1 + 2**-9, 1 + 2**-9, 1 + 2**-10), (math.inf, math.inf, math.inf, math.inf),
    ):  # fmt: skip
        for mode, wanted in (("rna", away), ("rn", even), ("rz", zero)):
            assert of(f"cvt.{mode}.tf32.f32 $0, $1;", "=r,f", np.float32(v)).view(np.float32)[0] == wanted, (mode, v)


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_pairs_of_eight_bit_floats(kind: str, dtype: Any):
    high, low = np.float32(1.75), np.float32(-1e9)
    largest = -float(ml_dtypes.finfo(dtype).max)
    pair = of(f"cvt.rn.satfinite.{kind}x2.f32 $0, $1, $2;", "=h,f,f", high, low)
    assert pair.dtype == np.uint16
    assert pair.view(dtype).astype(float).tolist() == [largest, 1.75]
    halves = of(f"cvt.rn.f16x2.{kind}x2 $0, $1;", "=r,h", pair[0])
    assert halves.view(np.float16).tolist() == [largest, 1.75]
    again = of(f"cvt.rn.satfinite.{kind}x2.f16x2 $0, $1;", "=h,r", halves[0])
    assert again.tolist() == pair.tolist()


@pytest.mark.parametrize(("mode", "wanted"), [("rn", 16777216.0), ("rz", 16777216.0), ("rp", 16777218.0)])
def test_integers_become_floats_rounded_as_told(mode: str, wanted: float):
    assert of(f"cvt.{mode}.f32.s32 $0, $1;", "=f,r", np.int32(2**24 + 1)).view(np.float32)[0] == wanted


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [
    "add.sat.s32 $0, $1, $2;", "mad.hi.s32 $0, $1, $2, $1;", "max.xorsign.abs.f32 $0, $1, $2;",
    "max.f32 $0, $1, $2, $1;", "fma.rn.relu.f16x2 $0, $1, $2, $1;", "cvt.rs.f16x2.f32 $0, $1, $2, $1;",
    "cvt.rp.f16.f32 $0, $1;", "cvt.pack.sat.s8.s32.b32 $0, $1, $2, $1;", "setp.lt.and.s32 p, $1, $2, q;",
    "mad.wide.s32 $0, $1, $2, -1;", "add.cc.u32 $0, $1, $2;", "lop3.or.b32 $0|p, $1, $2, $1, 0xC0, q;",
    "cvt.rn.e4m3x2.f32 $0, $1, $2;", "atom.global.add.u32 $0, [$1], $2;", "ld.global.b32 $0, [$1];",
])  # fmt: skip
def test_forms_that_are_not_evaluated_are_refused(text: str):
    with pytest.raises(UnknownPtx):
        Assembly.of(text, "=r,r,r")


def test_constraints_that_are_not_known_are_refused():
    with pytest.raises(UnknownPtx):
        Assembly.of("add.s32 $0, $0, 1;", "=r,0")


@given(st.sampled_from(["u32", "s32", "u64", "s64"]), st.integers(0, 2**64 - 1), st.integers(0, 80), st.integers(0, 80))
def test_extracted_bits_follow_the_definition(kind: str, number: int, at: int, count: int) -> None:
    bits = int(kind[1:])
    source = [number >> k & 1 for k in range(bits)]
    fill = source[min(at + count - 1, bits - 1)] if kind[0] == "s" and count else 0
    wanted = [source[at + k] if k < count and at + k < bits else fill for k in range(bits)]
    value = np.array(number & (1 << bits) - 1, f"u{bits // 8}")[()]
    letter = "r" if bits == 32 else "l"
    found = of(f"bfe.{kind} $0, $1, {at}, {count};", f"={letter},{letter}", value)
    assert [int(found[0]) >> k & 1 for k in range(bits)] == wanted


def test_saturated_zeros_have_no_sign():
    for text in ("cvt.sat.f32.f32 $0, $1;", "add.sat.f32 $0, $1, $1;"):
        found = of(text, "=r,r", np.float32(-0.0))
        assert found.view(np.uint32)[0] == 0


@pytest.mark.parametrize(("text", "value", "wanted"), [
    ("cvt.rn.sat.f32.s32 $0, $1;", np.int32(5), 1.0), ("cvt.rn.sat.f32.s32 $0, $1;", np.int32(-1), 0.0),
    ("{ .reg .pred p; setp.lt.ftz.f32 p, $1, 0f00000000; selp.f32 $0, 0f3F800000, 0f00000000, p; }",
     np.float32(-1e-40), 0.0),
    ("{ .reg .pred p; mov.pred p, 1; mov.b32 $0, 0f3F800000; @!p mov.b32 $0, 0f00000000; }", np.int32(0), 1.0),
])  # fmt: skip
def test_modifiers_that_change_results(text: str, value: Any, wanted: float) -> None:
    assert float(of(text, "=r,r", value).view(np.float32)[0]) == wanted


@pytest.mark.parametrize(("text", "value", "wanted"), [
    ("cvt.rn.bf16.s32 $0, $1;", np.int32(2**30 + 2**22 + 1), 0x4E81),
    ("cvt.rn.f16.f64 $0, $1;", np.float64(1 + 2**-11 + 2**-40), 0x3C01),
    ("cvt.rn.bf16.f64 $0, $1;", np.float64(1 + 2**-8 + 2**-40), 0x3F81),
    ("cvt.rn.f16.f64 $0, $1;", np.float64(1e300), 0x7C00),
])  # fmt: skip
def test_narrow_results_are_rounded_once(text: str, value: Any, wanted: int) -> None:
    letter = "r" if value.itemsize == 4 else "d"
    assert int(of(text, f"=h,{letter}", value)[0]) == wanted


def test_results_may_be_written_before_the_last_operand_is_read():
    assert int(of("add.s32 $0, $1, 1; add.s32 $0, $0, $1;", "=&r,r", np.int32(4))[0]) == 9


def test_messages_may_have_any_letters():
    assert unescaped(r'gr\C3\B6\C3\9Fer \\22 \22') == 'größer \\22 "'
