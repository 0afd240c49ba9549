"""Tensor descriptors on a real GPU: the CUtensorMap that a kernel's bulk copies use."""

from __future__ import annotations

from typing import Any

from paellapy.instrument.arguments import Descriptor
from paellapy.instrument.device.driver import check, driver

# Triton numbers element types as the device does; three of the driver's numbers differ.
_HOST_TYPES = {8: 10, 9: 8, 10: 9}
_TF32 = 11


def encode_tile(descriptor: Descriptor, facts: dict[str, Any]) -> bytes:
    """The 128 bytes of the map. `facts` is one entry of Triton's `tensordesc_meta`."""
    cu = driver()
    shape = list(descriptor.shape)
    if facts["fp4_padded"]:
        shape[-1] *= 2
    kind = _TF32 if descriptor.tf32 else _HOST_TYPES.get(facts["elem_type"], facts["elem_type"])
    size, rank = facts["elem_size"], len(shape)
    # The driver counts dimensions from the innermost one, and omits its stride. It refuses an empty list.
    strides = [size * stride for stride in descriptor.strides[-2::-1]] or [size * shape[0]]
    fill = cu.CUtensorMapFloatOOBfill
    encoded = cu.cuTensorMapEncodeTiled(
        cu.CUtensorMapDataType(kind),
        rank,
        descriptor.base,
        [cu.cuuint64_t(extent) for extent in reversed(shape)],
        [cu.cuuint64_t(stride) for stride in strides],
        [cu.cuuint32_t(extent) for extent in reversed(facts["block_size"])],
        [cu.cuuint32_t(1)] * rank,
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle(facts["swizzle"]),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
        if descriptor.nan_padding
        else fill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = check(encoded, "describing a tensor").opaque
    return b"".join(int(word).to_bytes(8, "little") for word in words)
