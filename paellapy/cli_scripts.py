"""`paellapy run --best-effort script.py …`: runs an unchanged script beside a running engine."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from paellapy.instrument.device import Device, launch_hook
from paellapy.instrument.device.launch_hook import Cells
from paellapy.instrument.errors import PaellaError, TraceError
from paellapy.instrument.traces.session import trace
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.core.rings import SharedBlock
from paellapy.scheduler.engine.guests import Greeting, GreetingError, NoEngineError, knock
from paellapy.viz.palette import need


class RunError(PaellaError):
    """`paellapy run` was given a script or an option that it cannot use."""


def warn_of_own_options(context: typer.Context) -> None:
    """Warns of options behind the script that this command has too: the script gets them, and the command does not."""
    own = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(each.partition("=")[0] for each in context.args):
        if name.startswith("-") and name in own:
            said = f"warning: {name} stands behind the script, so the script gets it; `paellapy {context.info_name}` "
            typer.echo(f"{said}reads its own options before the script", err=True)


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script to run; it gets the arguments that follow")],
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="required: launches and copies wait while the engine needs the GPU")
    ] = False,
    share: Annotated[float, typer.Option(help="part of the time in which it may launch, from 0.01 to 1")] = 1.0,
    priority: Annotated[int, typer.Option(help="priority of the script: it waits for jobs of higher priority")] = -1,
    engine: Annotated[
        str | None, typer.Option(help="process id or socket of the engine  [dim](this user's newest)[/dim]")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="queued kernels after which it waits for the GPU; 0: no limit")
    ] = 0,
    name: Annotated[str | None, typer.Option(help="name of the script in the engine  [dim](file name)[/dim]")] = None,
) -> None:
    """Run a script beside an engine that holds its GPU work back while requests need the GPU.

    The script needs no change. If the engine ends, the script continues without it.
    """
    if not best_effort:
        said = "`paellapy run` needs --best-effort: write `paellapy run --best-effort script.py`"
        raise RunError(said)
    from paellapy.instrument.device.launch_hook import LEAST_SHARE

    if not LEAST_SHARE <= share <= 1:
        raise RunError(f"--share is {share}: give a part of the time, from {LEAST_SHARE} to 1")
    if in_flight < 0:
        raise RunError(f"--in-flight is {in_flight}: give a number of kernels, or 0 for no limit")
    path = Path(script)
    if not path.is_file():
        raise RunError(f"there is no script {script}: check its path")
    warn_of_own_options(context)

    Guest(name or path.stem, priority, share, engine, in_flight).join()
    gc.collect()
    gc.freeze()  # the collector need not search the modules imported for the gate
    sys.argv = [script, *context.args]
    sys.path[0] = str(path.resolve().parent)
    sys.exit(run_as_main(path.absolute()))


# `paellapy run --best-effort script.py`: this process's launches wait while an engine needs the GPU for itself.
#
# The gate is a block of words that the engine hands over. If the engine ends, the gate opens; if another engine starts,
# this process becomes its guest.


_MOST_IN_FLIGHT = 1 << 32
_ANSWER_S = 5.0  # an engine that does not answer within this time counts as absent
_RETRY_S = 1.0
_FIRST_S, _LAST_S = 0.02, 2.0  # pause between two searches for libraries: at first, and later
_PAUSES = 25  # a pause is at least this many times the processor time of a search


class Guest:
    """This process as the guest of an engine."""

    def __init__(
        self, name: str, priority: int = -1, share: float = 1.0, engine: str | None = None, in_flight: int = 0
    ) -> None:
        if not 0 <= in_flight <= _MOST_IN_FLIGHT:
            raise GreetingError(f"in_flight={in_flight}; it must be a number of kernels up to 2³², or 0 for no limit")
        self._in_flight = in_flight
        self._about = Greeting(name, priority, share, os.getpid())
        self._engine = engine
        self._free: NDArray[np.uint64] = np.zeros(launch_hook.WORDS, np.uint64)
        self._free[launch_hook.SHARE] = launch_hook.SHARE_UNIT
        self.cell = np.zeros(1, np.uint64)  # address of the gate's words in use, for compiled code
        self._block: SharedBlock | None = None
        self._left: list[Any] = []  # blocks that other threads may still read
        self._patched = 0  # pointers to the driver that lead through the gate
        self._open()
        self.name = ""

    @property
    def words(self) -> NDArray[np.uint64]:
        return self._free if self._block is None else self._block.array[: 8 * launch_hook.WORDS].view(np.uint64)

    def join(self) -> None:
        """Becomes the engine's guest, after which launches wait at the gate. NoEngineError if that is not possible."""
        self._follow(self._connect())
        launch_hook.keep_forever(self)  # the driver's callers read `cell` and the words
        launch_hook.hold = lambda: launch_hook.Gate(self.words).wait()
        self._watch()
        os.register_at_fork(after_in_child=self._after_fork)

    def _watch(self) -> None:
        threading.Thread(target=self._watch_driver, name="paellapy-gate", daemon=True).start()

    def _after_fork(self) -> None:
        """A forked process shares the words, and so the gate. If the driver is in use already, the fork cannot use it.
        """
        if not self._patched:
            self._watch()

    def _connect(self) -> socket.socket:
        line = knock(self._engine)
        line.settimeout(_ANSWER_S)
        try:
            line.send(self._about.message())
            said, descriptors, _, _ = socket.recv_fds(line, 4096, 1)
            answer = json.loads(said) if said else {"error": "it closed the connection"}
            if not descriptors or not isinstance(answer, dict):
                why = answer.get("error") if isinstance(answer, dict) else answer
                raise NoEngineError(f"the engine refused this process: {why}")
            block = SharedBlock.of(descriptors[0])
        except (OSError, ValueError) as e:
            line.close()
            raise NoEngineError(f"the engine does not answer: {e}") from e
        except NoEngineError:
            line.close()
            raise
        line.settimeout(None)
        self.name, self._block = str(answer.get("name")), block
        block.array[: 8 * launch_hook.WORDS].view(np.uint64)[launch_hook.IN_FLIGHT] = self._in_flight
        self.cell[0] = block.address
        return line

    def _open(self) -> None:
        """Opens the gate: without an engine, nothing waits."""
        self._left.append(self._block)
        self._block = None
        self.cell[0] = self._free.ctypes.data

    def _follow(self, line: socket.socket) -> None:
        def follow() -> None:
            current: socket.socket | None = line
            while True:
                if current is not None:
                    with contextlib.suppress(OSError):
                        current.recv(1)  # returns when the engine ends, since it sends nothing
                    current.close()
                    self._open()
                    current = None
                time.sleep(_RETRY_S)
                with contextlib.suppress(NoEngineError):
                    current = self._connect()

        threading.Thread(target=follow, name="paellapy-guest", daemon=True).start()

    def _watch_driver(self) -> None:
        """Puts the gate before the driver's launch functions, whenever a library has looked them up."""
        cells = Cells(int(self.cell.ctypes.data))
        wait_s = _FIRST_S
        while True:
            began = time.thread_time()
            # Libraries fill their tables on first use, which may be late in a script. So the search never ends, but
            # takes a small part of the time.
            new = cells.look()
            wait_s = _FIRST_S if new or not cells.patched else min(1.5 * wait_s, _LAST_S)
            if cells.patched:
                self._patched = self.words[launch_hook.CELLS] = cells.patched
            time.sleep(max(wait_s, _PAUSES * (time.thread_time() - began)))


