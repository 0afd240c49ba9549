"""Which kernels wait for other blocks, read off their loops."""

from __future__ import annotations

import pytest
from ptx_pieces import entry, module

from paellapy.instrument.ptx.flow import FlowGraph, blocks_that_wait
from paellapy.instrument.ptx.module import Module

LEAVE = "setp.eq.u32 %p1, %r1, 0; @%p1 bra again; ret;"  # a loop's end: round again while %r1 is 0


def waits(body: str, *functions: str) -> str:
    parsed = Module.parse(module(*functions, entry(body)))
    return blocks_that_wait(parsed, parsed.entry("k"))


@pytest.mark.parametrize(
    "body",
    [
        f"again: ld.volatile.global.u32 %r1, [%rd1]; {LEAVE}",
        f"again: ld.acquire.gpu.global.u32 %r1, [%rd1]; {LEAVE}",
        f"again: ld.relaxed.gpu.u32 %r1, [%rd1]; {LEAVE}",
        f"again: ld.global.cv.u32 %r1, [%rd1]; {LEAVE}",
        f"again: atom.global.cas.b32 %r1, [%rd1], 0, 1; {LEAVE}",
        f"mov.u32 %r2, 0; again: atom.global.cas.b32 %r1, [%rd1], %r2, 1; {LEAVE}",
        f"again: atom.global.exch.b32 %r1, [%rd1], 1; {LEAVE}",
        f"again: atom.global.add.u32 %r1, [%rd1], 0; {LEAVE}",
        f"mov.b32 %r2, 0; again: atom.global.add.u32 %r1, [%rd1], %r2; {LEAVE}",
        # one thread reads, the others are told through shared memory, or by a barrier
        "again: @%p2 ld.volatile.global.u32 %r2, [%rd1]; @%p2 st.shared.u32 [%r9], %r2; bar.sync 0; "
        f"ld.shared.u32 %r1, [%r9]; {LEAVE}",
        "again: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p2, %r1, 0; bar.red.or.pred %p1, 0, %p2; "
        "@%p1 bra again; ret;",
        # what leaves the loop is set on one way of a branch
        "again: ld.volatile.global.u32 %r2, [%rd1]; mov.u32 %r1, 0; setp.eq.u32 %p2, %r2, 0; @%p2 bra over; "
        f"mov.u32 %r1, 1; over: {LEAVE}",
        # a wait inside a loop over tiles
        "mov.u32 %r5, 0; tile: again: ld.volatile.global.u32 %r1, [%rd1]; setp.eq.u32 %p1, %r1, 0; @%p1 bra again; "
        "add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 9; @%p2 bra tile; ret;",
        "again: ld.volatile.global.u32 %r1, [%rd1]; brx.idx %r1, table;",
    ],
)  # fmt: skip
def test_loops_that_watch_memory_wait(body: str) -> None:
    assert waits(body)


@pytest.mark.parametrize(
    "body",
    [
        "ld.volatile.global.u32 %r1, [%rd1]; ret;",
        # weak loads, shared memory
        f"again: ld.global.u32 %r1, [%rd1]; {LEAVE}",
        f"again: ld.volatile.shared.u32 %r1, [%r9]; {LEAVE}",
        f"again: atom.shared.cas.b32 %r1, [%r9], 0, 1; {LEAVE}",
        # every turn makes progress
        f"again: atom.global.add.u32 %r1, [%rd1], 1; {LEAVE}",
        f"mov.b32 %r2, 1; again: atom.global.add.u32 %r1, [%rd1], %r2; {LEAVE}",
        f"again: atom.global.inc.u32 %r1, [%rd1], 99; {LEAVE}",
        "again: mov.u32 %r2, %r1; add.u32 %r3, %r2, 5; atom.global.cas.b32 %r1, [%rd1], %r2, %r3; "
        "setp.ne.u32 %p1, %r1, %r2; @%p1 bra again; ret;",
        # a counted loop that happens to watch
        "mov.u32 %r5, 0; again: ld.volatile.global.u32 %r1, [%rd1]; st.global.u32 [%rd2], %r1; add.u32 %r5, %r5, 1; "
        "setp.lt.u32 %p1, %r5, 9; @%p1 bra again; ret;",
        "mov.u32 %r5, 0; again: atom.global.exch.b32 %r1, [%rd1], 1; setp.eq.u32 %p2, %r1, 0; @%p2 bra over; "
        "st.global.u32 [%rd2], %r1; over: add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 9; @%p1 bra again; ret;",
        "brx.idx %r1, table;",
    ],
)  # fmt: skip
def test_loops_that_go_on_by_themselves_do_not(body: str) -> None:
    assert not waits(body)


def test_a_function_that_watches_memory_waits_where_it_is_called_in_a_loop() -> None:
    registers = ".reg .b32 %r<3>; .reg .b64 %rd<3>;"
    load = "ld.volatile.global.u32 %r1, [%rd1]; st.param.b32 [out], %r1;"
    look = f".func (.param .b32 out) look() {{ {registers} {load} ret; }}"
    through = ".func (.param .b32 out) through() { call (out), look; ret; }"
    call = "call (result), {name}; ld.param.b32 %r1, [result];"
    for name in ("look", "through"):
        assert waits(f"again: {call.format(name=name)} {LEAVE}", look, through)
        assert not waits(f"{call.format(name=name)} ret;", look, through)


def test_the_instruction_waited_at_is_named() -> None:
    read = "@%p3 ld.volatile.global.u32 %r1, [%rd1]"
    assert waits(f"again:  {read}; {LEAVE}") == read


def test_every_jump_backwards_makes_a_loop() -> None:
    body = (
        "outer: mov.u32 %r1, 0; inner: add.u32 %r1, %r1, 1; @%p1 bra inner; @%p2 bra outer; own: @%p3 bra own; "
        "first: mov.u32 %r2, 0; @%p4 bra first; mov.u32 %r3, 0; @%p5 bra first; ret; back: bra first;"
    )
    graph = FlowGraph.of(Module.parse(module(entry(body))).entry())
    assert graph is not None
    assert sorted(map(sorted, graph.loops())) == [[0, 1, 2, 3], [1, 2], [4], [5, 6], [5, 6, 7, 8]]
