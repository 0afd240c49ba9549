"""Preempted kernels, run thread by thread in any order: whenever the flag changes, every block runs once, and whole."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_machine import Kernel, packed, steps
from ptx_pieces import entry, module

from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import DESCRIPTOR, FLAG_COPIES, FLAG_COPY_BYTES, LEFT_HEAD_BYTES

BLOCKS, TOGETHER = 6, 3
FLAG, LEFT, NUMBERS, COUNT = 0x1000, 0x4000, 0x8000, 0x9000
START = """
	ld.param.u64 %rd1, [numbers];
	ld.param.u64 %rd2, [count];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mad.wide.u32 %rd3, %r2, 4, %rd1;
	mad.wide.u32 %rd4, %r1, 4, %rd2;
	shl.b32 %r3, %r2, 2;
	mov.u32 %r4, 0;"""
EFFECT = "atom.global.add.u32 %r9, [%rd4], 1;"
PIECES = {
    "read": "ld.global.u32 %r4, [%rd3];",
    "read on": "mad.wide.u32 %rd5, %r4, 4, %rd1; ld.global.u32 %r4, [%rd5];",
    "read in braces": "{ .reg .b32 %t; ld.global.u32 %t, [%rd3]; mov.u32 %r4, %t; }",
    "masked read of null": "mov.u64 %rd8, 0; setp.ge.u32 %p3, %r2, 32; @%p3 ld.global.u32 %r5, [%rd8];",
    "strong read": "ld.volatile.global.u32 %r4, [%rd3];",
    "read if": "setp.ge.u32 %p2, %r4, 32; @%p2 ld.global.u32 %r5, [%rd3+4096];",
    "look up": "st.shared.u32 [%r3], %r4; ld.shared.u32 %r6, [%r3]; mad.wide.u32 %rd6, %r6, 4, %rd1;"
    "ld.global.u32 %r7, [%rd6];",
    "copy on": "mad.wide.u32 %rd7, %r4, 4, %rd1; cp.async.ca.shared.global [%r3], [%rd7], 4;",
    "use": "add.u32 %r5, %r4, 1;",
    "share": "st.shared.u32 [%r3], %r4;",
    "barrier": "bar.sync 0;",
    "barrier of some": "bar.sync 1, 64;",
    "copy": "cp.async.ca.shared.global [%r3], [%rd3], 4;",
    "wait": "cp.async.wait_all;",
    "effect": EFFECT,
    "jump": "setp.lt.u32 %p1, %r1, 3; @%p1 bra over; add.u32 %r5, %r1, 1; over:",
}
bodies = st.lists(st.sampled_from([name for name in PIECES if name != "jump"]), max_size=8)


@dataclass
class Gpu:
    """The memory of a launch, with a flag that is written copy by copy while blocks run."""

    body: list[str]
    threads: int
    random: random.Random

    def __post_init__(self) -> None:
        self.memory = {NUMBERS + 4 * k: (k * 7 + 3) % 32 for k in range(32)} | {COUNT + 4 * k: 0 for k in range(BLOCKS)}
        self.memory |= {FLAG + k * FLAG_COPY_BYTES: 0 for k in range(FLAG_COPIES)}
        text = "\n".join((START, *(PIECES[name] for name in self.body), PIECES["wait"], EFFECT, "ret;"))
        parameters = "(.param .u64 numbers, .param .u64 count)"
        self.ptx = module(entry(text, parameters, directives=f".reqntid {self.threads}"))
        self.effects = self.threads * (1 + self.body.count("effect"))
        self.seen: set[int] = set()  # values of the flag that blocks may have read

    def set_flag(self, value: int, copies: range = range(FLAG_COPIES)) -> None:
        self.memory.update((FLAG + k * FLAG_COPY_BYTES, value) for k in copies)
        self.seen.add(value)

    def run(self, epoch: int, todo: list[int] | None, values: list[int]) -> list[int]:
        """Launches all blocks, or those of a list, while the flag takes these values. Returns the blocks that left."""
        blocks = BLOCKS if todo is None else len(todo)
        before = [self.memory[COUNT + 4 * k] for k in range(BLOCKS)]
        descriptor = np.zeros((), DESCRIPTOR)
        descriptor["flag"], descriptor["left"], descriptor["epoch"] = FLAG, LEFT, epoch
        descriptor["grid_x"], descriptor["grid_y"], descriptor["grid_z"] = BLOCKS, 1, 1
        self.memory[LEFT] = 0
        if todo is not None:
            descriptor["todo"] = listed = LEFT + 0x1000
            self.memory.update((listed + 4 * k, number) for k, number in enumerate(todo))
        kernel = Kernel(passes.apply(self.ptx, PassConfig(preempt=True, sliced=todo is not None)), self.threads)
        launched = kernel.launch(self.memory, blocks, [packed(NUMBERS), packed(COUNT), descriptor.tobytes()])
        writes = [(value, copy) for value in values for copy in range(FLAG_COPIES)]
        pace = self.random.choice([3, 20, 100])  # instructions from one write to the next
        for k, _ in enumerate(steps(launched, self.random.randrange, TOGETHER)):
            if writes and k % pace == 0:
                value, copy = writes.pop(0)
                self.set_flag(value, range(copy, copy + 1))
        left = [self.memory[LEFT + LEFT_HEAD_BYTES + 4 * k] for k in range(self.memory[LEFT])]
        assert len(set(left)) == len(left)
        ran = set(range(BLOCKS) if todo is None else todo) - set(left)
        for block in range(BLOCKS):
            added = self.memory[COUNT + 4 * block] - before[block]
            assert added == (self.effects if block in ran else 0), f"block {block} ran in part"
        return left


@settings(max_examples=100, deadline=None)
@given(bodies, st.booleans(), st.lists(st.sampled_from([0, 4, 5, 9])), st.lists(st.sampled_from([0, 9, 10])), st.data())
def test_whenever_the_flag_changes_a_block_runs_as_a_whole_or_not_at_all(
    body: list[str], jump: bool, first: list[int], second: list[int], data: st.DataObject
) -> None:
    if jump:
        body.insert(data.draw(st.integers(0, len(body))), "jump")
    threads = data.draw(st.sampled_from([2, 3, 32]))
    gpu = Gpu(body, threads, random.Random(data.draw(st.integers(0, 2**30))))
    gpu.set_flag(data.draw(st.sampled_from([0, 4, 5])))
    left = gpu.run(5, None, first)
    assert max(gpu.seen) >= 5 or not left
    left = gpu.run(10, left, second)
    gpu.set_flag(9)
    assert not gpu.run(10, left, []), "a launch is preempted by its own number and higher ones"
    assert [gpu.memory[COUNT + 4 * k] for k in range(BLOCKS)] == [gpu.effects] * BLOCKS


@settings(max_examples=100, deadline=None)
@given(bodies, st.integers(0, 2**30))
def test_a_block_that_does_not_run_follows_no_number_that_is_not_written_yet(body: list[str], seed: int) -> None:
    """The launch that writes the numbers is preempted too. The machine raises for memory that does not exist."""
    gpu = Gpu(body, 4, random.Random(seed))
    gpu.memory.update((NUMBERS + 4 * k, 0xDEAD0000 + 997 * k) for k in range(32))
    gpu.set_flag(5)
    assert sorted(gpu.run(5, None, [])) == list(range(BLOCKS))


@pytest.mark.parametrize("threads", [4, 32])
@pytest.mark.parametrize(
    "body",
    [[], ["read"], ["masked read of null"], ["read", "share", "barrier"], ["copy", "use"], ["effect"]],
    ids=str,
)
def test_while_the_flag_is_set_no_block_runs(body: list[str], threads: int) -> None:
    gpu = Gpu(body, threads, random.Random(1))
    gpu.set_flag(5)
    assert sorted(gpu.run(5, None, [])) == list(range(BLOCKS))
    assert sorted(gpu.run(5, [4, 1], [])) == [1, 4]
