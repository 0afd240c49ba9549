"""Requests and answers of OpenAI's API and of Triton's generate, as plain functions."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.serving.errors import RequestError
from paellapy.serving.openai import (
    DONE,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_STOPS,
    Answer,
    Asked,
    Choice,
    Usage,
    check_values,
    error_body,
    read_chat,
    read_completion,
    read_generate,
)

pytestmark = pytest.mark.quick

HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Piece:
    text: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None


def completion(**fields: Any) -> Asked:
    return read_completion(json.dumps({"model": "m", "prompt": "a", **fields}).encode())


def chat(**fields: Any) -> Asked:
    return read_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def generate(**fields: Any) -> Asked:
    return read_generate("m", json.dumps({"text_input": "a", **fields}).encode(), stream=False)


# -- requests


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), ("", [""]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_are_texts_or_tokens(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_a_request_of_a_load_generator_is_read() -> None:
    asked = completion(
        prompt=[5, 6], max_tokens=8, temperature=0.0, repetition_penalty=1.0, logprobs=None, ignore_eos=True, stop=None,
        stream=True, stream_options={"include_usage": True}, top_k=-1, user="x",
    )  # fmt: skip
    assert asked.sampling == {
        "max_tokens": 8, "temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True, "top_k": 0,
    }  # fmt: skip
    assert (asked.stream, asked.usage, asked.logprobs, asked.n) == (True, True, False, 1)


def test_defaults_are_those_of_the_api() -> None:
    assert completion().sampling == {"max_tokens": 16}
    assert chat().sampling == {}
    assert chat(max_tokens=3, max_completion_tokens=5).sampling == {"max_tokens": 5}
    assert chat(logprobs=True).sampling == {"logprobs": 0}


def test_stop_strings_and_ids() -> None:
    assert completion(stop="x").sampling["stop"] == ("x",)
    assert completion(stop=["x", "y"], stop_token_ids=[3]).sampling["stop_ids"] == (3,)
    assert completion(logit_bias={"7": -100}).sampling["logit_bias"] == {7: -100.0}


def test_a_form_of_answers_is_a_schema() -> None:
    schema = {"type": "array"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert chat(response_format=form).sampling == {"json_schema": schema}
    assert chat(response_format={"type": "json_object"}).sampling == {"json_schema": {"type": "object"}}
    assert chat(response_format={"type": "text"}).sampling == {}


def test_contents_may_be_parts() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == HELLO


def test_priorities_count_from_the_models_own() -> None:
    assert completion(priority=-2).sooner == 2
    assert generate(parameters={"priority": 1, "timeout": 500}).level == 1


def test_triton_takes_parameters_inside_and_beside() -> None:
    inside, beside = generate(parameters={"max_tokens": 3, "stop": "x"}), generate(max_tokens=3, stop="x", stream=False)
    assert inside == beside
    assert inside.sampling == {"max_tokens": 3, "stop": ("x",)}
    assert not inside.echo
    assert generate(exclude_input_in_output=False).echo


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a"] * (MOST_CHOICES + 1)}, "n"),
        ({"n": 0}, "n"),
        ({"temperature": "warm"}, "temperature"),
        ({"tempreature": 1}, "tempreature"),
        ({"stop": ["x"] * (MOST_STOPS + 1)}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"stop_token_ids": list(range(2000))}, "stop_token_ids"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"more": True}}, "stream_options.more"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: Any, name: str) -> None:
    with pytest.raises(RequestError) as e:
        completion(**fields)
    assert (e.value.status, e.value.field) == (400, name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": ""}] * (MOST_MESSAGES + 1)}, "messages"),
        ({"messages": ["a"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"prompt": "a"}, "prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: Any, name: str) -> None:
    with pytest.raises(RequestError) as e:
        chat(**fields)
    assert (e.value.status, e.value.field) == (400, name)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text_input": 1}, "text_input"),
        ({"parameters": {"max_tokens": "x"}}, "parameters.max_tokens"),
        ({"parameters": {"colour": 1}}, "parameters.colour"),
        ({"stream": True}, "stream"),
        ({"priority": -1}, "parameters.priority"),
    ],
)
def test_a_wrong_field_of_generate_is_named(fields: Any, name: str) -> None:
    with pytest.raises(RequestError) as e:
        generate(**fields)
    assert (e.value.status, e.value.field) == (400, name)


def test_values_are_counted_before_they_are_made() -> None:
    body = b'{"model": "m", "prompt": [' + b"[1]," * 1_000_000 + b"[1]]}"
    with pytest.raises(RequestError) as e:
        check_values(body, context=4096)
    assert (e.value.field, e.value.given, e.value.limit) == ("body", 1_000_001, 1 << 17)
    check_values(body, context=500_001)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = ["model", "prompt", "messages", "n", "stop", "logprobs", "text_input", "parameters", "stream", "temperature"]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6) | VALUES)
@settings(max_examples=200, deadline=None)
def test_any_body_is_read_or_refused(body: Any) -> None:
    text = json.dumps(body).encode()
    for read in (read_completion, read_chat, lambda body: read_generate("m", body, False)):
        with contextlib.suppress(RequestError):
            assert 1 <= read(text).choices <= MOST_CHOICES


# -- answers

TOP = ((9, -0.5), (8, -1.0))


def text_of(token: int) -> str:
    return f"<{token}>"


def answers(asked: Asked, pieces: list[Piece], usage: Usage) -> tuple[list[Any], Any]:
    """The events of a stream, and the whole answer."""
    answer, choice = Answer(asked, text_of), Choice(0)
    sent = b""
    for piece in pieces:
        text = choice.add(piece)
        sent += answer.chunk(choice, text, usage)
        assert answer.keep(choice, text) > len(text)
    sent += answer.end(usage)
    assert sent.endswith(DONE)
    events = [json.loads(each.removeprefix("data: ")) for each in sent.decode().split("\n\n")[:-2]]
    return events, json.loads(msgspec.json.encode(answer.whole([choice], usage)))


def test_a_stream_of_a_completion_adds_up_to_the_whole() -> None:
    pieces = [Piece("He", 5, -0.1, TOP), Piece("", 6, -0.2, TOP), Piece("llo", 7, -0.3, TOP, "stop")]
    usage = Usage(4, 3, 2)
    asked = completion(stream=True, stream_options={"include_usage": True}, logprobs=2)
    events, whole = answers(asked, pieces, usage)
    *chunks, last = events
    assert [each["choices"][0]["text"] for each in chunks] == ["He", "", "llo"]
    assert [each["choices"][0]["finish_reason"] for each in chunks] == [None, None, "stop"]
    assert {(each["id"], each["object"], each["usage"]) for each in chunks} == {(whole["id"], "text_completion", None)}
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert whole["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Hello", "stop")
    assert choice["logprobs"] == {
        "tokens": ["<5>", "<6>", "<7>"], "token_logprobs": [-0.1, -0.2, -0.3], "text_offset": [0, 2, 2],
        "top_logprobs": [{"<9>": -0.5, "<8>": -1.0, f"<{t}>": lp} for t, lp in ((5, -0.1), (6, -0.2), (7, -0.3))],
    }  # fmt: skip
    joined = [each["choices"][0]["logprobs"] for each in chunks]
    assert {key: [entry for each in joined for entry in each[key]] for key in joined[0]} == choice["logprobs"]


def test_a_stream_of_a_chat_begins_with_the_role() -> None:
    pieces = [Piece("Hi", 5, -0.1, TOP), Piece("!", 6, -0.2, TOP, "length")]
    asked = chat(stream=True, logprobs=True, top_logprobs=1)
    events, whole = answers(asked, pieces, Usage(1, 2))
    deltas = [each["choices"][0]["delta"] for each in events]
    assert deltas == [{"role": "assistant", "content": "Hi"}, {"content": "!"}]
    assert [each["object"] for each in events] == ["chat.completion.chunk"] * 2
    assert "usage" not in events[0]
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == "Hi!"
    top = [{"token": "<9>", "logprob": -0.5, "bytes": [60, 57, 62]}]
    assert choice["logprobs"]["content"][0] == {
        "token": "<5>", "logprob": -0.1, "bytes": [60, 53, 62], "top_logprobs": top,
    }  # fmt: skip


def test_usage_may_come_with_every_chunk() -> None:
    asked = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    events, _ = answers(asked, [Piece("a", 1)], Usage(2, 1))
    assert [each["usage"]["total_tokens"] for each in events] == [3, 3]


def test_an_echo_is_part_of_the_first_piece() -> None:
    choice = Choice(0, "Once ")
    assert [(choice.add(Piece("upon", 1)), choice.offset), (choice.add(Piece(" a", 2)), choice.offset)] == [
        ("Once upon", 0), (" a", 9)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (413, "invalid_request_error"), (401, "authentication_error"),
     (404, "not_found_error"), (429, "rate_limit_error"), (503, "service_unavailable_error"), (500, "server_error")],
)  # fmt: skip
def test_errors_have_the_apis_form(status: int, kind: str) -> None:
    assert error_body(status, "why", "n")["error"].keys() == {"message", "type", "param", "code"}
    assert error_body(status, "why", "n")["error"]["type"] == kind
