"""The time that an open gate adds to a launch: calls of a C library function, directly and through the gate.

    python benchmarks/gate_cost.py

It needs no GPU, since the gate works with any function.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from pathlib import Path

import numba
import numpy as np
from common import RESULTS, save

from paellapy.instrument.device import gate
from paellapy.instrument.device.gate_code import gated
from paellapy.scheduler.core.atomics import call_launch

CALLS, ROUNDS = 2_000_000, 9


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    words = np.zeros(gate.WORDS, np.uint64)
    words[gate.SHARE] = gate.SHARE_UNIT
    cell = np.array([words.ctypes.data], np.uint64)
    straight = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value or 0
    through, keep = gated({straight: "abs"}, int(cell.ctypes.data))
    results = {"straight_ns": ns_per_call(straight), "gated_ns": ns_per_call(through[straight])}
    assert keep is not None
    results["added_ns"] = [round(float(np.median(results["gated_ns"]) - np.median(results["straight_ns"])), 3)]
    print(results)
    save("gate_cost", results, None, args.folder)


if __name__ == "__main__":
    main()
