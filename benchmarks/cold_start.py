"""Time of the first use on a machine without caches, for this tree and another checkout, in one run.

    python benchmarks/cold_start.py [--against CHECKOUT] [--tasks serve] [--rounds 3] [--device cuda]

Every task runs in its own process with empty caches (Numba's, Triton's, paellapy's), then once more with the caches
that the first run has filled. It counts CPU-seconds of the process and its children, since wall-clock time means little
on a shared machine. The trees take turns, so that a slow moment affects both. Tasks of loading a model count the
loading thread's time of `engine.load` alone, after the core is compiled and a small model was asked.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import PRODUCT, arguments, commits, environment, finish, trees

MIX = """
import paellapy as pp
try:
    from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
except ImportError:  # an earlier version
    from paellapy.scheduler.sim.mix import MIX, mix_profiles
load = pp.Poisson(3000, MIX, duration=0.05)
assert pp.simulate(mix_profiles(), load, "srpt").model().completed > 0
"""
SECOND = """
import time
def longest(job): return -job.total_ns
began = time.process_time()
assert pp.simulate(mix_profiles(), load, pp.policy(longest)).model().completed > 0
print(time.process_time() - began)
"""
ENGINE = """
import paellapy as pp
from paellapy import demo
with pp.Engine("virtual:h200") as engine:
    for name in demo.names():
        engine.load(demo.load(name))
    for name in demo.names():
        assert engine.infer_sync(name, {"image": demo.held_out()[0][0]})
"""
SERVE = """
import json, signal, socket, subprocess, sys, time, urllib.request
from paellapy import demo
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
x = demo.held_out()[0][:1]
tensor = {"name": "image", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()}
body = json.dumps({"inputs": [tensor]}).encode()
began = time.perf_counter()
command = [sys.executable, "-m", "paellapy", "serve", "--port", str(port)]
server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
try:
    while server.poll() is None:
        try:
            url = f"http://127.0.0.1:{port}/v2/models/cnn/infer"
            assert json.load(urllib.request.urlopen(urllib.request.Request(url, body), timeout=60))["outputs"]
            break
        except OSError:
            time.sleep(0.05)
    print(time.perf_counter() - began)
finally:
    server.send_signal(signal.SIGINT)
    server.wait(30)
"""
LOAD = """
import time
import paellapy as pp
from paellapy import demo
with pp.Engine(DEVICE) as engine:
    engine.load(demo.load("mlp", batch=(1,)).changed(name="first"))
    engine.infer_sync("first", {"image": demo.held_out()[0][0]})
    if NAME in demo.names():
        model = demo.load(NAME)
    else:
        import torch, torchvision
        net = torchvision.models.get_model(NAME, weights=None)
        model = pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), name=NAME, dtype=torch.float16)
    began, cpu = time.perf_counter(), time.thread_time()
    engine.load(model)
    print(time.thread_time() - cpu, time.perf_counter() - began)
"""
TASKS = {
    "import paellapy": "import paellapy", "first simulate": MIX,
    "first engine, demo models, one answer each": ENGINE, "serve the demo models, to the first answer": SERVE,
}  # fmt: skip


def measure(tree: Path, code: str, caches: Path) -> tuple[float, float, str]:
    """CPU-seconds and seconds of a process that runs the code against a tree, and the process's output."""
    env = environment(
        tree, NUMBA_CACHE_DIR=f"{caches}/numba", TRITON_CACHE_DIR=f"{caches}/triton",
        PAELLAPY_CACHE_DIR=f"{caches}/paellapy", XDG_CACHE_HOME=f"{caches}/cache",
    )  # fmt: skip
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], env=env, cwd=caches, stdout=subprocess.PIPE)
    assert process.stdout is not None
    said = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"a task failed in {tree}")
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began, said.strip()


def once(tree: Path, task: str) -> dict[tuple[str, str], tuple[float, float]]:
    """CPU-seconds and seconds of one task in one tree, with empty caches and with filled ones."""
    # Python's own byte code is not measured here: an installed package has it.
    folders = [str(tree / name) for name in PRODUCT if (tree / name).is_dir()]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], check=True)
    with tempfile.TemporaryDirectory() as folder:  # the files are in memory from now on
        measure(tree, "import paellapy as pp; [getattr(pp, n) for n in pp.__all__]", Path(folder))
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for caches in ("empty", "filled"):
            cpu_s, s, said = measure(tree, TASKS[task], Path(folder))
            if task.startswith("load "):
                cpu_s, s = map(float, said.split())
            found[task, caches] = cpu_s, float(said) if task.startswith("serve") else s
        if task == "first simulate":
            cpu_s = float(measure(tree, MIX + SECOND, Path(folder))[2])
            found["another policy in the same process", "empty"] = cpu_s, cpu_s
    return found


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", rounds=3, against=True)
    parser.add_argument("--tasks", default="", help="run only tasks whose name contains this text")
    parser.add_argument("--models", default=None, help="to load: demo models, or torchvision's on a GPU")
    o = parser.parse_args()
    on_gpu = o.device.startswith("cuda")
    for name in (o.models or ("resnet18,densenet121,vit_b_16" if on_gpu else "mlp,cnn,transformer")).split(","):
        TASKS[f"load {name}"] = f"DEVICE, NAME = {o.device!r}, {name!r}{LOAD}"
    runs: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for _ in range(o.rounds):
        for task in (name for name in TASKS if o.tasks in name):
            for name, tree in trees(o).items():
                for key, value in once(tree, task).items():
                    runs.setdefault(key, {}).setdefault(name, []).append(value)
    found: list[dict[str, Any]] = []
    for (task, caches), by_tree in runs.items():
        row: dict[str, Any] = {"task": task, "caches": caches}
        for name, values in by_tree.items():
            row[f"{name}_cpu_s"], row[f"{name}_s"] = (statistics.median(v) for v in zip(*values, strict=True))
        if "before_cpu_s" in row:
            row["ratio"] = row["now_cpu_s"] / row["before_cpu_s"]
        found.append(row)
    head = ["task", "caches", *(f"{name}, CPU s" for name in trees(o)), "now ÷ before"]
    rows = [[r["task"], r["caches"], *(f"{r[f'{name}_cpu_s']:.2f}" for name in trees(o)),
             f"{r['ratio']:.2f}" if "ratio" in r else "–"] for r in found]  # fmt: skip
    name = "cold_start_cuda" if on_gpu else "cold_start"
    finish(o, name, {"commits": commits(o), "medians": found}, "first use", [head, *rows])


if __name__ == "__main__":
    main()
