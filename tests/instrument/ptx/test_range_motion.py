"""Arithmetic of addresses moves ahead of clock readings, and a kernel computes the same as without ranges."""

from __future__ import annotations

import re

import hypothesis.strategies as st
from hypothesis import given

from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.compiled import assemble
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Statement, statements
from paellapy.instrument.ptx.ranges import Marker

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) .reqntid 128
{
	.reg .b32 %r<80>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<4>;
	.reg .pred %q;
	ld.param.u64 %rd0, [p];
	setp.eq.u64 %q, %rd0, 0;
"""
CLOCK = re.compile(r"mov\.u32 %paellapy_rc\d, %clock;")
BEGIN, END = "begin", "end"
COPY = "cp.async.cg.shared.global [%r2], [%rd1], 16;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def passed(*code: str) -> str:
    lines = [Marker(line == BEGIN, False, "a").ptx if line in (BEGIN, END) else line for line in code]
    return passes.apply(HEAD + "\n".join(f"\t{line}" for line in [*lines, "ret;", "}"]) + "\n", PassConfig("trace"))


def behind(out: str) -> str:
    """The code after the last reading of a range's clock."""
    return CLOCK.split(out)[-1]


def test_the_address_of_a_copy_is_computed_before_the_clock_is_read():
    address = ("add.s32 %r1, %r1, 64;", "cvt.u64.u32 %rd1, %r1;", "add.s32 %r2, %r3, 4096;")
    out = passed(WAIT, END, *address, "bar.sync 0;", COPY)
    assert assemble(out, "sm_90a", "k").cubin
    assert not any(line in behind(out) for line in address)
    assert behind(out).index("bar.sync 0;") < behind(out).index(COPY)


def test_nothing_leaves_a_range_that_begins():
    add = "add.s32 %r2, %r3, 64;"
    assert add in behind(passed(WAIT, END, "bar.sync 0;", BEGIN, add, COPY))
    assert add in behind(passed(WAIT, END, BEGIN, add, COPY))


def test_nothing_moves_where_no_matrix_instruction_hides_its_time():
    add = "add.s32 %r2, %r3, 64;"
    assert add in behind(passed("bar.sync 0;", END, add, COPY))
    assert add in behind(passed("bar.sync 0;", END, add, COPY, WAIT))


def test_other_work_stays_behind_the_clock():
    for line, access in (
        ("add.s32 %r1, %r1, 64;", "st.global.u32 [%rd0], %r1;"),  # a value, not an address
        ("add.f32 %f1, %f1, %f2;", "st.global.f32 [%rd0], %f1;"),
        ("ld.global.u64 %rd1, [%rd0];", COPY),
        ("@%q add.s32 %r2, %r2, 64;", COPY),  # some threads keep the older value
        ("mov.u32 %r2, %clock;", COPY),
        ("add.cc.u32 %r2, %r2, 64;", COPY),  # a later `addc` reads its carry
    ):
        assert line in behind(passed(WAIT, END, line, access))


def test_an_address_that_must_wait_stays_behind_the_clock():
    add = "add.s32 %r2, %r3, 64;"
    for before in ("ld.shared.u32 %r3, [%r4];", "ld.shared.u32 %r4, [%r2];", "st.shared.u32 [%r4], %r2;"):
        assert add in behind(passed(WAIT, END, before, add, COPY))
    assert add in behind(passed(WAIT, END, "$loop:", add, COPY, "@%q bra $loop;"))
    assert add in behind(passed(WAIT, END, "{", ".reg .b32 %r3;", "mov.u32 %r3, 5;", add, "}", COPY))
    assert add in behind(passed("{", ".reg .b32 %r3;", WAIT, END, "}", add, COPY))  # another %r3


def test_the_result_of_a_matrix_instruction_is_not_used_early():
    parts = ", ".join(f"%r{i}" for i in range(10, 14))
    matrix = f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {{{parts}}}, %rd2, %rd3, 1;"
    add = "add.s32 %r2, %r10, 64;"
    out = passed("wgmma.fence.sync.aligned;", matrix, "wgmma.commit_group.sync.aligned;", END, WAIT, add, COPY)
    assert assemble(out, "sm_90a", "k").cubin
    assert behind(out).index(WAIT) < behind(out).index(add)


def test_a_record_is_stored_at_the_end_of_its_line():
    out = passed(BEGIN, "bar.sync 0;", END, COPY, COPY, "@%q bra $there;", "$there:")
    stored = behind(out).index("st.global.v4.u32")
    assert behind(out).rindex(COPY) < stored < behind(out).index("bra $there;")


REGISTER, ADDRESS = st.sampled_from(["%r1", "%r2", "%r3"]), st.sampled_from(["%rd1", "%rd2"])
LINE = st.one_of(
    st.sampled_from([BEGIN, END, "bar.sync 0;", WAIT, "@%q bra $there;"]),
    st.builds("add.s32 {}, {}, {};".format, REGISTER, REGISTER, REGISTER),
    st.builds("@%q add.s32 {}, {}, 1;".format, REGISTER, REGISTER),
    st.builds("shfl.sync.idx.b32 {}, {}, 0, 31, -1;".format, REGISTER, REGISTER),
    st.builds("cvt.u64.u32 {}, {};".format, ADDRESS, REGISTER),
    st.builds("ld.global.u32 {}, [{}];".format, REGISTER, ADDRESS),
    st.builds("st.global.u32 [{}], {};".format, ADDRESS, REGISTER),
    st.builds("cp.async.cg.shared.global [{}], [{}], 16;".format, REGISTER, ADDRESS),
)


def effects(code: list[Statement]) -> list[tuple[object, ...]]:
    """What a list of statements does in order, with its registers as formulas of their first values."""
    value: dict[str, object] = {}
    found: list[tuple[object, ...]] = []
    for s in code:
        given = [value.get(text, text) for text in s.operands() if text.startswith("%")]
        if s.is_op("st", "cp", "bar", "wgmma", "bra", "ld"):
            found.append((s.opcode, *given[1 if s.is_op("ld") else 0 :]))
        if s.is_op("add", "shfl", "cvt", "ld"):
            old = given[0] if s.guard else None
            value[s.operands()[0]] = hash((s.opcode, old, *given[1:], len(found) if s.is_op("ld") else 0))
    return [*found, tuple(sorted(value.items()))]


@given(st.lists(LINE, min_size=2, max_size=25))
def test_a_kernel_does_the_same_in_the_same_order(code):
    code = [WAIT, END, *code, *(f"ld.shared.u32 %r4, [%r{i}];" for i in (1, 2, 3))]
    out = passed(*code, "$there:")
    own = [s for s in statements(out[out.index("setp.eq.u64 %q") : out.rindex("}")]) if "paellapy" not in str(s)]
    own = [s for s in own if any(str(s).strip().endswith(line) for line in code)]
    given_code = [s for line in code if line not in (BEGIN, END) for s in statements(line)]
    assert len(own) == len(given_code)
    assert effects(own) == effects(given_code)
