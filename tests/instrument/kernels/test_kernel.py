"""`pp.kernel`: what can be wrapped, compiling without a GPU, and what a launch passes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from stand_in_device import StandInDevice

from paellapy.instrument.arguments import param_offsets
from paellapy.instrument.errors import ArgumentError, InstrumentError, LaunchError
from paellapy.instrument.kernels.cuda import CudaKernel
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.triton_kernel import TritonKernel
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Module

pytestmark = [pytest.mark.quick, pytest.mark.versions]

SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


@triton.jit
def scale(x, out, n, factor, B: tl.constexpr):
    """Multiplies."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def total(pair, out):
    tl.store(out, tl.load(pair[0]) + pair[1])


@triton.jit
def nothing():
    pass


TYPES = ("*fp32", "*fp32", "i32", "fp32")


@pytest.fixture
def device() -> Iterator[StandInDevice]:
    with StandInDevice.make() as made:
        yield made


# -- wrapping


def test_bare_decorator_counts() -> None:
    made = kernel(scale)
    assert isinstance(made, TritonKernel)
    assert (made.name, made.report, made.arg_names) == ("scale", "count", ["x", "out", "n", "factor", "B"])
    assert made.__doc__ == "Multiplies."


def test_decorator_with_options() -> None:
    made = kernel(report="notify", exits="barrier")(scale)
    assert (made.report, made.exits) == ("notify", "barrier")
    assert kernel(report=None)(scale).report is None


def test_records_need_a_trace_to_go_to() -> None:
    assert kernel(scale, report="trace").report is None


def test_over_autotune_and_heuristics() -> None:
    configs = [triton.Config({"B": 64}, num_warps=2), triton.Config({"B": 128})]
    tuned = kernel(triton.autotune(configs=configs, key=["n"])(scale))
    assert tuned.compile(*TYPES, target="sm_80").source.threads == 64, "the first, where none can be timed"
    chosen = kernel(triton.heuristics({"B": lambda args: 2 * args["n"]})(scale))
    assert "constexpr" in chosen.compile("*fp32", "*fp32", 32, "fp32", target="sm_80").source.metadata["signature"]["B"]
    both = kernel(triton.autotune(configs=[triton.Config({}, num_warps=8)], key=[])(
        triton.heuristics({"B": lambda args: 256})(scale)))  # fmt: skip
    assert both.compile(*TYPES, target="sm_80").source.threads == 256


@pytest.mark.parametrize("thing", [len, "source", 5, lambda x: x])
def test_what_is_no_kernel_is_refused(thing: Any) -> None:
    with failing(ArgumentError, field="fn"):
        kernel(thing)


def test_a_kernel_says_its_name_and_how_it_is_launched() -> None:
    ours, cuda = kernel(scale), kernel(source=SAXPY, name="saxpy")
    assert (repr(ours), repr(cuda)) == ("<TritonKernel scale[grid]>", "<CudaKernel saxpy[grid, block]>")
    with failing(ArgumentError, kernel="scale", field="grid"):
        ours(1, 2, n=3)
    with failing(ArgumentError, kernel="saxpy", field="grid"):
        cuda()


def test_unknown_levels_and_exits_are_refused_at_once() -> None:
    with failing(InstrumentError, field="report", given="loud"):
        kernel(scale, report="loud")  # type: ignore[call-overload]
    with failing(InstrumentError, field="exits", given="somehow"):
        kernel(scale, exits="somehow")  # type: ignore[call-overload]


def test_threads_of_triton_kernels_are_not_counted_out() -> None:
    with failing(InstrumentError, kernel="scale", field="exits", given="count-out"):
        kernel(scale, exits="count-out")


def test_cuda_source_needs_a_name_and_a_name_needs_source() -> None:
    assert isinstance(kernel(source=SAXPY, name="saxpy"), CudaKernel)
    with failing(ArgumentError, field="name"):
        kernel(source=SAXPY)  # type: ignore[call-overload]
    with failing(ArgumentError, field="source", given="saxpy"):
        kernel(name="saxpy")  # type: ignore[call-overload]
    with failing(ArgumentError, field="source"):
        kernel(scale, options=["-DX"])  # type: ignore[call-overload]
    with failing(ArgumentError, field="fn"):
        kernel(scale, source=SAXPY, name="saxpy")  # type: ignore[call-overload]


