"""Shared by all benchmarks: arguments, result files, facts about the machine, tables, and runs in other checkouts."""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
PRODUCT = ("instrument", "scheduler", "serving", "paellapy")  # its folders
WIDTH = 120  # of a line in a result file, unless it is one array of numbers
DIGITS = 6  # of a stored figure
sys.path.append(str(ROOT / "tests"))  # for the corpus of kernels and the browser

# -- arguments


def arguments(
    doc: str | None, *, device: str = "", quick: bool = False, seeds: range | None = None, seconds: float = 0.0,
    rounds: int = 0, against: bool = False,
) -> argparse.ArgumentParser:  # fmt: skip
    """The options that scripts share; each has those with a value given here, and `--out`."""
    parser = _Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    if device:
        parser.add_argument("--device", default=device, help=f"cuda or virtual:h200 (default: {device})")
    if quick:
        parser.add_argument("--quick", action="store_true", help="smallest sizes: shows that the script runs")
    if seeds is not None:
        parser.add_argument("--seeds", type=seed_range, default=seeds, help="number of seeds, or which, as in 5-9")
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"of each load (default: {seconds:g})")
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of all cases (default: {rounds})")
    if against:
        parser.add_argument("--against", type=Path, help="checkout of another version, measured in turns with this one")
    return parser


class _Parser(argparse.ArgumentParser):
    def parse_args(self, *given: Any, **named: Any) -> Any:
        """Figures of `--quick` mean nothing: they do not replace stored ones."""
        found = super().parse_args(*given, **named)
        if getattr(found, "quick", False) and found.out == RESULTS:
            found.out = Path(tempfile.gettempdir()) / "paellapy-benchmarks"
        return found


def seed_range(text: str) -> range:
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if dash else range(int(first))
    if not found:
        raise argparse.ArgumentTypeError(f"there is no seed in {text!r}: give their number, or which, as in 5-9")
    return found


def trees(o: argparse.Namespace) -> dict[str, Path]:
    """This checkout and, with `--against`, another one."""
    return {"now": ROOT} | ({"before": o.against.resolve()} if o.against else {})


def need_gpu(why: str) -> Any:
    """The GPU of this machine, or the end."""
    from paellapy.instrument.device import CudaDevice, Device

    device = Device("auto")
    if not isinstance(device, CudaDevice):
        raise SystemExit(f"{why}: this needs a GPU")
    return device


# -- facts


@functools.cache
def commit(checkout: Path = ROOT) -> str:
    """The commit measured; "+" marks uncommitted changes. $PAELLAPY_COMMIT names it in a copy without git."""
    if checkout == ROOT and (named := os.environ.get("PAELLAPY_COMMIT")):
        return named
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def commits(o: argparse.Namespace) -> dict[str, str]:
    """Of this checkout and of the other one."""
    return {name: commit(tree) for name, tree in trees(o).items()}


@functools.cache
def cpu_name() -> str:
    """As lscpu names it: /proc/cpuinfo has no name of an ARM core."""
    try:
        run = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    except (OSError, subprocess.CalledProcessError):
        return platform.machine()
    found = [line.split(":", 1)[1].strip() for line in run.stdout.splitlines() if line.startswith("Model name:")]
    return next(iter(found), platform.machine())


