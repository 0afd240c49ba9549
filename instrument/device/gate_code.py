"""Machine code of gates: functions that wait and then call the driver.

The only compiler needed is LLVM, which comes with Numba. Numba itself is not used, because it would take seconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir

from paellapy.instrument.device import gate
from paellapy.instrument.device.driver import NOT_READY

_SLEEP_US = 20  # between two looks at a closed gate
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

    def bound(self, is_capturing: int, query: int) -> None:
        """Makes the guest wait for its stream after a number of kernels, because queued kernels keep running when the
        gate closes. A stream that is being captured is not waited for.
        """
        drain = self._drain = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [_I64]), "drain")
        count = ir.GlobalVariable(self.module, _I64, "kernels")
        count.initializer = _number(0)
        names = ("begin", "due", "asks", "look", "end")
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
        b.cbranch(b.icmp_unsigned("==", b.urem(n, most), _number(0)), blocks["asks"], blocks["end"])
        b = code["asks"]
        kind = ir.FunctionType(_I32, [_I64, status.type])
        failed = self._call(b, is_capturing, kind, [drain.args[0], status])
        captured = b.or_(failed, b.load(status))
        b.cbranch(b.icmp_unsigned("==", captured, ir.Constant(_I32, 0)), blocks["look"], blocks["end"])
        b = code["look"]
        found = self._call(b, query, ir.FunctionType(_I32, [_I64]), [drain.args[0]])
        b.cbranch(b.icmp_unsigned("==", found, ir.Constant(_I32, NOT_READY)), blocks["look"], blocks["end"])
        code["end"].ret_void()


def address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def gated(
    originals: Mapping[int, str], cell: int, streams: tuple[int, int] | None = None
) -> tuple[dict[int, int], Any]:
    """C functions that wait at the gate whose words are at the address in `cell`, and then call the originals, which
    are given by address and name. Returns them by the originals' addresses, and an object that keeps them alive.
    `streams`: the addresses of cuStreamIsCapturing and cuStreamQuery, for waiting for streams.
    """
    gate_code = _Gate(cell)
    if streams is not None:
        gate_code.bound(*streams)
    names = {original: gate_code.before(original, name) for original, name in originals.items()}
    engine = assembled(gate_code.module)
    return {original: int(engine.get_function_address(name)) for original, name in names.items()}, engine


def assembled(module: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    engine = llvm.create_mcjit_compiler(parsed, llvm.Target.from_default_triple().create_target_machine(opt=2))
    engine.finalize_object()
    return engine
