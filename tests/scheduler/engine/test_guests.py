"""Other processes beside an engine, on the virtual GPU: held back, let go by share, killed, and left alone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from engine_models import asking, scale_model
from places import TESTS
from waiting import wait_until

import paellapy as pp
from paellapy.cli.guest import Guest
from paellapy.instrument.device import launch_hook
from paellapy.scheduler.core.errors import EngineClosedError
from paellapy.scheduler.engine.guests import NoEngineError, knock

X = np.arange(64, dtype=np.float32)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def engine():
    with pp.Engine("virtual:h200", policy="priority") as engine:
        engine.load(scale_model())
        yield engine


@contextlib.contextmanager
def guest(*options: str, seconds: float = 30.0):
    script = str(TESTS / "guest_script.py")
    line = [sys.executable, "-m", "paellapy", "run", *options, script, str(seconds), "its", "--own"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def job(engine):
    return engine.stats()["jobs"].get("guest_script")


def test_a_script_is_held_back_killed_in_its_lease_and_never_missed(engine):
    with guest("--best-effort") as process:
        wait_until(lambda: (job(engine) or {"launches": 0})["launches"] > 0)
        assert job(engine)["pid"] == process.pid
        with asking(engine) as counts:
            wait_until(lambda: counts[0] > 50 and job(engine)["waits"] > 0)
        wait_until(lambda: job(engine)["closes"] > 0 and job(engine)["state"] == "running")
        with asking(engine, gap_s=0.05) as counts:  # the gate is open in the gaps
            wait_until(lambda: counts[0] > 2 and job(engine)["state"] == "running")
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: job(engine) is None)
            wait_until(lambda before=counts[0]: counts[0] > before + 5)


def test_a_script_goes_on_when_the_engine_leaves():
    engine = pp.Engine("virtual:h200")
    try:
        with guest("--best-effort", "--share", "0.2", seconds=3) as process:
            wait_until(lambda: (job(engine) or {"launches": 0})["launches"] > 0)
            engine.close()
            out, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
        assert out.splitlines()[-1].startswith("done")
        assert out.splitlines()[-1].endswith("its --own")
    finally:
        engine.close()


@pytest.mark.parametrize("_", range(3))
def test_an_engine_that_closes_under_load_answers_what_it_took_and_lets_its_guests_go(_):
    """The core closes gates until its last request is answered."""
    engine, ended = pp.Engine("virtual:h200", policy="priority"), []
    engine.load(scale_model())
    own = Guest("here", priority=-1)
    line = own.connect()
    wait_until(lambda: engine.state.core["gates"][0] == 1)

    def ask() -> None:
        try:
            while True:
                assert np.array_equal(engine.infer_sync("scale", {"x": X})["y"], 2 * X)
        except Exception as e:
            ended.append(e)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    wait_until(lambda: engine.stats()["jobs"]["here"]["closes"] > 0)
    engine.close()
    for each in threads:
        each.join(60)
    assert [type(e) for e in ended] == [EngineClosedError] * 4
    wait_until(lambda: not launch_hook.closed_at(own.words, time.monotonic_ns()))
    line.close()


def test_a_gate_closes_for_higher_priority_and_opens_after_it(engine):
    own = Guest("here", priority=-1)
    line = own.connect()
    wait_until(lambda: engine.state.core["gates"][0] == 1)
    assert not launch_hook.closed_at(own.words, time.monotonic_ns())
    engine.infer_sync("scale", {"x": X})
    wait_until(lambda: engine.stats()["jobs"]["here"]["closes"] == 1)
    wait_until(lambda: not own.words[launch_hook.CLOSED_UNTIL_NS])
    with engine.lease("low", priority=-2):  # not for lower priorities
        time.sleep(0.01)
        assert engine.stats()["jobs"]["here"]["closes"] == 1
    line.close()
    wait_until(lambda: engine.state.core["gates"][0] == 0)


def test_two_guests_of_one_name_are_told_apart_and_more_than_fit_are_refused(engine):
    lines = [Guest("g", share=0.5) for _ in range(2)]
    held = [each.connect() for each in lines]
    assert [each.name for each in lines] == ["g", "g-2"]
    held += [Guest("g").connect() for _ in range(14)]
    with pytest.raises(NoEngineError, match="16 guests"):
        Guest("g").connect()
    for line in held:
        line.close()
    wait_until(lambda: engine.state.core["gates"][0] == 0)
    assert engine.stats()["jobs"] == {}


def test_a_guest_with_the_name_of_a_lease_is_seen_beside_it(engine):
    with Guest("train").connect(), engine.lease("train"):
        kinds = {name: each["kind"] for name, each in engine.stats()["jobs"].items()}
        assert kinds == {"train": "leases", f"train-{os.getpid()}": "process"}


def test_a_lease_that_nobody_renews_expires():
    words = np.zeros(launch_hook.WORDS, np.uint64)
    words[launch_hook.CLOSED_UNTIL_NS] = time.monotonic_ns() + 20_000_000
    words[launch_hook.SHARE] = launch_hook.SHARE_UNIT
    launch_hook.Gate(words).wait()
    assert words[launch_hook.WAITS] == 1
    assert words[launch_hook.WAITED_NS] > 0


@pytest.mark.parametrize("share", [0.25, 0.7])
def test_a_share_is_the_part_of_the_time_that_the_gate_is_open(share):
    words = np.zeros(launch_hook.WORDS, np.uint64)
    words[launch_hook.SHARE], words[launch_hook.ALIVE_UNTIL_NS] = int(share * launch_hook.SHARE_UNIT), 1 << 60
    times = range(0, 10 * launch_hook.PERIOD_NS, 10_007)
    assert np.mean([not launch_hook.closed_at(words, t) for t in times]) == pytest.approx(share, abs=0.01)
    assert not launch_hook.closed_at(words, (1 << 60) + launch_hook.PERIOD_NS - 1)  # the engine is gone


def test_an_engine_that_hides_is_not_found_and_what_the_dead_left_is_swept_away(engine, folder):
    left = folder / "hidden-engine-999999999-0.sock"  # beyond any process's number
    left.touch()
    engine.guests.hide()
    assert not left.exists()
    with pytest.raises(NoEngineError):
        knock()
    engine.guests.show()
    knock().close()


def test_an_engine_that_ends_closes_lines_that_said_nothing(folder):
    with pp.Engine("virtual:h200"):
        line = knock()
        line.settimeout(60)
    with line, contextlib.suppress(ConnectionResetError):  # reset where the engine ended before it accepted the line
        assert line.recv(1) == b""


def test_without_an_engine_the_remedy_is_named(folder):
    with pytest.raises(NoEngineError, match="start one"):
        knock()
    (folder / "engine-1-0.sock").touch()  # of one that ended without a word
    with pytest.raises(NoEngineError):
        knock("1")
    assert not list(folder.iterdir())


def test_what_cannot_be_run_is_refused(tmp_path):
    for options, words in (
        ([str(tmp_path)], "--best-effort"), (["--best-effort", "no.py"], "no.py"),
        (["--best-effort", "--share", "2", str(TESTS / "guest_script.py")], "share is 2"),
        (["--best-effort", "--share", "0.001", str(TESTS / "guest_script.py")], "from 0.01 to 1"),
    ):  # fmt: skip
        found = subprocess.run([sys.executable, "-m", "paellapy", "run", *options], capture_output=True, text=True)
        assert found.returncode != 0
        assert words in found.stderr


def ran(tmp_path, text: str, *given: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "own.py").write_text(text)
    line = [sys.executable, "-m", "paellapy", "run", "--best-effort", "own.py", *given]
    return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=120)


def test_a_script_s_error_is_printed_as_python_prints_it(engine, tmp_path):
    found = ran(tmp_path, "def f():\n    raise ValueError('mine')\n\nf()\n")
    lines = found.stderr.splitlines()
    assert found.returncode == 1
    assert {"Traceback (most recent call last):", "ValueError: mine"} <= {*lines}
    frames = [each for each in lines if each.startswith("  File ")]
    assert len(frames) == 2
    assert all(str(tmp_path / "own.py") in each for each in frames)
    assert ran(tmp_path, "raise SystemExit(3)").returncode == 3


def test_a_script_sees_itself_as_under_python(engine, tmp_path):
    text = "import sys\nprint(__name__, __file__, sys.argv[1:], sys.path[0])\n"
    found = ran(tmp_path, text, "--share", "x")
    assert found.stdout.strip() == f"__main__ {tmp_path / 'own.py'} ['--share', 'x'] {tmp_path}", found.stderr


FORKS = """
import os, sys, threading
from paellapy.instrument.device import launch_hook
from paellapy.scheduler.core.errors import EngineClosedError
child = os.fork()
if child == 0:
    launch_hook.hold()  # as a launch on the virtual GPU
    print(sorted(each.name for each in threading.enumerate() if each.name == "paellapy-gate"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
sys.stdin.read()
"""


def test_a_fork_of_a_script_is_behind_the_same_gate(engine, tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    line = [sys.executable, "-m", "paellapy", "run", "--best-effort", str(tmp_path / "forks.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, **pipes) as process:
        try:
            assert process.stdout.readline().strip() == "['paellapy-gate']"  # it looks for the driver by itself
            assert engine.stats()["jobs"]["forks"]["launches"] == 1
        finally:
            _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert "Traceback" not in error  # newer Pythons warn of forks beside threads