# Runs a script in this process as `python script.py` would: for `paellapy run` and `paellapy trace`.


_INTERRUPTED = 130  # exit code that shells expect after Ctrl-C


def run_as_main(script: Path) -> int:
    """Runs a script as `python script.py` would, and returns the exit code."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_from_script(error.__traceback__, script)))
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _from_script(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback without the frames that led into the script; empty for a script that does not compile."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames


# Checks that a command can write its output, before the work is done.


class OutputError(PaellaError):
    """A file cannot be written at the given path."""


def check_output(path: Path) -> None:
    """Raises OutputError unless a file can be written there."""
    folder = path.parent
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give the name of a file in it")
    if not folder.is_dir():
        raise OutputError(f"{path} cannot be written: the folder {folder} does not exist; create it or choose another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(f"{path} cannot be written: permission denied; choose another folder")


def check_picture(path: Path, what: str) -> None:
    """The same for a picture, which also needs matplotlib and a supported file name extension."""
    check_output(path)
    endings = need("matplotlib.backend_bases", what).FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise OutputError(f"{path} cannot hold a picture: give a name that ends in .{', .'.join(sorted(endings))}")


# `paellapy trace script.py`: runs a script as Python would, and records every instrumented kernel it launches.


@dataclass(frozen=True, slots=True)
class Ran:
    trace: Trace
    exit_code: int  # of `python script.py`


def run_script(
    script: Path, arguments: Sequence[str] = (), device: str | None = None, records_per_sm: int = 1 << 14
) -> Ran:
    """Runs a script as `__main__` inside `trace()`; an exception of the script is printed as Python prints it."""
    if not script.is_file():
        raise TraceError(f"there is no script {script}: check its path")
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with Device.open(device) if device else nullcontext(), trace(records_per_sm) as t:
            exit_code = run_as_main(script)
    finally:
        sys.argv, sys.path[:] = before
    return Ran(t, exit_code)
