"""Measures the tensor units that a segment uses, by the share that it leaves to a kernel that wants all of them.

The segment's slowdown says little if its products (`wgmma`) take precedence over the hog's (`mma.sync`), so the hog's
pace is measured too. If the hog runs at the fraction r of its own pace, beside a segment that takes s times as long as
alone, then the segment alone uses s · (1 - r) of the units.
"""

from __future__ import annotations

import numpy as np

from paellapy.scheduler.backends.cuda_hog import Work

_THREADS = 128  # one warp for each of an SM's tensor units
_CHAINS = 8  # concurrent products per warp, as each takes about 8 times as long as it keeps the unit busy

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"


def tensor_hog() -> Work:
    own = [f"{{%f{4 * k}, %f{4 * k + 1}, %f{4 * k + 2}, %f{4 * k + 3}}}" for k in range(_CHAINS)]
    zeros = [f"  mov.f32 %f{k}, 0f00000000;" for k in range(4 * _CHAINS)]
    operands = [f"  mov.b32 %r{k}, 0;" for k in range(6)]
    work = [f"  {_PRODUCT} {x}, {{%r0, %r1, %r2, %r3}}, {{%r4, %r5}}, {x};" for x in own]
    sums = [f"  add.f32 %f0, %f0, %f{k};" for k in range(1, 4 * _CHAINS)]
    return Work(
        "tensor_hog", _THREADS, blocks=1, rounds=256,
        registers=f"  .reg .b32 %r<6>;\n  .reg .f32 %f<{4 * _CHAINS}>;", before="\n".join([*zeros, *operands]),
        work="\n".join(work), after="\n".join([*sums, "  mov.b32 %result, %f0;"]),
    )  # fmt: skip


def part_of_units(stretch: float, pace: float) -> float:
    """The fraction of the tensor units that a segment uses, from its slowdown and the hog's pace beside it.

    >>> part_of_units(1.0, 0.4), part_of_units(1.6, 1 / 1.6), part_of_units(7.0, float("nan"))
    (0.6, 0.6, 0.0)
    """
    found = stretch * (1.0 - np.minimum(pace, 1.0))
    return round(float(np.clip(np.nan_to_num(found), 0.0, 1.0)), 3)
