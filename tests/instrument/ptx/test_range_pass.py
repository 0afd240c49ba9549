"""The code of the range pass, run thread by thread without a GPU: the host reads what the threads wrote."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_thread import Grid

from paellapy.instrument.device.base import EventLayout
from paellapy.instrument.device.cuda import _rings
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Marker, Ranges, Sites
from paellapy.instrument.records import DESCRIPTOR, RANGE_END, WHOLE_BLOCK

A, B, END = 0, 1, RANGE_END
GRID, THREADS, LINES, RINGS = (3, 2, 1), 64, 1 << 20, 1 << 24


def kernel(per_warp: bool, rounds: int) -> str:
    def mark(begins: bool, name: str, per_warp: bool = per_warp) -> str:
        return f"{Marker(begins, per_warp, name).ptx} mov.u32 %r9, 0;"

    return f""".version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) .reqntid {THREADS}
{{
	.reg .b32 %r<10>;
	.reg .pred %q;
	mov.u32 %r1, 0;
	{mark(True, "a", False)}
	bar.sync 0;
$loop:
	{mark(True, "b")}
	bar.sync 0;
	{mark(False, "b")}
	add.u32 %r1, %r1, 1;
	{mark(True, "b")}
	bar.sync 0;
	{mark(False, "b")}
	setp.lt.u32 %q, %r1, {rounds};
	@%q bra $loop;
	{mark(False, "a", False)}
	ret;
}}
"""


def run(per_warp: bool, rounds: int, records: int, where: int = 0x7_FFFF_F008) -> tuple[EventLayout, np.ndarray]:
    """Runs the grid with rings behind an address at which neither they nor their heads are aligned."""
    ptx = kernel(per_warp, rounds)
    out = passes.apply(ptx, PassConfig("trace"))
    layout = EventLayout.of(Ranges.in_text(ptx), Sites.in_text(out), 6, THREADS, records)
    rings = _rings(layout, where) if where else 0
    descriptor = np.zeros((), DESCRIPTOR)
    descriptor["lines"], descriptor["rings"], descriptor["ring_mask"] = LINES, RINGS, 1023
    descriptor["ranges"], descriptor["range_mask"] = rings, layout.mask
    grid = Grid(out, {"p": bytes(8), "k_paellapy": descriptor.tobytes()}, GRID, THREADS)
    grid.run()
    begin = rings - layout.heads_bytes
    ours = [address for address in grid.memory if address > RINGS + (1 << 20)]
    assert all(begin <= address < begin + layout.nbytes for address in ours)
    words = np.array([grid.memory.get(begin + at, 0xA5A5A5A5) for at in range(0, layout.nbytes, 4)], np.uint32)
    return layout, words.view(np.uint8)


@pytest.mark.parametrize("rounds", [1, 3, 20])
@pytest.mark.parametrize("per_warp", [False, True])
def test_the_host_reads_what_the_threads_wrote(per_warp, rounds):
    layout, memory = run(per_warp, rounds, records=16)
    found = layout.read(1, memory)
    inner = [B, B | END] * 2 * rounds
    for block in range(6):
        for warp in range(2) if per_warp else [WHOLE_BLOCK]:
            mine = (found.block == block) & (found.warp == warp)
            whole = [A, *inner, A | END] if warp in (0, WHOLE_BLOCK) else inner
            tags = found.tag[mine].tolist()
            assert tags == whole[len(whole) - len(tags) :]
            assert len(tags) == len(whole) or rounds == 20
            assert (np.diff(found.part[mine]) >= 0).all()
    wanted = 6 * (len(inner) * (2 if per_warp else 1) + 2)
    assert len(found.tag) + found.overwritten == wanted
    assert (found.overwritten > 0) == (rounds == 20)
    assert set(found.start_lo.tolist()) == {7}


def test_a_launch_without_room_for_records_writes_none():
    ptx = passes.apply(kernel(True, 2), PassConfig("trace"))
    descriptor = np.zeros((), DESCRIPTOR)
    descriptor["lines"], descriptor["rings"], descriptor["ring_mask"] = LINES, RINGS, 1023
    grid = Grid(ptx, {"p": bytes(8), "k_paellapy": descriptor.tobytes()}, GRID, THREADS)
    grid.run()
    assert all(LINES <= address < RINGS + (1 << 20) for address in grid.memory)
