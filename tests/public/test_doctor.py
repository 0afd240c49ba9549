"""`paellapy doctor` and the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paellapy import cli, doctor
from paellapy.instrument import env
from paellapy.instrument.errors import NoDeviceError
from paellapy.scheduler.core.processes import usable_cpus


@pytest.fixture(scope="module")
def examined() -> list[doctor.Finding]:
    return doctor.examine()


def test_doctor_tries_every_feature_and_says_what_to_do(examined: list[doctor.Finding]) -> None:
    findings = {f.name: f for f in examined}
    assert findings["triton"].detail
    assert findings["ptxas"].detail.startswith("CUDA")
    assert float(findings["CPUs"].detail) == usable_cpus()
    assert findings["instrument Triton kernels"].works
    assert findings["run and trace on the virtual GPU"].works
    for f in findings.values():
        if f.works is False:
            assert f.remedy, f"{f.name} does not work and nothing says what to do"


def test_doctor_ends_without_messages_of_libraries_on_a_fresh_machine(tmp_path: Path) -> None:
    """Triton's library lists, at the end of a process, objects of its compiler that were kept."""
    fresh = {**os.environ, "PAELLAPY_CACHE_DIR": str(tmp_path / "ours"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-m", "paellapy", "doctor"]
    done = subprocess.run(command, env=fresh, capture_output=True, text=True, timeout=250, check=True)
    assert done.stderr == ""


def test_doctor_prints_extras_as_they_are_typed() -> None:
    console = Console(width=200)
    with console.capture() as output:
        console.print(doctor.report([doctor.Finding("pictures", False, "missing", "pip install 'paellapy[viz]'")]))
    assert "'paellapy[viz]'" in output.get()


@pytest.mark.parametrize("width", [60, 80])
def test_doctor_cuts_nothing_off_on_a_narrow_terminal(examined: list[doctor.Finding], width: int) -> None:
    console = Console(width=width)
    with console.capture() as output:
        console.print(doctor.report(examined))
    cells = [line.split("│")[1:-1] for line in output.get().splitlines() if line.startswith("│")]
    columns = ["".join("".join(cell).split()) for cell in zip(*cells, strict=True)]
    assert "…" not in output.get()
    for f in examined:
        for column, text in zip(columns[1:], (f.name, f.detail, "" if f.works else f.remedy), strict=True):
            assert "".join(text.split()) in column


@pytest.mark.parametrize(
    ("cuda", "gpu", "says"),
    [(None, False, "without CUDA"), ("13.0", False, "finds no NVIDIA GPU"), ("13.0", True, "instrument_torch")],
)
def test_doctor_asks_pytorch_for_cuda_and_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpu: bool, says: str
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    found = next(f for f in doctor.examine() if f.name == "trace PyTorch's kernels")
    assert found.works is gpu
    assert says in found.detail


def test_the_command_line_also_shows_every_tuned_number_and_its_source_if_asked() -> None:
    result = CliRunner().invoke(cli.app, ["doctor", "--verbose"], env={"COLUMNS": "400"})
    assert result.exit_code == 0
    assert "virtual:h200" in result.output
    for each in doctor.tuning_here().numbers():
        assert each.name in result.output
        assert each.source in result.output


def test_errors_are_one_line_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise NoDeviceError("no such GPU; use another")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    assert capsys.readouterr().err.strip() == "paellapy: no such GPU; use another"


def test_a_source_tree_that_is_not_installed_has_a_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    env._installed.cache_clear()
    try:
        assert env.versions()["paellapy"] == "0+source"
    finally:
        env._installed.cache_clear()
