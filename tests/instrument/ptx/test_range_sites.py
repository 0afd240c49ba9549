"""Where ranges are recorded: which markers share a reading of the clock, and which readings share a store."""

from __future__ import annotations

import re

import hypothesis.strategies as st
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import given

import paellapy as pp
from paellapy.instrument.kernels.triton_kernel import _NoDevice
from paellapy.instrument.ptx import passes, sass
from paellapy.instrument.ptx.compiled import Source, assemble, blocks_by_registers
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Marker, Sites
from paellapy.instrument.records import RANGE_END

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
