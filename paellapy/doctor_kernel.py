"""The kernel the doctor tries. Triton reads its source from a file, so it has one."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def twice(x, out, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)
