"""Guests that mean harm, or err: whatever they say and write, the engine goes on and takes the next guest."""

from __future__ import annotations

import errno
import json
import mmap
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
from engine_models import scale_model
from places import TESTS
from waiting import wait_until

import paellapy as pp
from paellapy.cli.guest import Guest
from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.core.processes import SharedBlock
from paellapy.scheduler.engine.guests import _LINES, Greeting, GreetingError, knock

X = np.arange(64, dtype=np.float32)
HUGE = 99999999999999999999999
GOOD = {"name": "g", "priority": -1, "share": 1.0, "pid": 7}
BAD = {
    "priority": [HUGE, -HUGE, 1 << 62, float("inf"), float("nan"), 1.5, "3", None, [1], {}],
    "share": [0, 0.001, -1, 1.5, HUGE, float("inf"), float("nan"), "1", None, True, []],
    "pid": [0, -1, 1 << 31, HUGE, float("nan"), 1.5, "7", None, True],
    "name": ["", "x" * 256, "a\nb", "\ud800", 5, None, ["g"]],
}
CASES = [(field, value) for field, values in BAD.items() for value in values]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAELLAPY_RUNTIME_DIR", str(tmp_path_factory.mktemp("engine")))
        with pp.Engine("virtual:h200", policy="priority") as engine:
            engine.load(scale_model())
            yield engine


@pytest.fixture
def engine(served):
    yield served
    still_serves(served)


def still_serves(engine) -> None:
    """Requests are answered, and a guest can come, be seen and leave: both threads are alive."""
    assert np.array_equal(engine.infer_sync("scale", {"x": X})["y"], 2 * X)
    line = Guest("later", engine=str(engine.guests.path)).connect()
    wait_until(lambda: engine.state.core["gates"][0] == 1)
    assert "later" in engine.stats()["jobs"]
    line.close()
    wait_until(lambda: engine.state.core["gates"][0] == 0 and not engine.stats()["jobs"])


def say(engine, message: bytes) -> str:
    """The engine's answer to a message, which refuses it; the engine then hangs up."""
    with knock(str(engine.guests.path)) as line:
        line.settimeout(60)
        line.send(message)
        said, descriptors, _, _ = socket.recv_fds(line, 4096, 1)
        assert not descriptors
        assert line.recv(1) == b""
        return str(json.loads(said)["error"])


def test_every_field_of_a_greeting_is_checked_by_the_engine(engine):
    for field, value in CASES:
        assert f"{field}=" in say(engine, json.dumps(GOOD | {field: value}).encode()), (field, value)


@pytest.mark.parametrize(("field", "value"), CASES)
def test_every_field_of_a_greeting_is_checked_by_the_guest(field, value):
    with pytest.raises(GreetingError, match=f"{field}="):
        Greeting(**GOOD | {field: value})


@pytest.mark.parametrize(
    "message",
    [b"hello", b"\xff\xfe\x00", b"[" * 4000, b"{}", b"[]", b"null", b"7", b'{"name": "g"}', b"9" * 4096,
     json.dumps(GOOD | {"more": "x" * 5000}).encode()],
    ids=["text", "bytes", "nested", "empty", "list", "null", "number", "part", "digits", "long"],
)  # fmt: skip
def test_a_message_that_is_no_greeting_is_refused(engine, message):
    assert "name, priority, share, pid" in say(engine, message)


def test_a_guest_that_goes_on_talking_is_not_heard(engine):
    line = Guest("talker", engine=str(engine.guests.path)).connect()
    for _ in range(50):
        line.send(b'{"priority": Infinity}')
    line.close()
    wait_until(lambda: not engine.stats()["jobs"])


def test_connections_are_limited_and_released(engine):
    lines = [knock(str(engine.guests.path)) for _ in range(_LINES)]
    with lines[-1] as last:
        last.settimeout(60)
        assert str(_LINES) in json.loads(last.recv(4096))["error"]
    for line in lines:
        line.close()
    wait_until(lambda: _accepts(engine))


def _accepts(engine) -> bool:
    with knock(str(engine.guests.path)) as line:
        line.settimeout(60)
        try:
            line.send(b"hello")
            return "maximum" not in json.loads(line.recv(4096))["error"]
        except ConnectionError:  # refused before it could send
            return False


def test_a_guest_can_neither_shrink_nor_grow_nor_seal_its_block(engine):
    own = Guest("cutter", engine=str(engine.guests.path))
    line = own.connect()
    assert own._block is not None
    for size in (0, mmap.PAGESIZE // 2, 2 * mmap.PAGESIZE):
        with pytest.raises(OSError) as caught:
            os.ftruncate(own._block.fd, size)
        assert caught.value.errno == errno.EPERM
    for _ in range(20):
        engine.infer_sync("scale", {"x": X})
    line.close()
    wait_until(lambda: not engine.stats()["jobs"])


def test_a_guest_that_writes_all_over_its_block_harms_only_itself(engine):
    own, other = (Guest(name, engine=str(engine.guests.path)) for name in ("writer", "other"))
    lines = [own.connect(), other.connect()]
    wait_until(lambda: engine.state.core["gates"][0] == 2)
    before = other.words.copy()
    for value in (255, 0, 127):
        assert own._block is not None
        own._block.array[:] = value
        assert np.array_equal(engine.infer_sync("scale", {"x": X})["y"], 2 * X)
        assert {"writer", "other"} <= engine.stats()["jobs"].keys()
    assert np.array_equal(other.words[8:], before[8:])  # the words that only the guest writes
    for line in lines:
        line.close()
    wait_until(lambda: not engine.stats()["jobs"])


def test_a_block_keeps_its_size():
    block = SharedBlock(100)
    with pytest.raises(PermissionError):
        os.ftruncate(block.fd, 0)
    block.array[-1] = 1


@pytest.mark.parametrize(("option", "value"), [("--priority", HUGE), ("--in-flight", HUGE), ("--name", "a\nb")])
def test_the_command_line_refuses_in_one_sentence(option, value):
    line = [sys.executable, "-m", "paellapy", "run", "--best-effort", option, str(value)]
    line.append(str(TESTS / "guest_script.py"))
    found = subprocess.run(line, capture_output=True, text=True, check=False)
    assert found.returncode != 0
    assert option[2:].replace("-", "_") in found.stderr
    assert "Traceback" not in found.stderr


def test_a_priority_that_the_core_cannot_hold_is_refused(engine):
    uses = (
        lambda priority: engine.lease("script", priority=priority),
        lambda priority: engine.background(lambda: None, state=[], priority=priority),
        lambda priority: scale_model().changed(priority=priority),
    )
    for value in (HUGE, -HUGE, 10**5000, 1 << 62, float("inf"), 0.5, "high"):
        for use in uses:
            with pytest.raises(ModelError, match=r"priority.*integer"):
                use(value)
