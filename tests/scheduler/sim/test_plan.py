"""Placement: every model somewhere, no GPU overfull, and few moves from one plan to the next."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.plan import Fleet, PlanError, enough_gpus, expect, load_fleet, pack, plan, regroup, steps

pytestmark = pytest.mark.quick

NAMES = "abcd"
PROFILES = [
    ModelProfile(name, {1: [SegmentProfile(100e3 * (k + 1))]}, target_ms=1.0 * (k + 1), instances=4)
    for k, name in enumerate(NAMES)
]


@st.composite
def fleets(draw):
    rates = {name: draw(st.floats(1, 5000)) for name in draw(st.sets(st.sampled_from(NAMES), min_size=1))}
    gb = {name: draw(st.floats(0, 10)) for name in rates}
    gpus = draw(st.integers(1, 6))
    gpu_gb = max(max(gb.values()), sum(gb.values()) / gpus * draw(st.floats(1.0, 3)))
    return Fleet(PROFILES, rates, gpus, gb, gpu_gb + 1e-9, draw(st.sampled_from([(1.0,), (1.0, 0.5)])))


@given(fleets(), st.sampled_from([1.0, 2.0, math.inf]))
def test_packing_places_every_model_and_overfills_no_gpu(fleet, spread):
    try:
        placement = pack(fleet, spread)
    except PlanError:  # the pieces may not fit though their sum does
        return
    assert {name for each in placement for name in each} == set(fleet.rates)
    for each in placement:
        assert len(set(each)) == len(each)
        assert sum(map(fleet.gb, each)) <= fleet.gpu_gb + 1e-6
    if spread == math.inf and not any(fleet.memory_gb.values()):
        assert all(set(each) == set(fleet.rates) for each in placement)


@pytest.fixture
def short_runs(monkeypatch):
    monkeypatch.setattr("paellapy.scheduler.sim.plan.REQUESTS", 2000)


def test_a_plan_expects_what_it_simulates_and_keeps_what_is_good_enough(short_runs):
    fleet = Fleet(PROFILES, {"a": 3000, "b": 500}, 2, {"a": 6, "b": 6}, 10)
    found = plan(fleet)
    assert sorted(found.placement) == [("a",), ("b",)]
    assert 0.0 <= found.attainment <= 1.0
    assert found == expect(fleet, found.placement)
    swapped = found.placement[::-1]
    assert plan(fleet, current=swapped).placement == swapped


def test_more_load_takes_more_gpus(short_runs):
    few = enough_gpus(Fleet(PROFILES, {"a": 1000}, 1), 0.95)
    many = enough_gpus(Fleet(PROFILES, {"a": 60_000}, 1), 0.95)
    assert len(few.placement) < len(many.placement)


@pytest.mark.parametrize(
    ("more", "field", "limit"),
    [
        ({"rates": {"x": 1}}, "profiles", None),
        ({"rates": {"a": 0}}, "rates", None),
        ({"memory_gb": {"a": 20}, "gpu_gb": 10}, "memory_gb", 10),
        ({"memory_gb": {"a": 8, "b": 8}, "gpu_gb": 10, "gpus": 1}, "memory_gb", 10),
    ],
)
def test_fleets_without_sense_are_refused(more, field, limit):
    with pytest.raises(PlanError, check=lambda e: (e.field, getattr(e, "limit", None)) == (field, limit)):
        Fleet(PROFILES, **{"rates": {"a": 10, "b": 1}, "gpus": 2, **more})


@pytest.mark.parametrize(("field", "value"), [
    ("gpus", 0), ("gpus", 2.7), ("gpus", 1 << 70), ("rates", {"a": math.inf}), ("rates", {"a": math.nan}),
    ("rates", {"a": -1}), ("rates", 3), ("memory_gb", {"a": -4}), ("memory_gb", 3), ("gpu_gb", math.nan),
    ("gpu_gb", 0), ("speeds", ()), ("speeds", (0.0,)), ("sigma", -1), ("profiles", 3),
])  # fmt: skip
def test_bad_values_of_a_fleet_are_refused(field, value):
    with failing(PaellaError, field=field, given=value):
        Fleet(PROFILES if field != "profiles" else value, **{"rates": {"a": 10}, "gpus": 2} | {
            name: each for name, each in {field: value}.items() if name != "profiles"})  # fmt: skip


def test_a_plan_takes_no_longer_for_a_small_rate(monkeypatch):
    monkeypatch.setattr("paellapy.scheduler.sim.plan.REQUESTS", 300)
    found = plan(Fleet(PROFILES, {"a": 0.001}, 1), sure=math.inf)
    assert found.attainment > 0.99  # load reports every 2 ms of these 3.5 days would take hours


def test_a_goal_that_no_number_of_gpus_meets_is_refused_before_a_simulation(monkeypatch):
    monkeypatch.setattr("paellapy.scheduler.sim.plan.simulate_cluster", None)
    slow = ModelProfile("slow", {1: [SegmentProfile(3e6)]}, target_ms=2.0)
    with failing(PlanError, field="goal", model="slow", limit=0.75):
        enough_gpus(Fleet([*PROFILES, slow], {"a": 300, "slow": 100}, 1), 0.9)


def test_a_fleet_is_read_from_a_file(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text("gpus = 2\ngpu_gb = 80\n[models.resnet18]\nrate = 100\nmemory_gb = 0.1\n")
    fleet, goal = load_fleet(file)
    assert (fleet.gpus, fleet.rates, goal) == (2, {"resnet18": 100.0}, None)
    file.write_text("[models.resnet18]\nrate = 100\n")
    assert load_fleet(file)[1] == 0.99
    wrong = (
        (b"gpus = 2", "models"), (b"[models.resnet18]", "rate"), (b"x = ", "file"), (b"\xff\xfe", "file"),
        (b"goal = 1.5\n[models.resnet18]\nrate = 1", "goal"), (b'[models.resnet18]\nrate = "x"', "rates"),
        (b"gpu = 2\n[models.resnet18]\nrate = 1", "gpu"), (b"[models.resnet18]\nrate = 1\nmemory = 3", "memory"),
        (b"gpus = 2.7\n[models.resnet18]\nrate = 1", "gpus"), (b"[models.resnet18]\nrate = inf", "rates"),
    )  # fmt: skip
    for text, field in wrong:
        file.write_bytes(text)
        with pytest.raises(PlanError, check=lambda e, field=field: e.field == field):
            load_fleet(file)


placements = st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=4)


@given(placements, placements)
def test_steps_lead_to_the_wanted_placement_and_lose_no_model_on_the_way(now, wanted):
    now, wanted = (tuple(tuple(sorted(each)) for each in placement) for placement in (now, wanted))
    old = regroup([], now)
    new = regroup(old, wanted)
    taken = steps(old, new)
    assert taken[-1] == new
    assert Counter(each.models for each in new for _ in range(each.engines)) == Counter(wanted)
    assert len({each.name for each in new}) == len(new)
    assert steps(new, new) == [new]
    kept = {name for each in wanted for name in each} & {name for each in now for name in each}
    for before, after in itertools.pairwise([old, *taken]):
        models = {each.name: set(each.models) for each in before}
        # On engines that neither start nor load anything in this step
        there = [models[each.name] & set(each.models) for each in after if each.name in models]
        assert kept <= set().union(*there)
