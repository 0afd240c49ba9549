"""Time of the first use on a machine without caches, for this tree and another checkout, in one run.

    git worktree add ../before COMMIT
    python benchmarks/cold_start.py --base ../before
    python benchmarks/cold_start.py --tasks serve     # seconds from `paellapy serve` to its first answer

Every task runs in its own process with empty caches (Numba's, Triton's, paellapy's), then once more with the caches
that the first run has filled. It counts CPU-seconds of the process and its children, since wall-clock time means little
on a shared machine. The trees take turns, so that a slow moment affects both. Results are saved one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

HERE = Path(__file__).parents[1]
FOLDERS = ("paellapy", "serving", "scheduler", "instrument")

_MIX = """
import pathlib, paellapy as pp
if (pathlib.Path(pp.__file__).parents[1] / "scheduler/simulate_mix.py").is_file():  # before there were rooms
    from scheduler.simulate_mix import MIX, mix_profiles
else:
    from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
load = pp.Poisson(3000, MIX, duration=0.05)
assert pp.simulate(mix_profiles(), load, "srpt").model().completed > 0
"""
_SECOND = """
import time
def longest(job): return -job.total_ns
began = time.process_time()
assert pp.simulate(mix_profiles(), load, pp.policy(longest)).model().completed > 0
print(time.process_time() - began)
"""
_ENGINE = """
import numpy as np, paellapy as pp
from paellapy import demo
with pp.Engine("virtual:h200") as engine:
    for name in demo.names():
        engine.load(demo.load(name))
    for name in demo.names():
        assert engine.infer_sync(name, {"image": demo.held_out()[0][0]})
"""
_SERVE = """
import json, signal, socket, subprocess, sys, time, urllib.request
from paellapy import demo
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
image = {"name": "image", "shape": [1, 8, 8], "datatype": "FP32", "data": demo.held_out()[0][0].ravel().tolist()}
scores = {"name": "scores", "parameters": {"classification": 1}}
body = json.dumps({"inputs": [image], "outputs": [scores]}).encode()
began = time.perf_counter()
command = [sys.executable, "-c", "from paellapy.cli import main; main()", "serve", "--port", str(port)]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
try:
    while server.poll() is None:
        try:
            url = f"http://127.0.0.1:{port}/v2/models/cnn/infer"
            answer = json.load(urllib.request.urlopen(urllib.request.Request(url, body), timeout=60))
            break
        except OSError:
            time.sleep(0.05)
    assert answer["outputs"][0]["data"][0].endswith(":7"), answer
    print(time.perf_counter() - began)
finally:
    server.send_signal(signal.SIGINT)
    server.wait(30)
"""
TASKS = {
    "import paellapy": "import paellapy",
    "first simulate": _MIX,
    "first engine, demo models, one answer each": _ENGINE,
    "serve the demo models, to the first answer": _SERVE,
}
# The parts of a task's CPU time, where caches are empty.
_BEGIN = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import cpu_account
cpu_account.begin()
"""
_END = """
import json
print(json.dumps(cpu_account.end()))
"""
PARTS = {
    "first simulate": _BEGIN + _MIX + _END,
    "first engine, demo models, one answer each": _BEGIN + "cpu_account.begin_triton()\n" + _ENGINE + _END,
}


class TaskError(Exception):
    """A task ended with an error, which it has printed itself."""


