"""Code in processes of its own that need not import anything: one process imports, and forks for every case."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import TracebackType

from places import TESTS

# A case that reached its end says "done". Threads and exit handlers of a case end with its process.
_SERVER = """
import json as _json, os as _os, sys as _sys, traceback as _traceback

def _run(case):
    for number, name in enumerate(("out", "err"), 1):
        _os.dup2(_os.open(case[name], _os.O_WRONLY | _os.O_CREAT), number)
    _os.environ.update(case["environment"])
    status = 1
    try:
        exec(compile(case["code"], "case", "exec"), globals())
        status = print("done") or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else print(end.code, file=_sys.stderr) or 1
    except BaseException:
        _traceback.print_exc()
    finally:
        _sys.stdout.flush()
        _sys.stderr.flush()
        _os._exit(status)

for _line in _sys.stdin:
    if not (_child := _os.fork()):
        _run(_json.loads(_line))
    print(_os.waitstatus_to_exitcode(_os.waitpid(_child, 0)[1]), flush=True)
"""


class Forked:
    """Runs cases, each in a process of its own in which `head` has been run. The head must start no threads."""

    def __init__(self, head: str) -> None:
        self._head = head
        self._start()

    def _start(self) -> None:
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(self._head) + _SERVER],
            env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},  # BLAS must start none either
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, code: str, folder: Path, cache: Path | None = None) -> None:
        """Runs code to its end. Its output goes to the folder, and so does what it compiles unless `cache` is given."""
        status, said, complained = self.outcome(code, folder, {"PAELLAPY_CACHE_DIR": str(cache or folder)})
        assert status == "0", f"{status}: {complained}"
        assert said.endswith("done\n"), complained

    def outcome(self, code: str, folder: Path, environment: dict[str, str]) -> tuple[str, str, str]:
        """The status with which the code's process ends, and what it writes to standard output and standard error."""
        out, err = folder / "out.txt", folder / "err.txt"
        case = {"code": textwrap.dedent(code), "out": str(out), "err": str(err), "environment": environment}
        if self._process.poll() is not None:  # a case that did not end took it along
            self._start()
        given, told = self._process.stdin, self._process.stdout
        assert given is not None
        assert told is not None
        given.write(json.dumps(case) + "\n")
        given.flush()
        ended, _, _ = select.select([told], [], [], 200.0)
        status = told.readline().strip() if ended else "still running"
        if status == "still running":
            self._end()
        said, complained = (each.read_text() if each.exists() else "" for each in (out, err))
        return status, said, complained

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
