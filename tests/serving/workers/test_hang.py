"""An engine whose process lives and does nothing: noticed, answered for, and started again."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from serving_processes import processes
from serving_server import BODY, INFER, ask, infer_body

SOON = json.dumps(infer_body("x", np.ones((1, 64), np.float32), parameters={"timeout": 500_000})).encode()


def stop(server, pid):
    """Stops every thread of a process: on a busy machine one may run on until another has taken the signal."""
    os.kill(pid, signal.SIGSTOP)
    states = [Path(each, "stat") for each in Path(f"/proc/{pid}/task").iterdir()]
    server.wait_until(lambda: all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in states))


def is_ready(server):
    return ask(server, "GET", "/v2/health/ready")[0] == 200


def test_an_engine_that_stands_still_is_answered_for_and_started_again():
    with processes("served_models:pair", workers=1, server={"engine_timeout_s": 3.0, "admission": "off"}) as server:
        (stopped,) = server.pids("engine")
        stop(server, stopped)
        with ThreadPoolExecutor(2) as clients:
            asked = {body: clients.submit(ask, server, "POST", INFER, body) for body in (SOON, BODY)}
        for body, answer in asked.items():
            status, headers, said = answer.result()
            assert status == 503
            assert headers["Retry-After"]
            assert ("deadline" if body is SOON else "not respond") in said["error"] or "ended" in said["error"]
        assert ask(server, "GET", "/metrics")[0] == 200  # without the engine's part
        server.wait_until(lambda: not is_ready(server))
        server.wait_until(lambda: is_ready(server))
        assert server.pids("engine") != [stopped]
        assert ask(server, "POST", INFER, BODY)[0] == 200
        assert any("not respond" in line["message"] for line in server.lines())


def test_a_stop_does_not_wait_for_an_engine_that_stands_still():
    options = {"engine_timeout_s": 600.0, "drain_s": 600.0, "admission": "off"}
    with processes("served_models:pair", workers=1, server=options) as server:
        (stopped,) = server.pids("engine")
        stop(server, stopped)
        server.process.terminate()
        assert server.process.wait(300) == 0
