"""`paellapy trace` and `paellapy view`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from viz_traces import MIX, make

from paellapy import cli
from paellapy.cli.scripts import OutputError
from paellapy.instrument.env import versions
from paellapy.instrument.errors import TraceError
from paellapy.instrument.traces.trace import Trace

pytest.importorskip("plotly", reason="the extra `viz` is not installed")

SCRIPT = """
import sys
import numpy as np
import triton
import triton.language as tl
import paellapy as pp
import beside

@pp.kernel
@triton.jit
def double(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

assert __name__ == "__main__"
x, out = pp.array(np.ones(1000, np.float32)), pp.empty(1000)
double[(8,)](x, out, 1000, B=128)
print("sum", int(out.numpy().sum()), sys.argv[1:])
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def trace(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["trace", "--device", "virtual:h200", *map(str, arguments)])


def test_a_script_is_run_with_its_arguments_and_its_kernels_are_recorded(script: Path) -> None:
    before = list(sys.argv), list(sys.path)
    result = trace(script, "--out", "its own", "-x")
    assert result.exit_code == 0, result.output
    assert result.stdout == "sum 2000 ['--out', 'its own', '-x']\n"
    assert "report: trace.html" in result.stderr
    t = Trace.load("trace.pptrace")
    assert (t.kernels, len(t.blocks), t.device.name) == (("double",), 8, "NVIDIA H200 SXM 141GB (virtual)")
    page = Path("trace.html").read_text()
    assert "<h1>script.py</h1>" in page
    assert "<td>double</td>" in page
    assert (sys.argv, sys.path) == before


def test_an_option_behind_the_script_that_the_command_has_too_gets_a_warning(script: Path) -> None:
    warned = trace("--no-explain", script, "--out=its.html", "--dark", "--other").stderr.splitlines()
    found = [line.split()[1] for line in warned if line.startswith("warning")]
    assert found == ["--out", "--dark"]


def test_each_kernels_limit_is_printed_unless_it_is_turned_off(script: Path) -> None:
    with_it, without = trace(script), trace("--no-explain", script)
    assert "double: small grid" in with_it.stderr
    assert "small grid" not in without.stderr
    assert with_it.stdout == without.stdout


def test_an_engine_of_the_script_is_on_the_device_that_was_asked_for(script: Path) -> None:
    script.write_text("import paellapy as pp\nwith pp.Engine() as engine:\n    print(engine.stats()['device'])\n")
    with pytest.warns(UserWarning, match=r"engine\.trace\(\)"):  # its requests are not in the trace
        result = CliRunner().invoke(cli.app, ["trace", "--device", "virtual:t4", str(script)])
    assert result.exit_code == 1, result.output  # it launches no kernel
    assert result.stdout == "NVIDIA T4 16GB (virtual)\n"


def test_what_a_script_raises_is_shown_as_ever_and_the_trace_is_written(script: Path) -> None:
    script.write_text(SCRIPT + "\nraise RuntimeError('boom')\n")
    result = trace("-o", "other.pptrace", script)
    assert result.exit_code == 1
    shown = result.stderr.splitlines()
    first = shown.index("Traceback (most recent call last):")
    assert shown[first + 1].startswith(f'  File "{script}", line ')
    assert "RuntimeError: boom" in shown
    assert not any("runpy" in line or "paellapy/viz" in line for line in shown)
    assert len(Trace.load("other.pptrace").blocks) == 8
    assert Path("other.html").exists()


def test_json_is_the_last_line_of_standard_output(script: Path) -> None:
    result = trace("--json", script)
    assert result.exit_code == 0
    facts = json.loads(result.stdout.splitlines()[-1])
    (kernel,) = facts["summary"]["kernels"]
    assert kernel["blocks"] == len(Trace.load(facts["trace"]).blocks)
    assert [limits["kernel"] for limits in facts["limits"]] == [kernel["kernel"]]


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("sys.exit()", 0), ("sys.exit('why')", 1)])
def test_exit_codes_are_those_of_the_script(script: Path, ending: str, code: int) -> None:
    script.write_text(f"import sys\n{ending}\n")
    result = trace(script)
    assert result.exit_code == (code or 1)  # nothing was recorded
    assert ("why" in result.stderr) == ("why" in ending)
    assert "nothing was recorded" in result.stderr
    assert ("kernels made by pp.kernel" in result.stderr) == (code == 0)
    assert not Path("trace.pptrace").exists()


@pytest.mark.parametrize(
    ("wrong", "code"),
    [("raise RuntimeError('boom')\n", 1), ("def f(:\n", 1), ("import sys; sys.exit(3)\n", 3), ("\n", 1)],
)
def test_a_script_that_records_nothing_leaves_an_earlier_trace(script: Path, wrong: str, code: int) -> None:
    assert trace(script).exit_code == 0
    before = Path("trace.pptrace").read_bytes(), Path("trace.html").read_bytes()
    script.write_text(wrong)
    result = trace(script)
    assert result.exit_code == code
    assert "no trace is written" in result.stderr
    assert (Path("trace.pptrace").read_bytes(), Path("trace.html").read_bytes()) == before


def test_a_script_may_trace_itself(script: Path) -> None:
    own = SCRIPT.replace("double[(8,)]", "with pp.trace() as t:\n    double[(8,)]")
    script.write_text(own + "print(len(t.blocks), 'of its own')\n")
    result = trace(script)
    assert result.exit_code == 0, result.output
    assert "8 of its own" in result.stdout
    assert len(Trace.load("trace.pptrace").blocks) == 8


@pytest.mark.parametrize("out", ["nowhere/x.pptrace", ".", "x.html"])
def test_where_the_trace_goes_is_looked_at_before_the_script_runs(script: Path, out: str) -> None:
    script.write_text("print('ran')\n")
    result = trace("-o", out, script)
    assert isinstance(result.exception, OutputError)
    assert result.exception.path == Path(out)
    assert "ran" not in result.stdout


def test_a_script_that_is_not_there() -> None:
    error = trace("none.py").exception
    assert isinstance(error, TraceError)
    assert (error.field, error.given) == ("script", Path("none.py"))


def test_without_plotly_the_trace_is_still_written(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = trace(script)
    assert result.exit_code == 0
    assert "no report: plot() needs plotly: pip install" in result.stderr
    assert Path("trace.pptrace").exists()


def test_view_makes_a_page_and_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    file = tmp_path / "mix.pptrace"
    make(MIX, dropped=2).save(file)
    result = CliRunner().invoke(cli.app, ["view", str(file)])
    assert (result.exit_code, result.stdout.strip()) == (0, str(tmp_path / "mix.html"))
    assert opened == [(tmp_path / "mix.html").as_uri()]
    assert "2 dropped" in (tmp_path / "mix.html").read_text()
    other = tmp_path / "dark.html"
    result = CliRunner().invoke(cli.app, ["view", str(file), "--no-open", "--dark", "-o", str(other)])
    assert result.exit_code == 0
    assert len(opened) == 1
    assert ":root { --ground: #111111" in other.read_text()
    result = CliRunner().invoke(cli.app, ["view", str(file), "--no-open", "-o", str(tmp_path / "nowhere" / "x.html")])
    assert isinstance(result.exception, OutputError)


def test_help_says_what_paellapy_is_and_its_version_can_be_asked_for() -> None:
    assert "which block of which kernel ran on which SM" in CliRunner().invoke(cli.app, ["--help"]).output
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"paellapy {versions()['paellapy']}\n")
