"""`paellapy run --best-effort` for guest_probe.py: its gate notes which launches were held when, and counts calls.

    PROBE=FILE python benchmarks/guest_probe_gate.py script.py …

The file is an array of words, which the probe makes.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

from paellapy.cli.guest import Guest
from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.driver import NOT_READY
from paellapy.instrument.device.launch_hook import _I32, _I64, _Gate, _number

# Words of the file: launches held so far; when the stream of a held launch was last seen empty; when a launch last
# passed; how many words of libraries point into the driver; calls by function; and a row for each held launch: the last
# pass before it, when it was held, when its stream was seen empty, when it went on, and the number of its function.
COUNT, EMPTY, LAST_PASS, POINTERS, CALLS, LOG = 0, 2, 3, 4, 8, 128
ROWS, ROW = 16384, 8
SIZE = LOG + ROWS * ROW
EXTRA = (  # counted, not held
    "cuEventRecord", "cuEventRecordWithFlags", "cuStreamWaitEvent", "cuStreamSynchronize", "cuEventSynchronize",
    "cuCtxSynchronize", "cuEventQuery", "cuStreamQuery", "cuMemAlloc", "cuMemFree", "cuMemAllocAsync", "cuMemFreeAsync",
    "cuLaunchHostFunc", "cuStreamWriteValue32", "cuStreamWriteValue64", "cuStreamWaitValue32", "cuStreamBatchMemOp",
    "cuMemsetD8", "cuMemsetD32", "cuMemcpyDtoH", "cuMemcpyHtoD", "cuGraphInstantiate", "cuModuleLoadData",
    "cuLibraryLoadData", "cuMemHostAlloc", "cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync",
    "cuLaunchCooperativeKernelMultiDevice", "cuMemcpy2D", "cuMemcpy3D", "cuMemcpy2DUnaligned", "cuMemsetD16",
)  # fmt: skip
HELD = launch_hook.LAUNCH_FUNCTIONS
ALL = tuple(dict.fromkeys((*HELD, *EXTRA)))
assert CALLS + len(ALL) <= LOG
words_at = 0  # address of the file's words


class Logged(_Gate):
    """Holds as the gate does, and writes to the file."""

    def _at_file(self, word: int) -> Any:
        return _number(words_at + 8 * word)

    def _store(self, code: Any, address: Any, value: Any) -> None:
        code.store_atomic(value, code.inttoptr(address, _I64.as_pointer()), "release", 8)

    def bound(self, is_capturing: int, query: int) -> None:
        super().bound(is_capturing, query)
        held = self._held = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64, _I64]), "held")
        stream, name = held.args
        names = ("begin", "note", "asks", "look", "empty", "wait", "end")
        blocks = {each: held.append_basic_block(each) for each in names}
        code = {each: ir.IRBuilder(block) for each, block in blocks.items()}
        b = code["begin"]
        status = b.alloca(_I32)
        words = b.call(self._words, [])
        now = b.call(self._now, [])
        b.cbranch(b.icmp_unsigned("<", now, self._load(b, words)), blocks["note"], blocks["end"])
        b = code["note"]
        pointer = b.inttoptr(self._at_file(COUNT), _I64.as_pointer())
        row = b.and_(b.atomic_rmw("add", pointer, _number(1), "monotonic"), _number(ROWS - 1))
        at = b.add(self._at_file(LOG), b.mul(row, _number(8 * ROW)))
        self._store(b, at, self._load(b, self._at_file(LAST_PASS)))
        self._store(b, b.add(at, _number(8)), now)
        self._store(b, b.add(at, _number(16)), _number(0))
        self._store(b, b.add(at, _number(32)), name)
        b.branch(blocks["asks"])
        b = code["asks"]
        failed = self._call(b, is_capturing, ir.FunctionType(_I32, [_I64, status.type]), [stream, status])
        captured = b.or_(failed, b.load(status))
        b.cbranch(b.icmp_unsigned("==", captured, ir.Constant(_I32, 0)), blocks["look"], blocks["wait"])
        b = code["look"]
        found = self._call(b, query, ir.FunctionType(_I32, [_I64]), [stream])
        b.cbranch(b.icmp_unsigned("==", found, ir.Constant(_I32, NOT_READY)), blocks["look"], blocks["empty"])
        b = code["empty"]
        drained = b.call(self._now, [])
        self._store(b, b.add(at, _number(16)), drained)
        self._store(b, self._at_file(EMPTY), drained)
        b.branch(blocks["wait"])
        b = code["wait"]
        left = b.call(self._wait, [b.call(self._words, [])])
        self._store(b, b.add(at, _number(24)), left)
        b.branch(blocks["end"])
        code["end"].ret_void()

    def before(self, original: int, stream_in: str = "") -> str:
        kind = ir.FunctionType(_I64, [_I64] * 12)
        made = ir.Function(self.module, kind, f"gated_{original:x}")
        code = ir.IRBuilder(made.append_basic_block())
        number = ALL.index(stream_in)
        pointer = code.inttoptr(self._at_file(CALLS + number), _I64.as_pointer())
        code.atomic_rmw("add", pointer, _number(1), "monotonic")
        if stream_in in HELD:
            stream: Any = _number(0)
            if stream_in == "cuLaunchKernel":
                stream = made.args[8]
            elif stream_in == "cuLaunchKernelEx":
                config = code.add(made.args[0], _number(32))
                stream = code.load(code.inttoptr(config, _I64.as_pointer()))
            if stream_in in ("cuLaunchKernel", "cuLaunchKernelEx"):
                code.call(self._drain, [stream])  # before the gate, not behind it
            words = code.call(self._words, [])
            self._add(code, words, launch_hook.LAUNCHES, _number(1))
            with code.if_then(code.icmp_unsigned("!=", self._load(code, words), _number(0)), likely=False):
                code.call(self._held, [stream, _number(number)])
            self._store(code, self._at_file(LAST_PASS), code.call(self._now, []))
        code.ret(self._call(code, original, kind, list(made.args)))
        return str(made.name)


def install(path: str) -> None:
    """Makes the gate of this process write to a file."""
    global words_at
    words = np.memmap(path, np.uint64, "r+", shape=(SIZE,))
    words_at = int(words.ctypes.data)
    launch_hook._Gate = Logged  # type: ignore[misc]
    find = launch_hook.Finder.find

    def counting(self: Any, *given: Any) -> list[int]:
        found = find(self, *given)
        words[POINTERS] = max(int(words[POINTERS]), len(found))
        return found

    launch_hook.Finder.find = counting  # type: ignore[method-assign]
    first = launch_hook.Cells.__init__

    def with_all(self: Any, cell: int, library: str = "libcuda.so", names: Any = ALL) -> None:
        first(self, cell, library, names)

    launch_hook.Cells.__init__ = with_all  # type: ignore[method-assign]
    launch_hook.keep_forever(words)


def main() -> None:
    install(os.environ["PROBE"])
    script = sys.argv[1]
    Guest("probe").join()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