# -- compiling


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_a_compiled_kernel_shows_what_was_done_to_it(target: str) -> None:
    compiled = kernel(scale).compile(*TYPES, B=256, target=target)
    before, after = Module.parse(compiled.original_ptx).entry(), Module.parse(compiled.ptx).entry()
    assert after.param_names() == [*before.param_names()[:-2], "scale_paellapy"], "Triton's own two give way"
    assert compiled.cubin.startswith(b"\x7fELF")
    assert 0 < compiled.registers < 255
    assert compiled.shared_bytes == 0
    assert compiled.source.arch.startswith(target)
    assert repr(compiled).startswith(f"<scale for {compiled.source.arch}: count, {compiled.registers} registers, 0 B")


@pytest.mark.parametrize(("read", "scratch_bytes", "given_up"), [(None, 0, 2), (None, 8, 1), (-2, 0, 1), (-1, 0, 0)])
def test_parameters_of_triton_that_the_kernel_reads_stay(read: int | None, scratch_bytes: int, given_up: int) -> None:
    source = kernel(scale).compile(*TYPES, B=256, target="sm_90").source
    names = Module.parse(source.ptx).entry().param_names()
    body = source.ptx if read is None else source.ptx.replace("ret;", f"ld.param.u64 %rd1, [{names[read]}];\n\tret;")
    compiled = replace(source, ptx=body, scratch_bytes=scratch_bytes).build(PassConfig("count"))
    assert compiled.unread_params == given_up
    kept = names[: len(names) - given_up]
    assert Module.parse(compiled.ptx).entry().param_names() == [*kept, "scale_paellapy"]
    assert param_offsets(compiled.param_format) == param_offsets(source.param_format)[: len(kept)]


