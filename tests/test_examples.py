"""The traces that come with the package show what their names say."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from instrument.errors import TraceError


def test_every_example_loads_and_is_whole() -> None:
    assert len(pp.examples.names()) >= 3
    for name in pp.examples.names():
        t = pp.examples.load(name)
        assert len(t.blocks) == t.launches["blocks"].sum(), name
        assert (t.dropped, t.unfinished) == (0, 0), name
        assert t.device.name.endswith("(virtual)") == name.startswith("virtual-"), name


def of(example: str) -> list[str]:
    return [name for name in pp.examples.names() if name.endswith(example)]


def test_the_gemm_has_a_tail() -> None:
    for name in of("gemm-tail"):
        (kernel,) = pp.examples.load(name).summary().kernels
        assert 1 < kernel.waves < 2, name
        assert kernel.tail_share > 0.2, name


def test_the_addition_has_two_waves() -> None:
    for name in of("add-two-waves"):
        (kernel,) = pp.examples.load(name).summary().kernels
        assert kernel.waves == pytest.approx(2, abs=0.2), name


def test_two_kernels_share_the_gpu_on_two_streams() -> None:
    for name in of("two-streams"):
        t = pp.examples.load(name)
        assert set(t.kernels) == {"gemm", "softmax"}
        assert len(np.unique(t.launches["stream"])) == 2
        together = t.occupancy(400, kernel="gemm").resident * t.occupancy(400, kernel="softmax").resident
        assert together.any(), f"{name}: they were never on one SM at a time"


def test_an_unknown_example_names_the_known_ones() -> None:
    with pytest.raises(TraceError, match=r"no example 'mona-lisa', only .*virtual-h200-gemm-tail"):
        pp.examples.load("mona-lisa")
