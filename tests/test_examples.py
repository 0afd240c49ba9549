"""Every file of examples/ runs as it stands. One process runs the scripts one after the other."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from places import ROOT

from paellapy.serving.build import build_entries
from paellapy.serving.config import load_config

pytestmark = pytest.mark.xdist_group("examples")  # few tests that take long

EXAMPLES = ROOT / "examples"
SERVED = {"client.py", "aiohttp_app.py"}  # run against a server, below
NEEDS = {"two_torch_models": "torch", "train_beside": "torch", "jpeg_label": "simplejpeg"}


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in SERVED))
def test_a_script_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(NEEDS.get(Path(name).stem, "numpy"))
    runpy.run_path(name, run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_configuration_is_right_and_its_factories_exist(path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "numpy"))
    config, source = load_config(path)
    entries = build_entries(config, source)
    assert len(entries) == len(config.models) > 0


@pytest.mark.usefixtures("beside")
def test_the_client_gets_its_answer_from_the_application() -> None:
    made = runpy.run_path("aiohttp_app.py")["make_app"]()

    async def ask() -> tuple[str, str]:
        async with TestClient(TestServer(made)) as client:
            url = str(client.make_url("/inference"))
            own = await (await client.get("/")).text()
            ran = await asyncio.to_thread(
                subprocess.run, [sys.executable, "client.py", url], capture_output=True, text=True, check=True
            )
            return own, ran.stdout

    own, printed = asyncio.run(ask())
    assert own == "my own page\n"
    assert printed.split() == ["digit", "4"]


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        if path.suffix in (".py", ".toml"):
            assert f"]({path.name})" in table, path.name


def test_scripts_need_no_other_script() -> None:
    """They are to be copied: no imports of tests or of each other."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert not [name for name in names if f"import {name}" in text or f"from {name}" in text], path.name
