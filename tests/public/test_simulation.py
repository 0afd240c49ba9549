"""`pp.simulate` and `paellapy simulate`: policies tried without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import paellapy as pp
from paellapy import cli, demo
from paellapy.cli.scripts import OutputError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, save_profiles
from paellapy.simulation import named_models, profiles_of

pytestmark = pytest.mark.quick


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


def test_a_single_profile_is_simulated_and_what_is_none_is_named() -> None:
    net = ModelProfile("net", {1: [SegmentProfile(5e4)] * 4})
    load = pp.Poisson(1000, "net", duration=0.02)
    assert pp.simulate(net, load).all.completed == pp.simulate([net], load).all.completed > 0
    for wrong in ("mix", 3, [net, "net"]):
        with pytest.raises(pp.PaellaError, check=lambda e: e.field == "models"):
            pp.simulate(wrong, load)  # type: ignore[arg-type]


def test_profiles_keep_what_the_model_asks_for() -> None:
    model = demo.load("cnn", batch=(1, 2), target_ms=5.0)
    (profile,) = profiles_of([model])
    assert profile.name == "cnn"
    assert profile.target_ms == 5.0
    assert sorted(profile.sizes) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["nobody"], {"field": "models", "given": "nobody"}),
        (["."], {"field": "models", "given": "."}),
        (["mix", "--arrivals", "sometimes"], {"field": "arrivals", "given": "sometimes"}),
        (["mix", "--arrivals", "."], {"field": "arrivals", "given": "."}),
        (["mix", "--fidelity", "exact"], {"field": "fidelity", "given": "exact"}),
        (["mix", "--batch", "many"], {"field": "batch", "given": "many"}),
        (["mix", "--batch", "1,3"], {"field": "batch", "given": (1, 3)}),
        (["mix", "--batch", "0"], {"field": "batch", "given": (0,)}),
        (["demo", "--batch", "0"], {"field": "batch", "given": (0,)}),
        (["mix", "--admission", "--fidelity", "blocks"], {"field": "admission", "given": True}),
        (["mix", "--sigma", "-1"], {"field": "sigma", "given": -1.0}),
        (["mix", "--sigma", "100"], {"field": "sigma", "given": 100.0}),
        (["mix", "--seed", "-1"], {"field": "seed", "given": -1}),
        (["mix", "-p", "slack", "-p", "nobody"], {"name": "nobody"}),
        (["mix", "--chats", "9B rate=1"], {"field": "shape", "given": "9B"}),
        (["mix", "--chats", "1B"], {"field": "rate", "given": None}),
        (["mix", "--chats", "1B rate=many"], {"field": "rate", "given": "many"}),
        (["mix", "--chats", "1B colour=1"], {"field": "colour"}),
        (["mix", "--chats", "1B trace=x.csv rate=1"], {"field": "rate"}),
        (["mix", "--plot", "nowhere/x.png"], {"path": Path("nowhere/x.png")}),
        (["mix", "--plot", "."], {"path": Path()}),
        (["mix", "--out", "figures.txt"], {"path": Path("figures.txt")}),
    ],
)
def test_wrong_words_on_the_command_line_are_named(arguments: list[str], facts: dict[str, object]) -> None:
    result = CliRunner().invoke(cli.app, ["simulate", *arguments])
    assert isinstance(result.exception, pp.PaellaError), result.output
    assert facts.items() <= vars(result.exception).items()
    assert not result.output.strip()


@pytest.mark.parametrize("name", ["run.zzz", "run"])
def test_a_picture_has_an_ending_that_can_be_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(cli.app, ["simulate", "mix", "--plot", str(tmp_path / name)])
    assert isinstance(result.exception, OutputError)
    assert result.exception.path == tmp_path / name
    assert "virtual:h200" not in result.output  # nothing was simulated


def test_without_matplotlib_a_picture_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(cli.app, ["simulate", "mix", "--plot", str(tmp_path / "run.png")])
    assert isinstance(result.exception, pp.MissingExtraError)
    assert result.exception.library == "matplotlib"


@pytest.fixture
def profiles_file(tmp_path: Path) -> str:
    path = tmp_path / "nets.json"
    save_profiles(
        path, [ModelProfile("net", {1: [SegmentProfile(5e4)] * 4}), ModelProfile("none", {1: [SegmentProfile(5e4)]})]
    )
    return str(path)


def test_a_file_says_itself_which_batch_sizes_there_are(profiles_file: str) -> None:
    result = CliRunner().invoke(cli.app, ["simulate", profiles_file, "--batch", "4"])
    assert result.exception.field == "batch"


def test_admission_says_where_there_is_nothing_to_hold(profiles_file: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    words = ["simulate", profiles_file, "-p", "slack", "--admission", "--arrivals", str(rows)]
    rows.write_text("t,model\n0.001,net\n")
    assert "no model has a target" in CliRunner().invoke(cli.app, words).output
    rows.write_text("t,model,deadline\n0.001,net,5\n")
    assert "no model has a target" not in CliRunner().invoke(cli.app, words).output


def test_a_policy_with_a_place_runs_with_partitions(
    profiles_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import paellapy as pp\n\n\ndef rank(job):\n    return job.arrival_ns\n\n\ndef place(job):\n"
    code += "    return pp.Where(sms=0.25)\n\n\nplaced = pp.policy(name='placed', place=place)(rank)\n"
    Path("policy_with_place.py").write_text(code)
    words = ["simulate", "-p", "policy_with_place:placed", "--seconds", "0.05", "--rate", "1000"]
    without = CliRunner().invoke(cli.app, [*words, profiles_file])
    assert "--sm-partitions" in str(without.exception)
    undemanding = CliRunner().invoke(cli.app, [*words, profiles_file, "--sm-partitions", "8"])
    assert "sm_partitions needs" in str(undemanding.exception)
    save_profiles(Path("partitions.json"), [ModelProfile("net", {1: [SegmentProfile(5e4)] * 4}, demand={1: 0.2})])
    ran = CliRunner().invoke(cli.app, [*words, "partitions.json", "--sm-partitions", "8"])
    assert ran.exit_code == 0, ran.output
    assert "placed on virtual:h200" in ran.output


def test_a_model_nobody_asks_for_has_no_figures(profiles_file: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("t,model\n0.001,net\n")
    result = CliRunner().invoke(cli.app, ["simulate", profiles_file, "-p", "slack", "--arrivals", str(rows)])
    assert cells(result.output, "net")[:2] == ["net", "1/1"]
    assert cells(result.output, "none") == ["none", "0/0", "0", "–", "–", "–", "–", "–", "–"]
    assert "nan" not in result.output


def test_the_demo_has_the_targets_it_is_served_with() -> None:
    profiles, _ = named_models("demo", None, "virtual:h200")
    assert {each.name: each.target_ms for each in profiles} == demo.TARGETS_MS
    assert all(each.batch == (1,) for each in profiles)


def test_the_mix_says_that_it_was_measured_on_another_gpu() -> None:
    words = ["simulate", "mix", "-p", "slack", "--seconds", "0.01"]
    there, elsewhere = (CliRunner().invoke(cli.app, [*words, "--device", f"virtual:{part}"]) for part in ("h200", "t4"))
    assert "measured on an H200" not in there.output
    assert "measured on an H200" in elsewhere.output


def cells(output: str, name: str) -> list[str]:
    """The row of the table that begins with the name."""
    return next(line.split() for line in output.splitlines() if line.split()[:1] == [name])


def test_command_line_compares_policies_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture, figures = tmp_path / "run.png", tmp_path / "run.csv"
    words = ["simulate", "mix", "-p", "streams", "-p", "edf", "--seconds", "0.05", "--plot", str(picture)]
    result = CliRunner().invoke(cli.app, [*words, "--out", str(figures)])
    assert result.exit_code == 0, result.output
    assert "streams on virtual:h200" in result.output
    assert "edf on virtual:h200" in result.output
    assert picture.stat().st_size > 1000
    assert len(figures.read_text().splitlines()) == 1 + 2 * 9  # eight models and all of them


def test_command_line_refuses_what_would_be_late_if_asked() -> None:
    words = ["simulate", "mix", "-p", "slack", "--rate", "30000", "--arrivals", "poisson", "--seconds", "0.1"]
    plain, admitted = (CliRunner().invoke(cli.app, [*words, *more]) for more in ([], ["--admission"]))
    assert plain.exit_code == admitted.exit_code == 0, admitted.output
    done, submitted = cells(admitted.output, "all")[1].split("/")
    assert cells(plain.output, "all")[1] == f"{submitted}/{submitted}"
    assert int(cells(admitted.output, "all")[2]) == int(submitted) - int(done) > 0
    assert "refused" in admitted.output
    assert "refused" not in plain.output


def test_chats_are_simulated_beside_other_models(tmp_path: Path) -> None:
    trace = tmp_path / "chats.csv"
    trace.write_text("t,prompt,answer\n0,100,10\n0.01,50,5\n")
    words = ["simulate", "mix", "-p", "slack", "--rate", "100", "--seconds", "0.05"]
    for chats in ("1B rate=40 prompt=50 answer=5 tbt_ms=10", f"1B trace={trace}"):
        found = CliRunner().invoke(cli.app, [*words, "--chats", chats])
        assert found.exit_code == 0
        assert "1B" in found.output
