"""Launch options of Triton kernels: known names, their allowed values, and the ones that have an effect."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from triton.backends.amd.compiler import HIPOptions
from triton.backends.nvidia.compiler import CUDAOptions

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.triton_errors import also

# Launch options and their allowed values: Triton accepts some that no GPU can run, and fails on others far from the
# cause.
_LAUNCH_OPTIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "num_warps": ("a power of 2 from 1 to 32", lambda v: v in (1, 2, 4, 8, 16, 32)),
    "num_stages": ("an integer, 0 or more", lambda v: isinstance(v, int) and v >= 0),
    "num_ctas": ("a power of 2 from 1 to 16", lambda v: v in (1, 2, 4, 8, 16)),
    "maxnreg": ("None or an integer from 1 to 255", lambda v: v is None or (isinstance(v, int) and 1 <= v <= 255)),
    "enable_fp_fusion": ("True or False", lambda v: isinstance(v, bool)),
    "debug": ("True or False", lambda v: isinstance(v, bool)),
    "launch_pdl": ("True or False", lambda v: isinstance(v, bool)),
    "launch_cooperative_grid": ("True or False", lambda v: isinstance(v, bool)),
    # Triton's passes optimise for it; the machine code is still for the device.
    "arch": ("a name such as 'sm90'", lambda v: isinstance(v, str) and re.fullmatch(r"sm\d{2,3}", v) is not None),
    "extern_libs": ("a dictionary of paths", lambda v: v is None or isinstance(v, dict)),
}
# Other options of Triton's compiler for NVIDIA are passed on; options of other vendors' compilers have no meaning here.
_PASSED_ON = frozenset(f.name for f in fields(CUDAOptions)) - {"backend_name", "warp_size"}
_MEANINGLESS = frozenset(f.name for f in fields(HIPOptions)) - _PASSED_ON - {"backend_name", "warp_size"}


def split_options(options: dict[str, Any], name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Checks the keywords that are left after binding, which must be launch options; returns those that have an effect.
    """
    unknown = [o for o in options if o not in _PASSED_ON | _MEANINGLESS]
    if unknown:
        raise ArgumentError(
            f"kernel {name!r} got unknown keyword {unknown[0]!r}; it takes {', '.join(arguments)} and the launch "
            f"options {', '.join(sorted(_LAUNCH_OPTIONS))}"
        )
    for option, value in options.items():
        wanted, is_right = _LAUNCH_OPTIONS.get(option, ("", lambda _: True))
        if not is_right(value):
            # Triton itself raises an AssertionError.
            raise also(
                ArgumentError(f"kernel {name!r}: {option} must be {wanted}, not {value!r}"), AssertionError
            )
    return {option: value for option, value in options.items() if option in _PASSED_ON}
