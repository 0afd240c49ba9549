"""Texts over HTTP: OpenAI's client and Triton's addresses against a small language model on the virtual GPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from language_families import small_model
from router_server import routing
from serving_server import ask, running, scrape

import paellapy as pp
from paellapy.scheduler.core.errors import EngineAwayError, TooManyRequestsError
from paellapy.serving import schemas
from paellapy.serving.access import Key

openai: Any = pytest.importorskip("openai")
pytestmark = pytest.mark.xdist_group("language models")

CONTEXT = 256
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
PROMPT = "It is a truth"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    small_model(made, context=CONTEXT)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Any:
    model = pp.LanguageModel(folder, name="tiny", sequences=4, chunk=64)
    with running([model]) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Any, path: str, **body: Any) -> tuple[int, Any]:
    status, _, found = ask(server, "POST", path, json.dumps(body).encode())
    return status, found


def at_rest(server: Any) -> None:
    def is_free() -> bool:
        counts = server.engine.stats()["language_models"]["tiny"]
        return counts["free_pages"] == counts["pages"] and counts["running"] == counts["waiting"] == 0

    server.wait_until(is_free)
    assert server.service.in_flight == 0
    assert not server.service.live


# -- OpenAI's client


def test_models_are_listed(client: Any) -> None:
    assert [(each.id, each.max_model_len) for each in client.models.list()] == [("tiny", CONTEXT)]
    assert client.models.retrieve("tiny").owned_by == "paellapy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_texts_pass_through_a_router(server: Any) -> None:
    asked = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    generate = {"text_input": PROMPT, "parameters": {"temperature": 0, "max_tokens": 6, "ignore_eos": True}}
    with routing({"e": server.url}) as router:
        router.wait_until(lambda: router.router.ready)
        assert [each["id"] for each in ask(router, "GET", "/v1/models")[2]["data"]] == ["tiny"]
        assert ask(router, "GET", "/v1/models/tiny")[2]["id"] == "tiny"
        status, headers, said = ask(router, "POST", "/v1/completions", json.dumps(asked).encode())
        assert (status, headers["X-Engine"]) == (200, "e")
        text = said["choices"][0]["text"]
        streamed = json.dumps({**asked, "stream": True}).encode()
        _, headers, said = ask(router, "POST", "/openai/v1/completions", streamed)
        assert headers["Content-Type"] == "text/event-stream"
        *pieces, done = said.decode().strip().split("\n\n")
        assert "".join(json.loads(each[6:])["choices"][0]["text"] for each in pieces) == text
        assert done == "data: [DONE]"
        for path in ("/v2/models/tiny/generate", "/v2/models/tiny/versions/1/generate"):
            assert post(router, path, **generate)[1]["text_output"] == text
        *_, said = ask(router, "POST", "/v2/models/tiny/generate_stream", json.dumps(generate).encode())
        assert said.startswith(b"data: ")
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank"):
            status, said = post(router, path, model="none")
            assert (status, said["error"]["type"]) == (404, "not_found_error")
            assert post(router, path)[0] == 400
        assert ask(router, "POST", "/v1/embeddings", b'{"model": "tiny"}')[1]["X-Engine"] == "e"


def test_a_completion_is_that_of_the_engine(server: Any, client: Any) -> None:
    wanted = server.engine.generate("tiny", PROMPT, temperature=0, max_tokens=12, ignore_eos=True).text()
    found = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    assert found.choices[0].text == wanted
    assert found.choices[0].finish_reason == "length"
    usage = found.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (len(PROMPT), 12, len(PROMPT) + 12)
    pieces = list(client.completions.create(model="tiny", prompt=PROMPT, stream=True, **GREEDY))
    assert "".join(each.choices[0].text for each in pieces) == wanted
    assert [each.choices[0].finish_reason for each in pieces] == [None] * 11 + ["length"]


def test_a_stream_may_end_with_its_usage(client: Any) -> None:
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **GREEDY}
    *pieces, last = client.completions.create(model="tiny", prompt=PROMPT, **options)
    assert [each.usage for each in pieces] == [None] * 12
    assert (last.choices, last.usage.completion_tokens) == ([], 12)


def test_several_prompts_of_tokens_each_with_several_texts(server: Any, client: Any) -> None:
    found = client.completions.create(model="tiny", prompt=[[5, 6], [7]], n=2, **GREEDY)
    wanted = [server.engine.generate("tiny", p, temperature=0, max_tokens=12, ignore_eos=True).text()
              for p in ([5, 6], [7])]  # fmt: skip
    assert [each.text for each in found.choices] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [each.index for each in found.choices] == [0, 1, 2, 3]
    assert found.usage is not None
    assert found.usage.prompt_tokens == 3
    texts = dict.fromkeys(range(4), "")
    for each in client.completions.create(model="tiny", prompt=[[5, 6], [7]], n=2, stream=True, **GREEDY):
        texts[each.choices[0].index] += each.choices[0].text
    assert list(texts.values()) == [each.text for each in found.choices]


def test_log_probabilities_of_both_addresses_agree(client: Any) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, **GREEDY).choices[0].logprobs
    assert plain is not None
    assert plain.tokens is not None
    assert plain.top_logprobs is not None
    assert all(token in top for token, top in zip(plain.tokens, plain.top_logprobs, strict=True))
    assert all(lp == max(top.values()) for lp, top in zip(plain.token_logprobs, plain.top_logprobs, strict=True))
    chat = [{"role": "user", "content": PROMPT}]
    found = client.chat.completions.create(
        model="tiny", messages=chat, logprobs=True, top_logprobs=2, **GREEDY
    )  # fmt: skip
    listed = found.choices[0].logprobs
    assert listed is not None
    assert listed.content is not None
    assert [len(each.top_logprobs) for each in listed.content] == [2] * 12


def test_a_chat_takes_contents_as_parts_and_streams_its_role_once(client: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    options: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_completion_tokens": 6,
                               "extra_body": {"ignore_eos": True}}  # fmt: skip
    whole = client.chat.completions.create(messages=parts, **options)
    assert whole.usage.prompt_tokens == len(f"<user>{PROMPT}|<assistant>")
    pieces = list(client.chat.completions.create(messages=parts, stream=True, **options))
    deltas = [each.choices[0].delta for each in pieces]
    assert [each.role for each in deltas] == ["assistant"] + [None] * 5
    assert "".join(each.content for each in deltas) == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_an_answer_fulfils_a_schema(client: Any) -> None:
    pytest.importorskip("llguidance")
    form: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {"type": "boolean"}}}
    chat = [{"role": "user", "content": PROMPT}]
    found = client.chat.completions.create(model="tiny", messages=chat, response_format=form, max_tokens=20)
    assert json.loads(found.choices[0].message.content) in (True, False)
    form["json_schema"]["schema"] = {"type": "colour"}
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="tiny", messages=chat, response_format=form)
    assert e.value.param == "json_schema"


def by_schema(client: Any, schema: Any) -> Any:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    chat = [{"role": "user", "content": PROMPT}]
    return client.chat.completions.create(model="tiny", messages=chat, response_format=form, max_tokens=20)


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("schema", [{"$ref": "#"}, nested(400), {"enum": ["x" * 70_000]}])
def test_a_schema_that_cannot_be_used_is_refused(client: Any, schema: Any) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(openai.BadRequestError) as e:
        by_schema(client, schema)
    assert e.value.param == "json_schema"


def test_a_schema_that_takes_hours_to_compile_is_refused(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    hours = {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{k}}}"} for k in range(10, 50)]}
    with monkeypatch.context() as soon:
        soon.setattr(schemas, "CPU_S", 1)
        with pytest.raises(openai.BadRequestError) as e:
            by_schema(client, hours)
    assert e.value.param == "json_schema"
    assert json.loads(by_schema(client, {"type": "boolean"}).choices[0].message.content) in (True, False)


def test_a_stop_string_and_an_echo(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].text
    found = client.completions.create(model="tiny", prompt=PROMPT, stop=[whole[4:6]], echo=True, **GREEDY).choices[0]
    assert found.text == PROMPT + whole[: whole.index(whole[4:6])]
    assert found.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"model": "huge"}, openai.NotFoundError, None),
        ({"prompt": "x" * CONTEXT}, openai.BadRequestError, "prompt"),
        ({"prompt": [1_000_000]}, openai.BadRequestError, "prompt"),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"stop": ["x"] * 1000}, openai.BadRequestError, "stop"),
        ({"extra_body": {"colour": 1}}, openai.BadRequestError, "colour"),
        ({"prompt": "x" * 10_000_000}, openai.APIStatusError, "body"),
    ],
)
def test_a_wrong_request_is_told_in_the_apis_form(client: openai.OpenAI, body: Any, error: Any, param: Any) -> None:
    for stream in (False, True):
        with pytest.raises(error) as e:
            client.completions.create(**{"model": "tiny", "prompt": "a", "stream": stream, **body})
        assert e.value.param == param


# -- Triton's addresses


def test_generate_answers_as_triton_does(server: Any) -> None:
    wanted = server.engine.generate("tiny", PROMPT, temperature=0, max_tokens=5, ignore_eos=True).text()
    parameters = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    path = "/v2/models/tiny/generate"
    told = {"model_name": "tiny", "model_version": "1", "text_output": wanted}
    assert post(server, path, text_input=PROMPT, parameters=parameters) == (200, told)
    assert post(server, path, text_input=PROMPT, id="7", **parameters) == (200, {"id": "7", **told})
    _, headers, body = ask(server, "POST", f"{path}_stream", json.dumps({"text_input": PROMPT, **parameters}).encode())
    assert headers["Content-Type"] == "text/event-stream"
    events = [json.loads(each.removeprefix("data: ")) for each in body.decode().split("\n\n")[:-1]]
    assert "".join(each["text_output"] for each in events) == wanted
    assert len(events) == 5


def test_addresses_of_the_other_kind_say_where_to_go(server: Any) -> None:
    assert post(server, "/v2/models/tiny/infer", inputs=[])[0] == 400
    assert post(server, "/v2/models/nope/generate", text_input="a")[0] == 404
    status, _, found = ask(server, "GET", "/v2/models/tiny")
    assert (status, found["inputs"][0]["name"]) == (200, "text_input")
    assert ask(server, "GET", "/v2/models/tiny/config")[2]["model_transaction_policy"] == {"decoupled": True}
    assert ask(server, "GET", "/health")[0] == 200


def test_a_deadline_ends_a_text(server: Any) -> None:
    status, found = post(server, "/v2/models/tiny/generate", text_input="a", timeout=1000, max_tokens=200)
    assert (status, list(found)) == (503, ["error"])
    at_rest(server)


# -- clients


def test_a_client_that_leaves_cancels_its_text(server: Any) -> None:
    async def leave() -> None:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 200, "stream": True, "ignore_eos": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                await answer.content.readline()
            with pytest.raises(asyncio.TimeoutError):
                await session.post(
                    f"{server.url}/v1/completions", json={**body, "stream": False},
                    timeout=aiohttp.ClientTimeout(total=0.3),
                )  # fmt: skip

    before = server.engine.stats()["language_models"]["tiny"]["tokens"]
    asyncio.run(leave())
    at_rest(server)
    assert server.engine.stats()["language_models"]["tiny"]["tokens"] - before < 300


def test_clients_that_do_not_read_delay_nobody_and_the_slowest_is_cut_off(
    server: Any, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (listening,) = server.server._runner.sites
    listening._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    monkeypatch.setattr(server.service.unsent, "max_bytes", 150_000)
    body = json.dumps({"model": "tiny", "prompt": "a", "stream": True, "ignore_eos": True, "logprobs": 20})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) + 19}\r\n\r\n"
    with socket.socket() as first, socket.socket() as second:
        for deaf in (first, second):
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(f'{head}{body[:-1]}, "max_tokens": 120}}'.encode())
            server.wait_until(lambda: server.service.unsent.nbytes > 100_000)
        server.wait_until(lambda: len(server.service.live) == 1)
        assert client.completions.create(model="tiny", prompt=PROMPT, **GREEDY).choices[0].finish_reason == "length"
    server.wait_until(lambda: not server.service.in_flight)
    at_rest(server)
    assert server.service.unsent.nbytes == server.service.held.nbytes == 0


def test_an_engine_that_is_silent_ends_texts_with_an_error(server: Any) -> None:
    def give_up() -> None:
        server.wait_until(lambda: server.service.live)
        for each in list(server.service.live):
            server.loop.call_soon_threadsafe(each.abandon, EngineAwayError("it does not respond"))

    thread = threading.Thread(target=give_up)
    thread.start()
    status, found = post(server, "/v1/completions", model="tiny", prompt="a", max_tokens=200, ignore_eos=True)
    thread.join()
    assert (status, found["error"]["type"]) == (503, "service_unavailable_error")
    at_rest(server)


def test_an_unload_finishes_texts_and_a_load_brings_the_model_back(server: Any, client: Any) -> None:
    stream = iter(client.completions.create(model="tiny", prompt="a", stream=True, **GREEDY))
    next(stream)
    assert ask(server, "POST", "/v2/repository/models/tiny/unload", b"{}")[0] == 200
    assert len(list(stream)) == 11
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt="a")
    assert list(client.models.list()) == []
    assert ask(server, "POST", "/v2/repository/models/tiny/load", b"{}")[0] == 200
    assert client.completions.create(model="tiny", prompt="a", **GREEDY).usage.completion_tokens == 12


def test_the_dashboard_has_what_language_models_do(server: Any) -> None:
    (found,) = server.call(server.service.call("snapshot"))["language_models"]
    assert found["name"] == "tiny"
    assert found["tokens"] >= found["tbt"]["counts"][-1]
    assert len(found["ttft"]["counts"]) == len(found["ttft"]["bounds_s"]) + 1
    json.dumps(found)


def test_texts_are_counted(server: Any, client: Any) -> None:
    def total(name: str) -> float:
        return sum(s.value for s in scrape(server) if s.name == name and s.labels.get("model") == "tiny")

    names = ("paellapy_requests_answered_total", "paellapy_generated_tokens_total", "paellapy_prompt_tokens_total",
             "paellapy_ttft_seconds_count", "paellapy_tbt_seconds_count", "paellapy_texts_total")  # fmt: skip
    before = [total(name) for name in names]
    client.completions.create(model="tiny", prompt="abc", **GREEDY)
    assert [total(name) - was for name, was in zip(names, before, strict=True)] == [1, 12, 3, 1, 11, 1]


def test_keys_are_asked_for_in_the_apis_form(folder: Path) -> None:
    model = pp.LanguageModel(folder, name="tiny", sequences=4, chunk=64)
    keys = {"alice": Key("a", ("infer",)), "bob": Key("b", ("operate",)), "carol": Key("c", ("infer",))}
    with running([model], keys=keys, drain_s=240.0) as server:
        for key, error in (("x", openai.AuthenticationError), ("b", openai.PermissionDeniedError), ("a", None)):
            with openai.OpenAI(base_url=f"{server.url}/openai/v1", api_key=key) as client:
                if error is None:
                    found = client.completions.create(model="tiny", prompt="a", max_tokens=1)
                    assert found.usage.completion_tokens == 1
                    continue
                with pytest.raises(error) as e:
                    client.completions.create(model="tiny", prompt="a")
                assert e.value.param == "X-API-Key"
        check_a_tenant_that_wants_all_places(server)
        check_a_stop_lets_texts_end(server)


def check_a_tenant_that_wants_all_places(server: Any) -> None:
    server.engine.tenant("alice", share=3)
    begun: list[Any] = []
    with contextlib.suppress(TooManyRequestsError):
        while True:
            begun.append(server.engine.generate("tiny", [1], client="alice"))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="tiny", prompt="a", stream=stream)
    begun.append(server.engine.generate("tiny", [1], client="carol"))
    for each in begun:
        each.cancel()
    at_rest(server)


def check_a_stop_lets_texts_end(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="c", max_retries=0) as client:
        options = {**GREEDY, "max_tokens": 100}
        stream = iter(client.completions.create(model="tiny", prompt="a", stream=True, **options))
        next(stream)
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        server.wait_until(lambda: server.service.draining)
        assert len(list(stream)) == 99
    stopping.result()
