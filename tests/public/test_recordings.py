"""The traces that come with the package show what their names say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import paellapy as pp
from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.engine.trace import EngineTrace
from paellapy.viz.data import requests_of


def test_every_recording_loads_and_is_whole() -> None:
    assert len(pp.recordings.names()) >= 3
    for name in pp.recordings.names():
        t = pp.recordings.load(name)
        if not isinstance(t, EngineTrace):  # there launches are replayed
            assert len(t.blocks) == t.launches["blocks"].sum(), name
        assert (t.dropped, t.unfinished) == (0, 0), name
        assert t.device.name.endswith("(virtual)") == name.startswith("virtual-"), name


def of(example: str) -> list[str]:
    return [name for name in pp.recordings.names() if name.endswith(example)]


def test_the_tail_effect_is_there() -> None:
    for name in of("tail-effect"):
        (kernel,) = pp.recordings.load(name).summary().kernels
        assert 2 < kernel.waves < 3, name
        assert kernel.tail_share > 0.2, name


def test_the_mix_has_the_same_requests_under_both_policies() -> None:
    for name in of("mix-streams"):
        streams, paella = pp.recordings.load(name), pp.recordings.load(name.replace("streams", "paella"))
        assert isinstance(streams, EngineTrace)
        assert isinstance(paella, EngineTrace)
        assert (streams.policy, paella.policy) == ("streams", "paella")
        assert streams.simulated == paella.simulated == name.startswith("virtual-")
        asked = [np.bincount(t.jobs["model"]).tolist() for t in (streams, paella)]
        assert asked[0] == asked[1]
        assert all((t.jobs["status"] == 0).all() and (t.jobs["deadline_ns"] > 0).all() for t in (streams, paella))
        assert len(streams.blocks) == len(paella.blocks), "both compute the same"
        for t in (streams, paella):
            seen = requests_of(t)
            assert seen is not None
            assert set(seen.job_of.tolist()) == set(range(len(t.jobs))), "each has been on the GPU"
            assert sorted(seen.segment_of.tolist()) == list(range(len(t.segments))), "every segment is somebody's"
        late = [int((t.lateness_ns() > 0).sum()) for t in (streams, paella)]
        assert late[1] < late[0], "software scheduling meets more targets"


def test_every_example_is_small() -> None:
    folder = Path(pp.recordings.__file__).parent
    assert all(path.stat().st_size < 300_000 for path in folder.glob("*.pptrace"))


def test_an_example_without_a_gpu_in_its_name_is_the_real_one_where_it_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shipped = pp.recordings.load("virtual-h200-tail-effect")
    monkeypatch.setattr(pp.recordings, "files", lambda _: tmp_path)
    for name, facts in (("virtual-h200-x", shipped.device), ("h200-x", replace(shipped.device, name="NVIDIA H200"))):
        Trace(shipped.blocks, shipped.launches, shipped.kernels, facts).save(tmp_path / f"{name}.pptrace")
        assert pp.recordings.load("x").device == facts
    assert pp.recordings.origin(pp.recordings.load("x")) == "Recorded on a real NVIDIA H200."


def test_the_origin_of_a_trace_is_what_it_says_of_itself() -> None:
    tail, mix = (pp.recordings.load(f"virtual-h200-{name}") for name in ("tail-effect", "mix-paella"))
    assert "virtual NVIDIA H200" in pp.recordings.origin(tail)
    assert "times are modelled: not a measurement" in pp.recordings.origin(tail)
    assert "simulated time: not a measurement" in pp.recordings.origin(mix)


def test_the_addition_has_two_waves() -> None:
    for name in of("add-two-waves"):
        (kernel,) = pp.recordings.load(name).summary().kernels
        assert kernel.waves == pytest.approx(2, abs=0.2), name


def test_two_kernels_share_the_gpu_on_two_streams() -> None:
    for name in of("two-streams"):
        t = pp.recordings.load(name)
        assert set(t.kernels) == {"gemm", "softmax"}
        assert len(np.unique(t.launches["stream"])) == 2
        gemm, softmax = (t.select(kernel=kernel).blocks for kernel in ("gemm", "softmax"))
        beside = (gemm["start_ns"][:, None] < softmax["end_ns"]) & (softmax["start_ns"] < gemm["end_ns"][:, None])
        assert beside.any(axis=0).mean() > 0.1, f"{name}: few blocks ran beside those of the other stream"


def test_an_unknown_recording_names_the_known_ones() -> None:
    with pytest.raises(TraceError, check=lambda e: e.given == "mona-lisa"):
        pp.recordings.load("mona-lisa")
