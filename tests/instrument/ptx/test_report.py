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


def test_without_a_barrier_in_the_body_threads_may_leave_as_they_like() -> None:
    assert safe(f"{TID} {N} {TEST} @%p1 ret; st.global.u32 [%rd1], %r1; ret;")
    assert safe("ret;")


@pytest.mark.parametrize("index", ["%ctaid.x", "%nctaid.y", "%ntid.x", "%cluster_ctarank", "%smid"])
def test_branches_the_whole_block_takes_are_harmless(index: str) -> None:
    assert safe(f"mov.u32 %r1, {index}; {N} {TEST} @%p1 bra OUT; {BARRIER} OUT: ret;")


def test_a_branch_on_a_parameter_is_the_same_for_the_block() -> None:
    assert safe(f"{N} setp.eq.u32 %p1, %r2, 0; @%p1 ret; {BARRIER} ret;")


def test_a_loop_counted_by_a_parameter_may_hold_a_barrier() -> None:
    assert safe(f"{N} mov.u32 %r1, 0; L: {BARRIER} add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, %r2; @%p1 bra L; ret;")


@pytest.mark.parametrize("leave", ["@%p1 ret;", "@%p1 exit;", "@%p1 bra OUT;", "@!%p1 bra OUT;"])
def test_threads_that_leave_before_a_barrier_are_counted_out(leave: str) -> None:
    assert not safe(f"{TID} {N} {TEST} {leave} {BARRIER} OUT: ret;")


@pytest.mark.parametrize("where", ["%tid.x", "%tid.z", "%laneid", "%warpid", "%lanemask_lt", "%clock", "%globaltimer"])
def test_what_differs_between_threads_makes_a_branch_divergent(where: str) -> None:
    assert not safe(f"mov.u32 %r1, {where}; {N} {TEST} @%p1 ret; {BARRIER} ret;")


@pytest.mark.parametrize(
    "load",
    [
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
)
def test_what_comes_from_memory_or_other_threads_may_differ(load: str) -> None:
    assert not safe(f"{load} {N} {TEST} @%p1 ret; {BARRIER} ret;")


def test_a_divergent_if_without_a_barrier_inside_is_harmless() -> None:
    reduction = f"""
    {TID} mov.u32 %r3, 128;
    LOOP: setp.ge.u32 %p1, %r1, %r3; @%p1 bra SKIP;
    ld.shared.u32 %r4, [%r1]; st.shared.u32 [%r1], %r4;
    SKIP: {BARRIER} shr.u32 %r3, %r3, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra LOOP;
    ret;"""
    assert safe(reduction)


def test_a_barrier_in_a_loop_left_at_different_times_is_not() -> None:
    assert not safe(f"{TID} L: {BARRIER} sub.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L; ret;")


def test_a_counter_left_by_a_divergent_loop_differs() -> None:
    count = "mov.u32 %r3, 0; L: add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, %r1; @%p1 bra L;"
    assert not safe(f"{TID} {count} setp.ge.u32 %p2, %r3, 7; @%p2 ret; {BARRIER} ret;")


def test_a_value_chosen_by_a_divergent_branch_differs() -> None:
    choose = f"{TID} {N} {TEST} mov.u32 %r3, 0; @%p1 bra S; mov.u32 %r3, 1; S: setp.eq.u32 %p2, %r3, 0;"
    assert not safe(f"{choose} @%p2 ret; {BARRIER} ret;")
    predicated = f"{TID} {N} {TEST} mov.u32 %r3, 0; @%p1 mov.u32 %r3, 1; setp.eq.u32 %p2, %r3, 0;"
    assert not safe(f"{predicated} @%p2 ret; {BARRIER} ret;")


def test_the_second_result_of_setp_differs_too() -> None:
    assert not safe(f"{TID} {N} setp.lt.u32 %p1|%p2, %r1, %r2; @%p2 ret; {BARRIER} ret;")


def test_a_predicated_barrier_is_skipped_without_a_branch() -> None:
    assert not safe(f"{TID} {N} {TEST} @%p1 {BARRIER} ret;")
    assert safe(f"{BLOCK} {N} {TEST} @%p1 {BARRIER} ret;")


def test_a_barrier_in_a_device_function_is_not_followed() -> None:
    assert not safe("call f; ret;", f".func f() {{ {BARRIER} ret; }}")
    assert safe("call f; ret;", ".func f() { ret; }")


def test_indirect_branches_are_not_followed() -> None:
    assert not safe(f"T: .branchtargets A, B; brx.idx %r1, T; A: B: {BARRIER} ret;")


def test_a_branch_to_a_label_that_is_not_there_is_not_followed() -> None:
    assert not safe(f"{BARRIER} bra NOWHERE;")


def test_a_loop_without_an_end_is_handled() -> None:
    assert safe(f"L: {BARRIER} bra L;")
    assert not safe(f"{TID} {N} {TEST} @%p1 ret; L: {BARRIER} bra L;")


def test_inline_assembly_names_registers_without_percent() -> None:
    leave = "{{ .reg .pred {0}; setp.ge.s32 done{1}, %r1, %r2; @done{1} ret; }}"
    for name, number in (("done", ""), ("done<2>", "1"), ("a, done", "")):
        assert not safe(f"{TID} {N} {leave.format(name, number)} {BARRIER} ret;")
        assert safe(f"{BLOCK} {N} {leave.format(name, number)} {BARRIER} ret;")


def test_components_of_a_vector_belong_to_it() -> None:
    vector = f".reg .v2 .b32 %v; ld.global.v2.u32 %v, [%rd1]; {N} setp.ge.u32 %p1, %v.x, %r2;"
    assert not safe(f"{vector} @%p1 ret; {BARRIER} ret;")


def test_equal_labels_in_different_scopes_are_different_places() -> None:
    # The first loop holds a barrier and turns a different number of times per thread; the second holds none.
    turn = "sub.u32 %r1, %r1, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;"
    assert not safe(f"{TID} {{ L: {BARRIER} {turn} }} {{ L: {turn} }} ret;")
    assert safe(f"{TID} {{ L: {turn} }} {BARRIER} {{ L: {turn} }} ret;")


def test_a_scope_may_branch_out_of_itself() -> None:
    assert not safe(f"{TID} {N} {TEST} {{ {{ @%p1 bra OUT; }} }} {BARRIER} OUT: ret;")


def test_exit_in_a_device_function_is_refused_with_its_name() -> None:
    parsed = Module.parse(module(".func leaf() { exit; }", entry("call leaf; ret;")))
    with failing(InstrumentError, kernel="k", field="exit", given="leaf"):
        refuse_exit_in_functions(parsed, "k")


def test_exit_in_the_entry_is_not_refused() -> None:
    refuse_exit_in_functions(Module.parse(module(".func leaf() { ret; }", entry("exit;"))), "k")
