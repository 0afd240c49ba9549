"""Launch options of Triton kernels: they reach the compiler, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from failing import failing

from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels.triton_kernel import TritonKernel

pytestmark = pytest.mark.versions


@triton.jit
def copy(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def compiled(target: str = "sm_80", **options: Any) -> Any:
    return TritonKernel(copy, None, "auto").compile("*fp32", "*fp32", "i32", B=256, target=target, **options)


def test_launch_options_reach_the_compiler() -> None:
    assert [compiled(num_warps=w).source.threads for w in (1, 4, 8)] == [32, 128, 256]
    assert compiled(num_stages=5).source.metadata["num_stages"] == 5
    assert ".maxnreg 40" in compiled(maxnreg=40).ptx
    assert ".maxnreg" not in compiled().ptx
    assert compiled("sm_90", num_ctas=2).source.cluster == 2
    assert "--fmad=false" in compiled(enable_fp_fusion=False).source.ptxas_options
    assert "--fmad=false" not in compiled().source.ptxas_options
    assert '"cuda:80"' in compiled("sm_90", arch="sm80").asm["ttgir"]
    assert '"cuda:90"' in compiled("sm_90").asm["ttgir"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_warps": 3}, {"num_warps": 0}, {"num_warps": 64}, {"num_warps": "4"}, {"num_warps": [4]},
        {"num_stages": -1}, {"num_stages": 1.5}, {"num_ctas": 3}, {"maxnreg": 0}, {"maxnreg": 1000},
        {"enable_fp_fusion": "no"}, {"debug": 2}, {"arch": 90}, {"arch": "gfx942"},
    ],
)  # fmt: skip
def test_options_no_gpu_can_run_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with failing(ArgumentError, kernel="copy", field=name, given=value):
        compiled(**options)


def test_a_wrong_number_of_warps_is_the_error_that_triton_raises() -> None:
    with failing(AssertionError, kernel="copy", field="num_warps", given=3):
        compiled(num_warps=3)


def test_options_that_do_not_fit_are_the_error_that_triton_raises() -> None:
    with pytest.raises(ValueError, match=r"num_ctas > 1 requires NVIDIA SM90\+") as found:
        compiled(num_ctas=2)
    assert isinstance(found.value, CompileError)
