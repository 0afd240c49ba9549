"""`tune`: batches and GPUs are chosen together, within the limits of the search."""

from __future__ import annotations

import json

import pytest
from failing import failing
from typer.testing import CliRunner

from paellapy.cli import app
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, save_profiles
from paellapy.scheduler.sim.tune import ITERATIONS, PATIENCE, tune


def net(name: str, us: float, growth: float = 1.2, part: float = 0.9) -> ModelProfile:
    """A model whose time grows by `growth` for every doubling of the batch."""
    sizes = {}
    for k, batch in enumerate((1, 2, 4, 8)):
        sizes[batch] = [SegmentProfile(us * 1e3 * growth**k, blocks=int(4000 * part), warps=int(8000 * part))] * 3
    return ModelProfile(name, sizes, instances=4)


def test_models_under_load_get_larger_batches() -> None:
    found = tune([net("a", 100)], {"a": 6000}, seconds=0.1)
    assert found.choices["a"].batch > 1
    assert found.cost < 0.2 * found.first_cost


def test_models_that_disturb_each_other_go_to_different_gpus() -> None:
    models = [net("long", 2000, part=0.9), net("short", 20, part=0.9)]
    found = tune(models, {"long": 100, "short": 300}, 2, seconds=0.2)
    assert found.choices["long"].gpu != found.choices["short"].gpu


def test_the_search_ends() -> None:
    models = [net(f"m{k}", 50 + 40 * k) for k in range(4)]
    found = tune(models, {each.name: 800.0 for each in models}, 2, seconds=0.05)
    assert len(found.history) <= ITERATIONS
    assert list(found.history) == sorted(found.history, reverse=True)
    worse = [k for k, cost in enumerate(found.history) if cost == found.history[-1]]
    assert len(worse) <= PATIENCE + 1


A = net("a", 100)


@pytest.mark.parametrize(("models", "rates", "gpus", "more", "field"), [
    ([A], {"b": 100}, 1, {}, "rates"), ([A], [100], 1, {}, "rates"), ([A], {"a": "many"}, 1, {}, "rates"),
    ([A], {"a": 100}, 0, {}, "gpus"), ([A], {"a": 100}, 1.5, {}, "gpus"), ([A, A], {"a": 100}, 1, {}, "models"),
    ([A], {"a": 100}, 1, {"second": 1}, "second"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(models, rates, gpus, more, field) -> None:
    with failing(PaellaError, field=field):
        tune(models, rates, gpus, **more)


def test_the_command_writes_what_it_found(tmp_path) -> None:
    save_profiles(tmp_path / "models.json", [net("a", 100), net("b", 300)])
    arguments = ["tune", str(tmp_path / "models.json"), "--rate", "2000", "--gpus", "2", "--seconds", "0.05"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    assert set(json.loads((tmp_path / "found.json").read_text())["choices"]) == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "nowhere/found.json"], "folder nowhere does not exist"),
        (["--batch", "1,2"], "leave out --batch"),
        (["--batch", "many"], "'many'"),
    ],
)
def test_the_command_refuses_what_it_cannot_use_before_it_simulates(options, message, tmp_path) -> None:
    save_profiles(tmp_path / "models.json", [net("a", 100)])
    done = CliRunner().invoke(app, ["tune", str(tmp_path / "models.json"), *options])
    assert isinstance(done.exception, PaellaError)
    assert message in str(done.exception)
