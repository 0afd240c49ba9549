"""The API of OpenAI's clients, which most programs that use language models speak: requests, answers, errors.

    POST /v1/completions        {"model": "…", "prompt": "Once upon a time"}
    POST /v1/chat/completions   {"model": "…", "messages": [{"role": "user", "content": "Hello"}]}

Fields that other servers of this API know (`top_k`, `min_p`, `ignore_eos`, …) have their names. A field that is not
known is refused: it would otherwise have no effect. Triton's `generate` addresses are read here too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from paellapy.serving.errors import RequestError, short
from paellapy.serving.protocol import scheduling
from paellapy.serving.tensors import NOT_JSON

MOST_CHOICES = 128  # texts that one request may ask for
MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_STOP_IDS = 1024
MOST_MESSAGES = 4096  # of a chat: more are not made into a text, which would hold the interpreter
MOST_VALUES = 1 << 17  # of JSON: commas in a body, beyond two for each token of the longest context
KEPT_BYTES = 64  # of memory, besides its characters, for a text of an answer that is kept
COMPLETION_TOKENS = 16  # of a completion without max_tokens, as in OpenAI's API
DONE = b"data: [DONE]\n\n"

Prompt = str | list[int]
_encode = msgspec.json.Encoder().encode


# ---- requests --------------------------------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in every chunk


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class JsonSchema(msgspec.Struct):
    schema: dict[str, Any]


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of all addresses. None: the model's default."""

    stream: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None  # OpenAI's API: smaller goes first, 0: the model's own; Triton's: a level


