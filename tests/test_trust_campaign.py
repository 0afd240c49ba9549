"""The scripts about faults harm the process that they name, and count what they say they count."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "trust"))

import calibration
import campaign
import faults
import served


def test_a_process_that_has_ended_gets_no_signal(tmp_path: Path) -> None:
    """With a real GPU, the system needs seconds to clean up after it."""
    this: Any = SimpleNamespace(pid=os.getpid())
    server = served.Served(this, "http://127.0.0.1:1", tmp_path, tmp_path / "log")
    with subprocess.Popen(["sleep", "600"]) as process:
        while process.pid not in server.children().get("sleep", []):  # until it has its own name
            time.sleep(0.01)
        assert str(process.pid) in faults.kill(server, "sleep")
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet cleaned up
        assert process.pid not in server.children().get("sleep", [])
        assert process.pid in server.children(ended=True)["sleep"]
        assert str(process.pid) not in faults.kill(server, "sleep")


def part(commit: str, seconds: float, requests: int, recoveries: dict[str, float]) -> dict[str, Any]:
    load = {"requests": requests, "outcomes": {"right": requests}, "kinds": {}, "errors": {}, "recent_latency_ms": {}}
    found = [{"fault": name, "recovery_s": s} for name, s in recoveries.items()]
    on = {"cpu": "some", "commit": commit, "date": "2026-11-17"}
    return {"on": on, "results": {"load": load, "faults": found, "settings": {"cores": 2}, "seconds": seconds}}


def test_merged_campaigns_say_what_each_server_did() -> None:
    first = part("a", 5.0, 10, {"engine-killed": 0.1})
    second = part("b", 7.0, 30, {"engine-killed": 9.0, "worker-killed": 0.2})
    third = part("c", 1.0, 2, {"engine-stops": 0.3})
    for found in (
        campaign.merged([first, second, third]),
        campaign.merged([campaign.merged([first, second]), third]),
        campaign.merged([first, campaign.merged([second, third])]),
    ):
        results = found["results"]
        assert found["on"]["commit"] == "a, b, c"
        assert results["load"]["requests"] == results["load"]["outcomes"]["right"] == 42
        assert [(each["commit"], each["seconds"], each["requests"]) for each in results["servers"]] == [
            ("a", 5.0, 10),
            ("b", 7.0, 30),
            ("c", 1.0, 2),
        ]
        recoveries = {each["fault"]: (each["recovery_s"], each["server"]) for each in results["faults"]}
        assert recoveries == {"worker-killed": (0.2, 1), "engine-killed": (9.0, 1), "engine-stops": (0.3, 2)}
        assert results["seconds"] == pytest.approx(13.0)


def test_a_fault_that_comes_again_keeps_its_longest_recovery() -> None:
    found: list[dict[str, Any]] = []
    for recovery_s, seen in ((0.1, "first"), (2.5, "second"), (0.3, "third")):
        campaign.add(found, {"fault": "engine-killed", "recovery_s": recovery_s, "seen": seen})
    campaign.add(found, {"fault": "worker-killed", "recovery_s": 0.0, "seen": "first"})
    assert [(each["fault"], each["seen"], each["recoveries_s"]) for each in found] == [
        ("engine-killed", "second", [0.1, 2.5, 0.3]),
        ("worker-killed", "first", [0.0]),
    ]
    campaign.add(found, {"fault": "engine-killed", "recovery_s": None, "seen": "never"})  # longer than any other
    assert found[0]["seen"] == "never"


def test_no_fault_begins_shortly_before_the_end() -> None:
    found: list[dict[str, Any]] = []
    nobody: Any = None
    asyncio.run(campaign.inject(["engine-killed"], nobody, nobody, found, until=time.monotonic() + 1.0))
    assert found == []


def test_calibration_counts_refusals_of_each_model() -> None:
    played: Any = [(0.0, SimpleNamespace(model=name)) for name in ("mlp", "mlp", "cnn", "cnn")]
    with_admission = [(503, 0.0), (200, 0.01), (200, 0.2), (200, 0.01)]
    without = [(200, 0.2), (200, 0.01), (200, 0.01), (200, 0.01)]
    found = calibration.compare(played, with_admission, without)
    assert found["refused_by_model"] == {"mlp": 0.5, "cnn": 0.0}
    assert found["rightly_refused"] == 1.0
    assert (found["in_time_with_admission"], found["in_time_without"]) == (0.5, 0.75)
    assert found["late_though_let_in"] == pytest.approx(1 / 3)


def test_programs_keep_cores_busy_only_meanwhile() -> None:
    with calibration.occupied(2) as pids:
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert len(set(pids)) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_calibration_weighs_each_load_by_its_refused_requests() -> None:
    loads = {
        "0.8": {"requests": 100, "refused": 0.0, "rightly_refused": None},
        "1.2": {"requests": 100, "refused": 0.1, "rightly_refused": 1.0},
        "2.0": {"requests": 100, "refused": 0.3, "rightly_refused": 0.5},
    }
    assert calibration.rightly_refused(loads) == pytest.approx(0.625)
    assert calibration.rightly_refused({"0.8": loads["0.8"]}) is None


def test_a_request_without_an_answer_counts_as_late() -> None:
    played: Any = [(0.0, SimpleNamespace(model="mlp"))] * 2
    found = calibration.compare(played, [(503, 0.0), (200, 0.01)], [(0, math.inf), (200, 0.01)])
    assert found["rightly_refused"] == 1.0
