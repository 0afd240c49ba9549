"""A compiled kernel: the result of both front ends, assembled by `ptxas`, and the input of every device."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from paellapy.instrument import cache
from paellapy.instrument.arguments import param_offsets
from paellapy.instrument.errors import ArgumentError, InstrumentError, PtxError, also
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import Exits, PassConfig

# --- PTX to machine code with `ptxas` ---------------------------------------------------------------------------------
# Triton's wheel brings one or two `ptxas`; these, a toolkit's and that of NVIDIA's `nvidia-cuda-nvcc` wheel are
# candidates. The first one that supports the module's PTX version is used: NVRTC is often newer than the `ptxas` beside
# it.

_RESOURCES = re.compile(
    r"Function properties for (?P<name>[\w$]+)\s*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<store>\d+) bytes spill stores, (?P<load>\d+) bytes spill loads\s*\n"
    r"[^\n]*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)

_LONGEST_S = 600  # the largest kernels of flash-linear-attention take tens of seconds


@dataclass(frozen=True, slots=True)
class Assembled:
    """Machine code of one entry, and the resources of a block."""

    cubin: bytes
    registers: int  # per thread
    static_shared_bytes: int
    spill_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Ptxas:
    path: str
    release: tuple[int, int]

    @property
    def newest_ptx(self) -> tuple[int, int]:
        """The newest PTX ISA that a CUDA release reads (PTX ISA manual, release history)."""
        major, minor = self.release
        if major == 12 and minor >= 6:  # 12.5 and 12.6 read the same PTX
            minor -= 1
        return major - 4, minor


@functools.cache
def find_ptxas() -> tuple[Ptxas, ...]:
    """Every `ptxas` on this machine, the one in $PAELLAPY_PTXAS and Triton's first."""
    paths: list[Path] = []
    if configured := os.environ.get("PAELLAPY_PTXAS"):
        if _release(Path(configured)) is None:
            raise PtxError(
                f"PAELLAPY_PTXAS={configured} is not a ptxas that runs on this machine; correct or unset it",
                field="PAELLAPY_PTXAS", given=configured,
            )
        paths.append(Path(configured))
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
        paths += [bundled / "ptxas", bundled / "ptxas-blackwell"]
    if home := os.environ.get("CUDA_HOME"):
        paths.append(Path(home) / "bin" / "ptxas")
    if on_path := shutil.which("ptxas"):
        paths.append(Path(on_path))
    paths.append(Path("/usr/local/cuda/bin/ptxas"))
    different: dict[Path, Path] = {}  # $CUDA_HOME, $PATH and the usual place may be the same
    for path in paths:
        different.setdefault(path.resolve(), path)
    return tuple(Ptxas(str(path), release) for path in different.values() if (release := _release(path)))


def _release(path: Path) -> tuple[int, int] | None:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def choose_ptxas(ptx_version: tuple[int, int], preferred: str | None = None) -> Ptxas:
    """The first `ptxas` that reads `ptx_version`; `preferred` is tried before all others."""
    known = find_ptxas()
    ordered = sorted(known, key=lambda p: p.path != preferred)
    for candidate in ordered:
        if candidate.newest_ptx >= ptx_version:
            return candidate
    have = ", ".join(f"{p.path} (CUDA {p.release[0]}.{p.release[1]})" for p in known) or "none"
    raise PtxError(
        f"no ptxas on this machine reads PTX {ptx_version[0]}.{ptx_version[1]} (found: {have}). Install a newer "
        "Triton, "
        "or `pip install nvidia-cuda-nvcc` and set PAELLAPY_PTXAS to its ptxas.", field="version", given=ptx_version
    )


def assemble(ptx: str, arch: str, entry: str, options: tuple[str, ...] = (), preferred: str | None = None) -> Assembled:
    """Machine code for one entry, cached on disk. `arch` is a name such as "sm_90a"."""
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if version is None:
        raise PtxError("the PTX module has no .version line: pass a complete module", field=".version")
    tool = choose_ptxas((int(version[1]), int(version[2])), preferred)
    key = cache.digest("cubin", ptx, arch, entry, " ".join(options), f"{tool.path} {tool.release}")
    if stored := cache.read(key):
        head, _, cubin = stored.partition(b"\n")
        return Assembled(cubin, **json.loads(head))
    result = _run(tool, ptx, arch, entry, options)
    facts = {n: getattr(result, n) for n in ("registers", "static_shared_bytes", "spill_bytes", "stack_bytes")}
    cache.write(key, json.dumps(facts).encode() + b"\n" + result.cubin)
    return result