class SamplingBody(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields of both addresses of OpenAI's API."""

    model: str
    n: int | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    response_format: ResponseFormat | None = None
    # About the client, not the answer: read and not used
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None


class CompletionBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(SamplingBody, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None


class GenerateParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    exclude_input_in_output: bool | None = None  # None: as True
    timeout: float | None = None


class GenerateBody(GenerateParameters, kw_only=True, forbid_unknown_fields=True):
    """Of Triton's `generate`: parameters may also stand beside the text."""

    text_input: str
    id: str = ""
    parameters: GenerateParameters | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for texts, whichever address it came to."""

    model: str
    prompts: list[Prompt] = field(default_factory=list)
    messages: list[dict[str, Any]] | None = None  # of a chat, in place of prompts
    template: Mapping[str, Any] = field(default_factory=dict)  # options of the chat template
    sampling: dict[str, Any] = field(default_factory=dict)  # those given, as fields of `Sampling`
    n: int = 1  # texts for each prompt
    stream: bool = False
    usage: bool = False  # the stream ends with the numbers of tokens
    usage_in_chunks: bool = False
    echo: bool = False  # the text begins with the prompt
    logprobs: bool = False
    sooner: int = 0  # priority above the model's own
    level: int | None = None  # Triton's priority
    timeout_us: float | None = None
    id: str = ""

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def choices(self) -> int:
        return self.n * (1 if self.is_chat else len(self.prompts))


_completion = msgspec.json.Decoder(CompletionBody).decode
_chat = msgspec.json.Decoder(ChatBody).decode
_generate = msgspec.json.Decoder(GenerateBody).decode


def read_completion(body: bytes | memoryview) -> Asked:
    """A request to /v1/completions; RequestError names the field that is wrong."""
    given = _decoded(_completion, body)
    if given.suffix:
        raise _unsupported("suffix", "texts are continued, not filled in")
    if given.best_of not in (None, given.n or 1):
        raise _unsupported("best_of", "all texts are returned: ask for them with n")
    sampling = _sampling(given)
    sampling.setdefault("max_tokens", COMPLETION_TOKENS)
    if given.logprobs is not None:
        sampling["logprobs"] = given.logprobs
        if given.echo:
            raise _unsupported("echo", "log probabilities of the prompt's tokens are not computed: leave out logprobs")
    prompts = _prompts(given.prompt)
    return _asked(given, sampling, prompts=prompts, echo=bool(given.echo), logprobs=given.logprobs is not None)


def read_chat(body: bytes | memoryview) -> Asked:
    """A request to /v1/chat/completions."""
    given = _decoded(_chat, body)
    if given.tools and given.tool_choice != "none":
        raise _unsupported("tools", "calls of tools are not read from a model's text")
    if any(each != "text" for each in given.modalities or ()):
        raise _unsupported("modalities", "models write text")
    if not given.messages:
        raise RequestError("messages is empty: give at least one message", field="messages", given=0, limit=1)
    if (count := len(given.messages)) > MOST_MESSAGES:
        said = f"the chat has {count:,} messages: send at most {MOST_MESSAGES:,}"
        raise RequestError(said, field="messages", given=count, limit=MOST_MESSAGES)
    sampling = _sampling(given)
    if given.max_completion_tokens is not None:
        sampling["max_tokens"] = given.max_completion_tokens
    if given.logprobs:
        sampling["logprobs"] = given.top_logprobs or 0
    elif given.top_logprobs is not None:
        raise RequestError("top_logprobs needs logprobs = true", field="top_logprobs", given=given.top_logprobs)
    messages = [_message(k, each) for k, each in enumerate(given.messages)]
    template = given.chat_template_kwargs or {}
    if taken := sorted(template.keys() & {"messages", "self"}):
        said = f"chat_template_kwargs may not have {taken[0]!r}: give messages beside it"
        raise RequestError(said, field="chat_template_kwargs", given=taken[0])
    return _asked(given, sampling, messages=messages, template=template, logprobs=bool(given.logprobs))


def read_generate(model: str, body: bytes | memoryview, stream: bool) -> Asked:
    """A request to /v2/models/{model}/generate or generate_stream."""
    given: GenerateBody = _decoded(_generate, body)
    inside = given.parameters or GenerateParameters()
    for name in inside.__struct_fields__:
        if getattr(inside, name) is None:
            setattr(inside, name, getattr(given, name))
    if inside.stream and not stream:
        raise RequestError("stream is true: send the request to generate_stream", field="stream", given=True)
    level, timeout_us = scheduling({"priority": inside.priority, "timeout": inside.timeout})
    return Asked(
        model=model, prompts=[given.text_input], sampling=_sampling(inside), stream=stream, level=level,
        timeout_us=timeout_us, echo=inside.exclude_input_in_output is False, id=given.id,
    )  # fmt: skip


def check_values(body: bytes | memoryview, context: int) -> None:
    """RequestError: the JSON has more values than any request needs. Their objects would hold the interpreter."""
    limit = max(MOST_VALUES, 2 * context)
    count = int(np.count_nonzero(np.frombuffer(body, np.uint8) == ord(",")))
    if count > limit:
        said = f"the body has {count:,} commas: send at most {limit:,} in one request"
        raise RequestError(said, field="body", given=count, limit=limit)


def _decoded(decode: Callable[[Any], Any], body: bytes | memoryview) -> Any:
    try:
        return decode(body)
    except NOT_JSON as e:
        raise _invalid(e) from None


def _invalid(error: Exception) -> RequestError:
    """msgspec's error with the field that it is about."""
    said, _, at = str(error).partition(" - at `$")
    name = at.rstrip("`").lstrip(".")
    for lead in ("Object contains unknown field `", "Object missing required field `"):
        if said.startswith(lead):
            name = ".".join(filter(None, (name, said[len(lead) :].rstrip("`"))))
            said = f"{name} is missing" if "missing" in lead else f"no field has the name {short(name)}"
            return RequestError(said, field=name)
    return RequestError(f"{name or 'the body'}: {said}", field=name or "body")


def _unsupported(name: str, why: str) -> RequestError:
    return RequestError(f"{name} is not supported: {why}", field=name)


_PLAIN = ("temperature", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
          "max_tokens", "min_tokens", "ignore_eos")  # fmt: skip


def _sampling(given: SamplingBody | GenerateParameters) -> dict[str, Any]:
    found = {name: value for name in _PLAIN if (value := getattr(given, name)) is not None}
    if given.top_k is not None:
        found["top_k"] = max(0, given.top_k)  # other servers take -1 for all tokens
    if given.stop is not None:
        stops = [given.stop] if isinstance(given.stop, str) else given.stop
        if len(stops) > MOST_STOPS:
            said = f"stop has {len(stops)} strings: give at most {MOST_STOPS}"
            raise RequestError(said, field="stop", given=len(stops), limit=MOST_STOPS)
        if (longest := max(map(len, stops), default=0)) > LONGEST_STOP:
            said = f"a string of stop has {longest} characters: give at most {LONGEST_STOP}"
            raise RequestError(said, field="stop", given=longest, limit=LONGEST_STOP)
        found["stop"] = tuple(stops)
    if isinstance(given, SamplingBody):
        if given.stop_token_ids:
            if (count := len(given.stop_token_ids)) > MOST_STOP_IDS:
                said = f"stop_token_ids has {count} ids: give at most {MOST_STOP_IDS}"
                raise RequestError(said, field="stop_token_ids", given=count, limit=MOST_STOP_IDS)
            found["stop_ids"] = tuple(given.stop_token_ids)
        if given.logit_bias:
            try:
                found["logit_bias"] = {int(token): bias for token, bias in given.logit_bias.items()}
            except ValueError:
                raise RequestError("the keys of logit_bias must be ids of tokens", field="logit_bias") from None
    return found


def _asked(given: SamplingBody, sampling: dict[str, Any], **more: Any) -> Asked:
    form = given.response_format
    if form is not None and form.type != "text":
        if form.type == "json_schema" and form.json_schema is None:
            raise RequestError("response_format.json_schema is missing", field="response_format.json_schema")
        sampling["json_schema"] = {"type": "object"} if form.json_schema is None else form.json_schema.schema
    if given.stream_options is not None and not given.stream:
        raise RequestError("stream_options needs stream = true", field="stream_options")
    options = given.stream_options or StreamOptions()
    asked = Asked(
        model=given.model, sampling=sampling, n=1 if given.n is None else given.n, stream=bool(given.stream),
        usage=options.include_usage, usage_in_chunks=options.continuous_usage_stats, sooner=-(given.priority or 0),
        **more,
    )  # fmt: skip
    if asked.n < 1 or asked.choices > MOST_CHOICES:
        said = f"n={asked.n} asks for {asked.choices} texts: ask for 1 to {MOST_CHOICES}"
        raise RequestError(said, field="n", given=asked.n, limit=MOST_CHOICES)
    return asked


def _prompts(given: str | list[Any]) -> list[Prompt]:
    """One text, the ids of its tokens, or a list of either."""
    if isinstance(given, str):
        return [given]
    for each in ([given], given):
        if all(isinstance(prompt, list) and set(map(type, prompt)) == {int} for prompt in each) and each:
            return list(each)
    if given and all(isinstance(prompt, str) for prompt in given):
        return list(given)
    said = "prompt must be a text, a list of ids of tokens, or a list of either, and not empty"
    raise RequestError(said, field="prompt")


def _message(k: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates expect it: its content is a text."""
    at, content = f"messages[{k}]", message.get("content")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{at}.role must be a text", field=f"{at}.role", given=message.get("role"))
    if isinstance(content, list):
        try:
            content = "".join(part.text for part in msgspec.convert(content, list[TextPart]))
        except msgspec.ValidationError:
            said = f'{at}.content: each part must be {{"type": "text", "text": "…"}}'
            raise RequestError(said, field=f"{at}.content") from None
    elif content is not None and not isinstance(content, str):
        said = f"{at}.content must be a text or a list of parts"
        raise RequestError(said, field=f"{at}.content", given=short(content))
    return {**message, "content": content or ""}


# ---- answers ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Usage:
    prompt: int = 0
    answer: int = 0
    cached: int = 0  # tokens of the prompts that were computed before

    def json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Choice:
    """One text of an answer, as it grows. `latest` is its last piece, `offset` where that begins."""

    def __init__(self, index: int, begin: str = "") -> None:
        self.index, self.finish = index, None
        self.count = self.offset = 0
        self.latest: Any = None
        self._begin, self._length = begin, 0
        self.texts: list[str] = []  # and the log probabilities as JSON, by part of the answer: those that are kept
        self.logprobs: dict[str, list[bytes]] = {}

    def add(self, piece: Any) -> str:
        """Takes the next piece; returns its text."""
        text = self._begin + piece.text
        self._begin, self.latest, self.finish = "", piece, piece.finish_reason
        self.count += 1
        self.offset = self._length
        self._length += len(text)
        return str(text)


class Answer:
    """The answer to one request in the API's form: whole, or chunk by chunk."""

    def __init__(self, asked: Asked, text_of: Callable[[int], str]) -> None:
        """`text_of` gives the text of a single token, for log probabilities."""
        self._asked, self._text_of = asked, text_of
        chat = asked.is_chat
        self.id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        kind = ("chat.completion.chunk" if asked.stream else "chat.completion") if chat else "text_completion"
        self._about = {"id": self.id, "object": kind, "created": int(time.time()), "model": asked.model}

    def chunk(self, choice: Choice, text: str, usage: Usage) -> bytes:
        """The event of the piece that `choice` took last."""
        first = choice.count == 1
        found: dict[str, Any] = {"index": choice.index}
        if self._asked.is_chat:
            found["delta"] = {"role": "assistant", "content": text} if first else {"content": text}
        else:
            found["text"] = text
        found["logprobs"] = self._listed(choice, {part: [each] for part, each in self._logprobs(choice).items()})
        found["finish_reason"] = choice.finish
        return self._event([found], usage if self._asked.usage_in_chunks else None)

    def end(self, usage: Usage) -> bytes:
        """The last events of a stream."""
        return (self._event([], usage) if self._asked.usage else b"") + DONE

    def keep(self, choice: Choice, text: str) -> int:
        """Keeps the latest piece for the whole answer; returns about how many bytes that takes. Log probabilities
        become JSON at once: those of a long text would hold the event loop for seconds.
        """
        choice.texts.append(text)
        nbytes = KEPT_BYTES + len(text)
        for part, each in self._logprobs(choice).items():
            choice.logprobs.setdefault(part, []).append(each)
            nbytes += KEPT_BYTES + len(each)
        return nbytes

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        found = []
        for choice in choices:
            text = "".join(choice.texts)
            made: dict[str, Any] = {"index": choice.index}
            if self._asked.is_chat:
                made["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                made["text"] = text
            logprobs = self._listed(choice, choice.logprobs)
            found.append({**made, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._about, "choices": found, "usage": usage.json()}

    def failed(self, status: int, said: str, param: str | None) -> bytes:
        """The last events of a stream that an error ends."""
        return event(error_body(status, said, param)) + DONE

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None) -> bytes:
        made = {**self._about, "choices": choices}
        if usage is not None:
            made["usage"] = usage.json()
        elif self._asked.usage:
            made["usage"] = None
        return event(made)

    def _logprobs(self, choice: Choice) -> dict[str, bytes]:
        """What the answer says of the latest piece, as JSON, by part of `logprobs`."""
        if not self._asked.logprobs:
            return {}
        text_of, p = self._text_of, choice.latest
        if self._asked.is_chat:
            most = self._asked.sampling["logprobs"]
            top = [self._entry(*each) for each in p.top[:most]]
            return {"content": _encode({**self._entry(p.token, p.logprob), "top_logprobs": top})}
        found = {
            "tokens": text_of(p.token),
            "token_logprobs": p.logprob,
            # The chosen token is among them, as in OpenAI's API
            "top_logprobs": {text_of(t): lp for t, lp in (*p.top, (p.token, p.logprob))},
            "text_offset": choice.offset,
        }
        return {part: _encode(each) for part, each in found.items()}

    def _listed(self, choice: Choice, parts: Mapping[str, Sequence[bytes]]) -> dict[str, Any] | None:
        if not self._asked.logprobs:
            return None
        names = ("content",) if self._asked.is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        found: dict[str, Any] = {name: msgspec.Raw(b"[%b]" % b",".join(parts.get(name, ()))) for name in names}
        return {**found, "refusal": None} if self._asked.is_chat else found

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % _encode(value)


def models_list(names: Mapping[str, int], created: float) -> dict[str, Any]:
    """The answer of /v1/models, from the models' names and contexts."""
    return {"object": "list", "data": [model_about(name, context, created) for name, context in names.items()]}


def model_about(name: str, context: int, created: float) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "paellapy", "max_model_len": context}


class GenerateAnswer:
    """As `Answer`, for Triton's `generate` addresses."""

    def __init__(self, asked: Asked, version: str) -> None:
        self._about = {"id": asked.id} if asked.id else {}
        self._about |= {"model_name": asked.model, "model_version": version}

    def chunk(self, choice: Choice, text: str, usage: Usage) -> bytes:
        return event({**self._about, "text_output": text})

    def keep(self, choice: Choice, text: str) -> int:
        choice.texts.append(text)
        return KEPT_BYTES + len(text)

    def end(self, usage: Usage) -> bytes:
        return b""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return {**self._about, "text_output": "".join(choices[0].texts)}

    def failed(self, status: int, said: str, param: str | None) -> bytes:
        return event({"error": said})


# ---- errors ----------------------------------------------------------------------------------------------------------

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
          503: "service_unavailable_error"}  # fmt: skip
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


def error_body(status: int, said: str, param: str | None) -> dict[str, Any]:
    """An error in the API's form.

    >>> error_body(400, "n=0: …", "n")["error"]["type"]
    'invalid_request_error'
    """
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": said, "type": kind, "param": param, "code": _CODES.get(status)}}
