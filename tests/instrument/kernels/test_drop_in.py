"""A decorated kernel in the place of the `@triton.jit` function it was, for tensors and Triton's own tools."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from failing import failing
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental import gluon
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import paellapy as pp
from paellapy.instrument.errors import ArgumentError, LaunchError

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def device() -> Any:
    with pp.Device("virtual:h200") as opened:
        yield opened


@triton.jit
def plain(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


add = pp.kernel(plain)
CONFIGS = [triton.Config({"B": b}, num_warps=w) for b, w in ((128, 1), (1024, 4))]


def cover(meta: dict[str, Any]) -> tuple[int]:
    return (triton.cdiv(meta["n"], meta["B"]),)


# ---- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "uint8"])
def test_cpu_tensors_are_arguments_and_results(dtype: str):
    kind = getattr(torch, dtype)
    x, y = (torch.arange(1000) % 7).to(kind), torch.ones(1000).to(kind)
    out = torch.zeros_like(x)
    add[cover](x, y, out, 1000, B=128)
    assert torch.equal(out, x + y)


def test_tensors_with_strides_and_gradients():
    x = torch.randn(1000, 2, requires_grad=True)

    @triton.jit
    def every_second(x, out, n, B: tl.constexpr):
        i = tl.arange(0, B)
        tl.store(out + i, tl.load(x + 2 * i, mask=i < n), mask=i < n)

    out = torch.zeros(1000, dtype=torch.float32)
    pp.kernel(every_second)[1,](x[:, 1], out, 1000, 1024)
    assert torch.equal(out, x[:, 1])


def test_sparse_tensors_are_refused():
    with failing(ArgumentError, kernel="plain", argument="x", field="layout", given="torch.sparse_coo"):
        add[cover](torch.eye(8).to_sparse(), torch.ones(8), torch.zeros(8), 8, B=8)


def test_the_interpreter_of_triton_is_named_where_it_stands_in_the_way():
    with failing(ArgumentError, kernel="plain", field="TRITON_INTERPRET"):
        pp.kernel(InterpretedFunction(plain.fn))


def test_hooks_see_the_tensors_themselves():
    seen: list[Any] = []
    kernel = pp.kernel(triton.heuristics({"B": lambda a: seen.append(a["x"]) or 256})(plain))
    x = torch.ones(100)
    kernel[lambda m: (seen.append(m["out"]), (1,))[1]](x, x, out := torch.zeros(100), 100)
    assert seen[0] is x
    assert seen[1] is out
    assert out.sum() == 200


def test_strided_arrays_of_eight_bit_floats():
    @triton.jit
    def rows(x, out):
        i = tl.arange(0, 32)
        tl.store(out + i, tl.load(x + i // 8 * 16 + i % 8).to(tl.float32))

    x, out = np.arange(64).reshape(8, 8).astype(ml_dtypes.float8_e5m2), np.zeros(32, np.float32)
    pp.kernel(rows)[1,](x[::2], out)
    assert (out.reshape(4, 8) == x[::2].astype(np.float32)).all()


# ---- arguments -----------------------------------------------------------------------------------------------------


@triton.jit
def triple(a):
    return a * 3


@triton.jit
def of_tuple(parts, out):
    tl.store(out, parts[1](parts[0]) + parts[2])


def test_functions_and_constants_inside_tuples():
    out = np.zeros(1, np.float32)
    pp.kernel(of_tuple)[1,]((2.0, triple, tl.constexpr(5)), out)
    assert out[0] == 11


@triton.jit
def copy_tile(source, target):
    target.store([0, 0], source.load([64, 32]))


@pytest.mark.parametrize("name", ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_tensor_descriptors_over_arrays_of_ours(name, dtype):
    data = np.random.default_rng(0).standard_normal((128, 128)).astype(dtype)
    with pp.Device(name):
        x, out, again = pp.array(data), pp.zeros((64, 32), dtype), pp.zeros((64, 32), dtype)
        assert (x.stride(), x.data_ptr() % 16) == ((128, 1), 0)
        assert (x.stride(0), x.stride(1), x.stride(-1)) == (128, 1, 1)
        kernel = pp.kernel(copy_tile)
        kernel[1,](TensorDescriptor.from_tensor(x, [64, 32]), TensorDescriptor.from_tensor(out, [64, 32]))
        source = TensorDescriptor(x, [128, 128], [128, 1], [64, 32])
        kernel[1,](source, TensorDescriptor(again, [64, 32], [32, 1], [64, 32]))
        for found in (out, again):
            np.testing.assert_array_equal(found.numpy(), data[64:, 32:64])


@triton.jit
def load_tile(out, source, M, N, BM: tl.constexpr, BN: tl.constexpr):
    tile = source.load([BM, 2 * BN])
    tl.store(out + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], tile)


@pytest.mark.parametrize("name", ["virtual:h200", "virtual:a100", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensor_descriptors_after_other_arguments(name):
    data = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
    with pp.Device(name):
        x, out = pp.array(data), pp.zeros((64, 32))
        pp.kernel(load_tile)[1,](out, TensorDescriptor.from_tensor(x, [64, 32]), 128, 128, BM=64, BN=32)
        np.testing.assert_array_equal(out.numpy(), data[64:, 64:96])


def test_a_tensor_descriptor_over_a_part_of_an_array():
    x, out = pp.array(np.arange(128 * 256, dtype=np.float32).reshape(128, 256)), pp.zeros((64, 32))
    part = x[:, 128:]
    assert part.stride() == (256, 1)
    assert part.stride(dim=0) == 256
    pp.kernel(copy_tile)[1,](TensorDescriptor.from_tensor(part, [64, 32]), TensorDescriptor.from_tensor(out, [64, 32]))
    np.testing.assert_array_equal(out, x[64:, 160:192])


@pytest.mark.parametrize("name", ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_model_may_make_tensor_descriptors(name):
    def fn(weights, inputs, outputs):
        made = [TensorDescriptor(a, a.shape[1:], [a.shape[2], 1], [64, 32]) for a in (inputs["x"], outputs["y"])]
        pp.kernel(copy_tile)[1,](*made)

    spec = {"inputs": {"x": pp.TensorSpec((128, 128))}, "outputs": {"y": pp.TensorSpec((64, 32))}}
    x = np.arange(128 * 128, dtype=np.float32).reshape(128, 128)
    with pp.Engine(name) as engine:
        engine.load(pp.Model("tile", fn, **spec, batch=(1,)))
        np.testing.assert_array_equal(engine.infer_sync("tile", {"x": x})["y"], x[64:, 32:64])


@triton.jit
def odd_names(target, report, sliced, B: tl.constexpr):
    tl.store(target, tl.load(report) + sliced)


def test_parameters_may_have_the_names_of_our_keywords():
    kernel, out = pp.kernel(odd_names), np.zeros(1, np.float32)
    kernel[1,](target=out, report=np.ones(1, np.float32), sliced=2, B=1)
    assert out[0] == 3
    made = kernel.compile(target="*fp32", report="*fp32", sliced="i32", B=1, target_="sm_80", report_=None)
    assert made.source.arch == "sm_80"
    assert made.ptx == made.original_ptx


def test_options_of_other_vendors_mean_nothing_and_unknown_ones_are_refused():
    x = np.ones(8, np.float32)
    add[1,](x, x, out := np.zeros(8, np.float32), 8, 8, waves_per_eu=2, matrix_instr_nonkdim=16)
    assert out.sum() == 16
    with failing(ArgumentError, kernel="plain", field="wavse_per_eu", given=2):
        add[1,](x, x, out, 8, 8, wavse_per_eu=2)


def test_types_may_stand_for_arrays_with_a_target_and_for_the_present_device():
    types = ("*fp32", "*fp32", "*fp32", "i32", 8)
    assert add.compile(*types).source.arch.startswith(pp.Device.current().target)
    assert add.compile(*types, target="sm_80").source.arch == "sm_80"


def test_options_of_the_compiler_are_passed_on():
    options = {"launch_cooperative_grid": True, "extern_libs": {}}
    made = add.compile("*fp32", "*fp32", "*fp32", "i32", 8, target="sm_90", **options)
    assert made.source.cooperative


@gluon.jit
def a_gluon_kernel(x):
    pass


def test_gluon_kernels_are_refused_in_a_sentence():
    with failing(ArgumentError, kernel="a_gluon_kernel", field="fn", given="gluon"):
        pp.kernel(a_gluon_kernel)


# ---- Triton's tools --------------------------------------------------------------------------------------------------


def test_run_and_warmup():
    x = torch.ones(100)
    made = add.warmup(torch.float32, torch.float32, torch.float32, 100, B=128, grid=(1,))
    made._init_handles()
    assert made.n_regs > 0
    assert list(made.asm) == ["ttir", "ttgir", "llir", "ptx", "cubin"]
    assert made.metadata.num_warps == 4
    add.run(x, x, out := torch.zeros(100), 100, B=128, grid=(1,), warmup=False)
    assert out.sum() == 200
    assert add.params[0].name == "x"


@pytest.mark.parametrize("first", [0, 1])
def test_warmup_compiles_what_a_launch_of_the_same_tensors_runs(first):
    x, out = torch.ones(104)[first : first + 100], torch.zeros(100)
    made = add.warmup(x, x, out, n=100, B=128, grid=cover)
    assert not out.any()
    assert made.asm["ttir"] == add[cover](x, x, out, 100, B=128).asm["ttir"]
    assert ("divisibility" in made.asm["ttir"].split("%y")[0]) == (first == 0)


def test_warmup_compiles_every_configuration_of_an_autotuner():
    by_type = triton.heuristics({"num_warps": lambda args: 8 if args["x"].dtype == torch.float32 else 2})(plain)
    for given, warps in ((torch.float32, 8), (torch.ones(100), 8), (torch.float16, 2)):
        assert pp.kernel(by_type).warmup(given, given, given, 100, B=128, grid=(1,)).metadata.num_warps == warps
    for tuned in (pp.kernel(triton.autotune(CONFIGS, [])(plain)), triton.autotune(CONFIGS, [])(add)):
        made = tuned.warmup(torch.float32, torch.float32, torch.float32, 100, grid=cover)
        assert [each.metadata.num_warps for each in made] == [1, 4]
        assert all(each.n_regs > 0 for each in made)


def test_a_launch_returns_the_compiled_kernel_as_tritons_does():
    x = torch.ones(100)
    launched = add[1,](x, x, torch.zeros(100), 100, B=128)
    assert "tt.load" in launched.asm["ttir"]
    assert ".visible .entry plain" in launched.asm["ptx"]
    assert launched.n_regs == launched.registers > 0
    assert "ttg.num-warps" in launched.asm["ttgir"]
    assert "define" in launched.asm["llir"]
    with failing(KeyError, kernel="plain", given="spirv", limit=("ttir", "ttgir", "llir", "ptx", "cubin")):
        launched.asm["spirv"]


def test_the_results_of_warmup_and_of_a_launch_can_be_launched():
    x, other = torch.ones(300), torch.full((300,), 2.0)
    warm = add.warmup(x, x, torch.zeros(300), 300, B=128, num_warps=8, grid=(1,))
    launched = add[cover](x, x, torch.zeros(300), 300, B=128, num_warps=8)
    for made in (warm, launched, add.warmup(torch.float32, torch.float32, torch.float32, 300, B=128, num_warps=8)):
        again = made[3, 1, 1](x, other, out := torch.zeros(300), 300, 128)
        assert torch.equal(out, x + other)
        assert again.metadata.num_warps == 8
        made[1, 1, 1](x, other, part := torch.zeros(300), 300, 64)  # the constant is compiled in: 128
        assert part.count_nonzero() == 128
    with failing(ArgumentError, kernel="plain", field="arguments", given=4):
        warm[3, 1, 1](x, other, out, 300)


def test_every_configuration_of_a_warm_autotuner_can_be_launched():
    x = torch.ones(128)
    for made in pp.kernel(triton.autotune(CONFIGS, [])(plain)).warmup(x, x, torch.zeros(128), 128, grid=cover):
        made[1, 1, 1](x, x, out := torch.zeros(128), 128, None)
        assert torch.equal(out, x + x)


@pp.kernel
@triton.jit
def halved(a, by: tl.constexpr = 2):
    return a / by


@pp.kernel
@triton.jit
def in_range(a):
    pp.range_begin("half")
    a = halved(a)
    pp.range_end("half")
    return a


@triton.jit
def of_function(x, out, f: tl.constexpr):
    tl.store(out, f(in_range(tl.load(x))))


def test_a_decorated_function_is_called_by_another_and_is_an_argument():
    kernel, x, out = pp.kernel(of_function), torch.full((1,), 12.0), torch.zeros(1)
    kernel[1,](x, out, halved)
    assert out.item() == 3
    with pp.trace() as t:
        kernel[1,](x, out, triple)
    assert out.item() == 18
    assert t.ranges.names == ("half",)


def test_a_kernel_has_the_class_of_the_function_it_decorates():
    tuned, guided = triton.autotune(CONFIGS, ["n"])(plain), triton.heuristics({"B": lambda _: 128})(plain)
    for decorated in (plain, tuned, guided):
        kernel = pp.kernel(decorated)
        assert isinstance(kernel, type(decorated))
        assert isinstance(kernel, pp.TritonKernel)
        assert (kernel.fn, kernel.jit) == (decorated.fn, plain)
        assert kernel.__globals__ is plain.__globals__
        with failing(ArgumentError, kernel="plain"):
            pp.kernel(kernel)
    assert pp.kernel(tuned).keys == ["n"]
    with failing(ArgumentError, field="fn", given="TritonKernel"):
        pp.kernel(triton.autotune(CONFIGS, ["n"])(add))


@triton.jit
def calls_decorated(x, out, f: tl.constexpr):
    tl.store(out, f(halved(tl.load(x))))


def test_triton_compiles_calls_of_decorated_functions_itself():
    signature = {"x": "*fp32", "out": "*fp32", "f": "constexpr"}
    texts = []
    for given in (halved, halved.jit):
        source = ASTSource(fn=calls_decorated, signature=signature, constexprs={"f": given})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": True})
        texts.append(made.asm["ptx"].partition(".entry")[2].partition(".section")[0])
    assert texts[0] == texts[1]


@pytest.fixture
def triton_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's compiler looks at Triton kernels only where there is a GPU."""
    for name in ("has_triton", "has_triton_package"):
        monkeypatch.setattr(f"torch.utils._triton.{name}", lambda *_: True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("tuned", [False, True])
def test_torch_compile_takes_decorated_kernels_into_its_graph(tuned: bool, backend: str, triton_in_torch: None):
    kernel = pp.kernel(triton.autotune(CONFIGS, ["n"])(plain) if tuned else plain)
    constants = {} if tuned else {"B": 128}

    def f(x: Any, y: Any) -> Any:
        out = torch.empty_like(x)
        kernel[cover](x + 1, y, out, x.numel(), **constants)
        return out * 2

    compiled = torch.compile(f, backend=backend, fullgraph=True)
    x, y = torch.randn(1000), torch.randn(1000)
    torch.testing.assert_close(compiled(x, y), (x + 1 + y) * 2)
    with pp.trace() as t:
        compiled(x, y)
    assert t.kernels == ("plain",)


def test_custom_operators_of_torch_may_launch_decorated_kernels(triton_in_torch: None):
    @torch.library.triton_op("paellapy_tests::add", mutates_args=())
    def added(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(add)[cover](x, y, out, x.numel(), B=128)
        return out

    x, y = torch.randn(1000), torch.randn(1000)
    assert torch.equal(added(x, y), x + y)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_inductor_compiles_decorated_kernels_from_their_text():
    import torch._inductor.config as inductor

    def f(x: Any, y: Any) -> Any:
        out = torch.empty_like(x)
        add[cover](x + 1, y, out, x.numel(), B=128)
        return out * 2

    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    pp.instrument_torch()
    try:
        with pp.Device("cuda"), inductor.patch(force_disable_caches=True):
            compiled = torch.compile(f, fullgraph=True)
            torch.testing.assert_close(compiled(x, y), (x + 1 + y) * 2)
            with pp.trace() as t:
                compiled(x, y)
    finally:
        pp.instrument_torch(False)
        torch._dynamo.reset()
    assert any("plain" in name for name in t.kernels)


@triton.jit
def apply(x, out, f: tl.constexpr):
    tl.store(out, f(tl.load(x)))


@triton.jit
def apply_first(x, out, functions):
    tl.store(out, functions[0](tl.load(x)))


def test_ranges_of_a_function_that_is_an_argument_are_traced():
    for kernel, given in ((apply, in_range), (apply, in_range.jit), (apply_first, (in_range,))):
        with pp.trace() as t:
            pp.kernel(kernel)[1,](torch.full((1,), 12.0), out := torch.zeros(1), given)
        assert out.item() == 6
        assert t.ranges.names == ("half",)
        with pp.trace() as t:
            pp.kernel(kernel)[1,](torch.ones(1), out, (triple,) if kernel is apply_first else triple)
        assert t.ranges.names == ()


@triton.jit
def broken_helper(a):
    return a + undefined_name  # noqa: F821


def test_an_error_in_a_called_function_is_in_the_message():
    @triton.jit
    def caller(x):
        tl.store(x, broken_helper(1.0))

    with failing(triton.CompilationError, kernel="caller") as caught:  # Triton's kind of error, and ours
        pp.kernel(caller)[1,](torch.ones(1))
    assert isinstance(caught.value, pp.CompileError)
    assert "undefined_name" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_configuration_that_was_chosen():
    kernel = pp.kernel(triton.autotune(CONFIGS, key=["n"])(plain))
    with failing(AttributeError, name="best_config"):
        _ = kernel.best_config
    x = torch.ones(5000)
    assert (kernel.configs, kernel.cache) == (CONFIGS, {})
    kernel[cover](x, x, torch.zeros(5000), 5000)
    assert kernel.best_config in CONFIGS
    assert list(kernel.cache.values()) == [kernel.best_config]


@pytest.mark.parametrize("n", [100, 5000])
def test_autotune_and_heuristics_above_the_decorator(n: int):
    tuned = triton.autotune(CONFIGS, key=["n"])(pp.kernel(plain))
    x, out = torch.ones(n), torch.zeros(n)
    tuned[cover](x, x, out, n)
    assert torch.equal(out, x + x)
    assert tuned.best_config in CONFIGS
    with pp.trace() as t:
        tuned[cover](x, x, out, n)
    assert len(t.blocks) == triton.cdiv(n, tuned.best_config.kwargs["B"])
    guided = triton.heuristics({"B": lambda args: 512})(pp.kernel(plain))
    guided[cover](x, x, out.zero_(), n)
    assert torch.equal(out, x + x)


@triton.jit
def square(x, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    total = tl.zeros((B, B), tl.float32)
    for k in range(0, n, B):
        left, right = tl.load(x + i[:, None] * n + k + i), tl.load(x + (k + i[:, None]) * n + i)
        total = tl.dot(left, right, total)
    tl.store(out + i[:, None] * n + i, total)


@pytest.mark.parametrize("above", [False, True], ids=["below the decorator", "above the decorator"])
def test_an_autotuner_passes_over_a_configuration_that_fits_on_no_sm(above: bool):
    configs = [triton.Config({"B": 128}, num_stages=4, num_warps=16), triton.Config({"B": 16}, num_stages=2)]
    tune = triton.autotune(configs, ["n"])
    kernel = tune(pp.kernel(square)) if above else pp.kernel(tune(square))
    x, out = torch.eye(256), torch.zeros(256, 256)
    kernel[1,](x, out, 256)
    assert kernel.best_config.kwargs == {"B": 16}
    assert torch.equal(out[:16, :16], torch.eye(16))


def test_a_block_that_fits_on_no_sm_raises_tritons_kind_of_error_too(device: Any):
    x = torch.eye(256)
    pp.kernel(square)[1,](x, torch.zeros(256, 256), 256, B=128, num_stages=4)
    with failing(triton.OutOfResources, field="shared memory", given=524288) as caught:
        device.synchronize()
    assert isinstance(caught.value, LaunchError)
    assert caught.value.required > caught.value.limit == 232448
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def _has_gpu() -> bool:
    return bool(torch.cuda.is_available())


@pytest.mark.skipif(_has_gpu(), reason="Triton's own driver answers here")
def test_triton_finds_the_virtual_gpu_where_there_is_no_other():
    active = triton.runtime.driver.active
    assert str(active.get_active_torch_device()) == "cpu"
    assert active.utils.get_device_properties(0)["multiprocessor_count"] == 132
    x, out = torch.ones(5000), torch.zeros(5000)
    ms = triton.testing.do_bench(lambda: add[cover](x, x, out, 5000, B=128), warmup=0.02, rep=0.05)
    assert 0 < ms < 1


@pytest.mark.skipif(_has_gpu(), reason="Triton runs it here")
def test_a_kernel_without_the_decorator_runs_too():
    out = torch.zeros(4)
    plain[1,](torch.ones(4), torch.ones(4), out, 4, B=4)
    assert out.tolist() == [2.0] * 4
