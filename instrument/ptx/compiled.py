"""A compiled kernel: what both front ends produce and every device takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from paellapy.instrument import cache
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.assemble import Assembled, assemble
from paellapy.instrument.ptx.passes import PassConfig
from paellapy.instrument.ptx.registers import blocks_by_registers, most_registers, room_for_all


@dataclass(frozen=True, slots=True)
class Source:
    """One specialisation of a kernel before our passes: plain PTX and what a launcher must know.

    `param_format` is the `struct` format of the kernel's own parameter buffer, hidden parameters included.
    """

    name: str  # entry in the PTX
    ptx: str
    arch: str  # "sm_90a"
    param_format: str
    threads: int | None  # per block; None where the launch decides (CUDA C)
    dynamic_shared_bytes: int = 0
    cluster: int = 1
    exits: passes.Exits = "auto"
    ptxas_options: tuple[str, ...] = ()
    ptxas_path: str | None = None
    scratch_bytes: int = 0  # per block, of the `global_scratch` parameter
    scratch_align: int = 1
    cooperative: bool = False
    dependent: bool = False  # programmatic dependent launch: it may start before the kernel before it is done
    ttir: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, compare=False)

    def build(self, config: PassConfig) -> Compiled:
        """Applies the passes and assembles."""
        if config.exits == "auto" and self.exits != "auto":
            config = replace(config, exits=self.exits)
        if config.preempt and self.cooperative:
            raise InstrumentError(
                f"kernel {self.name!r} cannot be preempted: a cooperative launch promises that all its blocks run at "
                "once. Launch it as a whole."
            )
        ptx = _passed(self.ptx, config, self.name)
        code = assemble(ptx, self.arch, self.name, self.ptxas_options, self.ptxas_path)
        if config.changes_anything and self.threads is not None:
            code = self._with_as_many_blocks(ptx, code, self.threads)
        return Compiled(self, config, ptx, code)

    def _with_as_many_blocks(self, ptx: str, code: Assembled, threads: int) -> Assembled:
        """Machine code that lets an SM hold as many blocks as of the plain kernel, where that costs no spills.

        Not where warps hand registers to each other, or the kernel itself says how many it takes.
        """
        if room_for_all(code.registers, threads) or "setmaxnreg" in ptx or ".maxnreg" in ptx:
            return code
        plain = assemble(self.ptx, self.arch, self.name, self.ptxas_options, self.ptxas_path)
        most = most_registers(blocks_by_registers(plain.registers, threads), threads, self.dynamic_shared_bytes)
        if code.registers <= most:
            return code
        options = (*self.ptxas_options, f"--maxrregcount={most}")
        fewer = assemble(ptx, self.arch, self.name, options, self.ptxas_path)
        return fewer if fewer.spill_bytes <= max(plain.spill_bytes, code.spill_bytes) else code


def _passed(ptx: str, config: PassConfig, name: str) -> str:
    """What the passes make of a module; kept on disk, since reading and printing PTX takes as long as compiling it."""
    where = cache.digest("passes", config.key(), name, ptx)
    stored = cache.read(where)
    if stored is not None:
        return stored.decode()
    found = passes.apply(ptx, config, name)
    cache.write(where, found.encode())
    return found


class Draft:
    """A kernel as far as it must be compiled to be evaluated: TTIR. The rest is done when somebody asks for it."""

    def __init__(self, name: str, ttir: str, metadata: dict[str, Any], finish: Callable[[], Source]) -> None:
        self.name, self.ttir, self.metadata = name, ttir, metadata
        self._finish = finish

    @classmethod
    def of(cls, source: Source) -> Draft:
        """A draft of what is finished."""
        return cls(source.name, source.ttir, source.metadata, lambda: source)

    @functools.cached_property
    def source(self) -> Source:
        return self._finish()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel ready to load: source, the passes applied to it, the resulting PTX and machine code."""

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
    def registers(self) -> int:
        """Registers per thread."""
        return self.code.registers

    @property
    def shared_bytes(self) -> int:
        """Shared memory per block, static and dynamic."""
        return self.code.static_shared_bytes + self.source.dynamic_shared_bytes

    # -- by the names that Triton's own compiled kernels have

    @property
    def asm(self) -> dict[str, Any]:
        """The kernel in the stages that are kept: "ttir" (Triton kernels), "ptx" and "cubin"."""
        stages = {"ttir": self.source.ttir} if self.source.ttir else {}
        return {**stages, "ptx": self.ptx, "cubin": self.cubin}

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

    def _init_handles(self) -> None:
        """Triton's scripts call it before they read `n_regs`; there is nothing to do."""

    def __repr__(self) -> str:
        level = self.config.report or "plain"
        return (
            f"<{self.name} for {self.source.arch}: {level}{', sliced' if self.config.sliced else ''}, "
            f"{self.registers} registers, {self.shared_bytes} B shared, {len(self.cubin)} B cubin>"
        )
