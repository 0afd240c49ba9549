"""The range pass: where ranges are recorded, how their arithmetic moves, and what the threads write."""

from __future__ import annotations

import re
from collections import defaultdict

import hypothesis.strategies as st
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given
from ptx_machine import Kernel

import paellapy as pp
from paellapy.instrument.device.base import EventLayout
from paellapy.instrument.device.cuda import _rings
from paellapy.instrument.kernels.triton_kernel import _NoDevice
from paellapy.instrument.ptx import passes, sass
from paellapy.instrument.ptx.compiled import Source, assemble, blocks_by_registers
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Statement, statements
from paellapy.instrument.ptx.ranges import Marker, Ranges, Sites
from paellapy.instrument.records import DESCRIPTOR, RANGE_END, WHOLE_BLOCK

HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) .reqntid 128
{
	.reg .b32 %r<300>;
	.reg .b64 %rd<4>;
	.reg .pred %q;
	ld.param.u64 %rd1, [p];
	setp.eq.u64 %q, %rd1, 0;
"""
ADD, STORE, BARRIER, JUMP = "add.s32 %r1, %r1, 1;", "st.global.u32 [%rd1], %r1;", "bar.sync 0;", "@%q bra $there;"
FENCE = "wgmma.fence.sync.aligned;"
WARP_NUMBER = "shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;"  # as Triton reads it


def mark(word: str, per_warp: bool = False) -> str:
    """ "+a" begins range a, "-a" ends it; as Triton writes it."""
    return f"{Marker(word[0] == '+', per_warp, word[1:]).ptx} mov.u32 %r9, 0;"


def passed(*lines: str) -> str:
    code = [mark(line) if line[0] in "+-" else line for line in lines]
    ptx = HEAD + "\n".join(f"\t{line}" for line in [*code, "$there:", "ret;", "}"]) + "\n"
    out = passes.apply(ptx, PassConfig("trace"))
    assert assemble(out, "sm_90a", "k").cubin
    return out


def moments(*lines: str) -> list[str]:
    """The records of a kernel as words: "+0 | -0 +1" has two readings of the clock."""
    return re.findall(r"// paellapy record \d+: (.*)", passed(*lines))


def test_markers_with_next_to_nothing_between_them_share_a_reading():
    assert moments("+a", STORE, "-a", "+b", STORE, "-b") == ["+0 | -0 +1 | -1"]
    assert moments("+a", STORE, "-a", *[ADD] * 4, "+b", STORE, "-b") == ["+0 | -0 +1 | -1"]
    assert moments("+a", STORE, "-a", *[ADD] * 5, "+b") == ["+0 | -0 | +1"]
    assert moments("+a", STORE, "-a", BARRIER, "+b") == ["+0 | -0 | +1"]


def test_a_record_has_three_moments_and_ends_where_code_branches():
    assert moments("+a", STORE, "+b", STORE, "-b", STORE, "-a") == ["+0 | +1 | -1", "-0"]
    assert moments("+a", STORE, JUMP, "-a") == ["+0", "-0"]
    assert moments("+a", STORE, "$loop:", "-a", JUMP.replace("there", "loop")) == ["+0", "-0"]
    assert moments("+a", STORE, "$L__tmp1:", "-a") == ["+0 | -0"]  # a label for debuggers


def test_ranges_of_blocks_and_of_warps_do_not_share_a_record():
    by_warp = mark("+b", per_warp=True)
    out = passed("+a", by_warp, STORE, "-a")
    assert re.findall(r"// paellapy record \d+: (.*)", out) == ["+0", "+1", "-0"]
    stores = re.findall(r"@(%paellapy_r[kl]) st\.global\.v\d\.u32 \[%paellapy_ra\]", out)
    assert stores == ["%paellapy_rk", "%paellapy_rl", "%paellapy_rk"]


def test_the_clock_is_read_at_a_matrix_instruction_and_not_amid_arithmetic_next_to_it():
    def before_clock(*lines: str) -> str:
        return passed(*lines).split("mov.u32 %paellapy_rc0, %clock;")[0]

    assert before_clock(STORE, "-a", *[ADD] * 20, FENCE).count(ADD) == 20
    assert before_clock(FENCE, *[ADD] * 20, "-a", STORE).count(ADD) == 0
    assert before_clock(FENCE, *[ADD] * 20, "-a", *[ADD] * 10, FENCE).count(ADD) == 30  # the nearer one
    assert before_clock(STORE, "-a", *[ADD] * 200, FENCE).count(ADD) == 0  # too far
    assert before_clock("-a", *[ADD] * 20, WARP_NUMBER, FENCE).count(ADD) == 20
    assert before_clock("-a", *[ADD] * 20, WARP_NUMBER.replace(" 0,", " %r3,"), FENCE).count(ADD) == 0
    assert before_clock("-a", *[ADD] * 20, STORE, FENCE).count(ADD) == 0  # a store keeps its side
    assert before_clock("-a", *[ADD] * 20, BARRIER).count(ADD) == 0
    assert before_clock("+a", *[ADD] * 20, "-a", FENCE).count(ADD) == 0  # or the range would be empty


words = st.sampled_from(["+a", "-a", "+b", "-b", "+c", "-c"])
lines = st.lists(st.one_of(words, st.sampled_from([ADD, STORE, BARRIER, JUMP, FENCE])), min_size=1, max_size=25)


@given(lines)
def test_every_marker_is_recorded_once_and_in_order(code):
    names: dict[str, int] = {}
    wanted = [names.setdefault(w[1:], len(names)) | (RANGE_END if w[0] == "-" else 0) for w in code if w[0] in "+-"]
    ptx = HEAD + "\n".join(mark(w) if w[0] in "+-" else w for w in [*code, "$there:", "ret;", "}"])
    out = passes.apply(ptx, PassConfig("trace"))
    assert [tag for site in Sites.in_text(out).moments for at in site for tag in at] == wanted
    assert ".pragma" not in out
    own = "|".join(map(re.escape, (ADD, STORE, BARRIER, JUMP, FENCE)))
    assert re.findall(own, out) == [line for line in code if line[0] not in "+-"]


@triton.jit
def gemm(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rm, rn, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        with pp.range("load a"):
            x = tl.load(a + rm[:, None] * K + k + rk[None, :])
        with pp.range("load b"):
            y = tl.load(b + (k + rk)[:, None] * BN + rn[None, :])
        with pp.range("mma"):
            acc = tl.dot(x, y, acc)
    tl.store(c + rm[:, None] * BN + rn[None, :], acc.to(tl.float16))


def marked(kernel: pp.Kernel, *args: object, **options: object) -> Source:
    values, key, rest = kernel._bind(_NoDevice, args, options)
    return kernel._source.source(values, kernel._with_options(key, rest), rest, "sm_90", True)


def test_six_events_of_a_pipelined_loop_cost_three_readings_and_one_store():
    source = marked(pp.kernel(gemm), "*fp16:16", "*fp16:16", "*fp16:16", 4096, 128, 128, 64, num_warps=8, num_stages=3)
    plain, traced = source.build(PassConfig()), source.build(PassConfig("trace"))
    assert "+0 | -0 +1 -1 +2 | -2" in traced.ptx
    loops = []
    for build in (plain, traced):
        code = sass.instructions(build.cubin, build.name)
        start, end = next((x.target, i) for i, x in enumerate(code) if x.kind == "jump" and 0 <= x.target < i - 20)
        loops.append([x.kind for x in code[start : end + 1]])
    assert [loop.count("store") for loop in loops] == [0, 1]
    assert [loop.count("jump") for loop in loops] == [1, 1]
    assert [loop.count("barrier") for loop in loops] == [2, 2]
    assert len(loops[1]) - len(loops[0]) < 6 * 3  # ptxas decides; less than three instructions an event
    assert blocks_by_registers(traced.registers, 256) == blocks_by_registers(plain.registers, 256)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_with_ranges():
    kernel, rng, steps = pp.kernel(gemm), np.random.default_rng(0), 20
    with pp.Device("cuda"):
        a, b = (pp.array(rng.standard_normal(s).astype(np.float16)) for s in ((128, 64 * steps), (64 * steps, 128)))
        plain, out = pp.zeros((128, 128), np.float16), pp.zeros((128, 128), np.float16)
        kernel[(1,)](a, b, plain, 64 * steps, 128, 128, 64, num_warps=8, num_stages=3)
        with pp.trace() as t:
            kernel[(1,)](a, b, out, 64 * steps, 128, 128, 64, num_warps=8, num_stages=3)
    np.testing.assert_array_equal(out.numpy(), plain.numpy())
    assert t.ranges.lost == 0
    of = {name: t.ranges.records[t.ranges.records["range"] == i] for i, name in enumerate(t.ranges.names)}
    assert {name: len(rows) for name, rows in of.items()} == dict.fromkeys(("load a", "load b", "mma"), steps)
    assert (of["load a"]["end_ns"] <= of["load b"]["start_ns"]).all()
    assert (of["load b"]["end_ns"] <= of["mma"]["start_ns"]).all()
    assert (of["mma"]["end_ns"][:-1] <= of["load a"]["start_ns"][1:]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rounds", [3, 5000])
def test_a_gpu_counts_the_events_that_it_could_not_keep(rounds):
    text = r"""
    extern "C" __global__ void steps(float* x, int rounds) {
        pp_range_begin("all");
        for (int i = 0; i < rounds; ++i) {
            pp_range_begin("load");
            float v = x[threadIdx.x];
            pp_range_end("load");
            pp_range_begin("store");
            x[threadIdx.x] = v + 1;
            pp_range_end("store");
        }
        pp_range_end("all");
    }
    """
    kernel = pp.kernel(source=text, name="steps")
    with pp.Device("cuda"):
        x = pp.zeros(128)
        with pp.trace() as t:
            kernel[4, 128](x, rounds)
    assert 2 * len(t.ranges) + t.ranges.lost == 4 * (2 + 4 * rounds)
    assert (t.ranges.lost == 0) == (rounds == 3)
    assert (t.ranges.records["end_ns"] >= t.ranges.records["start_ns"]).all()


MOVING_HEAD = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) .reqntid 128
{
	.reg .b32 %r<80>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<4>;
	.reg .pred %q;
	ld.param.u64 %rd0, [p];
	setp.eq.u64 %q, %rd0, 0;
"""
CLOCK = re.compile(r"mov\.u32 %paellapy_rc\d, %clock;")
START, STOP = "begin", "end"
COPY = "cp.async.cg.shared.global [%r2], [%rd1], 16;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def moved(*code: str) -> str:
    lines = [Marker(line == START, False, "a").ptx if line in (START, STOP) else line for line in code]
    body = "\n".join(f"\t{line}" for line in [*lines, "ret;", "}"])
    return passes.apply(f"{MOVING_HEAD}{body}\n", PassConfig("trace"))


def behind(out: str) -> str:
    """The code after the last reading of a range's clock."""
    return CLOCK.split(out)[-1]


def test_the_address_of_a_copy_is_computed_before_the_clock_is_read():
    address = ("add.s32 %r1, %r1, 64;", "cvt.u64.u32 %rd1, %r1;", "add.s32 %r2, %r3, 4096;")
    out = moved(WAIT, STOP, *address, "bar.sync 0;", COPY)
    assert assemble(out, "sm_90a", "k").cubin
    assert not any(line in behind(out) for line in address)
    assert behind(out).index("bar.sync 0;") < behind(out).index(COPY)


def test_nothing_leaves_a_range_that_begins():
    add = "add.s32 %r2, %r3, 64;"
    assert add in behind(moved(WAIT, STOP, "bar.sync 0;", START, add, COPY))
    assert add in behind(moved(WAIT, STOP, START, add, COPY))


def test_nothing_moves_where_no_matrix_instruction_hides_its_time():
    add = "add.s32 %r2, %r3, 64;"
    assert add in behind(moved("bar.sync 0;", STOP, add, COPY))
    assert add in behind(moved("bar.sync 0;", STOP, add, COPY, WAIT))


def test_other_work_stays_behind_the_clock():
    for line, access in (
        ("add.s32 %r1, %r1, 64;", "st.global.u32 [%rd0], %r1;"),  # a value, not an address
        ("add.f32 %f1, %f1, %f2;", "st.global.f32 [%rd0], %f1;"),
        ("ld.global.u64 %rd1, [%rd0];", COPY),
        ("@%q add.s32 %r2, %r2, 64;", COPY),  # some threads keep the older value
        ("mov.u32 %r2, %clock;", COPY),
        ("add.cc.u32 %r2, %r2, 64;", COPY),  # a later `addc` reads its carry
    ):
        assert line in behind(moved(WAIT, STOP, line, access))


def test_an_address_that_must_wait_stays_behind_the_clock():
    add = "add.s32 %r2, %r3, 64;"
    for before in ("ld.shared.u32 %r3, [%r4];", "ld.shared.u32 %r4, [%r2];", "st.shared.u32 [%r4], %r2;"):
        assert add in behind(moved(WAIT, STOP, before, add, COPY))
    assert add in behind(moved(WAIT, STOP, "$loop:", add, COPY, "@%q bra $loop;"))
    assert add in behind(moved(WAIT, STOP, "{", ".reg .b32 %r3;", "mov.u32 %r3, 5;", add, "}", COPY))
    assert add in behind(moved("{", ".reg .b32 %r3;", WAIT, STOP, "}", add, COPY))  # another %r3


def test_the_result_of_a_matrix_instruction_is_not_used_early():
    parts = ", ".join(f"%r{i}" for i in range(10, 14))
    matrix = f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {{{parts}}}, %rd2, %rd3, 1;"
    add = "add.s32 %r2, %r10, 64;"
    out = moved("wgmma.fence.sync.aligned;", matrix, "wgmma.commit_group.sync.aligned;", STOP, WAIT, add, COPY)
    assert assemble(out, "sm_90a", "k").cubin
    assert behind(out).index(WAIT) < behind(out).index(add)


def test_a_record_is_stored_at_the_end_of_its_line():
    out = moved(START, "bar.sync 0;", STOP, COPY, COPY, "@%q bra $there;", "$there:")
    stored = behind(out).index("st.global.v4.u32")
    assert behind(out).rindex(COPY) < stored < behind(out).index("bra $there;")


REGISTER, ADDRESS = st.sampled_from(["%r1", "%r2", "%r3"]), st.sampled_from(["%rd1", "%rd2"])
LINE = st.one_of(
    st.sampled_from([START, STOP, "bar.sync 0;", WAIT, "@%q bra $there;"]),
    st.builds("add.s32 {}, {}, {};".format, REGISTER, REGISTER, REGISTER),
    st.builds("@%q add.s32 {}, {}, 1;".format, REGISTER, REGISTER),
    st.builds("shfl.sync.idx.b32 {}, {}, 0, 31, -1;".format, REGISTER, REGISTER),
    st.builds("cvt.u64.u32 {}, {};".format, ADDRESS, REGISTER),
    st.builds("ld.global.u32 {}, [{}];".format, REGISTER, ADDRESS),
    st.builds("st.global.u32 [{}], {};".format, ADDRESS, REGISTER),
    st.builds("cp.async.cg.shared.global [{}], [{}], 16;".format, REGISTER, ADDRESS),
)


def effects(code: list[Statement]) -> list[tuple[object, ...]]:
    """What a list of statements does in order, with its registers as formulas of their first values."""
    value: dict[str, object] = {}
    found: list[tuple[object, ...]] = []
    for s in code:
        given = [value.get(text, text) for text in s.operands() if text.startswith("%")]
        if s.is_op("st", "cp", "bar", "wgmma", "bra", "ld"):
            found.append((s.opcode, *given[1 if s.is_op("ld") else 0 :]))
        if s.is_op("add", "shfl", "cvt", "ld"):
            old = given[0] if s.guard else None
            value[s.operands()[0]] = hash((s.opcode, old, *given[1:], len(found) if s.is_op("ld") else 0))
    return [*found, tuple(sorted(value.items()))]


@given(st.lists(LINE, min_size=2, max_size=25))
def test_a_kernel_does_the_same_in_the_same_order(code):
    code = [WAIT, STOP, *code, *(f"ld.shared.u32 %r4, [%r{i}];" for i in (1, 2, 3))]
    out = moved(*code, "$there:")
    own = [s for s in statements(out[out.index("setp.eq.u64 %q") : out.rindex("}")]) if "paellapy" not in str(s)]
    own = [s for s in own if any(str(s).strip().endswith(line) for line in code)]
    given_code = [s for line in code if line not in (START, STOP) for s in statements(line)]
    assert len(own) == len(given_code)
    assert effects(own) == effects(given_code)


A, B, LAST = 0, 1, RANGE_END
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


def executed(ptx: str, descriptor: np.ndarray) -> dict[int, int]:
    """What the grid wrote to its memory, which holds zeros before."""
    memory = defaultdict(int)
    for block in Kernel(ptx, THREADS).launch(memory, GRID, [bytes(8), descriptor.tobytes()]):
        block.run()
    return memory


def run(per_warp: bool, rounds: int, records: int, where: int = 0x7_FFFF_F008) -> tuple[EventLayout, np.ndarray]:
    """Runs the grid with rings behind an address at which neither they nor their heads are aligned."""
    ptx = kernel(per_warp, rounds)
    out = passes.apply(ptx, PassConfig("trace"))
    layout = EventLayout.of(Ranges.in_text(ptx), Sites.in_text(out), 6, THREADS, records)
    rings = _rings(layout, where) if where else 0
    descriptor = np.zeros((), DESCRIPTOR)
    descriptor["lines"], descriptor["rings"], descriptor["ring_mask"] = LINES, RINGS, 1023
    descriptor["ranges"], descriptor["range_mask"] = rings, layout.mask
    memory = executed(out, descriptor)
    begin = rings - layout.heads_bytes
    ours = [address for address in memory if address > RINGS + (1 << 20)]
    assert all(begin <= address < begin + layout.nbytes for address in ours)
    words = np.array([memory.get(begin + at, 0xA5A5A5A5) for at in range(0, layout.nbytes, 4)], np.uint32)
    return layout, words.view(np.uint8)


@pytest.mark.parametrize("rounds", [1, 3, 20])
@pytest.mark.parametrize("per_warp", [False, True])
def test_the_host_reads_what_the_threads_wrote(per_warp, rounds):
    layout, memory = run(per_warp, rounds, records=16)
    found = layout.read(1, memory)
    inner = [B, B | LAST] * 2 * rounds
    for block in range(6):
        for warp in range(2) if per_warp else [WHOLE_BLOCK]:
            mine = (found.block == block) & (found.warp == warp)
            whole = [A, *inner, A | LAST] if warp in (0, WHOLE_BLOCK) else inner
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
    assert all(LINES <= address < RINGS + (1 << 20) for address in executed(ptx, descriptor))
