"""The corpus itself is sound: every kernel compiles without a GPU, every reference is an answer."""

from __future__ import annotations

import numpy as np
import pytest
import triton
from corpus import TRITON_CASES, Case, ast_source
from triton.backends.compiler import GPUTarget


def test_names_are_unique() -> None:
    names = [case.name for case in TRITON_CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_triton_kernel_compiles_without_a_gpu(case: Case) -> None:
    call = case.make(np.random.default_rng(1), 1.0)
    target = GPUTarget("cuda", max(80, case.min_sm), 32)
    compiled = triton.compile(ast_source(case.kernel, call), target=target, options=call.options)
    assert ".entry" in compiled.asm["ptx"]


@pytest.mark.parametrize("case", TRITON_CASES, ids=str)
def test_reference_is_finite_and_has_the_outputs_shapes(case: Case) -> None:
    call = case.make(np.random.default_rng(2), 1.0)
    expected = call.reference()
    assert set(expected) == set(call.outputs)
    for name, value in expected.items():
        out = call.args[name]
        assert value.shape == out.shape
        assert np.isfinite(value.astype(np.float64)).all()
    # Launching must not change the answer: references of kernels that add to their outputs keep their own copy.
    for name in call.outputs:
        call.args[name][...] = 1
    assert all(np.array_equal(call.reference()[name], expected[name]) for name in expected)
