"""The PTX model: what is not edited prints back byte for byte, what is malformed is refused, edits land in place."""

from __future__ import annotations

import string
from dataclasses import dataclass

import pytest
from corpus import CUDA_CASES, TRITON_CASES, Case, CudaCase
from corpus_sources import source_of
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_pieces import HEADER, entry, module

from paellapy.instrument.errors import PtxError
from paellapy.instrument.ptx.module import Function, Kind, Module, Statement, statements, tokenize

pytestmark = pytest.mark.quick

pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC, which the extra dev has")


def only(ptx: str) -> Function:
    return Module.parse(ptx).entry()


def opcodes(function: Function) -> list[str]:
    return [s.opcode for s in function.instructions()]


# -- what compilers write


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_triton_ptx_prints_back_unchanged(case: Case) -> None:
    ptx = source_of(case).ptx
    parsed = Module.parse(ptx)
    assert str(parsed) == ptx
    (function,) = parsed.entries()
    assert len(function.params) >= 2  # global_scratch and profile_scratch, at least
    assert function.directive(".reqntid") is not None
    assert function.body is not None
    assert any(s.is_op("ret") for s in function.instructions())


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_nvrtc_ptx_prints_back_unchanged(case: CudaCase) -> None:
    ptx = source_of(case).ptx
    parsed = Module.parse(ptx)
    assert str(parsed) == ptx
    names = [f.name for f in parsed.entries()]
    assert len(names) == ptx.count(".entry ")
    assert any(case.entry in name for name in names)


# -- hand-written modules

ODDITIES = {
    "weak": ".weak .entry k() { ret; }",
    "no linkage": ".entry k() { ret; }",
    "empty list with white space": ".visible .entry k(\n\t/* none */\n) { ret; }",
    "no parentheses": ".visible .entry k { ret; }",
    "no parentheses, directives": ".visible .entry k .maxntid 128, 1, 1 { ret; }",
    "arrays": ".visible .entry k(.param .align 8 .b8 a[24], .param .b32 b[4]) { ret; }",
    "aligned pointer": ".visible .entry k(.param .u64 .ptr .global .align 16 x, .param .u64 .ptr .align 1 y) { ret; }",
    "bounds": ".visible .entry k()\n.reqntid 128, 1, 1\n.minnctapersm 2\n.maxnreg 64\n{ ret; }",
    "cluster": ".visible .entry k()\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{ ret; }",
    "pragma of an entry": '.visible .entry k() .pragma "nounroll"; { ret; }',
    "comment with code": ".visible .entry k() { // } ret; {\n /* } ; \" */ ret; }",
    "string with braces": '.visible .entry k() { .pragma "} ; // \\" {"; ret; }',
    "vectors": ".visible .entry k() { .reg .b32 %r<5>; ld.shared.v4.u32 {%r1, %r2, %r3, %r4}, [%r0+16]; ret; }",
    "scoped opcode": ".visible .entry k() { ld.shared::cta.u32 %r1, [x]; cp.async.bulk.shared::cluster.global "
    "[a], [b], 16, [c]; ret; }",
    "locations": ".visible .entry k() { .loc 1 2 3 ret; .loc 1 4 0, function_name $L__info_string0, inlined_at 1 7 5 "
    ".loc 2 5 1, function_name $L__info_string0 + 12, inlined_at 1 7 5 ret; }",
    "guards": ".visible .entry k() { @%p1 bra L; @!%p1 bra L; @ ! %p2 ret; L: exit; }",
    "call": ".visible .entry k() { { // callseq 0, 0\n.reg .b32 temp; .param .b32 param0; st.param.b32 [param0], %r1; "
    ".param .b32 retval0; call.uni (retval0), f, (param0); ld.param.b32 %r2, [retval0]; } ret; }",
    "indirect": ".visible .entry k() { ts: .branchtargets L1, L2; brx.idx %r0, ts; L1: L2: "
    "p : .callprototype (.param .b32 _) _ (.param .b64 _, .param .b32 _); call (r), %rd1, (a, b), p; ret; }",
    "nested scopes": ".visible .entry k() { { .reg .pred p; { L: @p bra L; } } { L: ret; } }",
    "stray semicolon": ".visible .entry k() { ; ret; ; }",
    "shared array": ".visible .entry k() { .shared .align 4 .b8 tile[1024]; .global .b8 t[3] = {1, 2, 3}; ret; }",
}  # fmt: skip
AROUND = {
    "declaration": ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n",
    "function": ".func (.reg .b32 %out) f(.reg .b32 %in) { mov.b32 %out, %in; ret; }\n",
    "attribute": ".weak .func .attribute(.unified(0xab, 0xcd)) .noreturn g() { trap; }\n",
    "globals": ".global .align 1 .b8 $str[4] = {37, 100, 10, 0};\n.extern .shared .align 16 .b8 smem[];\n"
    ".const .f32 c = 0f3F800000;\n",
    "alias": ".alias one, other;\n",
    "file": '.file 1 "/a b/{k};.py"\n.file 2 "x.cu", 1700000000, 4096\n',
    "sections": ".section .debug_str\n{\n$L__info_string0:\n.b8 107, 0\n.b64 $L__func_begin0+3\n}\n"
    ".section .debug_macinfo { }\n",
}  # fmt: skip