def _run(tool: Ptxas, ptx: str, arch: str, entry: str, options: tuple[str, ...]) -> Assembled:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        command = [tool.path, "-v", f"--gpu-name={arch}", *options, str(source), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            raise PtxError(
                f"ptxas {tool.release[0]}.{tool.release[1]} has not assembled kernel {entry!r} for {arch} within "
                f"{_LONGEST_S} s. Use smaller blocks, or another ptxas with PAELLAPY_PTXAS.",
                kernel=entry, field="time", limit=_LONGEST_S,
            ) from None
        log = done.stderr + done.stdout
        if done.returncode:
            from triton.runtime.errors import PTXASError

            text = f"ptxas {tool.release[0]}.{tool.release[1]} refused kernel {entry!r} for {arch}:\n{log}"
            ours = PtxError(text, kernel=entry, field="ptx", limit=arch, log=log)
            raise also(ours, PTXASError, error_message=text)
        for found in _RESOURCES.finditer(log):
            if found["name"] == entry:
                shared = re.search(r"(\d+) bytes smem", found["rest"])
                return Assembled(
                    cubin=output.read_bytes(),
                    registers=int(found["registers"]),
                    static_shared_bytes=int(shared[1]) if shared else 0,
                    spill_bytes=int(found["store"]) + int(found["load"]),
                    stack_bytes=int(found["stack"]),
                )
    raise PtxError(
        f"the output of ptxas does not list the resources of kernel {entry!r}:\n{log}", kernel=entry, field="resources"
    )


# --- registers and the blocks that an SM holds ------------------------------------------------------------------------
# Passes must not reduce a kernel's resident blocks. All parts from sm_70 on have 65,536 registers per SM in four
# partitions, allocated to warps in units of 256.

_PARTITION, _PARTITIONS, _UNIT, _WARP = 16384, 4, 256, 32
_MOST_THREADS = 2048
_SHARED_BYTES, _RESERVED_BYTES = 228 << 10, 1 << 10  # of the largest part, which bounds the others
REGISTER_STEP = 8  # registers per thread, in ptxas's steps


def blocks_by_registers(registers: int, threads: int) -> int:
    """The number of blocks for which an SM's registers suffice.

    >>> blocks_by_registers(40, 128), blocks_by_registers(48, 128)
    (12, 10)
    """
    per_warp = -(-max(registers, 1) * _WARP // _UNIT) * _UNIT
    return _PARTITION // per_warp * _PARTITIONS // -(-threads // _WARP)


def room_for_all(registers: int, threads: int) -> bool:
    """Whether registers cannot be the limit of a kernel's resident blocks."""
    return blocks_by_registers(registers, threads) * threads >= _MOST_THREADS


def most_registers(blocks: int, threads: int, shared_bytes: int) -> int:
    """The most registers per thread with which an SM holds this many blocks, as far as shared memory allows it."""
    blocks = min(blocks, _SHARED_BYTES // (shared_bytes + _RESERVED_BYTES))
    return max(
        (r for r in range(REGISTER_STEP, 256, REGISTER_STEP) if blocks_by_registers(r, threads) >= blocks),
        default=REGISTER_STEP,
    )


# --- kernels ----------------------------------------------------------------------------------------------------------

TRITON_PARAMS = 2  # behind a kernel's own, Triton adds the addresses of scratch memory and of a profile


@dataclass(frozen=True, slots=True)
class Source:
    """One specialisation of a kernel before our passes: plain PTX, and the facts that a launcher needs.

    `param_format` is the `struct` format of the kernel's own parameter buffer, including hidden parameters.
    """

    name: str  # entry in the PTX
    ptx: str
    arch: str  # "sm_90a"
    param_format: str
    threads: int | None  # per block; None if the launch decides (CUDA C)
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    exits: Exits = "auto"
    ptxas_options: tuple[str, ...] = ()
    ptxas_path: str | None = None
    scratch_bytes: int = 0  # per block, of the `global_scratch` parameter
    scratch_align: int = 1
    cooperative: bool = False
    dependent: bool = False  # programmatic dependent launch: it may start before the previous kernel is done
    ttir: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)
    # the kernel after another of Triton's stages, such as "ttgir"; None: there is none
    stage: Callable[[str], str] | None = field(default=None, compare=False)
    src: Any = field(default=None, compare=False)  # what Triton compiled, its `ASTSource`

    def build(self, config: PassConfig) -> Compiled:
        """Applies the passes and assembles."""
        if config.exits == "auto" and self.exits != "auto":
            config = replace(config, exits=self.exits)
        if config.preempt and self.cooperative:
            raise InstrumentError(
                f"kernel {self.name!r} cannot be preempted: it is launched cooperatively, so all its blocks must run "
                "at once. Launch it without `preemptible`.", kernel=self.name, field="preempt", given="cooperative"
            )
        return self.assembled(config, _passed(self.ptx, config, self.name, self.unread_params(config)))

    def unread_params(self, config: PassConfig) -> int:
        """The number of parameters, of those that Triton adds behind the kernel's own, that give way to our descriptor.

        Most kernels read none of them. Without them the descriptor is nearer to the kernel's own parameters, often on
        the same line of constant memory.
        """
        if not self.ttir or not config.changes_anything or config.pointer_param is not None:
            return 0
        count = len(param_offsets(self.param_format))
        most, unread = TRITON_PARAMS - bool(self.scratch_bytes), 0
        # A parameter that is not read is named once, where it is declared.
        while unread < most and self.ptx.count(f"{self.name}_param_{count - 1 - unread}") == 1:
            unread += 1
        return unread

    def assembled(self, config: PassConfig, ptx: str) -> Compiled:
        """The kernel as the passes have left it, in machine code."""
        code = assemble(ptx, self.arch, self.name, self.ptxas_options, self.ptxas_path)
        if config.changes_anything and self.threads is not None:
            ptx, code = self._with_as_many_blocks(ptx, code, self.threads)
        return Compiled(self, config, ptx, code)

    def _with_as_many_blocks(self, ptx: str, code: Assembled, threads: int) -> tuple[str, Assembled]:
        """PTX and machine code that let an SM hold about as many blocks as of the plain kernel, if that spills no more.

        Not for kernels whose warps exchange registers, that limit their registers themselves, or that use `wgmma`: with
        too few registers, `ptxas` makes each of its products wait for the one before, without a spill.
        """
        if room_for_all(code.registers, threads) or re.search(r"setmaxnreg|\.maxnreg|nctapersm|wgmma", ptx):
            return ptx, code
        plain = assemble(self.ptx, self.arch, self.name, self.ptxas_options, self.ptxas_path)
        spilled = max(plain.spill_bytes, code.spill_bytes)
        wanted, had = (blocks_by_registers(each.registers, threads) for each in (plain, code))
        for most in range(most_registers(wanted, threads, self.dynamic_shared_bytes), code.registers, REGISTER_STEP):
            if blocks_by_registers(most, threads) <= had:
                break  # nothing is gained any more
            limited = _with_most_registers(ptx, self.name, most)
            try:
                fewer = assemble(limited, self.arch, self.name, self.ptxas_options, self.ptxas_path)
            except PtxError:  # refused, or too slow: the kernel runs without the limit
                break
            if fewer.spill_bytes <= spilled:
                return limited, fewer
        return ptx, code


def _with_most_registers(ptx: str, entry: str, most: int) -> str:
    """The module with a limit of registers for one entry. It is a directive, because `ptxas` (12.9 and 13.4) ignores
    --maxrregcount where PTX fixes the size of a block, as Triton's does."""
    return re.sub(rf"(\.entry\s+{re.escape(entry)}(?![\w$])[^{{]*)\{{", rf"\1.maxnreg {most}\n{{", ptx, count=1)


def _passed(ptx: str, config: PassConfig, name: str, unread: int) -> str:
    """The result of the passes on a module, kept on disk, since parsing and printing PTX takes as long as compiling it.
    """
    if not config.changes_anything:
        return passes.apply(ptx, config, name)
    where = cache.digest("passes", config.key(), name, str(unread), ptx)
    stored = cache.read(where)
    if stored is not None:
        return stored.decode()
    found = passes.apply(ptx, config, name, unread)
    cache.write(where, found.encode())
    return found


class Draft:
    """A kernel compiled as far as evaluation needs: to TTIR. The rest is compiled on demand."""

    def __init__(self, name: str, ttir: str, metadata: dict[str, Any], finish: Callable[[], Source]) -> None:
        self.name, self.ttir, self.metadata = name, ttir, metadata
        self._finish = finish

    @classmethod
    def of(cls, source: Source) -> Draft:
        """A draft of a finished source."""
        return cls(source.name, source.ttir, source.metadata, lambda: source)

    @functools.cached_property
    def source(self) -> Source:
        return self._finish()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel ready to load: source, applied passes, the resulting PTX and machine code."""

    source: Source
    config: PassConfig
    ptx: str
    code: Assembled

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def original_ptx(self) -> str:
        """The PTX before the passes."""
        return self.source.ptx

    @property
    def cubin(self) -> bytes:
        return self.code.cubin

    @property
    def unread_params(self) -> int:
        """The number of Triton's parameters that gave way to the descriptor."""
        return self.source.unread_params(self.config)

    @property
    def param_format(self) -> str:
        """The `struct` format of the kernel's own parameters, without those that gave way."""
        return self.source.param_format.removesuffix("Q" * self.unread_params)

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.code.registers

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block, static and dynamic."""
        return self.code.static_shared_bytes + self.source.dynamic_shared_bytes

    # -- with the names of Triton's own compiled kernels

    @property
    def asm(self) -> Stages:
        """The kernel in all stages: "ptx" and "cubin", and of Triton's kernels "ttir", "ttgir" and "llir"."""
        return Stages(self.name, self.source.ttir, lambda: self)

    @property
    def n_regs(self) -> int:
        return self.registers

    @property
    def n_spills(self) -> int:
        return self.code.spill_bytes // 4

    @property
    def metadata(self) -> SimpleNamespace:
        facts = {"name": self.name, "shared": self.source.dynamic_shared_bytes, "num_ctas": self.source.cluster}
        return SimpleNamespace(**facts, **self.source.metadata)

    @property
    def n_max_threads(self) -> int:
        """The most threads that a block of it may have."""
        if self.source.threads is not None:
            return self.source.threads
        return next(n for n in range(1024, 0, -_WARP) if blocks_by_registers(self.registers, n))

    @property
    def src(self) -> Any:
        return self.source.src

    @property
    def hash(self) -> str:
        """Differs between kernels that differ."""
        return hashlib.sha256("\0".join((self.source.arch, self.source.ttir, self.ptx)).encode()).hexdigest()

    def _init_handles(self) -> None:
        """Does nothing; Triton's scripts call it before they read `n_regs`."""

    def __repr__(self) -> str:
        level = self.config.report or "plain"
        return (
            f"<{self.name} for {self.source.arch}: {level}{', sliced' if self.config.sliced else ''}, "
            f"{self.registers} registers, {self.shared_bytes} B shared, {len(self.cubin)} B cubin>"
        )


class Stages(Mapping[str, Any]):
    """`.asm` of a compiled kernel. Stages after TTIR are compiled on demand; "sass" is machine code as text."""

    def __init__(self, name: str, ttir: str, compiled: Callable[[], Compiled]) -> None:
        self._name, self._ttir, self._compiled = name, ttir, compiled
        self._stages = ("ttir", "ttgir", "llir", "ptx", "cubin") if ttir else ("ptx", "cubin")

    def __getitem__(self, stage: str) -> Any:
        if stage == "ttir" and self._ttir:
            return self._ttir
        if stage in ("ptx", "cubin"):
            return getattr(self._compiled(), stage)
        if stage == "sass":  # as in Triton, not among the keys
            from triton.tools.disasm import get_sass

            return get_sass(self._compiled().cubin)
        if stage in self._stages and (later := self._compiled().source.stage) is not None:
            return later(stage)
        text = f"kernel {self._name!r} has the stages {', '.join(self._stages)}, not {stage!r}"
        facts = {"kernel": self._name, "field": "stage", "given": stage, "limit": self._stages}
        raise also(ArgumentError(text, **facts), KeyError)

    def __contains__(self, stage: object) -> bool:
        return stage in self._stages

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)


class Launched:
    """The result of a launch that needs no machine code: a `Compiled`, made on first access."""

    def __init__(self, draft: Draft, compiled: Callable[[], Compiled]) -> None:
        self._draft, self._compiled = draft, compiled

    @property
    def name(self) -> str:
        return self._draft.name

    @property
    def asm(self) -> Stages:
        return Stages(self._draft.name, self._draft.ttir, self._compiled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled(), name)

    def __repr__(self) -> str:
        return f"<{self.name}, launched>"
