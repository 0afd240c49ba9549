"""The package: one import root, whatever lies beside the script, from a wheel and from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

from paellapy.instrument.traces import Elsewhere
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.sim.results import Results

pytestmark = pytest.mark.xdist_group("wheel")  # it is built once

OURS = ("instrument", "scheduler", "serving")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the repository, so that building leaves nothing in the original."""
    folder = tmp_path_factory.mktemp("source")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if name.startswith(("benchmarks/results/", "docs/", "notebooks/", "tests/")) or not (ROOT / name).exists():
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (folder / name).symlink_to(os.readlink(ROOT / name))
        else:
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def build(source: Path, into: Path, kind: str) -> Path:
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("wheel"), "wheel")


def test_a_wheel_holds_one_package_and_all_of_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"paellapy"}
    held = {name.removeprefix("paellapy/") for name in names if name.startswith("paellapy/")}
    for folder in (*OURS, "paellapy"):
        root = ROOT / folder
        for path in root.rglob("*"):
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                kept = path.relative_to(ROOT if folder != "paellapy" else root).as_posix()
                assert kept in held, f"{kept} is not in the wheel"


def test_a_source_distribution_holds_one_package(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build(source, tmp_path, "sdist")) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert not any(member.issym() for member in archive.getmembers())
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert {folder for folder in folders if not folder.endswith(".egg-info")} == {"paellapy"}
    assert {f"paellapy/{folder}/__init__.py" for folder in OURS} < names


def without_path() -> dict[str, str]:
    """This environment without PYTHONPATH, on which pip would take a repository for an installed package."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, installed by pip. Dependencies are this environment's; `make dist` fetches
    them.
    """
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    install = [*pip, "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, env=without_path(), capture_output=True, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_an_installed_wheel_has_its_command(fresh: Path) -> None:
    command = [str(fresh / "bin" / "paellapy"), "version"]
    done = subprocess.run(command, env=without_path(), cwd=fresh, capture_output=True, text=True, check=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version in done.stdout


@pytest.mark.parametrize("installed", ["wheel", "editable"])
def test_a_script_may_lie_beside_files_with_names_of_our_folders(installed: str, fresh: Path, tmp_path: Path) -> None:
    """And beside a package of such a name, as PyPI has them."""
    beside = tmp_path / "script"
    (beside / "scheduler").mkdir(parents=True)
    for name in ("instrument.py", "scheduler/__init__.py", "serving.py"):
        (beside / name).write_text("MINE = True\n")
    (beside / "queue_of_jobs.py").write_text(
        "import instrument, scheduler, serving\n"
        "import paellapy as pp\n"
        "for name in pp.__all__:\n    getattr(pp, name)\n"
        "import paellapy.scheduler.engine.engine\n"
        "assert instrument.MINE and scheduler.MINE and serving.MINE\n"
        "print(pp.__file__)\n"
    )
    environment = without_path()
    if installed == "wheel":
        (root,) = fresh.glob("lib/python*/site-packages")
        command = [str(fresh / "bin" / "python"), str(beside / "queue_of_jobs.py")]
    else:
        root, command = ROOT, [sys.executable, str(beside / "queue_of_jobs.py")]
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environment, cwd=beside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == root / "paellapy" / "__init__.py"


@pytest.mark.parametrize("folder", OURS)
def test_a_folder_refuses_to_be_a_second_copy_of_itself(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert f"import paellapy.{folder}" in done.stderr.splitlines()[-1]


def printed(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["paellapy", "paellapy.cli"])
def test_importing_the_package_imports_none_of_what_it_may_need(module: str) -> None:
    heavy = {"numpy", "numba", "triton", "aiohttp", "torch", "plotly", "matplotlib"}
    assert printed(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()\n"


def test_methods_from_above_are_there_without_another_import() -> None:
    code = "import paellapy as pp; t = pp.recordings.load('tail-effect'); print(t.plot.__name__, t.to_html.__name__)"
    assert printed(code).split() == ["plot", "to_html"]


def test_every_method_from_above_has_a_home() -> None:
    for owner in (Trace, Results):
        names = [name for name, value in vars(owner).items() if isinstance(value, Elsewhere)]
        assert names
        assert all(callable(getattr(owner, name)) for name in names)


def test_the_package_offers_what_is_public_and_nothing_else() -> None:
    code = (
        "import types, paellapy as pp\n"
        "for name in pp.__all__: getattr(pp, name)\n"
        "others = {n for n, v in vars(pp).items() if not n.startswith('_') and not isinstance(v, types.ModuleType)}\n"
        "print(others - set(pp.__all__) - {'annotations'}, sorted(dir(pp)) == sorted(pp.__all__))\n"
    )
    assert printed(code) == "set() True\n"