def facts(device: Any = None) -> dict[str, Any]:
    """The machine and the versions that a result was measured with."""
    from paellapy.instrument.env import versions

    return {
        "device": device.title if device else None, "cpu": cpu_name(), "cores": os.cpu_count(), "versions": versions(),
        "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


# -- result files


def dumps(value: Any, indent: int = 0) -> str:
    """JSON in which an array of numbers, or anything short, is one line."""
    flat = json.dumps(value, ensure_ascii=False)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    numbers = isinstance(value, list) and not any(isinstance(each, dict | list | str) for each in value)
    if not inner or numbers or indent + len(flat) <= WIDTH:
        return flat
    start, end = ("{", "}") if isinstance(value, dict) else ("[", "]")
    names = [json.dumps(str(name), ensure_ascii=False) + ": " for name in value] if start == "{" else [""] * len(value)
    lines = (f"{' ' * (indent + 1)}{n}{dumps(v, indent + 1)}" for n, v in zip(names, inner, strict=True))
    return start + "\n" + ",\n".join(lines) + f"\n{' ' * indent}{end}"


def rounded(value: Any) -> Any:
    """With as many digits as mean something; NumPy's numbers and arrays become Python's."""
    if isinstance(value, dict):
        return {str(name): rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if hasattr(value, "tolist"):
        return rounded(value.tolist())
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and abs(value) < 1e6 else value


def save(
    name: str, results: Any, device: Any = None, folder: Path | None = None, *,
    tables: dict[str, list[Sequence[object]]] | None = None, figures: dict[str, str] | None = None,
) -> Path:  # fmt: skip
    """Writes FOLDER/NAME.json with the facts. Earlier figures survive a run that is stopped while it writes.

    `tables` (rows, the first of them the head) and `figures` are what pages quote: docs/figures.py takes them over.
    """
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    content = {"on": facts(device), "results": rounded(results)}
    if tables:
        content["tables"] = {title: [[str(cell) for cell in row] for row in rows] for title, rows in tables.items()}
    if figures:
        content["figures"] = figures
    part.write_text(dumps(content) + "\n")
    os.replace(part, path)
    return path


def stored(name: str, folder: Path | None = None) -> Any:
    """What a script has stored; an empty dictionary if nothing."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.exists() else {}


class Points:
    """Points of a long run, each measured with several seeds: {name: {"seeds": […], "commit": …, figure: […]}}.

    A point keeps the seeds of one commit only; a nested dictionary of figures becomes one of lists.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        self.found = found

    def has(self, name: str, seed: int) -> bool:
        point = self.found.get(name, {})
        return seed in point.get("seeds", ()) and point.get("commit") == commit()

    def add(self, name: str, seed: int, figures: dict[str, Any]) -> None:
        if self.found.get(name, {}).get("commit") != commit():
            self.found[name] = {"commit": commit(), "seeds": []}
        self._append(self.found[name], {"seeds": seed, **figures})

    def _append(self, lists: dict[str, Any], figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            if isinstance(value, dict):
                self._append(lists.setdefault(name, {}), value)
            else:
                lists.setdefault(name, []).append(rounded(value))


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, least and most."""
    found = sorted(values)
    return {"median": statistics.median(found), "least": found[0], "most": found[-1]}


def ranged(values: Sequence[float], digits: int = 2) -> str:
    """Median, and least to most where there are several values."""
    low, middle, high = (f"{f(values):.{digits}f}" for f in (min, statistics.median, max))
    return middle if len(values) == 1 else f"{middle} ({low} … {high})"


def show(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table in the terminal; numbers with four digits."""
    table = Table(title=title, box=None)
    for column in head:
        table.add_column(column, justify="left" if column == head[0] else "right")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)


def finish(
    o: argparse.Namespace, name: str, results: Any, title: str, rows: list[Sequence[object]], device: Any = None, *,
    table: str = "", figures: dict[str, str] | None = None,
) -> None:  # fmt: skip
    """Shows a table, whose first row is its head, and stores it with the results: as `table`, or by the file's name."""
    show(title, rows[0], rows[1:])
    tables = {table or name.replace("_", "-"): rows}
    print(save(name, results, device, o.out, tables=tables, figures=figures))


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure over runs that have the same ones."""
    found: dict[str, Any] = {}
    for name, value in runs[0].items():
        each = [run[name] for run in runs]
        found[name] = medians(each) if isinstance(value, dict) else statistics.median(each)
    return found


# -- processes


def environment(checkout: Path | None = None, **more: str) -> dict[str, str]:
    """Of a process that imports paellapy from that checkout."""
    path = [str(checkout or ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    others = [each for each in path[1:] if each and Path(each) != ROOT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([path[0], *others]), **more}


def script_in(checkout: Path | None, script: str) -> list[str]:
    """The command that runs a benchmark of that checkout: start it with `environment(checkout)`."""
    return [sys.executable, str((checkout or ROOT) / "benchmarks" / Path(script).name)]


def said_by(script: str, *options: str, checkout: Path | None = None) -> Any:
    """The last line that this version of a script writes, as JSON; it imports paellapy from that checkout."""
    command = [sys.executable, script, *options]
    run = subprocess.run(command, env=environment(checkout), cwd=checkout, capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: {run.stderr[-1500:]}")
    return json.loads(run.stdout.splitlines()[-1])


def run_at_once(commands: Iterable[Sequence[str]], seconds: float) -> None:
    """Runs commands beside each other, and ends those that are not done after that time."""
    running = [subprocess.Popen(each, env=environment()) for each in commands]
    ends = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(ends - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class ServerProcess:
    """A script of that checkout which serves in processes of its own, and first writes its address."""

    def __init__(self, script: str, *options: str, checkout: Path | None = None, **streams: Any) -> None:
        command, env = [*script_in(checkout, script), *options], environment(checkout)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=env, **streams)

    @functools.cached_property
    def url(self) -> str:
        """Its address, once it is ready."""
        assert self.process.stdout is not None
        if not (said := self.process.stdout.readline().strip()):
            raise SystemExit(f"a server did not start: {self.process.args!s}")
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate()


def announce(url: str) -> None:
    """What a server's process says when it is ready."""
    print(url, flush=True)


def run_in(checkout: Path, script: str, name: str, *options: str) -> Any:
    """The results that a script of that checkout stores as NAME."""
    with tempfile.TemporaryDirectory() as folder:
        command = script_in(checkout, script)
        known = Path(command[1]).read_text()  # earlier versions named the option for the folder differently
        out = next((each for each in ("--write", "--folder") if f'"{each}"' in known), "--out")
        command += [*options, out, folder]
        subprocess.run(command, check=True, env=environment(checkout), cwd=checkout)
        return stored(name, Path(folder))


def in_turns(
    given: argparse.Namespace, script: str, name: str, figures: Callable[[Any], dict[str, float]], *options: str
) -> dict[str, Any]:
    """This version and another in turns: for each figure the ratio now ÷ before, median, least and most."""
    checkouts, rounds = trees(given), given.rounds
    runs: dict[str, list[dict[str, float]]] = {which: [] for which in checkouts}
    for k in range(rounds):
        for which in list(checkouts)[:: 1 if k % 2 else -1]:
            runs[which].append(figures(run_in(checkouts[which], script, name, *options)))
    pairs = list(zip(runs["now"], runs["before"], strict=True))
    shared = [name for name in pairs[0][0] if all(before.get(name) for _, before in pairs)]
    ratios = {name: spread(now[name] / before[name] for now, before in pairs) for name in shared}
    show("now ÷ before", ["", "median", "least", "most"], [[name, *each.values()] for name, each in ratios.items()])
    return {"commits": commits(given), "rounds": rounds, "ratios": ratios}


MPS_CONTROL = "nvidia-cuda-mps-control"


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """Variables for processes that share the GPU through an MPS daemon of their own, which ends afterwards."""
    if shutil.which(MPS_CONTROL) is None:
        raise SystemExit(f"{MPS_CONTROL} is not on this machine: it comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory() as scratch:
        env = {name: str(Path(scratch) / name) for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
        for folder in env.values():
            Path(folder).mkdir()
        whole = {**os.environ, **env}
        subprocess.run([MPS_CONTROL, "-d"], check=True, env=whole, timeout=30)
        try:
            yield env
        finally:
            subprocess.run([MPS_CONTROL], input="quit -t 10\n", text=True, env=whole, check=False, timeout=30)
