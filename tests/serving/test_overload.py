"""Many more requests than a server can do: every answer is right or a 503, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
from urllib.request import urlopen

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving_server import infer_body, read_until, serving

from paellapy import demo

IMAGES, LABELS = demo.held_out()
CLIENTS, EACH = 80, 12

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
    with urlopen(f"{url}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    wanted = ("paellapy_requests_in_flight", "paellapy_items_live", "paellapy_items_queued")
    return sum(s.value for family in families for s in family.samples if s.name in wanted)


@pytest.mark.parametrize("workers", [0, 1])
def test_under_overload_every_answer_is_right_or_a_refusal(tmp_path, workers):
    """Eighty clients at once, each waiting for its answer. One at a time takes the CPU milliseconds on any machine, so
    the last of eighty would wait for longer than the target."""
    (tmp_path / "paella.toml").write_text(CONFIG.format(workers=workers))
    right, refused, wrong = [], [], []

    async def client(session, url, k):
        body = infer_body("image", IMAGES[k : k + 1], outputs=[{"name": "scores", "parameters": {"classification": 1}}])
        for _ in range(EACH):
            async with session.post(f"{url}/v2/models/cnn/infer", json=body) as answer:
                found = await answer.json()
                if answer.status == 200:
                    digit = int(found["outputs"][0]["data"][0].split(":")[1])
                    (right if digit == expected[k] else wrong).append(digit)
                else:
                    assert answer.status == 503, found
                    assert int(answer.headers["Retry-After"]) >= 1
                    refused.append(found["error"])

    async def ask_one(session, url, k):
        """Asks until it is admitted, which it is once it is alone."""
        body = infer_body("image", IMAGES[k : k + 1], outputs=[{"name": "scores", "parameters": {"classification": 1}}])
        while True:
            async with session.post(f"{url}/v2/models/cnn/infer", json=body) as answer:
                if answer.status == 200:
                    return int((await answer.json())["outputs"][0]["data"][0].split(":")[1])
                assert answer.status == 503

    async def main(url):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for k in range(CLIENTS):
                expected.append(await ask_one(session, url, k))
            await asyncio.gather(*(client(session, url, k) for k in range(CLIENTS)))
            return [await ask_one(session, url, k) for k in range(5)]

    expected = []
    with serving(str(tmp_path / "paella.toml")) as process:
        said = read_until(process.stderr, '"message":"loaded"')
        url = next(json.loads(line)["url"] for line in said.splitlines() if '"listening"' in line)
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
