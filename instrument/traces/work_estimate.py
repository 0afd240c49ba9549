"""The work of launches on a real GPU: some of their blocks are evaluated, with empty memory in place of arrays."""

from __future__ import annotations

import contextlib
import functools
import io
import mmap
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paellapy.instrument.arguments import Descriptor
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import WARP
from paellapy.instrument.kernels.triton_source import launch_values
from paellapy.instrument.ptx.compiled import Source
from paellapy.instrument.records import Records
from paellapy.instrument.triton_ir import TtirProgram
from paellapy.instrument.triton_ir.lower import follows_data

_MOST_BLOCKS = 64  # evaluated per launch
_MOST_FLOPS = 1 << 31  # of matrix products in all evaluated blocks, about: a second of a CPU's time
_FEWEST_BLOCKS = 4  # evaluated per launch; a launch of which fewer can be evaluated in time stays unknown
_LAUNCH_S = 2.0  # time for one launch, about; most take milliseconds
_TRACE_S = 10.0  # time for all launches of a trace; the rest stay unknown
_AT_ONCE = 8  # blocks, so that the pages they store to fit into memory
_ROOM_BYTES = 1 << 36  # address space for an array; it takes memory only where a block stores
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python's mmap does not name

Work = tuple[int, int, int]  # bytes, operations, operations of tensor cores


class Counting:
    """Counts the work of launches, once for all launches that differ in nothing but the addresses of their arrays."""

    def __init__(self) -> None:
        self._known: dict[Any, Work | None] = {}
        self._left_s = _TRACE_S

    def count(
        self, source: Source, values: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
    ) -> Work | None:
        """The work of a launch; None where it depends on data, or where its kernel cannot be evaluated in time.

        `values` are the launch's arguments, with addresses in place of arrays.
        """
        begun = time.perf_counter()
        try:
            return self._find(source, values, grid, first, blocks)
        except Exception:  # of any kind: empty memory is no input that the kernel was written for
            return None
        finally:
            self._left_s -= time.perf_counter() - begun

    def _find(
        self, source: Source, values: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
    ) -> Work | None:
        program = _program(source)
        if program is None:
            return None
        given = launch_values(source.metadata["signature"], source.metadata["tiles"], lambda each, _: each, values)
        pointers = [t.kind in ("pointer", "descriptor") for _, t in program.module.entry.args]
        given = [_without_address(v) if is_pointer else v for v, is_pointer in zip(given, pointers, strict=True)]
        cluster = source.cluster  # the evaluator knows whole clusters
        grid, first, blocks = (grid[0] // cluster, *grid[1:]), first // cluster, blocks // cluster
        key = (source.ttir, tuple(given), grid, first, blocks)
        if key not in self._known and self._left_s > 0:
            self._known[key] = None  # if it fails
            self._known[key] = _count(program, given, grid, first, blocks)
        return self._known.get(key)


def _count(
    program: TtirProgram, given: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
) -> Work | None:
    """Evaluates blocks that are chosen at random, always the same, and takes them for all; None if that takes too long.
    """
    rooms: list[mmap.mmap] = []
    arguments = []
    for value, (_, kind) in zip(given, program.module.entry.args, strict=True):
        if kind.kind in ("pointer", "descriptor"):
            rooms.append(mmap.mmap(-1, _ROOM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE))
            rooms[-1].madvise(mmap.MADV_NOHUGEPAGE)
            memory = np.frombuffer(rooms[-1], kind.element.storage)
            value = replace(value, base=memory) if isinstance(value, Descriptor) else memory
        arguments.append(value)
    chosen = first + np.random.default_rng(0).choice(blocks, min(blocks, _MOST_BLOCKS), replace=False)
    found: list[Records] = []
    most, each_s = 1, float("inf")
    while (done := len(found) and sum(map(len, found))) < min(most, len(chosen)):
        ids = np.sort(chosen[done : min(done + _AT_ONCE, most)])
        begun = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # the kernel itself has printed its messages
            found.append(program.run(arguments, grid, ids, record=False))
        for room in rooms:
            room.madvise(mmap.MADV_DONTNEED)
        # The first block may also have compiled loops of the evaluator: one more is evaluated before it is given up.
        each_s = min(each_s, (time.perf_counter() - begun) / len(ids))
        if each_s * min(_FEWEST_BLOCKS, len(chosen)) > _LAUNCH_S and done + len(ids) < len(chosen):
            if found[1:]:
                return None
            most = 2
            continue
        affordable = min(_MOST_FLOPS // max(1, int(found[0]["dot_flops"][0])), int(_LAUNCH_S / max(each_s, 1e-9)))
        most = int(np.clip(affordable, _FEWEST_BLOCKS, _MOST_BLOCKS))
    rows = np.concatenate(found)
    scale = blocks / len(rows)
    loaded, stored, flops, dots = (
        round(int(rows[name].sum()) * scale) for name in ("bytes_loaded", "bytes_stored", "flops", "dot_flops")
    )
    return loaded + stored, flops, dots


def _program(source: Source) -> TtirProgram | None:
    if not source.ttir:
        return None  # CUDA C
    return _parsed(source.ttir, source.name, WARP * source.metadata.get("num_warps", 4))


@functools.lru_cache(64)
def _parsed(ttir: str, name: str, threads: int) -> TtirProgram | None:
    """A kernel whose work does not depend on data; None for others."""
    try:
        program = TtirProgram.parse(ttir, name, threads)
    except PaellaError:
        return None
    unknown = program.facts.serial or program.facts.addresses or follows_data(program.module)
    return None if unknown else program


def _without_address(value: Any) -> Any:
    return replace(value, base=None) if isinstance(value, Descriptor) else None
