"""TTIR text becomes an op tree that keeps names, types, attributes, regions and source lines."""

from __future__ import annotations

import numpy as np
import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import UnsupportedOpError
from paellapy.instrument.triton_ir.lower import called, constant
from paellapy.instrument.triton_ir.parse import parse, split_top, walk
from paellapy.instrument.triton_ir.types import ELEMENTS, parse_type

pytestmark = [pytest.mark.quick, pytest.mark.versions]

TEXT = r"""
#loc = loc("/src/kernels.py":10:1)
#loc5 = loc("/py/triton/language/standard.py":43:13)
#loc9 = loc("x"(#loc))
module attributes {tt.note = "}"} {
  tt.func public @k(%x: !tt.ptr<f32> {tt.divisibility = 16 : i32} loc("x"(#loc)), %n: i32 loc("n"(#loc))) {
    %cst = arith.constant dense<[1, -2, 3, 4]> : tensor<4xi32> loc(#loc1)
    %off = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32> loc(#loc3)
    %0 = tt.splat %x : !tt.ptr<f32> -> tensor<4x!tt.ptr<f32>> loc(#loc3)
    %1 = tt.addptr %0, %off : tensor<4x!tt.ptr<f32>>, tensor<4xi32> loc(#loc3)
    %2 = tt.load %1 {isVolatile = true} : tensor<4x!tt.ptr<f32>> loc(#loc4)
    %3:2 = "tt.reduce"(%2, %off) <{axis = 0 : i32}> ({
    ^bb0(%a: f32 loc(unknown), %b: i32 loc(callsite(#loc5 at #loc2)), %c: f32 loc(unknown), %d: i32 loc(unknown)):
      tt.reduce.return %a, %b : f32, i32 loc(#loc4)
    }) : (tensor<4xf32>, tensor<4xi32>) -> (f32, i32) loc(#loc6)
    tt.assert %true, "a string with { braces }, loc(#loc2) and // a comment" : i1 loc(#loc2)
    %left, %right = tt.split %4 : tensor<4x2xf32> -> tensor<4xf32> loc(#loc2)
    %5:2 = scf.for %i = %c0 to %n step %c1 iter_args(%p = %1, %s = %3#0) -> (tensor<4x!tt.ptr<f32>>, f32)  : i32 {
      %6 = scf.if %cond -> (f32) {
        scf.yield %s : f32 loc(#loc2)
      } else {
        scf.yield %3#0 : f32 loc(#loc2)
      } loc(#loc2)
      scf.yield %p, %6 : tensor<4x!tt.ptr<f32>>, f32 loc(#loc2)
    } {tt.num_stages = 3 : i32} loc(#loc6)
    %w = scf.while (%v = %n) : (i32) -> i32 {
      scf.condition(%cond) %v : i32 loc(#loc2)
    } do {
    ^bb0(%v: i32 loc(unknown)):
      scf.yield %v : i32 loc(#loc2)
    } loc(#loc2)
    cf.cond_br %cond, ^bb1(%n, %w : i32, i32), ^bb2 loc(#loc2)
  ^bb1(%q: i32 loc(unknown), %r: i32 loc(unknown)):  // pred: ^bb0
    tt.return loc(#loc)
  ^bb2:  // pred: ^bb0
    tt.return loc(#loc)
  } loc(#loc)
} loc(#loc)
#loc1 = loc(unknown)
#loc2 = loc("/src/kernels.py":12:5)
#loc3 = loc("off"(#loc2))
#loc4 = loc(callsite(#loc5 at #loc3))
#loc6 = loc(fused[#loc4, #loc2])
"""


def ops(text: str = TEXT) -> dict[str, list]:
    found: dict[str, list] = {}
    for op in walk(parse(text, "k").entry.region):
        found.setdefault(op.name, []).append(op)
    return found


def test_arguments_have_types() -> None:
    (x, x_type), (n, n_type) = parse(TEXT).entry.args
    assert (x, x_type.kind, x_type.element.name) == ("%x", "pointer", "f32")
    assert (n, n_type.kind, n_type.element.name) == ("%n", "value", "i32")


def test_operands_results_attributes_and_types() -> None:
    found = ops()
    assert found["tt.make_range"][0].integer("end") == 4
    assert found["tt.load"][0].flag("isVolatile")
    addptr = found["tt.addptr"][0]
    assert addptr.operands == ["%0", "%off"]
    assert addptr.out_types[0].element.name == "i32" or addptr.out_types[0].kind == "pointer"
    reduce = found["tt.reduce"][0]
    assert reduce.results == ["%3#0", "%3#1"]
    assert reduce.regions[0][0].args == ["%a", "%b", "%c", "%d"]
    assert [t.element.name for t in reduce.out_types] == ["f32", "i32"]
    assert found["tt.split"][0].results == ["%left", "%right"]


def test_regions_carry_their_arguments() -> None:
    found = ops()
    loop = found["scf.for"][0]
    assert loop.operands == ["%c0", "%n", "%c1", "%1", "%3#0"]
    assert loop.regions[0][0].args == ["%i", "%p", "%s"]
    assert loop.integer("tt.num_stages") == 3
    assert len(found["scf.if"][0].regions) == 2
    before, after = found["scf.while"][0].regions
    assert before[0].args == after[0].args == ["%v"]


