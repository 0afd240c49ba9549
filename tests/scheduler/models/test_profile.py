"""Profiles: measured once, kept on disk, and what simulations get of them."""

from __future__ import annotations

import json

import pytest
from engine_models import mlp_model, scale_model
from failing import failing
from typer.testing import CliRunner

import paellapy as pp
from paellapy import cli
from paellapy.instrument import cache
from paellapy.instrument.errors import ArgumentError, PaellaError
from paellapy.scheduler.backends.virtual import VirtualBackend
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.profiles import SegmentProfile
from paellapy.scheduler.core.state import Limits
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.engine.loading import Loader
from paellapy.scheduler.models import profile as profiles
from paellapy.scheduler.models.memory import MemoryPlan
from paellapy.scheduler.models.profile import ProgramProfile, model_profile, segment_profile
from paellapy.scheduler.models.program import Node


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path, monkeypatch):
    if "engine" not in request.fixturenames:  # these simulate, and what is compiled for that stays in the usual cache
        monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))


class Counted(VirtualBackend):
    """Counts how often times are measured."""

    measured = 0

    def node_times_ns(self, program):
        self.measured += 1
        return super().node_times_ns(program)


def load(model, quantum_us=50.0, instances=1):
    backend = Counted(pp.Device("virtual:h200"))
    loader = Loader(backend, MemoryPlan(1 << 33), Limits(), Tuning.for_device(backend.device), quantum_us * 1e3)
    return loader.load(model, instances, alone=True), backend


def test_a_second_load_finds_the_times_on_disk():
    first, measuring = load(mlp_model(batch=(1, 4)))
    again, reading = load(mlp_model(batch=(1, 4)))
    assert measuring.measured == 2
    assert reading.measured == 0
    assert again.profiles == first.profiles


def test_another_program_or_quantum_is_measured_anew():
    load(scale_model(steps=3, batch=(1,)))
    assert load(scale_model(steps=4, batch=(1,)))[1].measured == 1
    assert load(scale_model(steps=3, batch=(1,)), quantum_us=10)[1].measured == 1
    assert load(scale_model(steps=3, batch=(1,)))[1].measured == 0


def test_demand_is_measured_again_with_more_instances_and_not_with_fewer():
    seen = [load(mlp_model(batch=(1,)), instances=instances)[0].profiles[0] for instances in (1, 2, 8, 3)]
    assert [each.together for each in seen] == [0, 2, 8, 8]
    assert seen[0].demand == 0.0
    assert seen[2].demand <= seen[1].demand
    assert seen[3] == seen[2]


def test_times_follow_the_quantum():
    coarse, _ = load(scale_model(steps=60, batch=(1,)), quantum_us=50)
    fine, _ = load(scale_model(steps=60, batch=(1,)), quantum_us=10)
    assert len(fine.profiles[0].segments) > len(coarse.profiles[0].segments) > 1
    for segment in fine.profiles[0].segments[:-1]:
        assert 5e3 < segment.time_ns < 20e3
    # Cutting adds what a launch adds, never takes away.
    assert fine.profiles[0].segmented_ns >= 0.95 * fine.profiles[0].whole_ns


def test_a_long_kernel_is_sliced_into_whole_waves():
    loaded, backend = load(scale_model(steps=1, n=1 << 22, batch=(1,)), quantum_us=5)
    parts = loaded.profiles[0].cuts[0]
    wave = next(w for w in backend.wave_blocks(loaded.launches[0][0].program) if w)
    assert len(parts) > 1
    assert all(count % wave == 0 for _, count in parts[:-1])
    assert sum(count for _, count in parts) == (1 << 22) // 128


def test_no_more_segments_than_the_core_can_hold():
    backend = Counted(pp.Device("virtual:h200"))
    loader = Loader(backend, MemoryPlan(1 << 30), Limits(segments=4), Tuning.for_device(backend.device), 1e3)
    assert 1 < len(loader.load(scale_model(steps=40, batch=(1,)), 1, alone=True).profiles[0].bounds) <= 4


def test_the_largest_kernel_stands_for_the_segment():
    limits = pp.Device("virtual:h200").limits
    nodes = [
        Node("h2d", nbytes=4),
        Node("kernel", "small", blocks=10, threads=64, registers=32),
        Node("kernel", "large", blocks=5000, threads=128, registers=64, shared_bytes=1024),
    ]
    found = segment_profile(nodes, [0, 4224, 1056], 5e4, limits)
    assert (found.blocks, found.warps, found.kernels) == (1056, 1056 * 4, 2)
    assert found.registers == 1056 * 4 * 64 * 32
    assert found.shared_bytes >= 1056 * 1024


def test_copies_alone_are_a_segment_too():
    found = segment_profile([Node("d2h", nbytes=1 << 20)], [0], 2e4, pp.Device("virtual:h200").limits)
    assert (found.time_ns, found.blocks, found.kernels) == (2e4, 1, 1)


def test_simulations_get_times_instances_and_targets():
    loaded, _ = load(mlp_model(batch=(1, 2), target_ms=3.0, priority=2, share=0.5))
    found = model_profile(loaded.model, loaded.profiles, instances=4, queue_limit=100)
    assert found.batch == (1, 2)
    assert found.alone_ns(1) == loaded.profiles[0].segmented_ns
    assert (found.target_ms, found.priority, found.share, found.instances) == (3.0, 2, 0.5, 4)


@pytest.fixture
def engine():
    with pp.Engine("virtual:h200") as engine:
        engine.load(mlp_model(batch=(1, 2), target_ms=30.0))
        yield engine


def test_a_loaded_model_is_simulated_from_its_profile(engine):
    profile = engine.model_profile("mlp")
    assert (profile.name, profile.batch, profile.target_ms) == ("mlp", (1, 2), 30.0)
    result = pp.simulate([profile], pp.Poisson(1000, "mlp", duration=0.05), "srpt")
    assert result.model("mlp").completed == result.model("mlp").submitted > 0


def test_profiles_are_kept_in_a_file_that_simulations_read(engine, tmp_path):
    path = tmp_path / "mine.json"
    pp.save_profiles(path, [engine.model_profile("mlp")])
    assert pp.load_profiles(str(path)) == [engine.model_profile("mlp")]
    ran = CliRunner().invoke(cli.app, ["simulate", str(path), "-p", "srpt", "--rate", "1000", "--seconds", "0.05"])
    assert ran.exit_code == 0, ran.output
    assert "srpt on virtual:h200" in ran.output
    assert "mlp" in ran.output


def test_a_file_that_is_not_there_or_holds_no_profiles_is_named(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(PaellaError) as caught:
            pp.load_profiles(path)
        assert str(path) in str(caught.value)


def test_the_programs_of_a_model_are_not_taken_for_a_model(engine):
    programs = engine.profile("mlp")
    with failing(ArgumentError, field="models", given=programs):
        pp.simulate([programs], pp.Poisson(10, "mlp"))
    with failing(ModelError, field="model", given=programs):
        engine.load(programs)


def test_tails_sum_what_remains():
    profile = ProgramProfile(1, ((0, 1), (1, 2)), (SegmentProfile(10.0), SegmentProfile(5.0)), 14.0, {}, True)
    assert [profile.tail_ns(k) for k in range(3)] == [15.0, 5.0, 0]


def test_a_profile_that_cannot_be_read_is_measured_again():
    where = profiles.key("program", "gpu", 5e4)
    for content in (b"not json", b"{}", json.dumps({"batch": 1, "bounds": 3}).encode()):
        cache.write(where, content)
        assert profiles.load(where) is None
