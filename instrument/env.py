"""The process that we run in: its share of the GPU's queues, its packages and imports, and the garbage collector."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import shlex
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

# --- hardware queues ------------------------------------------------------------------------------------------------
# Launches of a process share 8 of the GPU's hardware queues by default, and work in a queue waits for a long graph in
# front of it. CUDA reads the number when a process first uses a GPU; other libraries may do so before an engine does.
# So the number is set when paellapy is imported, unless the user has already chosen one.

CONNECTIONS, ALL = "CUDA_DEVICE_MAX_CONNECTIONS", 32

_late = False  # whether the GPU was in use before the number was set


def ask_for_all_queues() -> None:
    """Lets this process use every queue, unless a number was already chosen."""
    global _late
    if CONNECTIONS not in os.environ:
        _late = gpu_in_use()
        os.environ[CONNECTIONS] = str(ALL)


def warn_if_few_queues() -> None:
    """Warns if it was too late to set the number: requests would be slow in bursts for no visible reason."""
    if _late:
        warnings.warn(
            "this process used the GPU before paellapy was imported: its launches share 8 of the GPU's hardware "
            f"queues and wait for each other there in bursts. Import paellapy first, or set {CONNECTIONS}={ALL} before "
            "anything uses the GPU",
            stacklevel=5,  # the caller that creates the engine
        )


def gpu_in_use() -> bool:
    """Whether any code in this process has a context on a GPU. Loads and starts nothing."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count, device, flags, active = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):  # not initialised
        return False
    for i in range(count.value):
        if cuda.cuDeviceGet(ctypes.byref(device), i):
            continue
        state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        if not state and active.value:
            return True
    return False


# --- modules that are imported later ----------------------------------------------------------------------------------


class ImportHook:
    """Finds no module itself: calls a function with one module once others have found and loaded it."""

    def __init__(self, name: str, loaded: Callable[[ModuleType], object]) -> None:
        self._name, self.loaded = name, loaded

    def add(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        # Those behind this hook, which may be others for the same module.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else sys.meta_path
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                load(module)
                self.loaded(module)

            spec.loader.exec_module = load_and_tell  # type: ignore[method-assign]
        return spec


# --- versions of packages: for traces, benchmark results and `paellapy doctor` ---------------------------------------

_PACKAGES = ("paellapy", "triton", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numba", "numpy", "torch")


@functools.cache
def _installed() -> tuple[tuple[str, str], ...]:
    import platform
    from importlib import metadata  # slow, and `import paellapy` needs neither

    found = [("python", platform.python_version())]
    for package in _PACKAGES:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            if package == "paellapy":  # run from its source tree without being installed
                found.append((package, "0+source"))
    return tuple(found)


def versions() -> dict[str, str]:
    """Package → version, for installed packages; paellapy itself is always included."""
    return dict(_installed())


def install_line(extra: str) -> str:
    """The command that adds an extra to this installation: from the clone, wheel or repository that it came from.

    >>> install_line("viz").startswith("pip install ")
    True
    """
    clone = Path(__file__).parents[2]  # this folder is linked into the package
    if (clone / "pyproject.toml").exists():
        return f"pip install --editable {shlex.quote(f'{clone}[{extra}]')}"
    from importlib import metadata

    try:
        origin = json.loads(metadata.distribution("paellapy").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        origin = {}
    url = origin.get("url", "")
    if url.startswith("file://"):
        return f"pip install {shlex.quote(f'{unquote(url[7:])}[{extra}]')}"
    vcs = origin.get("vcs_info", {}).get("vcs")
    at = f" @ {vcs + '+' if vcs else ''}{url}" if url else ""
    return f"pip install {shlex.quote(f'paellapy[{extra}]{at}')}"


def cuda_line() -> str:
    return f"{install_line('cuda13')} (cuda12 for drivers older than 580)"


# --- progress ---------------------------------------------------------------------------------------------------------
# A line on stderr while work takes long. On a terminal it disappears afterwards. PAELLAPY_QUIET=1 turns it off.


def show_progress(text: str) -> bool:
    """Shows the line; whether `erase_progress` has to be called afterwards."""
    if os.environ.get("PAELLAPY_QUIET"):
        return False
    if not sys.stderr.isatty():
        _stderr().print(text, soft_wrap=True)
        return False
    _stderr().print(text, style="dim", end="\r", soft_wrap=False, overflow="ellipsis", no_wrap=True)
    return True


def erase_progress() -> None:
    from rich.control import Control
    from rich.segment import ControlType

    _stderr().control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


def _stderr() -> Any:
    return console(stderr=True)


def console(**options: Any) -> Any:
    """A rich console that says no more once its reader is gone. Rich would end the process, which may be a server."""
    from rich.console import Console  # imported only if a line is shown

    found: Any = Console(**options)
    found.on_broken_pipe = lambda: setattr(found, "quiet", True)
    return found


@contextlib.contextmanager
def progress(text: str, patience_s: float = 1.0) -> Iterator[None]:
    """Shows the line if what is inside takes longer than this."""
    lock, shown, over = threading.Lock(), False, False

    def show() -> None:
        nonlocal shown
        with lock:
            shown = not over and show_progress(text)

    timer = threading.Timer(patience_s, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            if shown:
                erase_progress()


# --- garbage collector ----------------------------------------------------------------------------------------------

_lock = threading.Lock()
_pauses: list[bool] = []  # one per thread inside: whether the collector was on before the first


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Lets no garbage collection begin inside, also while other threads leave. Objects without cycles are freed as
    always.
    """
    with _lock:
        _pauses.append(_pauses[0] if _pauses else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            was = _pauses.pop()
            if was and not _pauses:
                gc.enable()


def live_instances(kind: type) -> list[Any]:
    """The objects of this class and of its subclasses, except those that were spared by `gc.freeze`.

    Every object that the collector knows refers to its class, if the class was made in Python. `gc.get_objects` would
    also return objects that are not finished: CPython cannot finish a tuple that it makes of a generator while another
    thread holds the tuple.
    """
    kinds, waiting = {kind}, [kind]
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        waiting += [each for each in below if each not in kinds]
        kinds.update(below)
    # By its type: an object's own __class__ may be a property with side effects.
    return [each for each in gc.get_referrers(*kinds) if issubclass(type(each), kind)]
