"""Texts through workers: the engine's process writes them, a client that leaves ends them, and so does its restart."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from language_families import small_model
from serving_processes import Processes, processes
from serving_server import scrape

openai: Any = pytest.importorskip("openai")
pytestmark = pytest.mark.xdist_group("language models")

CONFIG = """
device = "virtual:h200"

[server]
port = 0
grace_s = 0.2
drain_s = 20.0
log_format = "json"
standby = "off"

[[models]]
language_model = "tiny"
sequences = 4
chunk = 64
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "tiny").mkdir()
    small_model(folder / "tiny")
    (folder / "served.toml").write_text(CONFIG)
    with processes(str(folder / "served.toml")) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Processes) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def write(client: openai.OpenAI, n: int = 6, **options: Any) -> Any:
    more = {"temperature": 0, "extra_body": {"ignore_eos": True}, "prompt": "It is a truth", **options}
    return client.completions.create(model="tiny", max_tokens=n, **more)


def value(server: Processes, name: str) -> float:
    return sum(s.value for s in scrape(server) if s.name == name)


def test_a_stream_adds_up_to_the_whole_text(client: Any) -> None:
    whole = write(client)
    assert whole.usage.completion_tokens == 6
    pieces = [each.choices[0] for each in write(client, stream=True)]
    assert "".join(each.text for each in pieces) == whole.choices[0].text
    assert [each.finish_reason for each in pieces] == [None] * 5 + ["length"]


def test_an_error_of_the_engine_keeps_its_facts(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as e:
        write(client, prompt=[5] * 300)
    assert e.value.param == "prompt"


def test_a_client_that_leaves_ends_its_text(server: Processes, client: Any) -> None:
    stream = write(client, 200, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: value(server, "paellapy_texts_running") == 0)
    assert value(server, "paellapy_generated_tokens_total") < 200


def test_a_restart_of_the_engine_ends_a_stream_with_one_error(server: Processes, client: Any) -> None:
    stream = iter(write(client, 200, stream=True))
    next(stream)
    threading.Thread(target=server.kill, args=("engine",)).start()
    with pytest.raises(openai.APIError) as e:
        list(stream)
    assert json.loads(json.dumps(e.value.body))["type"] == "service_unavailable_error"

    def is_written() -> bool:
        try:
            written = write(client)
        except openai.InternalServerError:  # of a worker that has not found the new engine yet
            return False
        return bool(written.usage.completion_tokens == 6)

    server.wait_until(is_written)


def test_the_first_text_of_a_worker_imports_no_engine() -> None:
    said = (
        "import sys; from paellapy.serving.workers.texts import RemoteGeneration; RemoteGeneration(print);"
        "assert 'paellapy.scheduler.engine.generation' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", said], check=True)
