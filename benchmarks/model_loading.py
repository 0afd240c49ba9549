"""The time of loading models, for this tree and another checkout, in one run.

    python benchmarks/model_loading.py [--device cuda] [--against CHECKOUT] [--models mlp,resnet18]

Each tree loads the models in its own process: first with empty caches of kernels, then with the caches that the first
run has filled. Before that, the core is compiled, and one small model is loaded and asked, so that only the models' own
time remains.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, arguments, commit, environment, save, show

TORCH = "torch cnn"


def made(name: str) -> Any:
    """A demo model, a small CNN of PyTorch's, or one of torchvision's by its name."""
    import paellapy as pp
    from paellapy import demo

    if name in demo.names():
        return demo.load(name)
    import torch

    if name == TORCH:
        layers: list[Any] = []
        for k in range(6):
            layers += [torch.nn.Conv2d(16 if k else 3, 16, 3, padding=1), torch.nn.ReLU()]
        net = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10))
        return pp.Model.from_torch(net, torch.zeros(1, 3, 32, 32), name=name)
    import torchvision

    net = torchvision.models.get_model(name, weights=None)
    return pp.Model.from_torch(net, torch.zeros(1, 3, 224, 224), name=name, dtype=torch.float16)


def load(device: str, names: list[str]) -> None:
    """In a process of its own: prints a line of JSON with the seconds of every model."""
    import paellapy as pp
    from paellapy import demo

    with pp.Engine(device) as engine:
        engine.load(demo.load("mlp", batch=(1,)).changed(name="first"))
        engine.infer_sync("first", {"image": demo.held_out()[0][0]})  # the loop is compiled
        for name in names:
            model = made(name)
            began = time.perf_counter(), time.thread_time()
            engine.load(model)
            took = time.perf_counter() - began[0], time.thread_time() - began[1]
            print(json.dumps({"model": name, "s": took[0], "cpu_s": took[1]}), flush=True)
            engine.unload(model.name)


def child(tree: Path, o: Any, caches: Path, numba: Path) -> list[dict[str, Any]]:
    env = environment(tree, NUMBA_CACHE_DIR=str(numba), TRITON_CACHE_DIR=f"{caches}/triton",
                      PAELLAPY_CACHE_DIR=f"{caches}/paellapy", XDG_CACHE_HOME=f"{caches}/cache")  # fmt: skip
    command = [sys.executable, __file__, "--child", "--device", o.device, "--models", o.models]
    said = subprocess.run(command, env=env, cwd=caches, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", rounds=3)
    parser.add_argument("--against", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--models", default="", help=f"demo models, '{TORCH}', or torchvision's, separated by commas")
    parser.add_argument("--child", action="store_true", help="load the models in this process")
    o = parser.parse_args()
    on_gpu = o.device.startswith("cuda")
    o.models = o.models or "mlp,cnn,transformer," + ("resnet18,densenet121,vit_b_16" if on_gpu else TORCH)
    if o.child:
        load(o.device, o.models.split(","))
        return
    trees = {"now": ROOT} | ({"before": o.against.resolve()} if o.against else {})
    runs: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(o.rounds + 1):  # in the first round the cores are compiled
            for name, tree in trees.items():
                with tempfile.TemporaryDirectory() as caches:
                    for kind in ("empty", "filled"):
                        for each in child(tree, o, Path(caches), Path(folder) / name):
                            if k:
                                runs.setdefault((each["model"], kind), {}).setdefault(name, []).append(each)
    found = [{"model": model, "caches": caches, "tree": name,
              **{key: statistics.median(e[key] for e in each) for key in ("s", "cpu_s")}}
             for (model, caches), by_tree in runs.items() for name, each in by_tree.items()]  # fmt: skip
    head = ["model", "caches", "tree", "s", "CPU s"]
    show("loading", head, [list(each.values()) for each in found])
    content = {"device": o.device, "commits": {name: commit(tree) for name, tree in trees.items()}, "medians": found}
    print(save("model_loading" if on_gpu else "model_loading_virtual", content, folder=o.out))


if __name__ == "__main__":
    main()
