"""The `preempt` pass: it combines with the others, decides before a block has any effect, refuses what waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from corpus import CUDA_CASES, TRITON_CASES, Case, CudaCase
from corpus_sources import source_of
from failing import failing
from ptx_pieces import entry, module

from paellapy.instrument import records
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Kind, Module, Statement

pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC: pip install 'paellapy[dev]'")

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
