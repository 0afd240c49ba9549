"""The CUDA C front end: source to PTX, parameters read back, arguments checked against them."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from corpus import CUDA_CASES
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import ArgumentError, CompileError
from paellapy.instrument.kernels import cuda
from paellapy.instrument.kernels.cuda import CudaKernel, CudaSource, bind_values, compile_to_ptx
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.triton_source import TypeHandlers

pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC, which the extra dev has")

HANDLERS = TypeHandlers()
SCALE = """
extern "C" __global__ void scale(float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a * FACTOR;
}
"""
OPTIONS = ("-DFACTOR=2.0f",)
TEMPLATE = """
namespace ours { template <typename T> __global__ void fill(T* x, T value) { x[threadIdx.x] = value; } }
__global__ void plain(int* x) { *x = 1; }
"""
EVERY_KIND = """
struct Pair { double a; char b; };
extern "C" __global__ void every(bool a, char b, short c, int d, long long e, float f, double g, Pair h, int* i) {
    *i = a + b + c + d + e + f + g + h.a + h.b;
}
"""
CODES = ("Q", "f", "I")


class CompiledAgain(Exception):
    pass


def never(*_: Any) -> Any:
    raise CompiledAgain


def codes(text: str, name: str) -> list[str]:
    return list(CudaSource(text, name).source("sm_80").metadata["codes"])


# -- compiling


def test_parameters_are_read_back_from_the_ptx() -> None:
    assert codes(EVERY_KIND, "every") == ["B", "B", "H", "I", "Q", "f", "d", "16s@8", "Q"]
    layout = CudaSource(EVERY_KIND, "every").source("sm_80").param_format
    assert struct.calcsize(layout) == 56


def test_a_source_without_parameters_has_none() -> None:
    case = next(c for c in CUDA_CASES if c.name == "no_parameters")
    assert codes(case.source, case.entry) == []


def test_nvrtc_gets_memory_of_its_own() -> None:
    assert len(cuda._room(0)) > 0, "one byte is shared by the whole process"
    CudaSource(SCALE, "scale", OPTIONS).source("sm_75")
    assert bytes(range(256))[32:33][0] == 32


def test_options_reach_the_compiler() -> None:
    assert CudaSource(SCALE, "scale", OPTIONS).source("sm_80").metadata["codes"] == list(CODES)
    with failing(CompileError, kernel="scale", field="source"):
        CudaSource(SCALE, "scale").source("sm_80")


def test_unknown_options_are_reported() -> None:
    with failing(CompileError, kernel="scale", field="source"):
        CudaSource(SCALE, "scale", ("--no-such-option",)).source("sm_80")


def test_options_are_a_list() -> None:
    with failing(ArgumentError, field="options", given="-DX"):
        CudaSource(SCALE, "scale", "-DX")


def test_templates_are_named_by_an_expression() -> None:
    float_source = CudaSource(TEMPLATE, "ours::fill<float>").source("sm_80")
    double_source = CudaSource(TEMPLATE, "ours::fill<double>").source("sm_80")
    assert [s.metadata["codes"] for s in (float_source, double_source)] == [["Q", "f"], ["Q", "d"]]
    assert float_source.name != double_source.name
    assert float_source.name in float_source.ptx


def test_a_mangled_kernel_says_how_to_name_it() -> None:
    with failing(CompileError, kernel="plain", field="name"):
        CudaSource(TEMPLATE, "plain").source("sm_80")


def test_a_name_expression_that_fits_nothing_is_an_error() -> None:
    with pytest.raises(CompileError):
        CudaSource(TEMPLATE, "ours::fill<nothing>").source("sm_80")


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_90a", "sm_100"])
def test_targets_keep_their_suffix(target: str) -> None:
    assert CudaSource(SCALE, "scale", OPTIONS).source(target).arch == target


def test_unknown_targets_are_refused() -> None:
    with failing(ArgumentError, field="target", given="ampere"):
        CudaSource(SCALE, "scale", OPTIONS).source("ampere")


def test_a_second_process_reads_the_ptx_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))
    first = compile_to_ptx(TEMPLATE, "ours::fill<float>", (), "sm_80")

    monkeypatch.setattr(cuda, "_compile", never)
    assert compile_to_ptx(TEMPLATE, "ours::fill<float>", (), "sm_80") == first
    for changed in [
        (TEMPLATE + " ", "ours::fill<float>", (), "sm_80"),
        (TEMPLATE, "ours::fill<double>", (), "sm_80"),
        (TEMPLATE, "ours::fill<float>", ("-DX",), "sm_80"),
        (TEMPLATE, "ours::fill<float>", (), "sm_90"),
    ]:
        with pytest.raises(CompiledAgain):
            compile_to_ptx(*changed)


def test_a_source_is_text() -> None:
    with failing(ArgumentError, field="source", given="bytes"):
        CudaSource(SCALE.encode(), "scale")  # type: ignore[arg-type]


# -- CuPy's objects, by what they look like


class RawKernel(SimpleNamespace):
    pass


class RawModule(SimpleNamespace):
    pass


RawKernel.__module__ = RawModule.__module__ = "cupy._core.raw"


def test_a_raw_kernel_brings_name_and_options() -> None:
    made = kernel(RawKernel(code=SCALE, name="scale", options=OPTIONS))
    assert isinstance(made, CudaKernel)
    assert made.name == "scale"
    assert made.compile(target="sm_80").source.metadata["codes"] == list(CODES)


def test_a_raw_module_needs_a_name() -> None:
    module = RawModule(code=SCALE, options=OPTIONS)
    with failing(ArgumentError, field="name"):
        kernel(module)
    assert kernel(module, name="scale").name == "scale"


# -- arguments


def bound(code: str, arg: Any) -> Any:
    return bind_values("k", [code], [arg], HANDLERS)[0]


@pytest.mark.parametrize("n", [0, 2, 4])
def test_the_number_of_arguments_must_fit(n: int) -> None:
    with failing(ArgumentError, kernel="k", field="arguments", given=n, limit=3):
        bind_values("k", CODES, [0] * n, HANDLERS)


@given(st.sampled_from("BHIQ"), st.integers(-(2**64), 2**65))
def test_integers_are_folded_into_their_bits_or_refused(code: str, value: int) -> None:
    bits = 8 * struct.calcsize(code)
    if -(2 ** (bits - 1)) <= value < 2**bits:
        packed = struct.pack(f"<{code}", bound(code, value))
        assert int.from_bytes(packed, "little", signed=value < 0) == value
    else:
        with failing(ArgumentError, kernel="k", field=0, given=value, limit=code):
            bound(code, value)


@pytest.mark.parametrize(
    ("code", "given_value", "packed"),
    [
        ("I", np.int32(-1), 2**32 - 1), ("Q", np.uint64(2**64 - 1), 2**64 - 1), ("B", True, 1),
        ("B", np.bool_(True), 1), ("f", 3, 3.0), ("d", np.float64(0.5), 0.5), ("f", np.float32(0.25), 0.25),
        ("Q", 0, 0),
    ],
)  # fmt: skip
def test_numbers_of_any_kind_are_taken(code: str, given_value: Any, packed: Any) -> None:
    assert bound(code, given_value) == packed


@pytest.mark.parametrize(
    ("code", "value"),
    [("I", 0.5), ("Q", 0.5), ("I", "text"), ("f", "text"), ("f", None), ("Q", None), ("Q", object()),
     ("I", np.zeros(3)), ("d", [1.0]), ("12s@4", 5), ("12s@4", b"short"), ("12s@4", np.zeros(4, np.float32)),
     ("I", np.float32(1))],
)  # fmt: skip
def test_arguments_of_the_wrong_kind_are_refused_by_position(code: str, value: Any) -> None:
    with failing(ArgumentError, kernel="k", field=0):
        bound(code, value)


def test_structures_travel_as_bytes() -> None:
    pair = np.array((0.5, 7), np.dtype([("a", "<f8"), ("b", "i1")], align=True))
    for value in (pair, pair[()], pair.tobytes()):
        assert bound("16s@8", value) == pair.tobytes()


def test_half_precision_numbers_fit_their_structures() -> None:
    assert bound("2s@2", np.float16(1.5)) == np.float16(1.5).tobytes()
    assert bound("2s@2", ml_dtypes.bfloat16(1.5)) == np.array(1.5, ml_dtypes.bfloat16).tobytes()


def test_the_corpus_binds_and_packs() -> None:
    for case in CUDA_CASES:
        source = CudaSource(case.source, case.name_expression or case.entry, case.options)
        target = f"sm_{case.min_sm}"
        call = case.make(np.random.default_rng(0), 1.0)
        compiled = source.source(target)
        values = bind_values(case.name, compiled.metadata["codes"], call.args, HANDLERS)
        assert len(struct.pack(compiled.param_format, *values)) == struct.calcsize(compiled.param_format)
