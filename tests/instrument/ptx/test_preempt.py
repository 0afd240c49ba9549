"""The preempt pass: it decides before a block has any effect, and every block runs once, and whole."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from corpus import CUDA_CASES, TRITON_CASES, Case, CudaCase
from corpus_sources import source_of
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st
from ptx_machine import Kernel, packed, steps
from ptx_pieces import entry, module

from paellapy.instrument import records
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Kind, Module, Statement
from paellapy.instrument.records import DESCRIPTOR, FLAG_COPIES, FLAG_COPY_BYTES, LEFT_HEAD_BYTES

pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC, which the extra dev has")

MOST_ADDED_REGISTERS = 16
WAITING = {"spin_lock", "grid_barrier"}
CLUSTERED = {"gemm_two_ctas", "cluster"}
REFUSED = WAITING | CLUSTERED
# Together they hold every piece of code beside every other.
CONFIGS = [
    ("sm_80", PassConfig("count", preempt=True)),
    ("sm_90", PassConfig("trace", sliced=True, also_notify=True, preempt=True)),
    ("sm_90", PassConfig(preempt=True)),
]


def variants() -> list[object]:
    kernels = [c for c in (*TRITON_CASES, *CUDA_CASES) if str(c) not in REFUSED]
    return [
        pytest.param(c, target, config, id=f"{c}-{target}-{config.report}")
        for c in kernels
        for target, config in CONFIGS
        if int(target[3:]) >= c.min_sm
    ]


def decided(ptx: str, name: str | None = None) -> tuple[list[Statement], list[Statement]]:
    """A kernel's instructions before the barrier at which its blocks decide, and those after it."""
    code = list(Module.parse(ptx).entry(name).instructions())
    decides = ("bar.red.or.pred", "vote.sync.any.pred")
    at = next(i for i, s in enumerate(code) if s.opcode in decides and "%paellapy_pp" in s.operands())
    return code[:at], code[at:]


def has_effect(s: Statement) -> bool:
    """Whether other blocks, or the memory of this one after its exit, can tell that an instruction ran."""
    if s.is_op("st"):
        return ".shared" not in s.opcode
    if s.is_op("cp"):
        return "bulk" in s.opcode
    return s.is_op("atom", "red", "call", "mbarrier", "wgmma", "ret", "exit", "griddepcontrol", "setmaxnreg")


@pytest.mark.parametrize(("case", "target", "config"), variants())
def test_it_combines_with_the_others_and_assembles(case: Case | CudaCase, target: str, config: PassConfig) -> None:
    source = source_of(case, target)
    if isinstance(case, CudaCase) and not case.instrumentable:
        config = replace(config, report=None)
    plain, built = source.build(PassConfig()), source.build(config)
    assert built.cubin
    if plain.registers < 64:
        assert built.registers <= plain.registers + MOST_ADDED_REGISTERS
    before, after = decided(built.ptx, source.name)
    assert all("%paellapy" in str(s) for s in before if has_effect(s)), "a block that is not run leaves nothing behind"
    if any(s.is_op("cp") for s in before):
        assert "cp.async.wait_all" in [s.opcode for s in after], "nor a copy on its way"
    if "paellapy_out" not in built.ptx:
        assert built.code.static_shared_bytes == plain.code.static_shared_bytes


@pytest.mark.parametrize("case", [c for c in (*TRITON_CASES, *CUDA_CASES) if str(c) in REFUSED], ids=str)
def test_kernels_whose_blocks_depend_on_each_other_are_refused(case: Case | CudaCase) -> None:
    with failing(InstrumentError, field="preempt") as raised:
        source_of(case).build(PassConfig(preempt=True))
    assert ("atom" if case.name in WAITING else "cluster") in raised.value.given


def apply(body: str, config: PassConfig | None = None, directives: str = "") -> str:
    return passes.apply(module(entry(body, directives=directives)), config or PassConfig(preempt=True), "k")


def test_a_cooperative_kernel_is_refused() -> None:
    source = replace(source_of(next(c for c in TRITON_CASES if c.name == "add")), cooperative=True)
    with failing(InstrumentError, kernel="add", field="preempt", given="cooperative"):
        source.build(PassConfig(preempt=True))


@pytest.mark.parametrize("directives", [".explicitcluster", ".reqnctapercluster 2"])
def test_clusters_are_refused(directives: str) -> None:
    with failing(InstrumentError, kernel="k", field="preempt", given="cluster"):
        apply("ret;", directives=directives)


def test_a_foreign_launch_cannot_be_preempted() -> None:
    with failing(InstrumentError, field="preempt", given="pointer_param"):
        PassConfig(preempt=True, pointer_param=0)