@pytest.mark.parametrize("oddity", ODDITIES)
@pytest.mark.parametrize("around", ["", *AROUND])
def test_every_construct_prints_back_and_is_found(oddity: str, around: str) -> None:
    ptx = HEADER + AROUND.get(around, "") + ODDITIES[oddity] + "\n// end\n"
    parsed = Module.parse(ptx)
    assert str(parsed) == ptx
    assert parsed.entry("k").body is not None
    assert (parsed.version(), parsed.target()) == ((8, 0), "sm_80")


def test_parts_of_a_function_are_told_apart() -> None:
    f = only(module(entry("ret;", "(.param .u64 .ptr .global .align 16 x, .param .align 4 .b8 s[12])", "k_1",
                          ".maxntid 16, 8 .minnctapersm 2")))  # fmt: skip
    assert f.name == "k_1"
    assert f.param_names() == ["x", "s"]
    assert f.directive(".maxntid") == [16, 8]
    assert f.directive(".minnctapersm") == [2]
    assert f.directive(".reqntid") is None


def test_statements_know_guard_opcode_and_operands() -> None:
    (s,) = statements("@!%p1 ld.shared::cta.v2.u32 {%r1, %r2}, [%rd1+8];")
    assert (s.kind, s.guard, s.opcode) == (Kind.INSTRUCTION, "%p1", "ld.shared::cta.v2.u32")
    assert s.operands() == ["{", "%r1", ",", "%r2", "}", ",", "[", "%rd1", "+", "8", "]"]
    assert s.is_op("ld", "st")
    assert not s.is_op("l", "ldu")


def test_labels_directives_and_braces_are_not_instructions() -> None:
    kinds = [s.kind for s in statements("L: .reg .b32 x; { ret; } .loc 1 2 3 bra L;")]
    assert kinds == [
        Kind.LABEL, Kind.DIRECTIVE, Kind.OPEN, Kind.INSTRUCTION, Kind.CLOSE, Kind.DIRECTIVE, Kind.INSTRUCTION
    ]  # fmt: skip


def test_an_entry_is_found_by_name_among_several() -> None:
    parsed = Module.parse(module(entry("ret;", name="a"), entry("exit;", name="b")))
    assert opcodes(parsed.entry("b")) == ["exit"]
    with failing(PtxError, field="entry", given="a, b"):
        parsed.entry()
    with failing(PtxError, field="entry", given="a, b"):
        parsed.entry("c")
    with failing(PtxError, field="entry", given="none"):
        Module.parse(HEADER).entry()


def test_a_missing_or_unreadable_header_is_an_error() -> None:
    with failing(PtxError, field=".version"):
        Module.parse(".target sm_80").version()
    with failing(PtxError, field=".version", given="eight"):
        Module.parse(".version eight .target sm_80").version()
    with failing(PtxError, field=".target"):
        Module.parse(".version 8.0").target()


# -- random modules from such pieces: what is built is what is read

identifiers = st.from_regex(r"[a-z_$][a-z0-9_$]{0,6}", fullmatch=True)
trivia = st.sampled_from([" ", "\n\t", " /* ; } */ ", ' // { "\n', "\n\n"])


@dataclass(frozen=True)
class Piece:
    text: str
    kind: Kind
    opcode: str = ""
    guard: str = ""


def instruction(opcode: str, operands: str, guard: str, negated: bool) -> Piece:
    prefix = f"@{'!' if negated else ''}{guard} " if guard else ""
    return Piece(f"{prefix}{opcode} {operands};", Kind.INSTRUCTION, opcode, guard)


