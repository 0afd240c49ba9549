"""Does what a stranger does with docs/start.md and docs/service.md, in a fresh clone without any cache.

    python3 .ci/start.py [--limit 300] [--json FILE] [--downloads]

Every block ```sh of the two pages is run; ```sh server is a server, which runs until the next one or the page's end. A
folder or a variable that a block sets holds for the next one. It then resolves every line on a page that installs
paellapy. The exit code is 1 if one fails, a section is not done within the limit, or a page has no such blocks any
more. Needs PyPI.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
PORT = 8000
READY = f"://127.0.0.1:{PORT}/v2/health/ready"
PAGES = {"start.md": (4, 1), "service.md": (5, 2)}  # sections and servers at least; fewer: this script reads it wrongly
STOP_S = 60.0
KEEP = '{ { export -p; printf "cd %q\\n" "$PWD"; } > "$STATE"; } 2>/dev/null'


def sections(page: str) -> dict[str, list[tuple[bool, str]]]:
    """Title → its blocks: whether it is a server, and its lines."""
    found: dict[str, list[tuple[bool, str]]] = {}
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, text = part.partition("\n")
        blocks = re.findall(r"^```sh( server)?\n(.*?)^```$", text, re.M | re.S)
        if blocks:
            found[title] = [(bool(server), lines) for server, lines in blocks]
    return found


def check_page(name: str, found: dict[str, list[tuple[bool, str]]]) -> None:
    servers = sum(server for blocks in found.values() for server, _ in blocks)
    if len(found) < PAGES[name][0] or servers < PAGES[name][1]:
        raise RuntimeError(f"docs/{name}: only {len(found)} sections with commands and {servers} servers were found")


def check_port() -> None:
    """Another server there would answer in place of ours."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            raise RuntimeError(f"port {PORT} is in use: stop the server there first")


def is_ready(scheme: str) -> bool:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE  # whether clients trust it, blocks show
    try:
        with urlopen(scheme + READY, timeout=2, context=trusting) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def wait_until_ready(process: subprocess.Popen[bytes], limit_s: float) -> None:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        if is_ready("http") or is_ready("https"):
            return
        time.sleep(0.5)
    raise TimeoutError(f"the server was not ready after {limit_s:.0f} s")


def by_uv(lines: str) -> str:
    """The same installations, from the same places into the environment $VIRTUAL_ENV, in a tenth of pip's time."""
    return re.sub(r"(?<![\w./-])(?:\.venv/bin/)?pip install\b", "uv pip install --quiet", lines)


class Terminal:
    """Runs a page's blocks one after the other."""

    def __init__(self, folder: Path, environment: dict[str, str], limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._state = Path(tempfile.mkdtemp(), "state")
        self._environment = {**environment, "STATE": str(self._state)}
        self._server: subprocess.Popen[bytes] | None = None

    def run(self, server: bool, lines: str) -> None:
        if "UV_CACHE_DIR" in self._environment:
            lines = by_uv(lines)
        before = f'. "{self._state}"' if self._state.exists() else ":"
        script = f"{{ {before}; }} >/dev/null 2>&1; set -x\n{lines}\n{'' if server else KEEP}"
        command = ["bash", "-euo", "pipefail", "-c", script]
        if not server:
            subprocess.run(command, cwd=self._folder, env=self._environment, check=True, timeout=self._limit_s)
            return
        self.stop()
        check_port()
        self._server = subprocess.Popen(command, cwd=self._folder, env=self._environment, start_new_session=True)
        wait_until_ready(self._server, self._limit_s)

    def stop(self) -> None:
        """Ends the server, as Ctrl-C does, and waits until it has answered its last requests."""
        process, self._server = self._server, None
        if process is None:
            return
        end = time.monotonic() + STOP_S
        with contextlib.suppress(ProcessLookupError):  # raised once all processes of the group have ended
            os.killpg(process.pid, signal.SIGTERM)
            while time.monotonic() < end:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
            raise TimeoutError(f"the server did not stop within {STOP_S:.0f} s")

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._state.parent)


