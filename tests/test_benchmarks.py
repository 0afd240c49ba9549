"""The benchmarks run: every script starts, and the engine's own do on a virtual GPU what they do on a real one."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_every_script_says_what_it_does() -> None:
    said = json.loads(run(str(Path(__file__).parent / "script_usage.py"), str(BENCHMARKS)))
    failed = {name: text for name, text in said.items() if not text.startswith(("usage:", "imported"))}
    if find_spec("litserve") is None:
        assert "No module named 'litserve'" in failed.pop("serving_litserve")
    assert not failed


def test_the_engine_is_compared_with_streams_and_every_output_is_right(tmp_path: Path) -> None:
    options = ["--device", "virtual:h200", "--quick", "--seeds", "1"]
    said = run(str(BENCHMARKS / "engine_h200.py"), *options, "--out", str(tmp_path))
    assert "0 wrong" in said
    assert json.loads((tmp_path / "engine_virtual.json").read_text())["on"]["commit"]


def test_the_papers_experiments_run_and_every_output_is_right(tmp_path: Path) -> None:
    options = ["--tiny", "--device", "virtual:h200", "--seeds", "1", "--seconds", "0.05", "--only", "light,saturation"]
    said = run(str(BENCHMARKS / "paper.py"), "run", *options, "--out", str(tmp_path))
    assert "0 left" in said
    assert " 0 wrong" in said
    options = ["--tiny", "--device", "cpu", "--seeds", "7-7", "--seconds", "0.2", "--rates", "50", "--threads", "2"]
    said = run(str(BENCHMARKS / "paper_eager.py"), *options, "--out", str(tmp_path))
    assert " 0 wrong" in said
    found = json.loads((tmp_path / "paper.json").read_text())["results"]
    assert found["points"].keys() == found["commits"].keys()
    assert found["points"]["fig11|eager, 2 threads|1.5|50|7"]["answered"] == 20


def test_the_published_systems_run_and_come_into_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--tiny", "--device", "virtual:h200", "--seeds", "1", "--seconds", "0.1", "--only", "limits,order"]
    said = run(str(BENCHMARKS / "systems_gpu.py"), *options, "--out", str(tmp_path))
    assert said.count(" 0 wrong") == 2
    found = json.loads((tmp_path / "systems_gpu.json").read_text())["results"]
    assert all(each["outputs"] > 0 for each in found["checked"].values())
    assert found["points"]["order|lax|lax|0"]["n"] == 16
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from systems_table import measured

    made = measured(found["points"])
    assert made.keys() == {"token", "quota", "antman", "fair", "tgs", "mlfq", "lax", "pack"}


def test_the_table_of_systems_has_medians_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from systems_table import measured

    points: dict[str, object] = {}
    for seed, value in enumerate((0.2, 0.9, 0.5)):
        points |= {f"order|lax|{policy}|{seed}": {"met": value} for policy in ("lax", "edf", "fifo")}
        points |= {f"order|pack|{policy}|{seed}": {"alone_share": {"a": value, "b": 1.0}} for policy in ("pack",)}
    made = measured(points)
    assert made.keys() == {"lax"}  # nothing is shown of a system without its rival
    assert made["lax"].count("0.500") == 3


def test_cold_models_and_models_in_processes_are_compared_with_pytorch(tmp_path: Path) -> None:
    options = ["--device", "virtual:h200", "--models", "4", "--share", "0.5", "--seconds", "0.5", "--cold", "2"]
    run(str(BENCHMARKS / "more_models.py"), *options, "--processes", "2", "--out", str(tmp_path))
    found = json.loads((tmp_path / "more_models.json").read_text())["results"]
    assert [found[part]["wrong"] for part in ("cold", "default", "lru", "to_cuda", "processes")] == [0] * 5


def test_answers_of_the_zoo_depend_on_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from model_zoo import Zoo, drawn

    zoo = Zoo(2, "virtual:h200")
    assert zoo.right("m0", zoo.answer("m0"))
    assert not zoo.right("m0", zoo.answer("m1"))
    head = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(head.weight)
    kept = head.bias.detach().clone()
    assert (drawn(torch, head).weight != 0).all()
    assert torch.equal(head.bias, kept)


def test_operations_on_memory_say_step_by_step_what_holds_it(tmp_path: Path) -> None:
    options = ["--device", "virtual:h200", "--operations", "40", "--out", str(tmp_path)]
    run(str(BENCHMARKS / "memory_operations.py"), *options)
    found = json.loads((tmp_path / "memory_operations_virtual.json").read_text())["results"]
    assert found["wrong"] == 0
    whens = [each["when"] for each in found["readings"]]
    assert whens[:3] == ["device", "engine", "loaded"]
    assert whens[-4:] == ["40 operations", "at rest", "unloaded", "closed"]
    launches = [each["account"]["launches"] for each in found["readings"] if "account" in each]
    assert (launches[0], launches[-1]) == (0, 0)
    assert min(launches[1:-1]) > 0


@pytest.mark.gpu
def test_operations_on_a_gpu_leave_no_graph_and_no_weights_with_the_driver(tmp_path: Path) -> None:
    run(str(BENCHMARKS / "memory_operations.py"), "--operations", "60", "--out", str(tmp_path))
    found = json.loads((tmp_path / "memory_operations.json").read_text())["results"]
    readings = {each["when"]: each for each in found["readings"]}
    assert readings["loaded"]["driver"]["executable graphs"]["count"] == readings["loaded"]["account"]["launches"]
    for kind in ("executable graphs", "graphs", "events", "mapped weights", "reserved addresses"):
        assert readings["unloaded"]["driver"][kind]["count"] == 0, kind
    assert readings["closed"]["driver"]["memory of weights"]["count"] == 0
    assert readings["closed"]["not_freed"] == {}


def test_the_core_is_built_without_its_account_of_gpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from accounting_cost import BUILDS, FIGURES, MODULE, measure, without_account

    source = (BENCHMARKS.parent / "scheduler" / "core" / "shares.py").read_text()
    assert MODULE.endswith("core.shares")
    made = without_account(source)
    compile(made, "shares.py", "exec")
    assert "gpu_ns +=" in source
    assert "gpu_ns +=" not in made
    assert "gpu_demand" not in made
    with pytest.raises(SystemExit, match="gpu_ns"):
        without_account(made)
    found = measure(sets=1, rounds=1)
    for name in FIGURES:
        assert found[name]["ns"].keys() == set(BUILDS)
        assert min(found[name]["ns"].values()) > 0


@pytest.mark.parametrize(("given", "found"), [("3", [0, 1, 2]), ("5-7", [5, 6, 7]), ("4-4", [4])])
def test_seeds_are_given_by_number_or_by_name(monkeypatch: pytest.MonkeyPatch, given: str, found: list[int]) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from common import seeds

    assert list(seeds(given)) == found
    with pytest.raises(argparse.ArgumentTypeError, match="which, as in 5-9"):
        seeds("7-5")


@pytest.mark.gpu
def test_a_gpu_says_how_fast_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_clock import gpu_state

    state = gpu_state()
    if not state:
        pytest.skip("this machine's cuda-bindings has no NVML, or the driver does not tell")
    assert 0 < state["sm_mhz"] < 10_000
    assert 0 < state["watts"] < 10_000


@pytest.mark.gpu
def test_probes_of_a_gpu_see_its_sms_and_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cupy")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gpu_probe import probe

    found = probe().look()
    assert 0 < found["sms"] <= 1024  # fewer than there are where other processes hold some
    least, middle, most = found["counted_mhz"]
    assert 0 < least <= middle <= most < 10_000
    assert all(found[name] > 0 for name in ("copy_256_mib_us", "copy_8_mib_us", "kernel_gap_ns", "matmul_us"))


def test_a_module_that_fails_when_it_is_called_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from paper_eager import Eager
    from paper_models import TINY

    eager = Eager(TINY, "cpu", threads=2)
    at, model, which = np.arange(8) * 1_000_000, np.zeros(8, np.int64), np.arange(8) % 4
    latency, _, wrong = eager.run(at, model, which)
    assert (latency > 0).all()
    assert wrong == 0
    answer = eager.answer

    def fail_once_it_runs(m: int, which: int, stream: object) -> object:
        if which == 3:
            raise MemoryError("none is left")
        return answer(m, which, stream)

    monkeypatch.setattr(eager, "answer", fail_once_it_runs)
    with pytest.raises(MemoryError, match="none is left"):
        eager.run(at, model, which)
    monkeypatch.setattr(Eager, "answer", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Eager(TINY, "cpu", threads=2)


def test_a_kernel_that_is_too_slow_for_one_side_is_kept_and_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from first_launch import summary

    slow = {"virtual": [0.5, 0.1], "interpreter": [None, "longer than 60 s, or the process ended"]}
    found = {"add": {"virtual": [0.5, 0.1], "interpreter": [1.0, 1.0]}, "scan": slow}
    made = summary(found, 3)
    assert (made["kernels"], made["tried"], made["of"]) == (1, 2, 3)
    assert made["times_faster"] == {"first": 2.0, "later": 10.0}
    assert made["cases"]["scan"] == slow
    assert summary({}, 3)["times_faster"] == {}


def rounds_of(per_s: list[float], cpu_us: float) -> list[dict[str, Any]]:
    return [{"per_s": each, "p50_ms": 1000 / each, "cpu_us": {"engine": cpu_us, "client": 99.0}} for each in per_s]


def test_versions_are_compared_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import floor_against

    runs = {"small": {"one": rounds_of([110.0, 300.0, 90.0], 2.0), "one before": rounds_of([100.0, 200.0, 100.0], 4.0)}}
    found = floor_against.beside_before(runs)["small"]["one"]
    assert found["rounds_per_s"] == [1.1, 1.5, 0.9]
    assert (found["per_s"], found["cpu"]) == (1.1, 0.5)
    assert floor_against.both(runs)["small"]["one before"] == {"per_s": 100.0, "p50_ms": 10.0, "cpu_us": 4.0}


def test_loads_fit_into_the_time_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import floor_against

    runs, rounds, added_s = 48, 3, 0.2
    each_s = floor_against.WARM_S * (1 + floor_against.WARMUP) + added_s
    seconds = floor_against.load_seconds(240.0, runs * each_s, runs, rounds)
    whole_s = rounds * runs * (seconds * (1 + floor_against.WARMUP) + added_s)
    assert whole_s == pytest.approx(240.0 - floor_against.END_S)
    with pytest.raises(SystemExit, match="--within"):
        floor_against.load_seconds(60.0, runs * each_s, runs, rounds)


def test_a_copy_without_git_is_named_by_its_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import floor_against

    assert floor_against.commit_of(tmp_path, "1234567") == "1234567"
    with pytest.raises(SystemExit, match="--before"):
        floor_against.commit_of(tmp_path, None)


def test_a_run_has_an_mps_daemon_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import mps

    control, told = tmp_path / "nvidia-cuda-mps-control", tmp_path / "told"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not mps.available()
    script = 'if [ $# = 0 ]; then read -r line; set -- "$line"; fi; echo "$1 in $CUDA_MPS_PIPE_DIRECTORY"'
    control.write_text(f"#!/bin/sh\n{script} >> {told}\n")
    control.chmod(0o755)
    assert mps.available()
    with pytest.raises(RuntimeError, match="the measurement failed"), mps.daemon() as env:  # noqa: PT012
        pipe = Path(env["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipe.is_dir()
        assert told.read_text() == f"-d in {pipe}\n"
        raise RuntimeError("the measurement failed")
    assert told.read_text().splitlines()[1:] == [f"quit -t 10 in {pipe}"]
    assert not pipe.exists()


def test_training_is_measured_under_policies_streams_and_mps_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    options = ["--device", "virtual:h200", "--small", "--seconds", "0.1", "--seeds", "2", "--loss-seeds", "1"]
    few = ["--rounds", "2", "--jobs", "transformer", "--quanta", "100", "--ways", "priority"]
    run(str(BENCHMARKS / "background.py"), *options, *few, "--folder", str(tmp_path))
    found = json.loads((tmp_path / "background.json").read_text())["results"]
    beside = {name for name, point in found.items() if isinstance(point, dict) and "steps_per_s" in point}
    ways = ("100 µs: priority", "one graph: stream priorities", "one graph: streams", "under MPS: none")
    assert beside == {f"transformer, {way}" for way in ways}
    assert found["transformer: paused and alone"]["requests"] == {"alone": 50, "paused": 50}
    assert found["transformer: losses"]["equal"] == [True]
    assert {point["wrong"] for point in found.values() if isinstance(point, dict) and "wrong" in point} == {0}


def test_a_gate_and_a_callback_look_at_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cupti
    from gate_cost import launcher

    from paellapy.instrument.device import launch_hook
    from paellapy.instrument.device.launch_hook import address, gated

    seen: list[tuple[int, ...]] = []
    launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 11)(lambda *given: seen.append(given) or 0)
    words = np.zeros(launch_hook.WORDS, np.uint64)
    words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
    cell = np.array([words.ctypes.data], np.uint64)
    through, keep = gated({address(launch): "cuLaunchKernel"}, int(cell.ctypes.data))
    assert keep is not None
    assert launcher(through[address(launch)])(77, 3) == 0
    assert seen == [(77, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)] * 3
    assert words[launch_hook.LAUNCHES] == 3
    look = ctypes.CFUNCTYPE(None, ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint32, ctypes.c_uint64)(cupti.look.address)
    counted, call = np.zeros(2, np.uint64), np.zeros(4, np.uint32)
    for leaving in (0, 1, 0, 1):
        call[0] = leaving
        look(counted.ctypes.data, cupti.DRIVER_API, cupti.LAUNCH_KERNEL, call.ctypes.data)
    assert counted.tolist() == [0, 2]
