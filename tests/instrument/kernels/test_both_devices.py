"""Arguments, options and tools of Triton, with tensors: the same on the virtual GPU and on a real one."""

from __future__ import annotations

import contextlib
import inspect
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

import paellapy as pp
from paellapy.instrument.kernels.triton_source import TRITON_VERSION

torch = pytest.importorskip("torch")
REPORTS = [None, "count", "trace"]


@pytest.fixture(params=["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where PyTorch's tensors must be, with the device made current."""
    with pp.Device(request.param):
        yield "cpu" if request.param.startswith("virtual") else "cuda"


def run(kernel: Any, report: Any, blocks: int, launch: Any) -> None:
    """Launches at a level; in a trace every block is recorded once, and the trace can be explained."""
    made = pp.kernel(kernel, report=None if report == "trace" else report)
    if report != "trace":
        launch(made)
        return
    with pp.trace() as t:
        launch(made)
    assert sorted(t.blocks["block"].tolist()) == list(range(blocks))
    assert str(t.explain())


# ---- arguments -------------------------------------------------------------------------------------------------------


@triton.jit
def scalars(
    out, a, b, c, d: tl.float64, e: tl.int8, f: tl.bfloat16, g: tl.float16, h: tl.uint64, i: tl.int1, j: tl.int64, k
):
    tl.store(out, a)
    tl.store(out + 1, b)
    tl.store(out + 2, c)
    tl.store(out + 3, d)
    tl.store(out + 4, e)
    tl.store(out + 5, f)
    tl.store(out + 6, g)
    tl.store(out + 7, h.to(tl.float64))
    tl.store(out + 8, i)
    tl.store(out + 9, j)
    tl.store(out + 10, k)


@pytest.mark.parametrize("report", REPORTS)
def test_scalars_of_every_type_arrive(place: str, report: Any) -> None:
    given = (7, -(2**40), 0.1, 1 / 3, -3, 1 + 2**-7, 0.5, 2**63 + 2**12, True, -(2**50), False)
    out = torch.zeros(11, dtype=torch.float64, device=place)
    run(scalars, report, 1, lambda k: k[1,](out, *given))
    wanted = [7, -(2**40), float(np.float32(0.1)), 1 / 3, -3, 1 + 2**-7, 0.5, 2**63 + 2**12, 1, -(2**50), 0]
    assert out.tolist() == wanted


Pair = namedtuple("Pair", "source scale")


@triton.jit
def negated(a):
    return -a


@triton.jit
def of_tuples(pair, rest, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(pair.source + i, mask=i < n) * pair.scale
    tl.store(out + i, rest[1](v) + tl.load(rest[0][1]) + rest[0][0], mask=i < n)


@pytest.mark.parametrize("report", REPORTS)
def test_tuples_of_arrays_numbers_and_functions_arrive(place: str, report: Any) -> None:
    x, out = torch.arange(200.0, device=place), torch.zeros(200, device=place)
    shift = torch.full((1,), 5.0, device=place)
    run(of_tuples, report, 2, lambda k: k[2,](Pair(x, 1.5), ((2, shift), negated), out, 200, B=128))
    assert torch.equal(out, -x * 1.5 + 7)


@triton.jit
def widened(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(tl.float32))


@pytest.mark.parametrize("given", [torch.int32, torch.uint8])
def test_tensors_under_another_type_arrive(place: str, given: Any) -> None:
    numbers = torch.tensor([-2.0, 1, 0.5, 3], device=place)
    held = numbers.view(torch.int32) if given == torch.int32 else numbers.to(torch.float8_e5m2).view(torch.uint8)
    kind = tl.float32 if given == torch.int32 else tl.float8e5
    pp.kernel(widened)[1,](triton.reinterpret(held, kind), out := torch.zeros(4, device=place), 4)
    assert torch.equal(out, numbers)


class Pointed:
    """All that Triton asks of an argument."""

    def __init__(self, tensor: Any, dtype: Any) -> None:
        self.tensor, self.dtype = tensor, dtype

    def data_ptr(self) -> int:
        return int(self.tensor.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, tl.float32, np.dtype("float32")])
def test_objects_with_an_address_and_a_type_arrive(place: str, dtype: Any) -> None:
    x, out = torch.arange(8.0, device=place), torch.zeros(8, device=place)
    pp.kernel(widened)[1,](Pointed(x[4:], dtype), Pointed(out, dtype), 4)
    assert out.tolist() == [4, 5, 6, 7, 0, 0, 0, 0]


def test_a_tensor_without_memory_is_refused(place: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.zeros(4, device=place)
    with failing(pp.ArgumentError, argument="x", field="argument", given="FakeTensor"):
        pp.kernel(widened)[1,](x, torch.zeros(4, device=place), 4)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "int16"])
def test_views_with_strides_arrive(place: str, dtype: str) -> None:
    @triton.jit
    def tile(x, out, s0, s1):
        i = tl.arange(0, 8)
        tl.store(out + i[:, None] * 8 + i[None, :], tl.load(x + i[:, None] * s0 + i[None, :] * s1).to(tl.float32))

    x = torch.arange(-128, 128, device=place).float().to(getattr(torch, dtype)).reshape(16, 16).T[::2, ::2]
    pp.kernel(tile)[1,](x, out := torch.zeros(8, 8, device=place), *x.stride())
    assert torch.equal(out, x.float())


# ---- tensor descriptors ----------------------------------------------------------------------------------------------


@triton.jit
def lines(source, target, out, n, B: tl.constexpr):
    p = tl.program_id(0)
    v = source.load([p * B])
    tl.store(out + p * B + tl.arange(0, B), v, mask=p * B + tl.arange(0, B) < n)
    target.store([p * B], v + v)


@pytest.mark.parametrize("report", REPORTS)
def test_descriptors_of_one_dimension(place: str, report: Any) -> None:
    x, y, out = (torch.zeros(104, device=place, dtype=torch.float16) for _ in range(3))
    x += torch.arange(104, device=place)
    made = [TensorDescriptor.from_tensor(t, [32]) for t in (x, y)]
    run(lines, report, 4, lambda k: k[4,](*made, out, 104, B=32))
    assert torch.equal(out, x)
    assert torch.equal(y, 2 * x)


@triton.jit
def cubes(tile, b, out, in_tuple: tl.constexpr):
    v = tile[0].load([1, b, -16]) if in_tuple else tile.load([1, b, -16])  # a multiple of 16 bytes
    i, j, k = tl.arange(0, 2), tl.arange(0, 16), tl.arange(0, 32)
    tl.store(out + i[:, None, None] * 512 + j[None, :, None] * 32 + k[None, None, :], v)


@pytest.mark.parametrize("in_tuple", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32"])
def test_descriptors_of_three_dimensions_also_in_a_tuple(place: str, dtype: str, in_tuple: bool) -> None:
    if in_tuple and TRITON_VERSION < (3, 7):
        pytest.skip("Triton takes descriptors in tuples from 3.7 on")
    x = torch.arange(3 * 20 * 48, device=place).reshape(3, 20, 48).to(getattr(torch, dtype))
    out = torch.full((2, 16, 32), 9, dtype=x.dtype, device=place)
    made = TensorDescriptor.from_tensor(x, [2, 16, 32])
    run(cubes, "trace", 1, lambda k: k[1,]((made,) if in_tuple else made, 8, out, in_tuple))
    wanted = torch.zeros_like(out)
    wanted[:, :12, 16:] = x[1:, 8:, :16]
    assert torch.equal(out, wanted)


@triton.jit
def corner(source, out):
    i = tl.arange(0, 16)
    tl.store(out + i[:, None] * 16 + i[None, :], source.load([24, 40]))


def test_descriptors_pad_with_nan_where_told(place: str) -> None:
    if "padding" not in inspect.signature(TensorDescriptor.from_tensor).parameters:
        pytest.skip("this version of Triton pads with zeros only")
    x, out = torch.ones(32, 48, device=place), torch.zeros(16, 16, device=place)
    for padding, wanted in (("nan", float("nan")), ("zero", 0.0)):
        pp.kernel(corner)[1,](TensorDescriptor.from_tensor(x, [16, 16], padding=padding), out)
        assert (out[:8, :8] == 1).all()
        np.testing.assert_array_equal(out[8:].cpu(), wanted)
        np.testing.assert_array_equal(out[:, 8:].cpu(), wanted)


@triton.jit
def added_up(target, B: tl.constexpr):
    target.atomic_add([0, 0], tl.full((B, B), 1.0, tl.float32))


def test_descriptors_add_to_memory(place: str) -> None:
    x = torch.zeros(32, 32, device=place)
    run(added_up, "trace", 6, lambda k: k[6,](TensorDescriptor.from_tensor(x, [16, 16]), 16))
    assert (x[:16, :16] == 6).all()
    assert x.sum() == 6 * 256


@triton.jit
def device_side(x, out, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    tl.make_tensor_descriptor(out, [M, N], [N, 1], [BM, BN]).store([i, j], source.load([i, j]) * 2)


@pytest.mark.parametrize("how", ["whole", "sliced", "preemptible"])
def test_descriptors_made_in_the_kernel(place: str, how: str) -> None:
    x, out = torch.randn(100, 64, device=place), torch.zeros(100, 64, device=place)
    kernel, given = pp.kernel(device_side), (x, out, 100, 64, 32, 32)
    if how == "whole":
        kernel[4, 2](*given)
    elif how == "sliced":
        for first, count in ((5, 3), (0, 5)):
            kernel.slice((4, 2), first, count)(*given)
    else:
        kernel.preemptible[4, 2](*given).synchronize()
    assert torch.equal(out, 2 * x)


# ---- options ---------------------------------------------------------------------------------------------------------


@triton.jit
def doubled(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("options", [
    {"launch_cooperative_grid": True}, {"launch_pdl": True}, {"launch_pdl": False}, {"maxnreg": 32},
    {"num_warps": 1, "num_stages": 1}, {"enable_fp_fusion": False}, {"extern_libs": {}}, {"waves_per_eu": 2},
], ids=lambda options: "+".join(options))  # fmt: skip
def test_options_of_launches(place: str, options: dict[str, Any], report: Any) -> None:
    x, out = torch.arange(1000.0, device=place), torch.zeros(1000, device=place)
    run(doubled, report, 8, lambda k: k[8,](x, out, 1000, B=128, **options))
    assert torch.equal(out, 2 * x)


@triton.jit
def handed_on(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    gdc_wait()
    v = tl.load(x + i, mask=i < n)
    gdc_launch_dependents()
    tl.store(out + i, v + 1, mask=i < n)


@pytest.mark.parametrize("report", REPORTS)
def test_launches_that_begin_before_their_predecessor_ends(place: str, report: Any) -> None:
    n = 1 << 16
    a, b = (torch.zeros(n, device=place) for _ in range(2))

    def chain(k: Any) -> None:
        for _ in range(10):
            k[n // 256,](a, b, n, B=256, launch_pdl=True)
            k[n // 256,](b, a, n, B=256, launch_pdl=True)

    made = pp.kernel(handed_on, report=None if report == "trace" else report)
    if report == "trace":
        with pp.trace() as t:
            chain(made)
        assert len(t.blocks) == 20 * n // 256
    else:
        chain(made)
    assert (a == 20).all()


# ---- Triton's tools --------------------------------------------------------------------------------------------------

CONFIGS = [triton.Config({"B": b}, num_warps=w) for b, w in ((128, 1), (512, 4))]


@triton.jit
def added(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)


def cover(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["B"]),)


@pytest.mark.parametrize("above", [False, True], ids=["below the decorator", "above the decorator"])
@pytest.mark.parametrize("kept", ["reset_to_zero", "restore_value", "pre_hook", "a configuration's pre_hook"])
def test_trials_of_an_autotuner_leave_no_traces(place: str, kept: str, above: bool) -> None:
    def clear(args: dict[str, Any], reset_only: bool = False) -> None:
        args["out"].zero_()

    configs, options = CONFIGS, {kept: clear if kept == "pre_hook" else ["out"]}
    if kept.startswith("a"):
        configs = [triton.Config(c.kwargs, num_warps=c.num_warps, pre_hook=clear) for c in CONFIGS]
        options = {}
    tune = triton.autotune(configs, ["n"], **options)
    kernel = tune(pp.kernel(added)) if above else pp.kernel(tune(added))
    x, out = torch.ones(1000, device=place), torch.zeros(1000, device=place)
    with pp.trace() as t:
        kernel[cover](x, out, 1000)
    assert (out == 1).all()
    assert len(t.launches) == 1
    assert kernel.best_config in configs


@pytest.mark.parametrize("guided", [False, True])
def test_trials_of_a_benchmark_of_the_users_own_are_not_part_of_a_trace(place: str, guided: bool) -> None:
    kernel, configs = pp.kernel(added), CONFIGS
    if guided:
        kernel = triton.heuristics({"num_warps": lambda args: 2})(kernel)
        configs = [triton.Config({"B": b}, num_warps=None) for b in (128, 512)]
    tune = triton.autotune(configs, ["n"], do_bench=lambda call, quantiles: (call(), [1.0] * 3)[1])
    x, out = torch.ones(1000, device=place), torch.zeros(1000, device=place)
    with pp.trace() as t:
        tune(kernel)[cover](x, out, 1000)
    assert (out == 3).all()
    assert len(t.launches) == 1


def test_results_of_launches_and_of_warmup_can_be_launched(place: str) -> None:
    x, out = torch.arange(300.0, device=place), torch.zeros(300, device=place)
    kernel = pp.kernel(doubled)
    warm = kernel.warmup(torch.float32, torch.float32, 300, B=128, grid=(1,))
    kernel.run(x, out, 300, B=128, grid=(3,), warmup=False)
    assert torch.equal(out, 2 * x)
    for made in (warm, kernel[3,](x, out, 300, B=128)):
        made[3, 1, 1](x, out.zero_(), 300, 128)
        assert torch.equal(out, 2 * x)
        assert made.n_regs > 0
        assert ".entry doubled" in made.asm["ptx"]
        assert "EXIT" in made.asm["sass"]
        assert (made.src.fn.fn, made.n_max_threads) == (doubled.fn, 128)
    others = kernel.warmup(torch.float16, torch.float32, 300, B=128, grid=(1,))
    assert warm.hash == made.hash != others.hash


def test_an_empty_grid_launches_nothing(place: str) -> None:
    x, out = torch.ones(8, device=place), torch.zeros(8, device=place)
    with pp.trace() as t:
        pp.kernel(doubled)[0,](x, out, 8, B=8)
    assert not out.any()
    assert len(t.blocks) == 0


def test_traces_inside_traces_hold_their_own_launches(place: str) -> None:
    x, out = torch.ones(1024, device=place), torch.zeros(1024, device=place)
    kernel = pp.kernel(doubled)
    with pp.trace() as outer:
        kernel[8,](x, out, 1024, B=128)
        with pp.trace() as inner:
            kernel[4,](x, out, 1024, B=256)
        with contextlib.suppress(ZeroDivisionError), pp.trace() as failed:
            kernel[2,](x, out, 1024, B=512)
            _ = 1 // 0
    assert [len(t.blocks) for t in (outer, inner, failed)] == [14, 4, 2]
    assert np.asarray(inner.occupancy(bins=5)).shape == inner.occupancy(bins=5).shape