def test_every_part_of_a_configuration_is_in_its_key() -> None:
    assert PassConfig(preempt=True).key() != PassConfig().key()
    assert PassConfig(preempt=True).changes_anything


def test_what_a_source_says_of_its_exits_leaves_the_rest_of_a_configuration_alone() -> None:
    source = replace(source_of(next(c for c in TRITON_CASES if c.name == "add")), exits="barrier")
    built = source.build(PassConfig("count", also_notify=True, preempt=True))
    assert built.config == PassConfig("count", exits="barrier", also_notify=True, preempt=True)


# -- where a block decides


def ops(statements: list[Statement]) -> list[str]:
    return [s.opcode for s in statements if "%paellapy" not in str(s)]


@pytest.mark.parametrize(
    ("body", "first"),
    [
        ("ld.global.u32 %r1, [%rd1]; ld.global.u32 %r2, [%rd2]; add.u32 %r3, %r1, %r2; ret;", 2),
        ("ld.global.u32 %r1, [%rd1]; mul.wide.u32 %rd3, %r1, 4; ld.global.u32 %r2, [%rd3]; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; add.u64 %rd3, %rd3, %r1; ld.global.u32 %r2, [%rd3]; bar.sync 0; ret;", 1),
        ("ld.global.u64 %rd3, [%rd1]; ld.global.u32 %r2, [%rd3]; ld.global.u32 %r3, [%rd2]; ret;", 1),
        ("ld.u64 %rd3, [%rd1]; ld.global.u32 %r2, [%rd3]; ret;", 0),
        ("ld.global.u32 %r1, [%rd1]; st.shared.u32 [%r1], %r2; bar.sync 0; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; shfl.sync.idx.b32 %r2, %r1, 0, 31, -1; ld.global.u32 %r3, [%rd2]; ret;", 3),
        ("ld.global.u32 %r1, [%rd1]; shfl.sync.idx.b32 %r2, %r3, 0, 31, %r1; bar.sync 0; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; bar.sync %r1; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; setp.ne.u32 %p1, %r1, 0; @%p1 ld.global.u32 %r2, [%rd2]; bar.sync 0; ret;", 1),
        ("mov.u32 %r1, 0; st.global.u32 [%rd1], %r1; ld.global.u32 %r2, [%rd2]; ret;", 0),
        ("ld.global.u32 %r1, [%rd1]; add.u32 %r3, %r1, 1; ld.global.u32 %r2, [%rd2]; add.u32 %r4, %r2, 1; ret;", 3),
        ("cp.async.ca.shared.global [%r1], [%rd1], 4; ld.global.u32 %r2, [%rd2]; ret;", 2),
        ("cp.async.bulk.commit_group; ld.global.u32 %r2, [%rd2]; ret;", 0),
        ("ld.global.u32 %r1, [%rd1]; st.shared.u32 [%r2], %r1; ld.global.u32 %r3, [%rd2]; ret;", 3),
        ("ld.global.u32 %r1, [%rd1]; st.u32 [%rd2], %r1; ld.global.u32 %r3, [%rd2]; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; bar.sync 1, 64; ld.global.u32 %r2, [%rd2]; ret;", 1),
        ("ld.global.u32 %r1, [%rd1]; @%p1 bar.sync 0; ld.global.u32 %r2, [%rd2]; ret;", 1),
        ("bar.sync 0; ld.global.u32 %r1, [%rd1]; ret;", 2),
        ("bar.sync 0; ld.global.u32 %r1, [%rd1]; bar.sync 2; ret;", 2),
        ("ld.global.u32 %r1, [%rd1];" + "add.u32 %r2, %r2, 1;" * 2000 + "bar.sync 0; ret;", 1),
        ("ld.volatile.global.u32 %r1, [%rd1]; ret;", 0),
        ("again: ld.global.u32 %r1, [%rd1]; setp.ne.u32 %p1, %r1, 0; @%p1 bra again; ret;", 0),
        ("mov.u32 %r1, 0; line: ld.global.u32 %r2, [%rd1]; ret;", 2),
        ("@%p1 bra over; ld.global.u32 %r1, [%rd1]; over: ret;", 0),
        ("{ .reg .b32 t; ld.global.u32 t, [%rd1]; } ld.global.u32 %r2, [%rd1]; ret;", 2),
        ("ret;", 0),
    ],
)
def test_a_block_decides_after_the_loads_it_begins_with(body: str, first: int) -> None:
    before, _ = decided(apply(body))
    assert ops(before) == [s.opcode for s in Module.parse(module(entry(body))).entry().instructions()][:first]