instructions = st.builds(
    instruction,
    st.sampled_from(["add.s32", "ret", "bar.sync", "st.shared::cta.v4.u32", "call.uni", "mov.b64"]),
    st.sampled_from(["", "%r1, %r2, -7", "{%r1, %r2}, [x+4]", "(r), f, (a, b)", "%rd1, {%r1, _}", '"a;}"']),
    st.sampled_from(["", "%p1", "p"]),
    st.booleans(),
)
directives = st.sampled_from(
    [
        Piece(".reg .b32 %r<9>;", Kind.DIRECTIVE, ".reg"),
        Piece(".loc 1 2 3, function_name $L1, inlined_at 1 7 5", Kind.DIRECTIVE, ".loc"),
        Piece(".loc 1 2 3", Kind.DIRECTIVE, ".loc"),
        Piece('.pragma "nounroll; }";', Kind.DIRECTIVE, ".pragma"),
        Piece(".shared .b8 s[4] = {1, 2, 3, 4};", Kind.DIRECTIVE, ".shared"),
    ]
)
labels = identifiers.map(lambda name: Piece(f"{name}:", Kind.LABEL))
pieces = st.recursive(
    st.one_of(instructions, directives, labels).map(lambda piece: [piece]),
    lambda inner: st.lists(inner, max_size=4).map(
        lambda parts: [Piece("{", Kind.OPEN), *(p for part in parts for p in part), Piece("}", Kind.CLOSE)]
    ),
    max_leaves=12,
)
params = st.sampled_from(
    [".param .u32 {}", ".param .align 8 .b8 {}[24]", ".param .u64 .ptr .global .align 16 {}", ".param .f64 {}"]
)


@dataclass(frozen=True)
class Built:
    name: str
    is_entry: bool
    params: list[str]
    body: list[Piece] | None
    text: str


@st.composite
def functions(draw: st.DrawFn) -> Built:
    name, is_entry = draw(identifiers), draw(st.booleans())
    names = draw(st.lists(identifiers, max_size=4))
    declared = ",".join(draw(trivia) + draw(params).format(n) for n in names)
    bare = not names and draw(st.booleans())
    parentheses = "" if bare else f"({declared})"
    after = draw(st.sampled_from(["", ".maxntid 64, 2", '.pragma "a;{";', ".reqntid 32 .explicitcluster"]))
    linkage = draw(st.sampled_from(["", ".visible ", ".weak ", ".extern "]))
    body = None
    ending = ";"
    if is_entry or draw(st.booleans()):
        body = [Piece("{", Kind.OPEN)]
        body += [p for part in draw(st.lists(pieces, max_size=4)) for p in part]
        body += [Piece("}", Kind.CLOSE)]
        ending = "".join(draw(trivia) + p.text for p in body)
    head = f"{linkage}{'.entry' if is_entry else '.func'}{draw(trivia)}{name}{parentheses} {after} "
    return Built(name, is_entry, names, body, head + ending)


@given(st.lists(functions(), max_size=4), st.lists(st.sampled_from(list(AROUND)), max_size=2), trivia)
@settings(max_examples=150, deadline=None)
def test_random_modules_parse_to_what_they_were_built_from(built: list[Built], around: list[str], tail: str) -> None:
    ptx = HEADER + "".join(AROUND[a] for a in around) + "\n".join(b.text for b in built) + tail
    parsed = Module.parse(ptx)
    assert str(parsed) == ptx
    found = [i for i in parsed.items if isinstance(i, Function)][-len(built) :] if built else []
    for wanted, function in zip(built, found, strict=True):
        assert (function.name, function.is_entry) == (wanted.name, wanted.is_entry)
        assert function.param_names() == wanted.params
        if wanted.body is None:
            assert function.body is None
        else:
            assert function.body is not None
            got = [(s.kind, s.opcode, s.guard) for s in function.body]
            assert got == [(p.kind, p.opcode, p.guard) for p in wanted.body]


@given(st.text(alphabet=string.printable, max_size=200))
def test_any_text_tokenises_without_loss_or_is_refused(text: str) -> None:
    try:
        tokens, tail = tokenize(text)
    except PtxError:
        return
    assert "".join(map(str, tokens)) + tail == text


# -- malformed input


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (HEADER + '.visible .entry k() { .pragma "x; ret; }', "string"),
        (HEADER + ".visible .entry k() { /* ret; }", "comment"),
        (HEADER + ".visible .entry k() { ret;", "statement"),
        (HEADER + ".visible .entry k(.param .u32 n", "statement"),
        (HEADER + ".visible .entry", "statement"),
        (HEADER + ".visible .entry k() { @%p1", "statement"),
        (HEADER + ".global .b8 x[4] = {1, 2", "statement"),
        (".version", "statement"),
    ],
)
def test_truncated_modules_are_refused(text: str, field: str) -> None:
    with failing(PtxError, field=field) as raised:
        Module.parse(text)
    assert getattr(raised.value, "line", 5) == 5


def reads_or_refuses(text: str) -> None:
    try:
        parsed = Module.parse(text)
    except PtxError:
        return
    assert str(parsed) == text


REAL = ("saxpy_debug", "noinline", "switch", "print_and_assert", "predicated_return")
real_ptx = st.sampled_from([c for c in CUDA_CASES if c.name in REAL]).map(lambda case: source_of(case).ptx)


