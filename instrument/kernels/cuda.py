"""`CudaKernel`: a CUDA C kernel that reports. It is launched with a grid and a block."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paellapy.instrument import cache
from paellapy.instrument.arguments import param_layout
from paellapy.instrument.device.base import Device, Launcher
from paellapy.instrument.env import cuda_line
from paellapy.instrument.errors import ArgumentError, CompileError, NoDeviceError, PtxError
from paellapy.instrument.gpu_model.parts import Occupancy
from paellapy.instrument.kernels.kernel import (
    Kernel,
    all_values,
    as_grid,
    blocks_at_once,
    check_part,
    occupancy_of,
    work_of,
)
from paellapy.instrument.kernels.preempt import Prepared
from paellapy.instrument.kernels.ranges import CUDA_PRELUDE, cuda_has_ranges
from paellapy.instrument.kernels.triton_source import target_capability
from paellapy.instrument.ptx.compiled import Compiled, Draft, Source
from paellapy.instrument.ptx.descriptor import Exits, PassConfig, Report
from paellapy.instrument.ptx.module import Module

# --- CUDA C front end: compiles source to PTX with NVRTC (no GPU needed), and reads the parameters from the PTX -------
# Takes a string, a `cupy.RawKernel` or a `cupy.RawModule`.

# PTX parameter types → struct codes. NVRTC declares every 32-bit integer as .u32, so signs are folded when packing.
_CODES = {"8": "B", "16": "H", "32": "I", "64": "Q"}


class CudaSource:
    """CUDA C source with one entry, chosen by name or by a C++ name expression such as "scale<float>"."""

    def __init__(self, source: str, name: str, options: Sequence[str] = ()) -> None:
        if not isinstance(source, str):
            raise ArgumentError(
                f"CUDA source must be a string, not {type(source).__name__}",
                field="source", given=type(source).__name__,
            )
        if isinstance(options, str):
            raise ArgumentError(
                f"options={options!r}: compiler options must be a list, as in options=[{options!r}]",
                field="options", given=options,
            )
        self.text, self.name, self.options = source, name, tuple(options)
        self.has_ranges = cuda_has_ranges(source)
        self._sources: dict[tuple[str, bool], Source] = {}

    @classmethod
    def from_cupy(cls, raw: Any, name: str | None) -> CudaSource:
        """The source of a `cupy.RawKernel`, or of a `cupy.RawModule` and the name of an entry."""
        wanted = name or getattr(raw, "name", None)
        if wanted is None:
            raise ArgumentError("a cupy.RawModule holds several kernels: choose one with name=…", field="name")
        return cls(raw.code, wanted, raw.options)

    def source(self, target: str, marked: bool = False) -> Source:
        """The plain kernel; `marked`: with the markers of its ranges."""
        which = (target, marked and self.has_ranges)
        if which not in self._sources:
            text = CUDA_PRELUDE + self.text if self.has_ranges else self.text
            options = [*self.options, "-DPAELLAPY_RANGES"] if which[1] else self.options
            ptx, entry = compile_to_ptx(text, self.name, options, target)
            try:
                function = Module.parse(ptx).entry(entry)
            except PtxError as e:
                raise CompileError(
                    f'CUDA kernel {self.name!r} was not found: {e}. Declare it extern "C" __global__, or give a C++ '
                    "name expression such as 'scale<float>'.", kernel=self.name, field="name"
                ) from None
            codes = [_param_code([t.text for t in param]) for param in function.params]
            found = re.search(r"^\s*\.target\s+(\w+)", ptx, re.M)
            self._sources[which] = Source(
                name=entry,
                ptx=ptx,
                arch=found[1] if found else target,
                param_format=param_layout(codes),
                threads=None,
                ptxas_options=("-lineinfo",),
                metadata={"codes": codes},
            )
        return self._sources[which]


def compile_to_ptx(text: str, name: str, options: Sequence[str], target: str) -> tuple[str, str]:
    """PTX and the entry's lowered name, cached on disk."""
    target_capability(target)  # refuses an unknown target
    arch = target.replace("sm_", "compute_")
    flags = [f"--gpu-architecture={arch}", "-lineinfo", *options, *(f"-I{d}" for d in _include_dirs())]
    version = ".".join(map(str, _check(_nvrtc().nvrtcVersion())))
    key = cache.digest("nvrtc", version, text, name, *flags)
    if stored := cache.read(key):
        entry, _, ptx = stored.decode().partition("\n")
        return ptx, entry
    ptx, entry = _compile(text, name, flags)
    cache.write(key, f"{entry}\n{ptx}".encode())
    return ptx, entry


