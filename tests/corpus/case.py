"""Entries of the corpus: a kernel, and a way to make one concrete launch of it with its expected answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int], Array]
Argument = Array | int | float | bool | None | tuple[Array, ...]

_TRITON_TYPES: dict[np.dtype[Any], str] = {
    np.dtype(np.float64): "fp64",
    np.dtype(np.float32): "fp32",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8e4nv",
    np.dtype(ml_dtypes.float8_e5m2): "fp8e5",
    np.dtype(np.bool_): "i1",
    **{np.dtype(f"{kind}{size}"): f"{kind}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)},
}


@dataclass(frozen=True, slots=True)
class Call:
    """One concrete Triton launch. Arrays are C-contiguous; kernels that take strides get them as integers."""

    args: dict[str, Argument]  # the runtime arguments, in the kernel's order
    constexprs: dict[str, Any]
    grid: tuple[int, ...]  # one to three dimensions
    outputs: tuple[str, ...]  # written by the kernel: poisoned, unless the kernel adds to what is there
    reference: Callable[[], dict[str, Array]]  # does not depend on what a launch wrote meanwhile
    tolerance: float  # on |out - reference| / |reference|; 0 asks for equality
    options: dict[str, int] = field(default_factory=lambda: options())  # num_warps, num_stages, …


@dataclass(frozen=True, slots=True)
class Case:
    """A Triton kernel of the corpus."""

    name: str
    kernel: Any  # triton.JITFunction
    make: Callable[[np.random.Generator, float], Call]  # scale multiplies the work; 1.0 is milliseconds of NumPy
    deterministic: bool = True  # False: bits differ between runs on a GPU (float atomics, block order visible)
    min_sm: int = 80  # the lowest target it compiles for
    sliceable: bool = True  # False: blocks wait for each other, so all of them must be resident together
    scratch: bool = False  # True: from sm_90 on the launcher must give it global scratch memory (tensor descriptors)
    evaluable: bool = True  # False: holds PTX of its own, which only a GPU can run

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class CudaCall:
    """One concrete launch of a CUDA C kernel. Scalars are NumPy scalars of the parameter's type."""

    args: list[Array | np.generic]  # in the kernel's order; a struct passed by value is a structured scalar
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    outputs: tuple[int, ...]  # indices into args
    reference: Callable[[], dict[int, Array]]
    tolerance: float
    shared_bytes: int = 0  # dynamic shared memory
    globals: Mapping[str, Array] = field(default_factory=dict)  # what `__device__` variables hold afterwards


@dataclass(frozen=True, slots=True)
class CudaCase:
    """A CUDA C kernel of the corpus."""

    name: str
    source: str
    entry: str  # its unmangled name: sources declare entries extern "C", unless there is a name_expression
    make: Callable[[np.random.Generator, float], CudaCall]
    options: tuple[str, ...] = ()  # for NVRTC
    name_expression: str | None = None  # the instantiation of a template
    deterministic: bool = True
    instrumentable: bool = True
    reason: str = ""  # why it is not instrumentable
    launchable: bool = True  # False: compile it only
    sliceable: bool = True  # False: blocks of a cluster must be launched together
    min_sm: int = 80

    def __str__(self) -> str:
        return self.name


def options(**given: int) -> dict[str, int]:
    """Compiler options of a call. Fusion is always requested: Triton 3.9 warns where it has to choose itself."""
    return {"enable_fp_fusion": True, **given}


