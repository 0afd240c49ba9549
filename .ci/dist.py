"""Builds the wheel and the source distribution into dist/, checks both, and tries each in a fresh environment.

    python .ci/dist.py [--no-install]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TRY = """
import numpy as np, triton, triton.language as tl, paellapy as pp
assert "site-packages" in pp.__file__, pp.__file__
for name in pp.__all__: getattr(pp, name)
t = pp.recordings.load("tail-effect")
print(t)
"""


def build() -> tuple[Path, Path]:
    """Both, from a copy of the tracked files: building leaves nothing in the tree."""
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), temporary], check=True)
        DIST.mkdir(exist_ok=True)
        made = []
        for kind in ("wheel", "sdist"):
            code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(DIST)!r}))"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=temporary, stdout=subprocess.PIPE, text=True, check=True)
            made.append(DIST / done.stdout.splitlines()[-1])
    return made[0], made[1]


def check(wheel: Path, sdist: Path) -> None:
    """The version of pyproject.toml, the licence, and the types are in both."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        said = archive.read(metadata).decode()
    assert f"\nVersion: {version}\n" in said
    assert "paellapy/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "paellapy/py.typed"} <= inside
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True)  # as PyPI reads them


def install(package: Path, folder: Path) -> None:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [python, "-m", "pip", "install", "--quiet", package],
        [python, "-c", TRY],
        [folder / "bin" / "paellapy", "version"],
        [folder / "bin" / "paellapy", "simulate", "mix", "--seconds", "0.05", "-p", "streams"],
    ):
        print("+", *command, flush=True)
        subprocess.run([str(each) for each in command], cwd=folder, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-install", action="store_true", help="only build and look inside")
    given = parser.parse_args()
    wheel, sdist = build()
    check(wheel, sdist)
    if not given.no_install:
        for package in (wheel, sdist):
            with tempfile.TemporaryDirectory() as temporary:
                install(package, Path(temporary))
    print(f"{wheel}\n{sdist}")


if __name__ == "__main__":
    main()
