"""Pointers to a library's functions lead through the gate: shown with one of the C library's, which Python calls."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, time
import numpy as np
from paellapy.instrument.device import gate
from paellapy.instrument.device.driver_cells import Cells

words = np.zeros(gate.WORDS, np.uint64)
words[gate.SHARE] = gate.SHARE_UNIT
cell = np.array([words.ctypes.data], np.uint64)
cells = Cells(int(cell.ctypes.data), "libc.so", ["getpriority"])
before = os.getpriority(os.PRIO_PROCESS, 0)
assert cells.look() > 0, "no cell has its address"
assert cells.look() == 0, "each is changed once"
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert words[gate.LAUNCHES] == 1 and words[gate.WAITS] == 0
words[gate.CLOSED_UNTIL_NS] = time.monotonic_ns() + 30_000_000
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert words[gate.WAITS] == 1 and words[gate.WAITED_NS] > 1_000_000
other = np.zeros(gate.WORDS, np.uint64)
other[gate.SHARE] = gate.SHARE_UNIT
cell[0] = other.ctypes.data
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert other[gate.LAUNCHES] == 1 and words[gate.LAUNCHES] == 2
assert Cells(int(cell.ctypes.data), "libnot.so").look() == 0
print("done")
"""


def test_calls_of_a_library_wait_at_the_gate_and_go_on() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert found.stdout == "done\n", found.stderr
