"""Where a barrier at the exit is safe, and where threads must be counted out."""

from __future__ import annotations

import pytest
from failing import failing
from ptx_pieces import entry, module

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.module import Module
from paellapy.instrument.ptx.report import barrier_at_exit_is_safe, refuse_exit_in_functions

pytestmark = pytest.mark.quick

PARAMS = "(.param .u64 x, .param .u32 n)"
TID = "mov.u32 %r1, %tid.x;"
BLOCK = "mov.u32 %r1, %ctaid.x;"
N = "ld.param.u32 %r2, [n];"
TEST = "setp.ge.u32 %p1, %r1, %r2;"
BARRIER = "bar.sync 0;"


def safe(body: str, *functions: str) -> bool:
    parsed = Module.parse(module(*functions, entry(body, PARAMS)))
    return barrier_at_exit_is_safe(parsed, parsed.entry())


LOOP_OF_BLOCK = f"{N} mov.u32 %r1, 0; L: {BARRIER} add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %r2; @%p1 bra L; ret;"
REDUCTION = f"""
    {TID} mov.u32 %r3, 128;
    LOOP: setp.ge.u32 %p1, %r1, %r3; @%p1 bra SKIP;
    ld.shared.u32 %r4, [%r1]; st.shared.u32 [%r1], %r4;
    SKIP: {BARRIER} shr.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra LOOP;
    ret;"""
# Equal labels in different scopes are different places: the first loop turns a different number of times per thread.
TURN = "sub.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;"
CHOOSE = f"{TID} {N} {TEST} mov.u32 %r3, 0; @%p1 bra S; mov.u32 %r3, 1; S: setp.eq.u32 %p2, %r3, 0;"
PREDICATED = f"{TID} {N} {TEST} mov.u32 %r3, 0; @%p1 mov.u32 %r3, 1; setp.eq.u32 %p2, %r3, 0;"
COUNT = "mov.u32 %r3, 0; L: add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r1; @%p1 bra L;"
VECTOR = f".reg .v2 .b32 %v; ld.global.v2.u32 %v, [%rd1]; {N} setp.ge.u32 %p1, %v.x, %r2;"
# Inline assembly names registers without percent.
LEAVE = "{{ .reg .pred {0}; setp.ge.s32 done{1}, %r1, %r2; @done{1} ret; }}"
NAMES = (("done", ""), ("done<2>", "1"), ("a, done", ""))


@pytest.mark.parametrize(
    "body",
    [
        f"{TID} {N} {TEST} @%p1 ret; st.global.u32 [%rd1], %r1; ret;",  # no barrier
        "ret;",
        *(f"mov.u32 %r1, {index}; {N} {TEST} @%p1 bra OUT; {BARRIER} OUT: ret;"
          for index in ("%ctaid.x", "%nctaid.y", "%ntid.x", "%cluster_ctarank", "%smid")),
        f"{N} setp.eq.u32 %p1, %r2, 0; @%p1 ret; {BARRIER} ret;",
        LOOP_OF_BLOCK,
        REDUCTION,
        f"{BLOCK} {N} {TEST} @%p1 {BARRIER} ret;",
        f"L: {BARRIER} bra L;",  # without an end
        f"{TID} {{ L: {TURN} }} {BARRIER} {{ L: {TURN} }} ret;",
        *(f"{BLOCK} {N} {LEAVE.format(name, number)} {BARRIER} ret;" for name, number in NAMES),
    ],
)  # fmt: skip
def test_branches_that_the_whole_block_takes_are_harmless(body: str) -> None:
    assert safe(body)


@pytest.mark.parametrize(
    "body",
    [
        *(f"{TID} {N} {TEST} {leave} {BARRIER} OUT: ret;"
          for leave in ("@%p1 ret;", "@%p1 exit;", "@%p1 bra OUT;", "@!%p1 bra OUT;")),
        f"{TID} L: {BARRIER} sub.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; ret;",
        f"{TID} {COUNT} setp.ge.u32 %p2, %r3, 7; @%p2 ret; {BARRIER} ret;",  # left by a divergent loop
        f"{CHOOSE} @%p2 ret; {BARRIER} ret;",
        f"{PREDICATED} @%p2 ret; {BARRIER} ret;",
        f"{TID} {N} setp.lt.u32 %p1|%p2, %r1, %r2; @%p2 ret; {BARRIER} ret;",
        f"{TID} {N} {TEST} @%p1 {BARRIER} ret;",
        f"T: .branchtargets A, B; brx.idx %r1, T; A: B: {BARRIER} ret;",
        f"{BARRIER} bra NOWHERE;",
        f"{TID} {N} {TEST} @%p1 ret; L: {BARRIER} bra L;",
        f"{VECTOR} @%p1 ret; {BARRIER} ret;",
        f"{TID} {{ L: {BARRIER} {TURN} }} {{ L: {TURN} }} ret;",
        f"{TID} {N} {TEST} {{ {{ @%p1 bra OUT; }} }} {BARRIER} OUT: ret;",
        *(f"{TID} {N} {LEAVE.format(name, number)} {BARRIER} ret;" for name, number in NAMES),
    ],
)  # fmt: skip
def test_threads_that_may_leave_before_a_barrier_are_counted_out(body: str) -> None:
    assert not safe(body)


@pytest.mark.parametrize(
    "load",
    [
        *(f"mov.u32 %r1, {where};" for where in ("%tid.x", "%tid.z", "%laneid", "%warpid", "%lanemask_lt", "%clock",
                                                 "%globaltimer")),
        "ld.global.u32 %r1, [%rd1];",
        "ld.shared.u32 %r1, [%r9];",
        "atom.global.add.u32 %r1, [%rd1], 1;",
        "shfl.sync.idx.b32 %r1, %r9, 0, 31, -1;",
        "activemask.b32 %r1;",
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%r1, %r3}, [%r9];",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r1, %r3}, {%r4, %r5}, {%r6}, {%r7, %r8};",
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r9];",
        "call (retval0), f, (param0); ld.param.u32 %r1, [retval0];",
    ],
)  # fmt: skip
def test_what_comes_from_memory_or_other_threads_may_differ(load: str) -> None:
    assert not safe(f"{load} {N} {TEST} @%p1 ret; {BARRIER} ret;")


def test_a_barrier_in_a_device_function_is_not_followed() -> None:
    assert not safe("call f; ret;", f".func f() {{ {BARRIER} ret; }}")
    assert safe("call f; ret;", ".func f() { ret; }")


def test_exit_in_a_device_function_is_refused_with_its_name() -> None:
    parsed = Module.parse(module(".func leaf() { exit; }", entry("call leaf; ret;")))
    with failing(InstrumentError, kernel="k", field="exit", given="leaf"):
        refuse_exit_in_functions(parsed, "k")


def test_exit_in_the_entry_is_not_refused() -> None:
    refuse_exit_in_functions(Module.parse(module(".func leaf() { ret; }", entry("exit;"))), "k")
