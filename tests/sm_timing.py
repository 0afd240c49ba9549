"""A GPU part with simple timings, so that the SM model's results are easy to calculate."""

from __future__ import annotations

from paellapy.instrument.gpu_model.parts import Timing, part

H200 = part("h200")
# No latencies and full rates: times follow from the work alone, and whole durations stay whole.
EXACT = Timing(
    launch_ns=0,
    kernel_gap_ns=0,
    graph_gap_ns=0,
    grid_issue_ns=0,
    block_issue_ns=0,
    block_overhead_ns=1,
    bandwidth_efficiency=1,
    flops_efficiency=1,
    tensor_efficiency=1,
    pcie_efficiency=1,
    copy_latency_ns=0,
)