@given(real_ptx, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_module_cut_anywhere_parses_or_is_refused(ptx: str, where: float) -> None:
    reads_or_refuses(ptx[: int(where * len(ptx))])


mutations = st.tuples(st.floats(0, 1), st.integers(0, 3), st.sampled_from([*'{}()[];:,.@!%"/*\\\n\x00é', "/*"]))


@given(real_ptx, st.lists(mutations))
@settings(max_examples=60, deadline=None)
def test_a_mutated_module_parses_or_is_refused(ptx: str, edits: list[tuple[float, int, str]]) -> None:
    for where, removed, inserted in edits:
        at = int(where * len(ptx))
        ptx = ptx[:at] + inserted + ptx[at + removed :]
    reads_or_refuses(ptx)


# -- editing


@pytest.mark.parametrize(
    ("given_params", "after", "wanted"),
    [
        ("()", "", "(\n\t.param .u32 extra)"),
        ("( )", "", "(\n\t.param .u32 extra )"),
        ("", "", "(\n\t.param .u32 extra\n)"),
        ("", " .maxntid 32", "(\n\t.param .u32 extra\n) .maxntid 32"),
        ("(.param .u64 x)", "", "(.param .u64 x,\n\t.param .u32 extra)"),
    ],
)
def test_a_parameter_is_added_last(given_params: str, after: str, wanted: str) -> None:
    parsed = Module.parse(f"{HEADER}.entry k{given_params}{after} {{ ret; }}")
    parsed.entry().add_param(".param .u32 extra")
    assert str(parsed) == f"{HEADER}.entry k{wanted} {{ ret; }}"
    again = Module.parse(str(parsed)).entry()
    assert again.param_names()[-1] == "extra"
    assert again.directive(".maxntid") == ([32] if after else None)


def order(function: Function) -> list[str]:
    """Opcodes and labels of a body, in order."""
    return [s.label or s.opcode for s in function.body or () if s.kind in (Kind.INSTRUCTION, Kind.LABEL)]


def edited(body: str, method: str) -> list[str]:
    function = only(module(entry(body)))
    getattr(function, method)("\n\tNEW 1;")
    assert Module.parse(str(function)).entry().body is not None
    return order(function)


def test_the_prologue_comes_before_the_first_label() -> None:
    assert edited(".loc 1 2 3 L: mov.b32 %r1, 1; bra L;", "insert_prologue") == ["NEW", "L", "mov.b32", "bra"]
    assert edited("{ ret; }", "insert_prologue") == ["NEW", "ret"]
    assert edited("", "insert_prologue") == ["NEW"]


def test_the_epilogue_comes_last() -> None:
    assert edited("ret; { exit; }", "insert_epilogue") == ["ret", "exit", "NEW"]


LOAD = "ld.global.u32 %r1, [%rd1];"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (f"{LOAD} add.u32 %r1, %r1, 1; {LOAD} ret;", ["ld.global.u32", "add.u32", "ld.global.u32", "NEW", "ret"]),
        ("cp.async.ca.shared.global [%r1], [%rd1], 16; ret;", ["cp.async.ca.shared.global", "NEW", "ret"]),
        ("ld.shared.u32 %r1, [%r2]; ret;", ["NEW", "ld.shared.u32", "ret"]),
        (f"@%p1 bra L; {LOAD} L: ret;", ["NEW", "bra", "ld.global.u32", "L", "ret"]),
        (f"bar.sync 0; {LOAD} ret;", ["NEW", "bar.sync", "ld.global.u32", "ret"]),
        (f"{LOAD} mid: {LOAD} bra mid;", ["ld.global.u32", "NEW", "mid", "ld.global.u32", "bra"]),
        (f"begin: .loc 1 2 3 {LOAD} ret;", ["begin", "ld.global.u32", "NEW", "ret"]),
        (f"{{ {LOAD} }} add.u32 %r1, %r1, 1; ret;", ["NEW", "ld.global.u32", "add.u32", "ret"]),
        ("ret;", ["NEW", "ret"]),
    ],
)  # fmt: skip
def test_code_is_put_after_the_loads_of_the_first_straight_line(body: str, wanted: list[str]) -> None:
    assert edited(body, "insert_after_first_loads") == wanted


def test_code_is_never_put_into_a_loop_the_body_begins_with() -> None:
    body = f"top: {LOAD} setp.ne.u32 %p1, %r1, 0; @%p1 bra top; ret;"
    assert edited(body, "insert_after_first_loads")[:2] == ["NEW", "top"]


def test_inserted_statements_are_statements() -> None:
    inserted = statements("@%p bra L;\n\tL: ret;")
    assert all(isinstance(s, Statement) for s in inserted)
    assert [s.guard for s in inserted] == ["%p", "", ""]
