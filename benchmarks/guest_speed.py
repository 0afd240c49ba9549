"""The speed of an eager training script behind an open gate ÷ its speed without a gate, and the reasons.

    python benchmarks/guest_speed.py                 on a GPU that nothing else uses
    python benchmarks/guest_speed.py --starts 6      also starts of the whole script, free and gated in turn

An eager script's speed varies by more between two starts than a gate costs. So one process makes blocks of steps in
turn: *free* blocks, in which all pointers lead to the driver; *gated* blocks, in which they lead through the gate; and
*searched* blocks, which are gated and during which libraries are searched once for new pointers, as `paellapy run`
does at most every two seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, need_gpu, save
from guest import Script

import paellapy as pp
from paellapy.cli.guest import LAST_PAUSE_S
from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.launch_hook import Cells

KINDS = ("free", "gated", "searched")


class Switch:
    """The pointers of this process to the driver's launch functions, all led through the gate, or none."""

    def __init__(self) -> None:
        self.words = np.zeros(launch_hook.WORDS, np.uint64)
        self.words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
        self._cell = np.array([self.words.ctypes.data], np.uint64)
        launch_hook.keep_forever(self)  # launches read its arrays until the process ends
        self.cells = Cells(int(self._cell.ctypes.data))
        while self.cells.look():
            pass
        cells = self.cells
        assert cells._finder is not None
        originals = {ours: original for original, ours in cells._ours.items()}
        found = cells._finder.find(cells._bounds, min(originals), max(originals) + 1)
        words = [ctypes.c_uint64.from_address(at) for at in found]
        # Protected cells are left as they are: libraries do not keep addresses there that they asked for.
        writable = [any(r.writable and r.start <= at < r.end for r in cells._data) for at in found]
        self._pairs = [
            (word, originals[word.value], word.value)
            for word, may in zip(words, writable, strict=True)
            if may and word.value in originals
        ]

    def __len__(self) -> int:
        return len(self._pairs)

    def set(self, gated: bool) -> None:
        for word, original, ours in self._pairs:
            word.value = ours if gated else original


def training(small: bool) -> Callable[[], Any]:
    """The step of guest_training.py."""
    torch.manual_seed(0)
    if small:
        net: Any = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10)).cuda()
        x, y = torch.randn((4, 3, 8, 8), device="cuda"), torch.randint(0, 10, (4,), device="cuda")
    else:
        from torchvision.models import resnet18

        net = resnet18(num_classes=10).cuda()
        x, y = torch.randn((32, 3, 128, 128), device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def kernels_per_step(step: Callable[[], Any]) -> dict[str, int]:
    """Kernels, copies and fills of one step as CUPTI sees them: those that pass the gate should be as many."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    names = [each.name for each in found.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return {"kernels": round((len(names) - copies) / 4), "copies": round(copies / 4)}


def block_ms(step: Callable[[], Any], steps: int, meanwhile: Callable[[], Any] | None) -> float:
    thread = threading.Thread(target=meanwhile) if meanwhile is not None else None
    torch.cuda.synchronize()
    began = time.perf_counter()
    if thread is not None:
        thread.start()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    if thread is not None:
        thread.join()
    return 1e3 * took


def in_one_process(step: Callable[[], Any], args: argparse.Namespace) -> dict[str, Any]:
    for _ in range(30):
        step()
    torch.cuda.synchronize()
    switch = Switch()
    for _ in range(10):
        step()
    rng = np.random.default_rng(0)
    ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    passed, searches = int(switch.words[launch_hook.LAUNCHES]), []

    def search() -> None:
        began = time.perf_counter()
        switch.cells.look()
        searches.append(time.perf_counter() - began)

    for _ in range(args.blocks):
        for kind in rng.permutation(KINDS):
            switch.set(kind != "free")
            before = int(switch.words[launch_hook.LAUNCHES])
            ms[str(kind)].append(round(block_ms(step, args.steps, search if kind == "searched" else None), 3))
            went = int(switch.words[launch_hook.LAUNCHES]) - before
            if (kind == "free") != (went == 0):
                raise RuntimeError(f"{went} launches went through the gate in a block that was {kind}")
            if kind != "free":
                passed = went
    free, gated, searched = (np.array(ms[kind]) for kind in KINDS)
    search_ms = float(np.median(searched - gated))
    # By block, so that a change of the machine's speed during the run does not count.
    each = free / gated
    chance = [float(np.median(rng.choice(each, len(each)))) for _ in range(2000)]
    return {
        "steps_per_block": args.steps, "launches_per_step": round(passed / args.steps, 1), "cells": len(switch),
        "ms": ms, "gated_speed": round(float(np.median(each)), 4),
        "gated_speed_95": [round(float(np.percentile(chance, p)), 4) for p in (2.5, 97.5)],
        "search_ms": round(search_ms, 2), "search_wall_ms": round(1e3 * float(np.median(searches)), 2),
        "search_part": round(search_ms / (1e3 * LAST_PAUSE_S), 4),
    }  # fmt: skip


def by_starts(args: argparse.Namespace) -> dict[str, list[float]]:
    """Steps a second of the whole script, free and under `paellapy run` beside an engine without work."""
    found: dict[str, list[float]] = {"free": [], "gated": []}
    with pp.Engine("virtual:h200"):
        for _ in range(args.starts):
            for kind, speeds in found.items():
                script = Script(kind == "gated", args.small)
                try:
                    began = time.monotonic()
                    time.sleep(args.seconds)
                    speeds.append(round(script.speed(began, time.monotonic()), 2))
                finally:
                    script.end()
                print(kind, speeds[-1], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--blocks", type=int, default=40, help="of each kind")
    parser.add_argument("--steps", type=int, default=20, help="in a block")
    parser.add_argument("--starts", type=int, default=0, help="of the whole script, of each kind")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each start")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="guest_speed")
    args = parser.parse_args()
    device = need_gpu("the speed of a script")
    step = training(args.small)
    results: dict[str, Any] = {"one process": in_one_process(step, args)}
    print({key: value for key, value in results["one process"].items() if key != "ms"}, flush=True)
    save(args.name, results, device, args.folder)
    if args.starts:
        results["starts"] = by_starts(args)
        save(args.name, results, device, args.folder)
    results["cupti_per_step"] = kernels_per_step(step)  # last: it leaves CUPTI in this process
    print(results["cupti_per_step"], flush=True)
    save(args.name, results, device, args.folder)


if __name__ == "__main__":
    main()
