"""The time that an open gate adds to a launch: calls of a C library function, directly and through the gate.

    python benchmarks/gate_cost.py

This needs no GPU, since the gate works with any function. On a GPU it also measures launches of an empty kernel:
directly, through the gate, and with a callback of CUPTI's, all in one process.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupti
import numba
import numpy as np
from common import RESULTS, save

from paellapy.instrument.device import CudaDevice, Device, launch_hook
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.device.driver import library as libcuda
from paellapy.instrument.device.launch_hook import address, gated
from paellapy.scheduler.core.atomics import call_launch

CALLS, ROUNDS = 2_000_000, 9
AHEAD, BATCHES = 400, 50  # launches until the GPU is waited for: fewer than fit into its queue; and how often
NOTHING = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\0"


@numba.njit(nogil=True)
def call_often(function: int, n: int) -> int:
    total = 0
    for k in range(n):
        total += call_launch(np.uint64(function), np.uint64(k), np.uint64(0))
    return total


def ns_per_call(function: int) -> list[float]:
    call_often(function, 1000)
    found = []
    for _ in range(ROUNDS):
        began = time.perf_counter_ns()
        call_often(function, CALLS)
        found.append(round((time.perf_counter_ns() - began) / CALLS, 3))
    return found


def launcher(function: int) -> Callable[[int, int], int]:
    """Launches a kernel of one thread and no arguments again and again; the sum of the statuses."""
    launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 11)(function)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def often(kernel: int, n: int) -> int:
        total = 0
        for _ in range(n):
            total += launch(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        return total

    return often  # type: ignore[no-any-return]


def ns_per_launch(often: Callable[[int, int], int], kernel: int) -> float:
    """Of the host; the GPU is waited for in between."""
    spent = 0
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        failed = often(kernel, AHEAD)
        spent += time.perf_counter_ns() - began
        if failed:
            raise SystemExit("a launch failed")
        check(driver().cuCtxSynchronize(), "waiting for the GPU")
    return round(spent / (AHEAD * BATCHES), 3)


def median(times: list[float]) -> float:
    return float(np.median(times))


def on_a_gpu(device: CudaDevice, cell: int) -> dict[str, Any]:
    """Launches directly and through the gate in turn; then with a callback, and directly again."""
    device.activate()
    module = check(driver().cuModuleLoadData(NOTHING), "loading a kernel")
    kernel = int(check(driver().cuModuleGetFunction(module, b"nothing"), "finding a kernel"))
    straight = address(libcuda().cuLaunchKernel)
    through, keep = gated({straight: "cuLaunchKernel"}, cell)
    launch_hook.keep_forever(keep)
    ways = {"straight_ns": launcher(straight), "gated_ns": launcher(through[straight])}
    found: dict[str, Any] = {name: [] for name in ways}
    for often in ways.values():
        ns_per_launch(often, kernel)
    for _ in range(ROUNDS):
        for name, often in ways.items():
            found[name].append(ns_per_launch(often, kernel))
    found["added_ns"] = round(median(found["gated_ns"]) - median(found["straight_ns"]), 3)
    path = cupti.library()
    if path is None:
        print(f"no callbacks: {cupti.MISSING}")
        return found
    with cupti.callbacks(path) as words:
        ns_per_launch(ways["straight_ns"], kernel)
        found["cupti_ns"] = [ns_per_launch(ways["straight_ns"], kernel) for _ in range(ROUNDS)]
    if words[1] != (ROUNDS + 1) * AHEAD * BATCHES:
        raise SystemExit(f"CUPTI has called back {words[1]} times, not for every launch")
    found["straight_again_ns"] = [ns_per_launch(ways["straight_ns"], kernel) for _ in range(ROUNDS)]
    found["cupti_added_ns"] = round(median(found["cupti_ns"]) - median(found["straight_ns"]), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    words = np.zeros(launch_hook.WORDS, np.uint64)
    words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
    cell = np.array([words.ctypes.data], np.uint64)
    straight = address(ctypes.CDLL(None).abs)
    through, keep = gated({straight: "abs"}, int(cell.ctypes.data))
    results: dict[str, Any] = {"straight_ns": ns_per_call(straight), "gated_ns": ns_per_call(through[straight])}
    assert keep is not None
    results["added_ns"] = [round(median(results["gated_ns"]) - median(results["straight_ns"]), 3)]
    device = Device("auto")
    if isinstance(device, CudaDevice):
        results["launches"] = on_a_gpu(device, int(cell.ctypes.data))
    print(results)
    save("gate_cost", results, device if isinstance(device, CudaDevice) else None, args.folder)


if __name__ == "__main__":
    main()
