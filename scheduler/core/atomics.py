"""Atomic words in arrays, and calls through an address: operations that compiled code needs and Numba lacks.

The compiler hoists plain array reads out of polling loops, so words that another thread, process or GPU writes are read
through this module.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paellapy.instrument.numba_ext.link import Generated, call

# Numba turns a u64 plus an int into a float, so every number combined with a word is a u64.
ZERO, ONE, ALL = np.uint64(0), np.uint64(1), np.uint64((1 << 64) - 1)


def c_address(function: Any) -> int:
    """The address of a function of a C library, or of a ctypes callback."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


_I64 = ir.IntType(64)
_I32 = ir.IntType(32)
_BYTES = ir.IntType(8).as_pointer()


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def load_at(typing: Any, address: Any) -> Generated:
    """The u64 at an address, with acquire order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(builder, args[0]), "acquire", 8)

    return types.uint64(types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def store_at(typing: Any, address: Any, value: Any) -> Generated:
    """Writes a u64, with release order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _pointer(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def or_at(typing: Any, address: Any, value: Any) -> Generated:
    """Sets bits of a u64; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("or", _pointer(builder, args[0]), args[1], "acq_rel")

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def and_at(typing: Any, address: Any, value: Any) -> Generated:
    """Clears the bits of a u64 that are not in `value`; returns the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("and", _pointer(builder, args[0]), args[1], "acq_rel")

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def exchange_at(typing: Any, address: Any, expected: Any, value: Any) -> Generated:
    """Compare and swap: writes `value` if the u64 is `expected`; returns whether it did."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_pointer(builder, args[0]), args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(types.uint64, types.uint64, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(typing: Any) -> Generated:
    """Makes all earlier writes visible to others before any later read.

    Acquire and release do not guarantee that, and a failed compare-and-swap has no write that could be ordered.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def call_asking(typing: Any, function: Any, first: Any, second: Any, third: Any) -> Generated:
    """double f(const void *, const void *, const void *). A function with fewer parameters ignores the last registers.

    This holds on x86-64 and AArch64, whose calling conventions pass the first six and eight pointers in registers.
    """
    return call(ir.DoubleType(), [_BYTES] * 3, types.float64(*[types.uint64] * 4))


@intrinsic  # type: ignore[untyped-decorator]
def call_telling(typing: Any, function: Any, first: Any, second: Any, third: Any) -> Generated:
    """void f(const void *, const void *, const void *), as `call_asking`"""
    return call(ir.VoidType(), [_BYTES] * 3, types.void(*[types.uint64] * 4))


@intrinsic  # type: ignore[untyped-decorator]
def call_launch(typing: Any, function: Any, graph: Any, stream: Any) -> Generated:
    """CUresult cuGraphLaunch(CUgraphExec, CUstream), or any function of that signature."""
    return call(_I32, [_I64, _I64], types.int32(types.uint64, types.uint64, types.uint64))


@intrinsic  # type: ignore[untyped-decorator]
def call_run(typing: Any, function: Any, model: Any, until: Any, stop: Any) -> Generated:
    """int64 run(SM model, until, stop): runs until that time, or until the first completion if `stop` is set"""
    signature = types.int64(types.uint64, model, types.float64, types.int64)
    return call(_I64, [_I64.as_pointer(), ir.DoubleType(), _I64], signature)


@intrinsic  # type: ignore[untyped-decorator]
def call_advance(typing: Any, function: Any, fluid: Any, state: Any, end: Any) -> Generated:
    """int64 advance(fluid, state, end): both tables by their addresses"""
    signature = types.int64(types.uint64, types.uint64, types.uint64, types.float64)
    return call(_I64, [_I64.as_pointer(), _I64.as_pointer(), ir.DoubleType()], signature)


@intrinsic  # type: ignore[untyped-decorator]
def call_back(typing: Any, function: Any) -> Generated:
    """int32 f(void): a Python callback, which takes the GIL"""
    return call(_I32, [], types.int32(types.uint64))


@intrinsic  # type: ignore[untyped-decorator]
def call_write(typing: Any, function: Any, descriptor: Any, buffer: Any, count: Any) -> Generated:
    """ssize_t write(int, const void *, size_t)"""
    signature = types.int64(types.uint64, types.int32, types.uint64, types.uint64)
    return call(_I64, [_I32, _BYTES, _I64], signature)


@intrinsic  # type: ignore[untyped-decorator]
def call_ppoll(typing: Any, function: Any, descriptors: Any, count: Any, timeout: Any, mask: Any) -> Generated:
    """int ppoll(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *)"""
    signature = types.int32(types.uint64, types.uint64, types.uint64, types.uint64, types.uint64)
    return call(_I32, [_BYTES, _I64, _BYTES, _BYTES], signature)


@intrinsic  # type: ignore[untyped-decorator]
def call_clock(typing: Any, function: Any, clock: Any, timespec: Any) -> Generated:
    """int clock_gettime(clockid_t, struct timespec *)"""
    return call(_I32, [_I32, _BYTES], types.int32(types.uint64, types.int32, types.uint64))


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Generated:
    """memcpy between two addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _I64])
        to, since = builder.inttoptr(args[0], _BYTES), builder.inttoptr(args[1], _BYTES)
        builder.call(memcpy, [to, since, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64, types.uint64), generate
