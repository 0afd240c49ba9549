"""The corpus itself is sound: every kernel compiles without a GPU, every reference is an answer."""

from __future__ import annotations

import numpy as np
import pytest
import triton
from corpus import CUDA_CASES, TRITON_CASES, Case, CudaCase, ast_source
from triton.backends.compiler import GPUTarget

from paellapy.instrument.kernels.cuda import _room
from paellapy.instrument.kernels.ranges import CUDA_PRELUDE

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="CUDA C needs NVRTC: pip install 'paellapy[dev]'")


def test_names_are_unique() -> None:
    for cases in (TRITON_CASES, CUDA_CASES):
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_triton_kernel_compiles_without_a_gpu(case: Case) -> None:
    call = case.make(np.random.default_rng(1), 1.0)
    target = GPUTarget("cuda", max(80, case.min_sm), 32)
    compiled = triton.compile(ast_source(case.kernel, call), target=target, options=call.options)
    assert ".entry" in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


@pytest.mark.parametrize("case", CUDA_CASES, ids=str)
def test_cuda_kernel_compiles_to_ptx_without_a_gpu(case: CudaCase) -> None:
    ptx, entry = cuda_ptx(case)
    assert f".entry {entry}" in ptx


@pytest.mark.parametrize("case", [*TRITON_CASES, *CUDA_CASES], ids=lambda case: f"{type(case).__name__}-{case}")
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_reference_is_finite_and_has_the_outputs_shapes(case: Case | CudaCase, scale: float) -> None:
    call = case.make(np.random.default_rng(2), scale)
    expected = call.reference()
    assert set(expected) == set(call.outputs)
    for key, value in expected.items():
        assert value.shape == call.args[key].shape
        assert np.isfinite(value.astype(np.float64)).all()
    # A launch must not change the answer: kernels that add to their outputs have references that keep a copy.
    for key in call.outputs:
        call.args[key][...] = 1
    again = call.reference()
    assert all(np.array_equal(again[key], expected[key]) for key in expected)


def cuda_ptx(case: CudaCase) -> tuple[str, str]:
    """PTX text and the entry's name in it."""
    text = (CUDA_PRELUDE + case.source).encode()
    program = ask(nvrtc.nvrtcCreateProgram(text, f"{case.name}.cu".encode(), 0, [], []))
    if case.name_expression:
        ask(nvrtc.nvrtcAddNameExpression(program, case.name_expression.encode()))
    options = [f"--gpu-architecture=compute_{case.min_sm}".encode(), *(option.encode() for option in case.options)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _room(ask(nvrtc.nvrtcGetProgramLogSize(program)))  # empty, it has one byte
    ask(nvrtc.nvrtcGetProgramLog(program, log))
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert bytes(range(256))[32:33][0] == 32  # writing to bytes of length one would change them everywhere
    entry = case.entry
    if case.name_expression:
        entry = ask(nvrtc.nvrtcGetLoweredName(program, case.name_expression.encode())).decode()
    ptx = _room(ask(nvrtc.nvrtcGetPTXSize(program)))
    ask(nvrtc.nvrtcGetPTX(program, ptx))
    ask(nvrtc.nvrtcDestroyProgram(program))
    return ptx.decode().rstrip("\0"), entry


def ask(answer: tuple) -> object:
    status, *values = answer
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return values[0] if values else None
