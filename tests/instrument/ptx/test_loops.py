"""Loops of PTX and of machine code: how many iterations one turn stands for."""

from __future__ import annotations

from collections import Counter

from paellapy.instrument.ptx.sass import ptx_loops

TEXT = """
.visible .entry other() { ret; }
.visible .entry two(.param .u64 p)
{
	.loc	1 7 5
	ld.global.b32 	%r1, [%rd1];
$L__BB0_1:
	.loc	1 8 5
	@%p1 ld.global.v4.b32 	{%r2, %r3, %r4, %r5}, [%rd1];
	fma.rn.f32 	%r6, %r2, %r3, %r4;
	mul.f32 	%r7, %r6, %r6;
$L__BB0_2:
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 };
	.loc	1 9 9
	@%p2 bra 	$L__BB0_2;
	.loc	1 8 5
	@!%p3 bra 	$L__BB0_1;
	bra.uni 	$L__BB0_3;
$L__BB0_3:
	st.global.b32 	[%rd1], %r7;
	ret;
}
"""


def test_loops_are_backward_jumps_with_their_lines() -> None:
    outer, inner = ptx_loops(TEXT, "two")
    assert (outer.line, inner.line) == (8, 9)
    assert outer.inside == Counter(load=1, mma=1, flops=3)
    assert outer.outside == Counter(load=1, store=1)
    assert inner.inside == Counter(mma=1)
    assert ptx_loops(TEXT, "other") == ptx_loops(TEXT, "absent") == []