def measure(tree: Path, code: str, caches: Path) -> tuple[float, float, str]:
    """CPU-seconds and seconds of a process that runs the code against a tree, and what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")])),
        "NUMBA_CACHE_DIR": str(caches / "numba"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "PAELLAPY_CACHE_DIR": str(caches / "paellapy"),
        "XDG_CACHE_HOME": str(caches / "cache"),
    }
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=caches, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise TaskError(f"a task failed in {tree}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began, said.strip()


def runs(trees: dict[str, Path], tasks: dict[str, str], repeats: int) -> Iterator[dict[str, Any]]:
    for repeat in range(repeats):
        for task, code in tasks.items():
            for name, tree in trees.items():
                try:
                    for each in once(tree, task, code):
                        yield {"tree": name, "repeat": repeat, **each}
                except TaskError as e:  # the others are measured all the same
                    print(f"{task}: {e}", file=sys.stderr)


def once(tree: Path, task: str, code: str) -> Iterator[dict[str, Any]]:
    """One task in one tree, with empty caches and with filled ones."""
    # Python's own byte code is not what is measured here: an installed package has it. The first import of a tree would
    # not write it where $PYTHONDONTWRITEBYTECODE is set, nor for modules that it does not reach.
    folders = [str(tree / name) for name in FOLDERS if (tree / name).is_dir()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=True)
    with tempfile.TemporaryDirectory() as folder:  # the files are in memory from now on
        measure(tree, "import paellapy as pp; [getattr(pp, n) for n in pp.__all__]", Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        for caches in ("empty", "filled"):
            cpu_s, s, said = measure(tree, code, Path(folder))
            yield {"task": task, "caches": caches, "cpu_s": cpu_s, "s": float(said) if code is _SERVE else s}
        if code is _MIX:
            _, _, said = measure(tree, _MIX + _SECOND, Path(folder))
            yield {
                "task": "another policy in the same process", "caches": "empty", "cpu_s": float(said), "s": float(said)
            }  # fmt: skip


def parts(task: str) -> dict[str, float]:
    """CPU-seconds of the parts of a task in this tree, with empty caches."""
    with tempfile.TemporaryDirectory() as folder:
        _, _, said = measure(HERE, PARTS[task], Path(folder))
    return {name: round(seconds, 3) for name, seconds in json.loads(said).items()}


def medians(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per task and caches: CPU-seconds in each tree and their ratio, and seconds."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    seconds: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        rows.setdefault((each["task"], each["caches"]), {}).setdefault(each["tree"], []).append(each["cpu_s"])
        seconds.setdefault((each["task"], each["caches"], each["tree"]), []).append(each["s"])
    table = []
    for (task, caches), by_tree in rows.items():
        row: dict[str, Any] = {"task": task, "caches": caches}
        row |= {f"{tree}_cpu_s": round(statistics.median(values), 3) for tree, values in by_tree.items()}
        row |= {f"{tree}_s": round(statistics.median(seconds[task, caches, tree]), 2) for tree in by_tree}
        if "base_cpu_s" in row and "this_cpu_s" in row:
            row["ratio"] = round(row["this_cpu_s"] / row["base_cpu_s"], 3)
        table.append(row)
    return table


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--tasks", default="", help="run only tasks whose name contains this text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="folder for the result (default: benchmarks/results)")
    arguments = parser.parse_args()
    trees = {"this": HERE} | ({"base": arguments.base.resolve()} if arguments.base else {})
    for tree in trees.values():
        if not (tree / "paellapy" / "__init__.py").is_file():
            raise SystemExit(f"{tree} is no checkout of paellapy")
    console = Console()
    tasks = {name: code for name, code in TASKS.items() if arguments.tasks in name}
    total = arguments.repeats * len(trees) * (2 * len(tasks) + (_MIX in tasks.values()))
    results: dict[str, Any] = {"commits": {name: commit_of(tree) for name, tree in trees.items()}}
    found: list[dict[str, Any]] = []
    measured = runs(trees, tasks, arguments.repeats)
    for each in track(measured, "cold and warm starts", total=total, console=console):
        found.append(each)
        results |= {"medians": medians(found), "runs": found}
        save("cold_start", results, folder=arguments.write)
    results["parts"] = {task: parts(task) for task in tasks if task in PARTS}
    rows = medians(found)
    table = Table("task", "caches", *(f"{name}, CPU s (s)" for name in trees), "ratio")
    for row in rows:
        cells = [f"{row[f'{n}_cpu_s']:.2f} ({row[f'{n}_s']:.1f})" if f"{n}_s" in row else "failed" for n in trees]
        table.add_row(row["task"], row["caches"], *cells, f"{row['ratio']:.2f}" if "ratio" in row else "")
    console.print(table)
    if not found:
        raise SystemExit("every task failed")
    console.print(save("cold_start", results, folder=arguments.write))


if __name__ == "__main__":
    main()