def test_a_variant_can_be_asked_for() -> None:
    made = kernel(scale, report=None)
    assert made.compile(*TYPES, B=64, target="sm_80").ptx == made.compile(*TYPES, B=64, target="sm_80").original_ptx
    sliced = made.compile(*TYPES, B=64, target="sm_80", report="trace", sliced=True)
    assert (sliced.config.report, sliced.config.sliced) == ("trace", True)
    assert "trace, sliced" in repr(sliced)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_cuda_kernels_compile_for_any_target(target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    compiled = kernel(source=SAXPY, name="saxpy").compile(target=target, sliced=True)
    assert "saxpy_paellapy" in compiled.ptx
    assert "saxpy_paellapy" not in compiled.original_ptx


@pytest.mark.parametrize(
    ("options", "limiter", "blocks"),
    [({"num_warps": 32, "maxnreg": 32}, "threads", 2), ({"num_warps": 1}, "blocks", 32)],
)
def test_theoretical_occupancy_names_what_limits_it(options: dict[str, int], limiter: str, blocks: int) -> None:
    found = kernel(scale).theoretical_occupancy(*TYPES, B=128, target="sm_90", **options)
    assert (found.limiter, found.blocks_per_sm) == (limiter, blocks)
    assert f"limited by {limiter}" in str(found)


def test_theoretical_occupancy_of_cuda_kernels_takes_the_block() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    made = kernel(source=SAXPY, name="saxpy")
    assert made.theoretical_occupancy(128, 100_000, target="sm_90").limiter == "shared memory"
    assert made.theoretical_occupancy((32, 32), target="sm_90").blocks_per_sm == 2
    with failing(LaunchError, field="threads", given=2048):
        made.theoretical_occupancy(2048, target="sm_90")


# -- launching


def test_a_launch_passes_what_travels(device: StandInDevice) -> None:
    x = np.zeros(100, np.float32)
    kernel(scale)[(2,)](x, x, 100, factor=0.5, B=64, num_warps=8)
    (launch,) = device.launches
    assert (launch.grid, launch.values, launch.part, launch.threads) == ((2,), [16, 16, 100, 0.5], None, 256)
    assert (launch.config.report, launch.config.sliced) == ("count", False)


def test_ones_and_none_are_compiled_in_and_tuples_travel_flat(device: StandInDevice) -> None:
    x = np.zeros(100, np.float32)
    kernel(scale)[(2,)](x, x, 1, 0.5, B=64)
    kernel(total)[(1,)]((x, 3), x)
    kernel(nothing)[(1,)]()
    assert [launch.values for launch in device.launches] == [[16, 16, 0.5], [16, 3, 16], []]


def test_inside_a_trace_a_kernel_reports_records(device: StandInDevice) -> None:
    made = kernel(nothing)
    made[(1,)]()
    device.session = object()
    made[(1,)]()
    device.session = None
    made[(1,)]()
    assert [launch.config.report for launch in device.launches] == ["count", "trace", "count"]


def test_a_grid_may_depend_on_the_constants(device: StandInDevice) -> None:
    x = np.zeros(100, np.float32)
    kernel(scale)[lambda meta: (triton.cdiv(meta["n"], meta["B"]),)](x, x, 100, 0.5, B=32)
    assert device.launches[0].grid == (4,)


@pytest.mark.parametrize(
    ("grid", "seen"),
    [(3, (3,)), ((3,), (3,)), ((3, 2), (3, 2)), ([3, 2, 1], (3, 2, 1)), (np.int64(3), (3,)), ((np.int32(3), 2), (3, 2)),
     (lambda meta: 3, (3,)), (lambda meta: [3, 2], (3, 2))],
)  # fmt: skip
def test_a_grid_is_one_to_three_integers(grid: Any, seen: tuple[int, ...], device: StandInDevice) -> None:
    kernel(nothing)[grid]()
    kernel(nothing).slice(grid, 1, 2)()
    assert [launch.grid for launch in device.launches] == [seen, seen]
    assert device.launches[1].part == (1, 2)


@pytest.mark.parametrize("grid", [(), (1, 2, 3, 4), 2.5, (2.0,), "3", None, ("a",), lambda meta: (1, 2.5)])
def test_any_other_grid_is_refused(grid: Any, device: StandInDevice) -> None:
    with failing(ArgumentError, field="grid"):
        kernel(nothing)[grid]()
    assert device.launches == []


@pytest.mark.parametrize("part", [(-1, 2), (0, 0), (0, 7), (6, 1), (5, 2), (2, -1)])
def test_a_slice_lies_in_the_grid(part: tuple[int, int], device: StandInDevice) -> None:
    with failing(ArgumentError, kernel="nothing", field="part", limit=6):
        kernel(nothing).slice((3, 2), *part)()
    assert device.launches == []


def test_wrong_arguments_name_the_kernel(device: StandInDevice) -> None:
    x = np.zeros(100, np.float32)
    made = kernel(scale)
    with failing(ArgumentError, kernel="scale", argument="factor", limit=["x", "out", "n", "factor", "B"]):
        made[(1,)](x, x, 100, B=64)
    with failing(ArgumentError, kernel="scale", field="colour", given="red"):
        made[(1,)](x, x, 100, 0.5, B=64, colour="red")
    with failing(ArgumentError, kernel="scale", argument="n", given="dict"):
        made[(1,)](x, x, {}, 0.5, B=64)
    with failing(ArgumentError, kernel="scale", field="num_warps", given=[4]):
        made[(1,)](x, x, 100, 0.5, B=64, num_warps=[4])
    assert device.launches == []


def test_cuda_kernels_are_launched_with_grid_and_block(device: StandInDevice) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    made = kernel(source=SAXPY, name="saxpy")
    x = np.zeros(100, np.float32)
    made[1, 128](2, x, x, 100)
    made[(1, 1), (64, 2), 1024](np.float32(2), x, x, np.int32(-1))
    made.slice((4, 32), 1, 2)(2.0, x, x, 100)
    first, second, third = device.launches
    assert (first.grid, first.block, first.shared_bytes, first.values) == ((1,), (128,), 0, [2.0, 16, 16, 100])
    assert (second.grid, second.block, second.shared_bytes) == ((1, 1), (64, 2), 1024)
    assert second.values[-1] == 2**32 - 1
    assert (third.part, third.config.sliced) == ((1, 2), True)


def test_wrong_launches_of_cuda_kernels_are_refused(device: StandInDevice) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    made = kernel(source=SAXPY, name="saxpy")
    x = np.zeros(100, np.float32)
    for configuration in (4, (4,), (4, 32, 0, 0)):
        with failing(ArgumentError, kernel="saxpy", field="block"):
            made[configuration]
    with failing(ArgumentError, field="grid", given=32.5):
        made[4, 32.5]
    with failing(ArgumentError, kernel="saxpy", field="arguments", given=2):
        made[1, 128](2.0, x)
    with failing(ArgumentError, kernel="saxpy", field="n"):
        made[1, 128](2.0, x, x, n=100)
    with failing(ArgumentError, kernel="saxpy", field="part", given=(3, 4)):
        made.slice((4, 32), 3, 4)(2.0, x, x, 100)
    assert device.launches == []
