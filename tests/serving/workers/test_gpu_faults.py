"""A request that ends the engine, as a stray address does on a real GPU: named, answered, and not let in again."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
from serving_processes import processes
from serving_server import ask, infer_body

LOOKUP = "/v2/models/lookup/infer"


def body(value, n=1):
    return json.dumps(infer_body("i", np.full((n, 1), value), "INT64")).encode()


def is_ready(server):
    return ask(server, "GET", "/v2/health/ready")[0] == 200


def both_answer(server):
    """Both workers answer. Each numbers its own requests; the kernel may give many connections to one of them."""
    seen = set()
    for _ in range(30):
        status, headers, _ = ask(server, "POST", LOOKUP, body(3))
        if status != 200:
            return False
        seen.add(headers["X-Request-Id"].partition("-")[0])
    return len(seen) == 2


@pytest.fixture(scope="module")
def server():
    """Each test uses a row of its own beyond the table: a request that was to blame is not run again."""
    with processes("served_models:losing_the_gpu", workers=2) as found:
        yield found


def restarted(server, before):
    server.wait_until(lambda: server.pids("engine") not in ([], [before]))
    server.wait_until(lambda: both_answer(server))


def test_who_made_the_gpu_fail_is_named_and_refused_when_it_comes_again(server):
    (before,) = server.pids("engine")
    status, headers, said = ask(server, "POST", LOOKUP, body(1 << 20))
    assert status == 500
    assert "Retry-After" not in headers
    assert "this request" in said["error"]
    restarted(server, before)
    (after,) = server.pids("engine")
    for _ in range(6):  # whichever worker is asked
        assert ask(server, "POST", LOOKUP, body(1 << 20))[0] == 500
        assert ask(server, "POST", LOOKUP, body(3))[0] == 200
    assert server.pids("engine") == [after]
    assert any("made the GPU fail" in line["message"] and line["model"] == "lookup" for line in server.lines())


def test_a_request_of_several_items_is_named_and_its_items_are_not(server):
    several = json.dumps(infer_body("i", np.array([[3], [1 << 21]]), "INT64")).encode()
    (before,) = server.pids("engine")
    status, headers, _ = ask(server, "POST", LOOKUP, several)
    assert status == 500
    assert "Retry-After" not in headers
    restarted(server, before)
    (after,) = server.pids("engine")
    assert ask(server, "POST", LOOKUP, several)[0] == 500
    assert server.pids("engine") == [after]


def test_whoever_asks_meanwhile_is_told_to_come_again_and_the_server_is_not_ready(server):
    found, stop = [], threading.Event()

    def look():
        while not stop.is_set():
            status, headers, _ = ask(server, "POST", LOOKUP, body(5))
            found.append((status, "Retry-After" in headers, is_ready(server)))
            time.sleep(0.002)

    threads = [threading.Thread(target=look) for _ in range(6)]  # all with the same content
    for thread in threads:
        thread.start()
    (before,) = server.pids("engine")
    assert ask(server, "POST", LOOKUP, body(1 << 22))[0] in (500, 503)  # alone, or beside others
    restarted(server, before)
    count = len(found)
    server.wait_until(lambda: len(found) > count + 5)
    stop.set()
    for thread in threads:
        thread.join()
    away = [each for each in found if each[0] != 200]
    assert away
    assert all(status == 503 and again for status, again, _ in away)
    assert any(not ready for _, _, ready in away)
    assert found[-1][0] == 200
