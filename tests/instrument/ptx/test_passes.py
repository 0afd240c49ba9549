"""The passes: every kernel of the corpus assembles in every variant; what cannot be done is refused with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from corpus import CUDA_CASES, TRITON_CASES, Case, CudaCase
from corpus_sources import source_of
from failing import failing
from ptx_pieces import entry, module

from paellapy.instrument.errors import InstrumentError, PtxError
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.compiled import assemble
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.records import DESCRIPTOR

pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC, which the extra dev has")

TARGETS = (80, 90, 100)
LEVELS = ("count", "trace", "notify")
MOST_ADDED_REGISTERS = 16
# Kernels whose threads leave at different times around a barrier. All others end at a barrier, which is cheaper.
COUNTED_OUT = {"barrier_after_return"}


def configs(target: str, sliceable: bool) -> list[PassConfig]:
    """Every variant for one target; for the other targets, variants that together add every piece of code once."""
    if target == "sm_90":
        chosen = [PassConfig(level, sliced) for level in (None, *LEVELS) for sliced in (False, True)]
        chosen += [PassConfig("count", sliced=True, also_notify=True), PassConfig("trace", also_notify=True)]
    else:
        chosen = [PassConfig("count"), PassConfig("trace", sliced=True), PassConfig("notify", sliced=True)]
    return chosen if sliceable else [replace(c, sliced=False) for c in chosen]


def variants() -> list[object]:
    kernels = [c for c in (*TRITON_CASES, *CUDA_CASES) if isinstance(c, Case) or c.instrumentable]
    return [
        pytest.param(case, f"sm_{target}", id=f"{case}-sm_{target}")
        for case in kernels
        for target in TARGETS
        if target >= case.min_sm
    ]


def is_clustered(ptx: str) -> bool:
    return ".reqnctapercluster" in ptx


def ways_out(function: Function) -> list[str]:
    return [s.opcode for s in function.instructions() if s.is_op("ret", "exit")]


@pytest.mark.parametrize(("case", "target"), variants())
def test_every_variant_assembles_with_few_more_registers(case: Case | CudaCase, target: str) -> None:
    source = source_of(case, target)
    plain = source.build(PassConfig())
    assert plain.ptx == source.ptx, "nothing asked for, nothing changed"
    for config in configs(target, sliceable=not is_clustered(source.ptx)):
        built = source.build(config)
        assert built.cubin
        if plain.registers < 64:
            assert built.registers <= plain.registers + MOST_ADDED_REGISTERS, config
        if config.report in ("count", "trace"):
            assert ways_out(Module.parse(built.ptx).entry(source.name)) == ["ret"], "one way out"
            assert ("paellapy_out" in built.ptx) == (case.name in COUNTED_OUT)
            if case.name not in COUNTED_OUT:
                assert built.code.static_shared_bytes == plain.code.static_shared_bytes


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_kernels_launched_by_triton_take_the_descriptor_by_pointer(case: Case) -> None:
    source = source_of(case)
    before = Module.parse(source.ptx).entry().param_names()
    for config in (PassConfig("trace", exits=source.exits, pointer_param=-1), PassConfig("notify", pointer_param=-1),
                   PassConfig("count", exits=source.exits, pointer_param=-1, also_notify=True)):  # fmt: skip
        ptx = passes.apply(source.ptx, config)
        assert Module.parse(ptx).entry().param_names() == before, "the signature is Triton's"
        if config.report == "trace":
            assemble(ptx, source.arch, source.name, source.ptxas_options, source.ptxas_path)


@pytest.mark.parametrize("case", [c for c in CUDA_CASES if not c.instrumentable], ids=str)
def test_kernels_that_cannot_report_their_end_are_refused(case: CudaCase) -> None:
    source = source_of(case)
    for level in ("count", "trace"):
        with failing(InstrumentError, kernel=case.entry, field="exit"):
            source.build(PassConfig(level))
    assert source.build(PassConfig("notify", sliced=True)).cubin  # neither needs the end


@pytest.mark.parametrize("case", [c for c in (*TRITON_CASES, *CUDA_CASES) if c.min_sm >= 90], ids=str)
def test_clusters_are_not_sliced(case: Case | CudaCase) -> None:
    source = source_of(case)
    if is_clustered(source.ptx):
        with failing(InstrumentError, field="slice", given="cluster"):
            source.build(PassConfig(sliced=True))


# -- what is refused


def apply(body: str, config: PassConfig, *functions: str, params: str = "()", directives: str = "") -> str:
    return passes.apply(module(*functions, entry(body, params, directives=directives)), config, "k")


def test_unknown_levels_and_exits_are_refused() -> None:
    with failing(InstrumentError, field="report", given="everything"):
        PassConfig("everything")  # type: ignore[arg-type]
    with failing(InstrumentError, field="exits", given="somehow"):
        PassConfig("count", exits="somehow")  # type: ignore[arg-type]


@pytest.mark.parametrize("second", [PassConfig("trace"), PassConfig(sliced=True), PassConfig("notify"), PassConfig()])
@pytest.mark.parametrize(
    "first", [PassConfig("count"), PassConfig("notify"), PassConfig(sliced=True), PassConfig("trace", pointer_param=0)]
)
def test_a_kernel_is_instrumented_once(first: PassConfig, second: PassConfig) -> None:
    once = apply("ret;", first, params="(.param .u64 x)")
    with failing(InstrumentError, kernel="k", field="instrumented"):
        passes.apply(once, second)
    with failing(InstrumentError, kernel="k", field="instrumented"):
        passes.apply(once, second, "k")


def test_a_module_that_no_pass_changes_is_returned_as_it_is() -> None:
    ptx = module(entry("ret;")) + "\n.file 1 \"paellapy/kernels.py\"\n"
    assert passes.apply(ptx, PassConfig(), "k") is ptx
    with failing(PtxError, field="entry", given="k"):
        passes.apply(ptx, PassConfig(), "nowhere")


def test_another_entry_of_the_same_module_can_be_instrumented_too() -> None:
    both = module(entry("mov.u32 %r1, %ctaid.x; ret;", name="a"), entry("mov.u32 %r1, %ctaid.x; ret;", name="b"))
    for level in LEVELS:
        config = PassConfig(level, sliced=True, exits="count-out")
        ptx = passes.apply(passes.apply(both, config, "a"), config, "b")
        for name in "ab":
            assemble(ptx, "sm_80", name)


def test_a_kernel_may_have_our_name_in_its_own() -> None:
    ptx = module(entry("ret;", "(.param .u32 paellapy_k_param_0)", name="paellapy_k"))
    assemble(passes.apply(ptx, PassConfig("count")), "sm_80", "paellapy_k")


def test_an_entry_has_to_be_named_among_several() -> None:
    with failing(PtxError, field="entry", given="a, b"):
        passes.apply(module(entry("ret;", name="a"), entry("ret;", name="b")), PassConfig("count"))


@pytest.mark.parametrize("register", ["%ctaid.x", "%nctaid.z"])
def test_a_device_function_that_reads_the_grid_cannot_be_sliced(register: str) -> None:
    function = f".func where() {{ .reg .b32 %a; mov.u32 %a, {register}; ret; }}"
    with failing(InstrumentError, kernel="k", field="slice", given="where"):
        apply("call where; ret;", PassConfig(sliced=True), function)
    apply("call where; ret;", PassConfig("count"), function)


@pytest.mark.parametrize("register", ["%clusterid.x", "%nclusterid.y"])
def test_a_kernel_that_numbers_clusters_cannot_be_sliced(register: str) -> None:
    with failing(InstrumentError, kernel="k", field="slice", given="%clusterid"):
        apply(f"mov.u32 %r1, {register}; ret;", PassConfig(sliced=True))


def test_a_cluster_size_left_to_the_launch_cannot_be_sliced() -> None:
    with failing(InstrumentError, kernel="k", field="slice", given="cluster"):
        apply("ret;", PassConfig(sliced=True), directives=".explicitcluster")
    apply("ret;", PassConfig(sliced=True), directives=".explicitcluster .reqnctapercluster 1")


def test_a_block_index_read_as_a_vector_cannot_be_sliced() -> None:
    with failing(InstrumentError, kernel="k", field="slice", given="%ctaid"):
        apply(".reg .v4 .b32 %v; mov.v4.u32 %v, %ctaid; ret;", PassConfig(sliced=True))


def test_foreign_launches_are_not_sliced_and_need_a_pointer() -> None:
    with failing(InstrumentError, field="slice", given="pointer_param"):
        PassConfig(sliced=True, pointer_param=0)
    with failing(InstrumentError, kernel="k", field="pointer_param", given=-1):
        apply("ret;", PassConfig("trace", pointer_param=-1))


def test_a_spare_barrier_must_be_spare() -> None:
    config = PassConfig("count", exits="spare-barrier")
    with failing(InstrumentError, kernel="k", field="barrier", given=15):
        apply("bar.sync 15, 64; ret;", config)
    assert "barrier.sync 15" in apply("bar.sync 3, 64; bar.warp.sync 15; ret;", config)


@pytest.mark.parametrize("inside", [True, False])
def test_counting_out_needs_shared_memory_to_spare(inside: bool) -> None:
    shared = ".shared .align 4 .b8 tile[3][16384];"
    config = PassConfig("trace", exits="count-out")
    with failing(InstrumentError, kernel="k", field="shared memory", given=49152):
        passes.apply(module("" if inside else shared, entry(f"{shared if inside else ''} ret;")), config)


# -- what is emitted


def test_guarded_exits_keep_their_guards() -> None:
    ptx = apply("@%p1 ret; @!%p2 exit; ret;", PassConfig("count"))
    function = Module.parse(ptx).entry()
    jumps = [str(s).strip() for s in function.instructions() if "$paellapy_exit" in str(s)]
    assert jumps == ["@%p1 bra $paellapy_exit;", "@!%p2 bra $paellapy_exit;", "bra $paellapy_exit;"]


def test_returns_in_device_functions_stay() -> None:
    ptx = apply("call f; ret;", PassConfig("trace"), ".func f() { ret; }")
    assert ways_out(next(f for f in Module.parse(ptx).functions() if f.name == "f")) == ["ret"]


def test_only_the_block_the_kernel_sees_is_renumbered() -> None:
    ptx = apply("mov.u32 %r1, %ctaid.y; mov.u32 %r2, %nctaid.x; ret;", PassConfig(sliced=True))
    body = Module.parse(ptx).entry().body or []
    reads = [str(s).strip() for s in body if "%r1" in str(s) or "%r2" in str(s)]
    assert reads == ["mov.u32 %r1, %paellapy_cy;", "mov.u32 %r2, %paellapy_gx;"]
    assert sum("%ctaid" in str(s) for s in body) == 1, "the real index is read once, to add the slice's offset"


def test_a_kernel_that_looks_at_no_index_is_sliced_by_its_launch_alone() -> None:
    ptx = apply("ret;", PassConfig(sliced=True))
    assert "%paellapy" not in ptx
    assert f"k_paellapy[{DESCRIPTOR.itemsize}]" in ptx


def test_the_same_config_gives_the_same_key() -> None:
    every = [PassConfig(r, s) for r in (None, *LEVELS) for s in (False, True)]
    every += [PassConfig("count", exits="barrier"), PassConfig("trace", pointer_param=-1)]
    assert len({c.key() for c in every}) == len(every)
    assert PassConfig("count").key() == PassConfig("count").key()
    assert [c.changes_anything for c in (PassConfig(), PassConfig("count"), PassConfig(sliced=True))] == [0, 1, 1]