def run_page(name: str, clone: Path, environment: dict[str, str], limit_s: float) -> dict[str, float]:
    """Section → seconds."""
    found = sections((clone / "docs" / name).read_text())
    check_page(name, found)
    taken: dict[str, float] = {}
    terminal = Terminal(clone, environment, limit_s)
    try:
        for title, blocks in found.items():
            began = time.monotonic()
            for server, lines in blocks:
                try:
                    terminal.run(server, lines)
                except (subprocess.SubprocessError, RuntimeError, TimeoutError) as error:
                    raise RuntimeError(f"docs/{name}, {title}: {error}") from error
            taken[title] = round(time.monotonic() - began, 1)
            print(f"{title}: {taken[title]} s", flush=True)
            if taken[title] > limit_s:
                raise TimeoutError(f"docs/{name}, {title}: took longer than {limit_s:.0f} s")
    finally:
        terminal.close()
    return taken


def install_lines(root: Path) -> list[tuple[str, ...]]:
    """What the pages let pip install together with paellapy, once each."""
    found = set()
    for page in (root / "README.md", root / "notebooks" / "README.md", *sorted((root / "docs").glob("*.md"))):
        lines = re.findall(r"pip install ([^`#\n]*)", page.read_text())
        found.update(tuple(shlex.split(line)) for line in lines if "'.[" in line)
    return sorted(found)


def pip(python: Path) -> list[str]:
    """pip's command, or uv's, which resolves without downloading packages."""
    by = ["uv", "pip", "install", "--python", str(python)]
    return by if shutil.which("uv") else [str(python), "-m", "pip", "install"]


def resolve(lines: Iterable[tuple[str, ...]], clone: Path, environment: dict[str, str]) -> None:
    """Raises unless each of these lines finds all its packages."""

    def dry(line: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [*pip(clone / ".venv" / "bin" / "python"), "--quiet", "--dry-run", *line]
        return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)

    with ThreadPoolExecutor(4) as pool:
        for line, done in zip(lines, pool.map(dry, lines), strict=True):
            if done.returncode:
                raise RuntimeError(f"pip install {shlex.join(line)}: {done.stderr}")


def install_torch(clone: Path, environment: dict[str, str]) -> None:
    """The version that the tests have, which is in uv's cache: pip would fetch the newest with all of CUDA."""
    dev = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    wanted = [each for each in dev if re.match(r"torch==|openai|tritonclient", each)]
    command = [*pip(clone / ".venv" / "bin" / "python"), "--quiet", *wanted]
    subprocess.run(command, cwd=clone, env=environment, check=True)


def _pip_cache() -> str:
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each section")
    parser.add_argument("--json", type=Path, help="where to keep the seconds")
    parser.add_argument("--downloads", action="store_true", help="use packages that pip or uv has downloaded before")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone, caches = Path(temporary, "paellapy"), Path(temporary, "caches")
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
        names = ("PAELLAPY_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
        # pip's own cache lies in the folder of caches, too.
        downloads = {"PIP_CACHE_DIR": _pip_cache()} if given.downloads else {"PIP_NO_CACHE_DIR": "1"}
        fresh = {name: str(caches / name) for name in names}
        environment = {**os.environ, **fresh, **downloads, "VIRTUAL_ENV": str(clone / ".venv")}
        if not given.downloads:
            environment.pop("UV_CACHE_DIR", None)
        environment.pop("PYTHONPATH", None)
        try:
            taken = run_page("start.md", clone, environment, given.limit)
            install_torch(clone, environment)
            taken |= run_page("service.md", clone, environment, given.limit)
            began = time.monotonic()
            resolve(lines := install_lines(clone), clone, environment)
            print(f"{len(lines)} lines that install: {time.monotonic() - began:.1f} s")
        except (subprocess.SubprocessError, RuntimeError, TimeoutError) as error:
            print(error, file=sys.stderr)
            return 1
    if given.json:
        given.json.write_text(json.dumps(taken, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
