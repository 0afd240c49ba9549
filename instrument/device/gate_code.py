"""Machine code of gates: functions that wait and then call the driver, and a memory search for pointers to it.

The only compiler needed is LLVM, which comes with Numba. Numba itself is not used, because it would take seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from llvmlite import binding as llvm
from llvmlite import ir

from paellapy.instrument.device import gate

_SLEEP_US = 20  # between two looks at a closed gate
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_ARGUMENTS = 12  # integers and pointers that are passed on, for any function: the most is eleven
_I64, _I32 = ir.IntType(64), ir.IntType(32)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


class _Gate:
    """Machine code of a gate and of all functions behind it, generated at once."""

    def __init__(self, cell: int) -> None:
        self.module, self._cell = ir.Module("paellapy_gate"), cell
        self._now, self._words, self._wait = (
            ir.Function(self.module, ir.FunctionType(_I64, [_I64] * n), name)
            for name, n in (("now_ns", 0), ("words", 0), ("wait", 1))
        )
        self.passes = ir.Function(self.module, ir.FunctionType(ir.VoidType(), []), "passes")
        libc: Any = ctypes.CDLL(None)
        self._make_now(address(libc.clock_gettime))
        code = ir.IRBuilder(self._words.append_basic_block())
        code.ret(self._load(code, _number(cell)))
        self._make_wait(address(libc.usleep))
        self._make_passes()
        self._drain: Any = None

    @staticmethod
    def _at(code: Any, words: Any, which: int) -> Any:
        return code.add(words, _number(8 * which))

    @staticmethod
    def _load(code: Any, address: Any) -> Any:
        return code.load_atomic(code.inttoptr(address, _I64.as_pointer()), "acquire", 8)

    def _add(self, code: Any, words: Any, which: int, value: Any) -> None:
        code.atomic_rmw("add", code.inttoptr(self._at(code, words, which), _I64.as_pointer()), value, "monotonic")

    @staticmethod
    def _call(code: Any, address: int, kind: Any, given: list[Any]) -> Any:
        return code.call(code.inttoptr(_number(address), kind.as_pointer()), given)

    def _make_now(self, clock_gettime: int) -> None:
        """Reads CLOCK_MONOTONIC into the caller's stack, since any thread may launch."""
        code = ir.IRBuilder(self._now.append_basic_block())
        spec = code.alloca(ir.ArrayType(_I64, 2))
        self._call(code, clock_gettime, ir.FunctionType(_I32, [_I32, spec.type]), [ir.Constant(_I32, 1), spec])
        both = code.load(spec)
        seconds = code.mul(code.extract_value(both, 0), _number(1_000_000_000))
        code.ret(code.add(seconds, code.extract_value(both, 1)))

    def _make_wait(self, usleep: int) -> None:
        """Waits while the gate is closed (see `gate.closed_at`); the words may change during each sleep."""
        names = ("begin", "look", "share", "alive", "period", "sleep", "end")
        blocks = [self._wait.append_basic_block(name) for name in names]
        begin, look, share_of, alive, period, sleep, end = (ir.IRBuilder(each) for each in blocks)
        began = begin.call(self._now, [])
        begin.branch(blocks[1])
        words, now = look.phi(_I64), look.phi(_I64)
        words.add_incoming(self._wait.args[0], blocks[0])
        now.add_incoming(began, blocks[0])
        look.cbranch(look.icmp_unsigned("<", now, self._load(look, words)), blocks[5], blocks[2])
        share = self._load(share_of, self._at(share_of, words, gate.SHARE))
        share_of.cbranch(share_of.icmp_unsigned("<", share, _number(gate.SHARE_UNIT)), blocks[3], blocks[6])
        until = self._load(alive, self._at(alive, words, gate.ALIVE_UNTIL_NS))
        alive.cbranch(alive.icmp_unsigned("<", now, until), blocks[4], blocks[6])
        part = period.mul(period.urem(now, _number(gate.PERIOD_NS)), _number(gate.SHARE_UNIT))
        over = period.icmp_unsigned(">=", part, period.mul(share, _number(gate.PERIOD_NS)))
        period.cbranch(over, blocks[5], blocks[6])
        self._call(sleep, usleep, ir.FunctionType(_I32, [_I32]), [ir.Constant(_I32, _SLEEP_US)])
        now.add_incoming(sleep.call(self._now, []), blocks[5])
        words.add_incoming(sleep.call(self._words, []), blocks[5])
        sleep.branch(blocks[1])
        with end.if_then(end.icmp_unsigned("!=", now, began)):
            self._add(end, words, gate.WAITS, _number(1))
            self._add(end, words, gate.WAITED_NS, end.sub(now, began))
        end.ret(now)

    def _make_passes(self) -> None:
        code = ir.IRBuilder(self.passes.append_basic_block())
        words = code.call(self._words, [])
        self._add(code, words, gate.LAUNCHES, _number(1))
        share = self._load(code, self._at(code, words, gate.SHARE))
        shut = code.icmp_unsigned("!=", self._load(code, words), _number(0))
        with code.if_then(code.or_(shut, code.icmp_unsigned("<", share, _number(gate.SHARE_UNIT))), likely=False):
            code.call(self._wait, [words])
        code.ret_void()

    def before(self, original: int, stream_in: str = "") -> str:
        """Adds a function that waits and then calls the original with all arguments that its caller may have passed
        (the callee ignores surplus ones); returns its name. `stream_in`: the kernel launch function whose argument
        layout it has.
        """
        kind = ir.FunctionType(_I64, [_I64] * _ARGUMENTS)
        made = ir.Function(self.module, kind, f"gated_{original:x}")
        code = ir.IRBuilder(made.append_basic_block())
        # The gate comes last: it may close during the wait for the stream.
        if self._drain is not None and stream_in == "cuLaunchKernel":
            code.call(self._drain, [made.args[8]])
        elif self._drain is not None and stream_in == "cuLaunchKernelEx":  # CUlaunchConfig.hStream
            config = code.add(made.args[0], _number(32))
            code.call(self._drain, [code.load(code.inttoptr(config, _I64.as_pointer()))])
        code.call(self.passes, [])
        code.ret(self._call(code, original, kind, list(made.args)))
        return str(made.name)

    def bound(self, is_capturing: int, create: int, record: int, query: int) -> None:
        """Makes the guest wait while it has too many kernels queued, because these keep running when the gate closes.
        Every half of that many kernels it waits for the event that it recorded one half before, and records it anew;
        so the GPU always has the other half to run. A stream that is being captured is not waited for.
        """
        drain = self._drain = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64]), "drain")
        count, event = (ir.GlobalVariable(self.module, _I64, name) for name in ("kernels", "event"))
        count.initializer = event.initializer = _number(0)
        stream, nothing = drain.args[0], ir.Constant(_I32, 0)
        names = ("begin", "due", "asks", "event", "create", "look", "record", "end")
        blocks = {name: drain.append_basic_block(name) for name in names}
        code = {name: ir.IRBuilder(block) for name, block in blocks.items()}
        b = code["begin"]
        status = b.alloca(_I32)
        words = b.call(self._words, [])
        most = self._load(b, self._at(b, words, gate.IN_FLIGHT))
        there = self._load(b, self._at(b, words, gate.ALIVE_UNTIL_NS))
        wanted = b.and_(b.icmp_unsigned("!=", most, _number(0)), b.icmp_unsigned("!=", there, _number(0)))
        b.cbranch(wanted, blocks["due"], blocks["end"])
        b = code["due"]
        n = b.atomic_rmw("add", count, _number(1), "monotonic")
        half = b.udiv(b.add(most, _number(1)), _number(2))
        b.cbranch(b.icmp_unsigned("==", b.urem(n, half), _number(0)), blocks["asks"], blocks["end"])
        b = code["asks"]
        failed = self._call(b, is_capturing, ir.FunctionType(_I32, [_I64, status.type]), [stream, status])
        captured = b.or_(failed, b.load(status))
        b.cbranch(b.icmp_unsigned("==", captured, nothing), blocks["event"], blocks["end"])
        b = code["event"]
        there_is = b.icmp_unsigned("!=", b.load_atomic(event, "acquire", 8), _number(0))
        b.cbranch(there_is, blocks["look"], blocks["create"])
        b = code["create"]
        made = self._call(
            b, create, ir.FunctionType(_I32, [event.type, _I32]), [event, ir.Constant(_I32, _NO_TIMING)]
        )
        b.cbranch(b.icmp_unsigned("==", made, nothing), blocks["record"], blocks["end"])
        b = code["look"]
        found = self._call(b, query, ir.FunctionType(_I32, [_I64]), [b.load_atomic(event, "acquire", 8)])
        b.cbranch(b.icmp_unsigned("==", found, ir.Constant(_I32, _NOT_READY)), blocks["look"], blocks["record"])
        b = code["record"]
        # This fails for a stream of another GPU, which then has no bound.
        recorded = [b.load_atomic(event, "acquire", 8), stream]
        self._call(b, record, ir.FunctionType(_I32, [_I64, _I64]), recorded)
        b.branch(blocks["end"])
        code["end"].ret_void()


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def gated(
    originals: Mapping[int, str], cell: int, streams: tuple[int, ...] | None = None
) -> tuple[dict[int, int], Any]:
    """C functions that wait at the gate whose words are at the address in `cell`, and then call the originals, which
    are given by address and name. Returns them by the originals' addresses, and an object that keeps them alive.
    `streams`: the addresses of cuStreamIsCapturing, cuEventCreate, cuEventRecord and cuEventQuery, for waiting for
    streams.
    """
    gate_code = _Gate(cell)
    if streams is not None:
        gate_code.bound(*streams)
    names = {original: gate_code.before(original, name) for original, name in originals.items()}
    engine = _assembled(gate_code.module)
    return {original: int(engine.get_function_address(name)) for original, name in names.items()}, engine


