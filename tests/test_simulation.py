"""`pp.simulate` and `paellapy simulate`: policies tried without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import paellapy as pp
from paellapy import cli, demo
from paellapy.simulation import named_models, profiles_of


def test_models_are_profiled_and_simulated() -> None:
    model = demo.load("mlp", batch=(1, 4))
    result = pp.simulate([model], pp.Poisson(2000, {"mlp": 1.0}, duration=0.05), "srpt", seed=3)
    assert result.model("mlp").completed == result.model("mlp").submitted > 0
    assert result.model("mlp").slowdown_p50 == pytest.approx(1.0, rel=1e-3)  # whole nanoseconds


def test_a_policy_of_a_few_lines_is_tried_like_any_other() -> None:
    @pp.policy
    def oldest(job: object) -> float:
        return job.arrival_ns  # type: ignore[attr-defined, no-any-return]

    profiles, shares = named_models("mix", (1,), "virtual:h200")
    result = pp.simulate(profiles, pp.Poisson(2000, shares, duration=0.05), oldest)
    assert result.model().completed > 0


def test_profiles_keep_what_the_model_asks_for() -> None:
    model = demo.load("cnn", batch=(1, 2), target_ms=5.0)
    (profile,) = profiles_of([model])
    assert profile.name == "cnn"
    assert profile.target_ms == 5.0
    assert sorted(profile.sizes) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no models 'nobody'"),
        (["mix", "--arrivals", "sometimes"], "no workload 'sometimes'"),
        (["mix", "--fidelity", "exact"], "segments or blocks"),
        (["mix", "--batch", "many"], "batch sizes are numbers"),
    ],
)
def test_wrong_words_on_the_command_line_get_one_clear_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["simulate", *arguments])
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_command_line_compares_policies_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.png"
    words = ["simulate", "mix", "-p", "streams", "-p", "edf", "--seconds", "0.05", "--plot", str(picture)]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    assert "streams on virtual:h200" in result.output
    assert "edf on virtual:h200" in result.output
    assert picture.stat().st_size > 1000


def test_command_line_refuses_what_would_be_late_if_asked() -> None:
    words = ["simulate", "mix", "-p", "slack", "--rate", "30000", "--arrivals", "poisson", "--seconds", "0.1"]
    plain, admitted = (CliRunner().invoke(cli.app, [*words, *more]) for more in ([], ["--admission"]))
    assert plain.exit_code == admitted.exit_code == 0, admitted.output
    total = next(line for line in plain.output.splitlines() if line.strip().startswith("all")).split()[1]
    done, submitted = next(
        line for line in admitted.output.splitlines() if line.strip().startswith("all")
    ).split()[1].split("/")  # fmt: skip
    assert total == f"{submitted}/{submitted}"
    assert int(done) < int(submitted)
