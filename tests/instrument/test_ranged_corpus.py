"""Ranges inserted into kernels of the corpus, as the benchmarks insert them: same results, and every range once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from corpus import CUDA_CASES, TRITON_CASES, CudaCase, ranged

import paellapy as pp
from paellapy.instrument.kernels.cuda import CudaSource
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.ranges import Ranges

# One of each kind; the benchmarks run them all.
NAMES = ("softmax", "layer_norm", "gemm_fp16", "gemm_descriptors", "attention_fp16_causal", "early_return")


SANITIZED = [c for c in CUDA_CASES if c.launchable and c.instrumentable]


@pytest.mark.parametrize("case", [c for c in TRITON_CASES if c.name in NAMES], ids=str)
def test_a_kernel_with_ranges_computes_the_same(case: Any) -> None:
    call = case.make(np.random.default_rng(0), 0.2)
    results = []
    with pp.Device("virtual:h200"):
        for kernel in (case.kernel, ranged.with_ranges(case.kernel)):
            given = {n: pp.array(v) if isinstance(v, np.ndarray) else v for n, v in call.args.items()}
            with pp.trace() as t:
                pp.kernel(kernel)[call.grid](**given, **call.constexprs, **call.options)
            results.append([np.asarray(given[name]) for name in call.outputs])
    for plain, found in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, found)
    bodies = Counter(t.ranges.records["block"][t.ranges.records["range"] == t.ranges.names.index("body")].tolist())
    assert set(bodies.values()) == {1}
    returned = t.ranges.lost  # blocks that return early leave their range open
    assert len(bodies) + returned == len(t.blocks)
    assert "_pp_range_begin" not in case.kernel.src


@pytest.mark.parametrize("case", SANITIZED, ids=str)
def test_cuda_kernels_with_ranges_assemble(case: CudaCase) -> None:
    text = ranged.inserted_cuda(case.source, case.entry)
    source = CudaSource(text, case.name_expression or case.entry, case.options).source("sm_90", marked=True)
    loops = ranged.inserted_cuda(case.source, case.entry).count('pp_warp_range_begin("round")')
    names = Ranges.in_text(source.ptx).names
    assert "body" in names
    assert ("round" in names) == bool(loops)
    assert source.build(PassConfig("trace")).cubin
