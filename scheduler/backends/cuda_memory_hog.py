"""Measures the bandwidth that a segment uses, by the share that it leaves to a kernel that wants all of it.

If all bandwidth is in use, the hog gets r · h of it: h is its fraction alone, and r its pace beside the segment
relative to its pace alone. The segment gets the rest. It takes s times as long as alone, so alone it uses
s · (1 - r · h).

If the hog is not slowed down, some bandwidth is left over, and the segment's own slowdown has another cause: the two
also share the SMs. The segment's use is then unknown but small, and counts as zero.
"""

from __future__ import annotations

import numpy as np

from paellapy.scheduler.backends.cuda_hog import MANY, Work

_SPAN_BYTES = 1 << 28  # read again and again: several times the size of the L2 cache
_THREADS = 256
_LOADS = 6  # per thread and round
ROUND_BYTES = 16 * _LOADS * _THREADS  # per block
_FREE = 0.92  # above this pace bandwidth is left over: other work on the SMs alone costs a hog up to 0.04


def memory_hog() -> Work:
    loads = []
    for k in range(_LOADS):
        loads += [
            f"  and.b64 %d{10 + k}, %d2, {_SPAN_BYTES - 1};",
            f"  add.u64 %d{10 + k}, %d{10 + k}, %d1;",
            "  add.u64 %d2, %d2, %d3;",
            f"  ld.global.cs.v4.u32 {{%r{10 + 4 * k}, %r{11 + 4 * k}, %r{12 + 4 * k}, %r{13 + 4 * k}}}, [%d{10 + k}];",
        ]
    sums = [f"  xor.b32 %r0, %r0, %r{k};" for k in range(10, 10 + 4 * _LOADS)]
    before = f"""
  ld.param.u64 %d1, [data];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %ctaid.x;
  mov.u32 %r3, %nctaid.x;
  mad.lo.u32 %r4, %r2, {_THREADS}, %r1;
  mul.wide.u32 %d2, %r4, 16;
  mul.wide.u32 %d3, %r3, {16 * _THREADS};
  mov.u32 %r0, 0;"""
    # Without the directive, the assembler would save registers for more blocks, and a load would wait for another.
    return Work(
        "memory_hog", _THREADS, blocks=2, rounds=4, registers="  .reg .b32 %r<40>;\n  .reg .b64 %d<20>;", before=before,
        work="\n".join(['  .pragma "nounroll";', *loads, *sums]), after="  mov.b32 %result, %r0;",
        data_bytes=_SPAN_BYTES, directives=f".minnctapersm {MANY}",
    )  # fmt: skip


def part_of_bandwidth(stretch: float, pace: float, hog: float) -> float:
    """The fraction of the bandwidth that a segment uses, from its slowdown and the hog's pace beside it.

    `hog` is the fraction that the hog gets alone.

    >>> part_of_bandwidth(1.5, 1 / 1.5, 0.6), part_of_bandwidth(1.25, 1.0, 0.6)
    (0.9, 0.0)
    """
    if not pace < _FREE:
        return 0.0
    return round(float(np.clip(stretch * (1.0 - pace * hog), 0.0, 1.0)), 3)