def poisoned(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An unwritten output: NaN, or a bit pattern that no kernel of the corpus computes."""
    dtype = np.dtype(dtype)
    if dtype.kind in "iub":
        return np.frombuffer(b"\xa5" * (int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()
    return np.full(shape, np.nan, dtype)


def blocks(n: int, block: int) -> tuple[int]:
    """The one-dimensional grid that covers `n` elements."""
    return (-(-n // block),)


def scaled(size: int, scale: float) -> int:
    """`size` multiplied by `scale`, at least 1 and ragged where `size` is."""
    return max(1, round(size * scale)) | (size & 1)


def drawn(low: int, high: int, dtype: Any = np.int32) -> Draw:
    """Draws integers from `low` to below `high`."""
    return lambda rng, n: rng.integers(low, high, n, dtype)


def elementwise(
    size: int, block: int, draws: dict[str, Draw], outputs: dict[str, Any], wanted: Callable[..., dict[str, Array]],
    tolerance: float = 0.0, *, rows: tuple[int, ...] = (), constants: dict[str, float] | None = None, **compiler: int,
) -> Callable[[np.random.Generator, float], Call]:  # fmt: skip
    """Launches of a kernel with an element a lane: (inputs…, outputs…, constants…, n).

    `outputs`: their types, with `rows` of n elements each; `wanted` computes them from the inputs.
    """

    def make(rng: np.random.Generator, scale: float) -> Call:
        n = scaled(size, scale)
        inputs = {name: draw(rng, n) for name, draw in draws.items()}
        empty = {name: poisoned((*rows, n), dtype) for name, dtype in outputs.items()}
        args = {**inputs, **empty, **(constants or {}), "n": n}
        grid, reference = blocks(n, block), lambda: wanted(**inputs)
        return Call(args, {"BLOCK": block}, grid, tuple(outputs), reference, tolerance, options(**compiler))

    return make


def normal(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
    """Normal random numbers, none of them zero after rounding to `dtype`."""
    values = rng.standard_normal(shape)
    values = np.where(np.abs(values) < 2**-6, 2**-6, values)
    return values.astype(dtype)


def upload(device: Any, value: Any) -> Any:
    """An argument in the memory of a device."""
    if isinstance(value, tuple):
        return tuple(upload(device, each) for each in value)
    return device.array(value) if isinstance(value, np.ndarray) else value


def assert_right(call: Any, found: Any = None) -> None:
    """Compares the outputs, by default those in the arguments of the call, with the reference."""
    expected = call.reference()
    for name in call.outputs:
        out = np.asarray((call.args if found is None else found)[name])
        assert relative_error(out, expected[name]) <= call.tolerance, name


def assert_same(case: Any, call: Any, found: dict[Any, Array], plain: dict[Any, Array]) -> None:
    """Compares the outputs of a kernel that was changed with those of the plain one, and with the reference."""
    for name, out in found.items():
        assert not case.deterministic or out.tobytes() == plain[name].tobytes(), f"{name} is not the plain kernel's"
    assert_right(call, found)


def relative_error(out: Array, reference: Array) -> float:
    """|out - reference| / |reference| in float64; NaN left in `out` gives NaN, so compare with `<=`.

    >>> relative_error(np.float32([1, 2]), np.float64([1, 2]))
    0.0
    """
    if out.shape != reference.shape:
        return float("inf")
    if out.dtype.kind in "iub" and reference.dtype.kind in "iub":
        return 0.0 if np.array_equal(out, reference) else float(np.mean(out != reference))
    wanted = reference.astype(np.float64)
    off = np.linalg.norm((out.astype(np.float64) - wanted).ravel())
    return float(off / (np.linalg.norm(wanted.ravel()) or 1.0))


def ast_source(kernel: Any, call: Call) -> Any:
    """The source for `triton.compile`: pointers aligned to 16 bytes, integers marked if divisible by 16."""
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constexprs: dict[Any, Any] = dict(call.constexprs)
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in call.constexprs:
            signature[name] = "constexpr"
            continue
        value = call.args[name]
        if isinstance(value, tuple):
            signature[name] = tuple(_triton_type(item) for item in value)
            attrs.update({(index, i): [["tt.divisibility", 16]] for i in range(len(value))})
            continue
        signature[name] = _triton_type(value)
        if value is None:
            constexprs[name] = None
        elif isinstance(value, np.ndarray) or (type(value) is int and value % 16 == 0):
            attrs[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)


def _triton_type(value: Argument) -> str:
    match value:
        case None:
            return "constexpr"
        case bool():
            return "i1"
        case int():
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        case float():
            return "fp32"
        case np.ndarray():
            return "*" + _TRITON_TYPES[value.dtype]
    raise TypeError(f"no Triton type for {type(value).__name__}")