def _compile(text: str, name: str, flags: Sequence[str]) -> tuple[str, str]:
    nvrtc = _nvrtc()
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], []))
    try:
        expression = name.encode()
        is_expression = "<" in name or "::" in name
        if is_expression:
            _check(nvrtc.nvrtcAddNameExpression(program, expression))
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
        if int(status):
            log = _room(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CompileError(
                f"CUDA kernel {name!r} does not compile:\n{log.rstrip(bytes(1)).decode()}", kernel=name, field="source"
            )
        entry = _check(nvrtc.nvrtcGetLoweredName(program, expression)).decode() if is_expression else name
        ptx = _room(_check(nvrtc.nvrtcGetPTXSize(program)))
        nvrtc.nvrtcGetPTX(program, ptx)
        return ptx.rstrip(b"\0").decode(), entry
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _room(size: int) -> bytes:
    """A buffer for NVRTC to write to. It has one byte more than needed: CPython shares all one-byte bytes objects of
    the same value, so that writing to one would change them everywhere in the process.
    """
    return bytes(size + 1)


@functools.cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as e:
        raise NoDeviceError(
            f"CUDA C kernels need NVRTC, which was not found ({e}). "
            f"Run {cuda_line()}.", field="nvrtc"
        ) from None
    return nvrtc


def _check(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise CompileError(f"NVRTC failed with {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


@functools.cache
def _include_dirs() -> tuple[str, ...]:
    """CUDA's headers (cuda_fp16.h and so on), from a toolkit or from NVIDIA's wheels."""
    roots = [Path(os.environ[v]) / "include" for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    roots.append(Path("/usr/local/cuda/include"))
    for package in ("nvidia.cu13", "nvidia.cuda_runtime"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        roots += [Path(p) / "include" for p in (spec.submodule_search_locations or ())] if spec else []
    return tuple(str(r) for r in roots if (r / "cuda_fp16.h").is_file())[:1]


def _param_code(texts: list[str]) -> str:
    """The struct code of one `.param` declaration."""
    if "[" in texts:
        size = texts[texts.index("[") + 1]
        alignment = texts[texts.index(".align") + 1] if ".align" in texts else "1"
        return f"{size}s@{alignment}"
    kind = next(t for t in texts[1:] if t[:2] in (".u", ".s", ".b", ".f") and t[2:].isdigit())
    if kind[1] == "f":
        return {"32": "f", "64": "d", "16": "e"}[kind[2:]]
    return _CODES[kind[2:]]


def bind_values(name: str, codes: Sequence[str], args: Sequence[Any], handlers: Any) -> list[Any]:
    """Arguments → values of the parameter buffer, checked against the kernel's parameters."""
    if len(args) != len(codes):
        raise ArgumentError(
            f"kernel {name!r} takes {len(codes)} arguments, but {len(args)} were given",
            kernel=name, field="arguments", given=len(args), limit=len(codes),
        )
    return [_bind_one(name, i, code, arg, handlers) for i, (code, arg) in enumerate(zip(codes, args, strict=True))]


def _bind_one(name: str, index: int, code: str, arg: Any, handlers: Any) -> Any:
    problem = None
    is_structure = code.partition("@")[0].endswith("s")
    if isinstance(arg, np.generic) and not is_structure:
        arg = arg.item()
    if is_structure:
        data = arg.tobytes() if isinstance(arg, (np.generic, np.ndarray)) else arg
        size = int(code.partition("s")[0])
        if isinstance(data, bytes) and len(data) == size:
            return data
        problem = f"a structure of {size} bytes (bytes, or a NumPy record)"
    elif isinstance(arg, bool) and code in "BHIQ":
        return int(arg)
    elif isinstance(arg, int) and code in "BHIQ":
        bits = 8 * {"B": 1, "H": 2, "I": 4, "Q": 8}[code]
        if -(1 << (bits - 1)) <= arg < (1 << bits):
            return arg & ((1 << bits) - 1)
        problem = f"an integer of {bits} bits"
    elif isinstance(arg, (int, float)) and code in "fde":
        return float(arg)
    elif isinstance(arg, (int, float)):
        problem = "an integer or an array"
    elif code == "Q" and arg is not None:
        try:
            return (handlers.get(type(arg)) or handlers.missing)(arg)[0]
        except ArgumentError as e:
            raise ArgumentError(
                f"argument {index} of kernel {name!r}: {e}", kernel=name, field=index, given=arg
            ) from None
    raise ArgumentError(
        f"argument {index} of kernel {name!r} must be {problem or 'a number'}, not {type(arg).__name__} {arg!r:.60}",
        kernel=name, field=index, given=arg, limit=code,
    )


class CudaKernel(Kernel):
    """A CUDA C kernel: launch it as `kernel[grid, block](…)` or `kernel[grid, block, shared_bytes](…)`."""

    _launched = "[grid, block]"

    def __init__(self, source: CudaSource, report: Report | None, exits: Exits) -> None:
        super().__init__(report, exits)
        self._source, self.name = source, source.name

    def __getitem__(self, configuration: Any) -> Callable[..., Any]:
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, None)

    def slice(self, configuration: Any, first: int, count: int) -> Callable[..., Any]:
        """Launches blocks `first … first + count - 1` of the logical grid only; `configuration` as in `kernel[…]`."""
        grid, block, shared = self._configuration(configuration)
        return functools.partial(self._run, grid, block, shared, (first, count))

    def _configuration(self, given: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        if not isinstance(given, tuple) or len(given) not in (2, 3):
            raise ArgumentError(
                f"launch CUDA kernel {self.name!r} as {self.name}[grid, block](…): grid and block are both needed",
                kernel=self.name, field="block", given=given,
            )
        grid, block, *rest = given
        return as_grid(grid), as_grid(block), int(rest[0]) if rest else 0

    def _run(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        part: tuple[int, int] | None,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._refuse_keywords(kwargs)
        device = Device.current()
        launcher = self._launchers.get((device.session is None, part is None, device))
        source = self._source.source(device.target, marked=device.session is not None)
        if launcher is None:
            launcher = device.prepare(Draft.of(source), self._config(device, part is not None), all_values)
            self._launchers[device.session is None, part is None, device] = launcher
        values = bind_values(self.name, source.metadata["codes"], args, device.handlers)
        if part is not None:
            check_part(self.name, grid, part)
        return launcher(grid, values, block, shared_bytes, part)

    def prepare_preemptible(self, device: Device, configuration: Any, args: Any, kwargs: Any) -> Prepared:
        self._refuse_keywords(kwargs)
        grid, block, shared_bytes = self._configuration(configuration)
        source = self._source.source(device.target, marked=device.session is not None)

        def launcher(sliced: bool) -> Launcher:
            key = (device.session is None, not sliced, device, "preempt")
            if key not in self._launchers:
                config = self._config(device, sliced, preempt=True)
                self._launchers[key] = device.prepare(Draft.of(source), config, all_values)
            return self._launchers[key]

        values = bind_values(self.name, source.metadata["codes"], args, device.handlers)
        work = replace(work_of(self.name, grid, values, device), block=block, shared_bytes=shared_bytes)
        held = functools.partial(blocks_at_once, device, launcher, work)
        return Prepared(self.name, work, launcher, held, self._waves, (block, shared_bytes, device), args)

    def _refuse_keywords(self, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ArgumentError(
                f"CUDA kernel {self.name!r} takes arguments by position only: pass {next(iter(kwargs))} without its "
                "name", kernel=self.name, field=next(iter(kwargs))
            )

    def compile(
        self, target: str | None = None, report: Report | Literal["own"] | None = "own", sliced: bool = False
    ) -> Compiled:
        """Compiles for any target, without a GPU and without launching; `report=None` gives the plain kernel."""
        source = self._source.source(target or Device.current().target)
        return source.build(PassConfig(self.report if report == "own" else report, sliced, self.exits))

    def theoretical_occupancy(
        self, block: int | tuple[int, ...], shared_bytes: int = 0, target: str | None = None
    ) -> Occupancy:
        """Blocks of this kernel that an SM can hold, and the resource that limits them; as for Triton kernels."""
        limits = self._limits(target) if target else Device.current().limits
        threads = functools.reduce(lambda a, b: a * b, as_grid(block))
        return occupancy_of(limits, threads, self.compile(target), shared_bytes)
