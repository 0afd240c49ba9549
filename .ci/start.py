"""Runs the commands of docs/start.md in a fresh clone without any cache, and says how long each took.

    python3 .ci/start.py [--limit 300] [--json FILE] [--downloads]

A block ```sh is run to its end; a block ```sh server runs until all other blocks of its section are done. The exit code
is 1 if a block fails, a section is not done within the limit, or the page has no such blocks any more. Needs PyPI.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
PORT = 8000
READY = f"http://127.0.0.1:{PORT}/v2/health/ready"
SECTIONS, SERVERS = 4, 1  # at least; fewer: the page was changed and this script reads it wrongly


def sections(page: str) -> dict[str, list[tuple[bool, str]]]:
    """Title → its blocks: whether it is a server, and its lines."""
    found: dict[str, list[tuple[bool, str]]] = {}
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        title, _, text = part.partition("\n")
        blocks = re.findall(r"^```sh( server)?\n(.*?)^```$", text, re.M | re.S)
        if blocks:
            found[title] = [(bool(server), lines) for server, lines in blocks]
    return found


def check_page(found: dict[str, list[tuple[bool, str]]]) -> None:
    servers = sum(server for blocks in found.values() for server, _ in blocks)
    if len(found) < SECTIONS or servers < SERVERS:
        raise RuntimeError(f"docs/start.md: only {len(found)} sections with commands and {servers} servers were found")


def check_port() -> None:
    """Another server there would answer in place of ours."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            raise RuntimeError(f"port {PORT} is in use: stop the server there first")


def wait_until_ready(process: subprocess.Popen[bytes], limit_s: float) -> None:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urlopen(READY, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(0.5)
    raise TimeoutError(f"the server was not ready after {limit_s:.0f} s")


def run_section(blocks: list[tuple[bool, str]], folder: Path, environment: dict[str, str], limit_s: float) -> None:
    servers: list[subprocess.Popen[bytes]] = []
    try:
        for server, lines in blocks:
            command = ["bash", "-euxo", "pipefail", "-c", lines]
            if server:
                check_port()
                servers.append(subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True))
                wait_until_ready(servers[-1], limit_s)
            else:
                subprocess.run(command, cwd=folder, env=environment, check=True, timeout=limit_s)
    finally:
        for process in servers:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def _pip_cache() -> str:
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each section")
    parser.add_argument("--json", type=Path, help="where to keep the seconds")
    parser.add_argument("--downloads", action="store_true", help="use packages that pip has downloaded before")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        clone, caches = Path(temporary, "paellapy"), Path(temporary, "caches")
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)], check=True)
        names = ("PAELLAPY_CACHE_DIR", "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
        # pip's own cache lies in the folder of caches, too.
        downloads = {"PIP_CACHE_DIR": _pip_cache()} if given.downloads else {"PIP_NO_CACHE_DIR": "1"}
        environment = {**os.environ, **{name: str(caches / name) for name in names}, **downloads}
        environment.pop("PYTHONPATH", None)
        taken: dict[str, float] = {}
        found = sections((clone / "docs" / "start.md").read_text())
        try:
            check_page(found)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        for title, blocks in found.items():
            began = time.monotonic()
            try:
                run_section(blocks, clone, environment, given.limit)
            except (subprocess.SubprocessError, RuntimeError, TimeoutError) as error:
                print(f"{title}: {error}", file=sys.stderr)
                return 1
            taken[title] = round(time.monotonic() - began, 1)
            print(f"{title}: {taken[title]} s", flush=True)
    if given.json:
        given.json.write_text(json.dumps(taken, indent=1) + "\n")
    slow = [title for title, seconds in taken.items() if seconds > given.limit]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