def _assembled(module: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()
    return engine


class Finder:
    """Searches memory in one call, without the interpreter's lock, which a busy script releases only every 5 ms."""

    ROOM = 4096  # words found at first; more room is made as needed

    def __init__(self) -> None:
        module = ir.Module("paellapy_finder")
        kind = ir.FunctionType(_I64, [_I64] * 6)
        self._write(ir.Function(module, kind, "find"))
        self._keep = _assembled(module)
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, *[ctypes.c_uint64] * 6)(
            self._keep.get_function_address("find")
        )
        self._found = np.zeros(self.ROOM, np.uint64)

    def find(self, bounds: Any, low: int, high: int) -> list[int]:
        """Addresses of words within `bounds`, rows of start and end, that hold a number from `low` to below `high`."""
        while True:
            room = len(self._found)
            count = self._call(bounds.ctypes.data, len(bounds), low, high - low, self._found.ctypes.data, room)
            if count < room:
                found: list[int] = self._found[:count].tolist()
                return found
            self._found = np.zeros(2 * room, np.uint64)  # some may have been left out

    @staticmethod
    def _write(function: Any) -> None:
        """for row in bounds: for at in range(start, end, 8): if word(at) − low < span: found[count++] = at"""
        bounds, rows, low, span, found, most = function.args
        names = ("begin", "row", "open", "word", "look", "hit", "note", "next", "after", "end")
        blocks = {name: function.append_basic_block(name) for name in names}
        code = {name: ir.IRBuilder(block) for name, block in blocks.items()}
        pointer = _I64.as_pointer()

        def load(builder: Any, address: Any) -> Any:
            return builder.load(builder.inttoptr(address, pointer))

        code["begin"].branch(blocks["row"])
        b = code["row"]
        row, count = b.phi(_I64), b.phi(_I64)
        b.cbranch(b.icmp_unsigned("<", row, rows), blocks["open"], blocks["end"])
        b = code["open"]
        where = b.add(bounds, b.mul(row, _number(16)))
        start, end = load(b, where), load(b, b.add(where, _number(8)))
        b.branch(blocks["word"])
        b = code["word"]
        at, seen = b.phi(_I64), b.phi(_I64)
        b.cbranch(b.icmp_unsigned("<", at, end), blocks["look"], blocks["after"])
        b = code["look"]
        near = b.icmp_unsigned("<", b.sub(load(b, at), low), span)
        b.cbranch(near, blocks["hit"], blocks["next"])
        b = code["hit"]
        b.cbranch(b.icmp_unsigned("<", seen, most), blocks["note"], blocks["next"])
        b = code["note"]
        b.store(at, b.inttoptr(b.add(found, b.mul(seen, _number(8))), pointer))
        more = b.add(seen, _number(1))
        b.branch(blocks["next"])
        b = code["next"]
        now = b.phi(_I64)
        for block, value in (("look", seen), ("hit", seen), ("note", more)):
            now.add_incoming(value, blocks[block])
        following = b.add(at, _number(8))
        b.branch(blocks["word"])
        at.add_incoming(start, blocks["open"])
        at.add_incoming(following, blocks["next"])
        seen.add_incoming(count, blocks["open"])
        seen.add_incoming(now, blocks["next"])
        b = code["after"]
        following_row = b.add(row, _number(1))
        b.branch(blocks["row"])
        row.add_incoming(_number(0), blocks["begin"])
        row.add_incoming(following_row, blocks["after"])
        count.add_incoming(_number(0), blocks["begin"])
        count.add_incoming(seen, blocks["after"])
        code["end"].ret(count)
