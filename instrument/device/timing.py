"""Calibration of a GPU's timing: every time and efficiency of the SM model, in one place."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paellapy.instrument.device.parts import Part
from paellapy.instrument.errors import NoDeviceError

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Timing of one part. Defaults were measured on one H200; `Timing.for_part` prefers a part's recorded profile."""

    # From the host's call to the first block on an idle GPU: 3.4–4.0 µs of cuLaunchKernel, then the doorbell across
    # PCIe and the fetch. With a 2.4 µs kernel and the completion word's return, this gives the measured loop of 9–10
    # µs.
    launch_ns: float = 5700.0
    kernel_gap_ns: float = 4000.0  # kernel to kernel in one stream, launched one by one
    graph_gap_ns: float = 1000.0  # kernel to kernel inside one graph
    # The front end starts one grid after the other, over all streams: 1.35 M kernels/s at saturation.
    grid_issue_ns: float = 740.0
    block_issue_ns: float = 0.35  # the block scheduler places one block after the other
    block_overhead_ns: float = 600.0  # a block's fixed latency before its work flows: setup and the first load
    # A block's waiting time, per step of its longest dependent chain, per element that each of its threads computes,
    # and per instruction on numbers that all threads share.
    load_ns: float = 350.0
    atomic_ns: float = 500.0
    reduction_ns: float = 60.0
    dot_ns: float = 150.0
    element_ns: float = 0.5
    instruction_ns: float = 2.0
    # For parts whose machine code is read (lone_block.py), these two replace the six above: the time of a cycle, and
    # the time to fetch each different instruction. 0: it is not read.
    cycle_ns: float = 0.0
    fetch_ns: float = 0.0
    sector_update_ns: float = 0.675  # one turn of atomic updates after another at the same line of L2 (ttir/sectors.py)
    fma_product_cost: float = 4.0  # products on the ordinary units, in units of their flops, including operand movement
    l2_speedup: float = 2.5  # how much faster than memory L2 delivers data that fit into it
    # 16384 blocks of 3 x 4 KiB in 48 µs; an fp16 GEMM of 2048³ in 27 µs.
    bandwidth_efficiency: float = 0.92
    flops_efficiency: float = 0.9
    tensor_efficiency: float = 0.7
    sm_bytes_per_clock: float = 64.0  # one SM's port to L2 (A100 whitepaper): the most that a lone SM can draw
    copy_latency_ns: float = 1500.0
    pcie_efficiency: float = 0.85
    jitter: float = 0.0  # blocks vary by up to this fraction either way, drawn from the model's seed

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"timing {field.name}={value!r}: it must be a number of at least 0")
        for name in ("bandwidth_efficiency", "flops_efficiency", "tensor_efficiency", "pcie_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"timing {name}={getattr(self, name)}: it must be above 0 and at most 1")
        if self.jitter >= 1 or self.sm_bytes_per_clock == 0:
            raise ValueError("timing jitter must be below 1 and sm_bytes_per_clock above 0")

    @classmethod
    def load(cls, path: Path) -> Timing:
        """Reads a recorded profile: JSON, with any of these names under "timing"; the others keep their defaults."""
        recorded: dict[str, Any] = json.loads(path.read_text())["timing"]
        unknown = set(recorded) - {field.name for field in fields(cls)}
        if unknown:
            raise NoDeviceError(
                f"{path.name} sets timing that this version of paellapy does not know: {', '.join(sorted(unknown))}; "
                "upgrade paellapy"
            )
        return cls(**recorded)

    @classmethod
    def for_part(cls, part: Part) -> Timing:
        """The part's recorded profile if there is one, otherwise the defaults."""
        path = PROFILES / f"{part.name}.json"
        return cls.load(path) if path.exists() else cls()

    def save(self, path: Path, **about: object) -> None:
        """Writes a profile; `about` says how it was recorded (device, driver, date, error against the part)."""
        path.write_text(json.dumps({**about, "timing": asdict(self)}, indent=2) + "\n")