@pytest.mark.parametrize(
    ("body", "barrier"),
    [
        ("ld.global.u32 %r1, [%rd1]; add.u32 %r1, %r1, 1; st.shared.u32 [%r2], %r1; bar.sync 0; ret;", "0"),
        ("ld.global.u32 %r1, [%rd1]; shfl.sync.bfly.b32 %r3, %r1, 16, 31, -1; barrier.sync.aligned 3; ret;", "3"),
        ("st.shared.u32 [%r2], %r1; bar.sync 1; ret;", "1"),
    ],
)
def test_a_barrier_of_the_kernel_is_also_the_one_at_which_its_block_decides(body: str, barrier: str) -> None:
    before, after = decided(apply(body))
    assert len(ops(before)) == body.count(";") - 2
    assert after[0].operands()[2] == barrier
    assert not any(s.opcode in ("bar.sync", "barrier.sync.aligned") for s in after)


@pytest.mark.parametrize(("directives", "op"), [(".reqntid 32", "vote"), (".reqntid 8, 8", "bar"), ("", "bar")])
def test_a_block_of_one_warp_decides_without_a_barrier(directives: str, op: str) -> None:
    _, after = decided(apply("ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd2], %r1; ret;", directives=directives))
    assert after[0].is_op(op)


def test_the_code_of_blocks_that_leave_is_behind_the_kernel_s_own() -> None:
    ptx = apply("ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd2], %r1;")
    assert ptx.index("st.global.u32 [%rd2]") < ptx.index("$paellapy_leave:")
    _, after = decided(ptx)
    end = next(i for i, s in enumerate(after) if s.is_op("ret"))
    assert [s.opcode for s in after[:end] if not s.is_op("bra")] == ["bar.red.or.pred", "st.global.u32"]


def test_only_axes_that_the_kernel_reads_choose_a_copy_of_the_flag() -> None:
    assert "%ctaid.y" not in "".join(map(str, decided(apply("mov.u32 %r1, %ctaid.x; ret;"))[0]))
    assert "%ctaid.y" in "".join(map(str, decided(apply("mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; ret;"))[0]))


def test_the_flag_is_read_first_and_by_one_thread() -> None:
    before, after = decided(apply("ld.global.u32 %r1, [%rd1]; ret;"))
    reads = [i for i, s in enumerate(before) if s.opcode == "ld.relaxed.sys.global.u32"]
    assert len(reads) == 1
    assert before[reads[0]].guard
    assert reads[0] < next(i for i, s in enumerate(before) if s.opcode == "ld.global.u32")
    assert [s.opcode for s in after if s.is_op("atom", "st")] == ["atom.relaxed.gpu.global.add.u32", "st.global.u32"]


def test_the_flag_and_its_number_are_near_the_kernel_s_own_parameters() -> None:
    reads = [records.field_offset(records.DESCRIPTOR, name) for name in ("flag", "epoch")]
    assert max(reads) < 32, "each line of constant memory that a block reads first is a round trip"


@pytest.mark.parametrize("level", ["count", "trace"])
def test_blocks_that_do_not_run_are_not_reported(level: str) -> None:
    config = PassConfig(level, preempt=True)  # type: ignore[arg-type]
    body = "ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd2], %r1; ret;"
    before, after = decided(apply(body, config))
    assert not any(s.is_op("red", "atom") for s in before)
    assert after[1].is_op("bra")
    leaves = str(Module.parse(apply(body, config)).entry()).split("$paellapy_leave:")[1]
    assert "%paellapy_line]" not in leaves
    assert "%paellapy_line+" not in leaves
    assert "%paellapy_record" not in leaves


def test_a_block_that_does_not_run_notes_its_place_in_the_whole_grid() -> None:
    _, after = decided(apply("ret;", PassConfig(sliced=True, preempt=True)))
    noted = [t.text for s in after for t in s.tokens if t.text.startswith(("%ctaid", "%nctaid"))]
    assert not noted, "of a slice, its place in the slice says nothing"


def test_a_list_of_blocks_is_read_only_where_there_is_one() -> None:
    body = Module.parse(apply("mov.u32 %r1, %ctaid.x; ret;", PassConfig(sliced=True, preempt=True))).entry().body or []
    read = next(i for i, s in enumerate(body) if s.opcode == "ld.global.nc.u32")
    assert "bra $paellapy_in_order" in str(body[read - 2])
    assert body[read + 1].kind is Kind.LABEL
    assert "ld.global.nc" not in apply("mov.u32 %r1, %ctaid.x; ret;", PassConfig(sliced=True))


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
        launched = kernel.launch(self.memory, (blocks, 1, 1), [packed(NUMBERS), packed(COUNT), descriptor.tobytes()])
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
