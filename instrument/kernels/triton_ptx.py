"""Triton's PTX: its target, threads and exits, and how Triton calls `ptxas` for it."""

from __future__ import annotations

import functools
import re

import triton

from paellapy.instrument.ptx.pass_config import Exits

TRITON_VERSION = tuple(int(re.sub(r"\D.*", "", part) or 0) for part in triton.__version__.split(".")[:2])


def ptx_target(ptx: str, arch: int) -> str:
    """The target that the PTX names, such as "sm_90a"."""
    found = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
    return found[1] if found else f"sm_{arch}"


def block_threads(ptx: str) -> int:
    """The threads of a block if the PTX fixes them, else 0.

    >>> block_threads(".visible .entry add() .reqntid 128 { ret; }")
    128
    """
    found = re.search(r"\.reqntid\s+(\d+)", ptx)
    return int(found[1]) if found else 0


def exits_of(ptx: str) -> Exits:
    """How the end of a block is detected: Triton branches per block, never per thread."""
    return "spare-barrier" if _is_warp_specialised(ptx) else "barrier"


def _is_warp_specialised(ptx: str) -> bool:
    """Whether a kernel is warp-specialised: groups of warps exchange registers, or wait at counted barriers."""
    return "setmaxnreg" in ptx or re.search(r"\bbar(rier)?\.sync(\.aligned)?\s+\d+\s*,\s*\d+", ptx) is not None


def ptxas_options(enable_fp_fusion: bool) -> tuple[str, ...]:
    """The options that Triton gives to `ptxas`."""
    flags = ["-lineinfo"]
    if not enable_fp_fusion:
        flags.append("--fmad=false")
    if TRITON_VERSION >= (3, 7):
        flags.append("--regAllocOptLevel=2")  # Triton's own setting since 3.7, because of a bug in ptxas 13
    return tuple(flags)


@functools.cache
def triton_ptxas(arch: int) -> str | None:
    """The path of the `ptxas` that Triton calls."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)