def test_branches_name_their_targets() -> None:
    region = parse(TEXT).entry.region
    assert [block.label for block in region] == ["^bb0", "^bb1", "^bb2"]
    branch = region[0].ops[-1]
    assert branch.operands == ["%cond"]
    assert branch.successors == [("^bb1", ["%n", "%w"]), ("^bb2", [])]


def test_locations_lead_to_the_users_line() -> None:
    module = parse(TEXT)
    lines = {op.name: module.locations.line(op.loc) for op in walk(module.entry.region)}
    assert lines["tt.load"] == "/src/kernels.py:12"  # through a call site and a name, past Triton's own library
    assert lines["tt.reduce"] == "/src/kernels.py:12"
    assert lines["scf.for"] == "/src/kernels.py:12"
    assert lines["arith.constant"] == "unknown line"


def test_strings_are_not_syntax() -> None:
    (check,) = ops()["tt.assert"]
    assert check.operands == ["%true"]
    assert "loc(#loc2) and // a comment" in check.body


@pytest.mark.parametrize("text", ["", "module {\n}", "not TTIR at all"])
def test_text_without_a_function_is_refused(text: str) -> None:
    with failing(UnsupportedOpError, kernel="k", op="tt.func"):
        parse(text, "k")


def test_text_that_ends_early_is_refused() -> None:
    with failing(UnsupportedOpError, kernel="k", field="ttir"):
        parse(TEXT.split("%5:2")[0], "k")


@pytest.mark.parametrize(
    ("text", "kind", "shape", "element", "block"),
    [
        ("i32", "value", (), "i32", ()),
        ("tensor<128x64xf16>", "value", (128, 64), "f16", ()),
        ("tensor<2x!tt.ptr<bf16>>", "pointer", (2,), "bf16", ()),
        ("!tt.ptr<i64, 1>", "pointer", (), "i64", ()),
        ("!tt.ptr<tensor<16x32xf8E4M3FN>>", "block_pointer", (), "f8E4M3FN", (16, 32)),
        ("!tt.tensordesc<16x32xf32>", "descriptor", (), "f32", (16, 32)),
        ("!tt.tensordesc<tensor<16x32xf32>>", "descriptor", (), "f32", (16, 32)),
    ],
)
def test_types(text: str, kind: str, shape: tuple, element: str, block: tuple) -> None:
    parsed = parse_type(text)
    assert (parsed.kind, parsed.shape, parsed.element.name, parsed.block) == (kind, shape, element, block)


@pytest.mark.parametrize(
    ("text", "type", "value"),
    [
        ("31", "i32", np.int32(31)),
        ("-1", "i64", np.int64(-1)),
        ("4294967295", "i32", np.int32(-1)),
        ("dense<0xFF800000>", "tensor<4xf32>", np.float32(-np.inf)),
        ("0xFC00", "f16", np.float32(-np.inf)),
        ("0x3F80", "bf16", np.float32(1)),
        ("dense<1.500000e+00>", "tensor<4x4xbf16>", np.float32(1.5)),
        ("dense<true>", "tensor<4xi1>", np.bool_(True)),
        ("1.000000e-05", "f64", np.float64(1e-5)),
    ],
)
def test_constants(text: str, type: str, value: np.generic) -> None:
    parsed = constant(text, parse_type(type))
    assert parsed == value
    assert parsed.dtype == value.dtype


def test_dense_lists_and_hex_strings() -> None:
    assert constant("dense<[[1, -2], [3, 4]]>", parse_type("tensor<2x2xi32>")).tolist() == [[[1, -2], [3, 4]]]
    assert constant('dense<"0x0000803F00000040">', parse_type("tensor<2xf32>")).tolist() == [[1.0, 2.0]]
    assert constant("true", None)


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["i8", "i16", "i32", "i64"]))
def test_integers_wrap_to_their_width(number: int, name: str) -> None:
    bits = 8 * ELEMENTS[name].size
    wrapped = (number + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    assert int(constant(str(number), parse_type(name))) == wrapped


@given(st.lists(st.text("ab<>(){}[]", max_size=6).filter(lambda s: s.strip()), max_size=5))
def test_split_gives_back_balanced_parts(parts: list[str]) -> None:
    balanced = [f"({p})" for p in parts if _balanced(p)]
    assert split_top(", ".join(balanced)) == balanced


def _balanced(text: str) -> bool:
    stack = []
    for c in text:
        if c in "<([{":
            stack.append(c)
        elif c in ">)]}":
            if not stack:
                return False
            stack.pop()
    return not stack


@pytest.mark.parametrize("name", ["f", '"f.<locals>.g__Pfp32__(1,)cconstexpr_8_"'])
def test_a_called_function_may_have_parentheses_in_its_name(name: str) -> None:
    text = f"module {{\n tt.func public @k(%n: i32) {{\n tt.call @{name}(%n) : (i32) -> ()\n tt.return\n }}\n"
    text += f" tt.func private @{name}(%n: i32) {{\n tt.return\n }}\n}}"
    module = parse(text)
    assert called(module.funcs["k"].region[0].ops[0]) in set(module.funcs) - {"k"}
