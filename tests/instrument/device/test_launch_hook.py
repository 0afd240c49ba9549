"""Launches that wait at a gate: pointers lead through it, and the search of memory finds every pointer."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from paellapy.instrument.device.launch_hook import Finder, in_pieces

CODE = """
import gc, os, time
import numpy as np
from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.launch_hook import Cells

words = np.zeros(launch_hook.WORDS, np.uint64)
words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
cell = np.array([words.ctypes.data], np.uint64)
cells = Cells(int(cell.ctypes.data), "libc.so", ["getpriority"])
before = os.getpriority(os.PRIO_PROCESS, 0)
assert cells.look() > 0, "no cell has its address"
assert cells.look() == 0, "each is changed once"
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert words[launch_hook.LAUNCHES] == 1 and words[launch_hook.WAITS] == 0
words[launch_hook.CLOSED_UNTIL_NS] = time.monotonic_ns() + 30_000_000
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert words[launch_hook.WAITS] == 1 and words[launch_hook.WAITED_NS] > 1_000_000
other = np.zeros(launch_hook.WORDS, np.uint64)
other[launch_hook.SHARE] = launch_hook.SHARE_UNIT
cell[0] = other.ctypes.data
assert os.getpriority(os.PRIO_PROCESS, 0) == before
assert other[launch_hook.LAUNCHES] == 1 and words[launch_hook.LAUNCHES] == 2
assert Cells(int(cell.ctypes.data), "libnot.so").look() == 0
del cells
gc.collect()
assert os.getpriority(os.PRIO_PROCESS, 0) == before and other[launch_hook.LAUNCHES] == 2, "the code outlives the object"
print("done")
"""


def test_calls_of_a_library_wait_at_the_gate_and_go_on() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert found.stdout == "done\n", found.stderr


DRIVER = """
#include <string.h>
int launches;
int cuLaunchKernel(long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long last)
{ launches++; return (int)last; }
int queries, capturing;
unsigned long *gate, until; /* if set, the gate closes while a stream is asked */
int cuStreamIsCapturing(long stream, int *status) { *status = capturing; return stream != 9; }
int cuStreamQuery(long stream) { if (gate) *gate = until; return ++queries % 3 ? 600 : 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long flags, int *status)
{ *found = strcmp(name, "cuLaunchKernel") ? 0 : (void *)cuLaunchKernel; return 0; }
"""
# As NVIDIA's runtime does it: it asks once it is first used, and keeps the addresses where data begin as zeros.
RUNTIME = """
#include <dlfcn.h>
static int (*launch)(long, long, long, long, long, long, long, long, long, long, long);
int use(void) {
    int (*ask)(const char *, void **, int, unsigned long, int *);
    *(void **)&ask = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuGetProcAddress_v2");
    return ask("cuLaunchKernel", (void **)&launch, 4000, 0, 0);
}
int run(int last) { return launch(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, last); }
"""
LATE = """
import ctypes
import time
import numpy as np
from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.launch_hook import Cells

words = np.zeros(launch_hook.WORDS, np.uint64)
words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
cell = np.array([words.ctypes.data], np.uint64)
cells = Cells(int(cell.ctypes.data))
runtime = ctypes.CDLL("libruntime.so")
assert cells.look() == 0, "the driver is not loaded"
driver = ctypes.CDLL("libcuda.so.1")
assert cells.look() == 0, "nobody has asked for it"
runtime.use()
assert cells.look() == 1
assert runtime.run(77) == 77 and words[launch_hook.LAUNCHES] == 1
assert ctypes.c_int.in_dll(driver, "launches").value == 1
queries = ctypes.c_int.in_dll(driver, "queries")
assert queries.value == 0, "nothing says that there is a bound"
words[launch_hook.IN_FLIGHT], words[launch_hook.ALIVE_UNTIL_NS] = 4, 1
for _ in range(8):
    assert runtime.run(5) == 5
assert queries.value == 6, "every fourth, until the stream is done"
ctypes.c_int.in_dll(driver, "capturing").value = 1
for _ in range(8):
    assert runtime.run(5) == 5
assert queries.value == 6, "a stream that is captured is let alone"
ctypes.c_int.in_dll(driver, "capturing").value = 0
ctypes.c_uint64.in_dll(driver, "until").value = time.monotonic_ns() + 50_000_000
ctypes.c_uint64.in_dll(driver, "gate").value = words.ctypes.data
while queries.value == 6:
    assert runtime.run(5) == 5 and words[launch_hook.WAITS] == (queries.value > 6)
print("done")
"""


def test_a_library_that_asks_for_launches_late_waits_too(tmp_path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    for name, text in (("libcuda.so.1", DRIVER), ("libruntime.so", RUNTIME)):
        (tmp_path / "it.c").write_text(text)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / name, tmp_path / "it.c"], check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    line = [sys.executable, "-c", LATE]
    found = subprocess.run(line, capture_output=True, text=True, timeout=120, env=environment)
    assert found.stdout == "done\n", found.stderr


@pytest.mark.parametrize("plain", [False, True])
def test_a_search_finds_all_words_however_many_there_are(plain: bool) -> None:
    words = np.full(300_000, 5, np.uint64)  # more than a piece
    words[[100, 299_999]] = 9
    start = int(words.ctypes.data)
    pieces = in_pieces([(start, start + 8 * 1000 + 3), (start + 8 * 1000, start + words.nbytes)])
    assert len(pieces) == 4
    finder = Finder(plain)
    assert finder.plain == plain
    for _ in range(2):  # the room that was made is kept
        assert finder.find(pieces, 4, 6) == [start + 8 * k for k in range(len(words)) if k not in (100, 299_999)]
    assert finder.find(pieces, 9, 10) == [start + 800, start + 8 * 299_999]
    assert finder.find(pieces[:0], 4, 6) == []


def test_memory_that_is_gone_is_passed_over() -> None:
    """As when a library is unloaded during a search."""
    block = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    seen = np.frombuffer(block, np.uint64)
    start, nbytes = int(seen.ctypes.data), seen.nbytes
    del seen
    block.close()
    here = np.array([7, 1 << 41], np.uint64)
    at = int(here.ctypes.data)
    found = Finder().find(in_pieces([(start, start + nbytes), (at, at + here.nbytes)]), 1 << 41, (1 << 41) + 1)
    assert at + 8 in found


def test_a_search_works_where_memory_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.open", refuse)
    words = np.array([1, 77], np.uint64)
    start = int(words.ctypes.data)
    finder = Finder()
    assert finder.plain
    assert finder.find(in_pieces([(start, start + words.nbytes)]), 77, 78) == [start + 8]
