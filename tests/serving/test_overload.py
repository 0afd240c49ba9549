"""Many more requests than a server can do: every answer is right or a 503, and nothing is left behind."""

from __future__ import annotations

import asyncio

import aiohttp
import numpy as np
import pytest
from serving_server import At, infer_body, scrape, serving, url_once

from paellapy import demo

pytestmark = pytest.mark.xdist_group("overload")  # two tests that take long

IMAGES, LABELS = demo.held_out()
CLIENTS, EACH = 80, 4

CONFIG = """
device = "virtual:h200"
[server]
port = 0
workers = {workers}
log_format = "json"
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "cnn", batch = [1] }}
target_ms = 40
instances = 1
"""


def left(url):
    wanted = ("paellapy_requests_in_flight", "paellapy_items_live", "paellapy_items_queued")
    return sum(s.value for s in scrape(At(url)) if s.name in wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_under_overload_every_answer_is_right_or_a_refusal(tmp_path, workers):
    """Eighty clients at once, each waiting for its answer. One at a time takes the CPU milliseconds on any machine, so
    the last of eighty would wait for longer than the target."""
    (tmp_path / "paella.toml").write_text(CONFIG.format(workers=workers))
    right, refused, wrong = [], [], []

    async def digit(session, url, k):
        """The class of an image; None: the request was refused."""
        body = infer_body("image", IMAGES[k : k + 1], outputs=[{"name": "scores", "parameters": {"classification": 1}}])
        async with session.post(f"{url}/v2/models/cnn/infer", json=body) as answer:
            found = await answer.json()
            if answer.status == 200:
                return int(found["outputs"][0]["data"][0].split(":")[1])
            assert answer.status == 503, found
            assert int(answer.headers["Retry-After"]) >= 1
            return None

    async def client(session, url, k):
        for _ in range(EACH):
            found = await digit(session, url, k)
            (refused if found is None else right if found == expected[k] else wrong).append(found)

    async def ask_one(session, url, k):
        """Asks until it is admitted, which it is once it is alone."""
        while (found := await digit(session, url, k)) is None:
            pass
        return found

    async def main(url):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for k in range(CLIENTS):
                expected.append(await ask_one(session, url, k))
            await asyncio.gather(*(client(session, url, k) for k in range(CLIENTS)))
            return [await ask_one(session, url, k) for k in range(5)]

    expected = []
    with serving(str(tmp_path / "paella.toml")) as process:
        url = url_once(process)
        after = asyncio.run(main(url))
        while left(url):
            pass
        process.terminate()
        assert process.wait(120) == 0
    assert np.mean(np.array(expected) == LABELS[:CLIENTS]) > 0.9
    assert not wrong
    assert right
    assert refused
    assert len(right) + len(refused) == CLIENTS * EACH
    assert after == expected[:5]
