"""Vectors and scores of texts: `/v1/embeddings` as OpenAI's clients send it, `/v1/rerank` as those of Jina and Cohere.

    POST /v1/embeddings   {"model": "…", "input": ["a text", "another"]}
    POST /v1/rerank       {"model": "…", "query": "…", "documents": ["…", "…"], "top_n": 3}

The texts of a request run as single requests of the model, some at a time, and are answered together. Long answers are
written in pieces, so that other requests go on meanwhile.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from paellapy.scheduler.engine.pipelines import Served
from paellapy.scheduler.models.text_reader import encoder_inputs
from paellapy.serving.access import CLIENT, infers
from paellapy.serving.errors import RequestError, encode_json, short
from paellapy.serving.inference import Handled, read
from paellapy.serving.limits import TEXT_BYTES
from paellapy.serving.openai import error_body
from paellapy.serving.protocol import Pieces, Request
from paellapy.serving.service import SERVICE, Service
from paellapy.serving.tensors import NOT_JSON

MOST_TEXTS = 2048  # of one request, as in OpenAI's API
MOST_CHARACTERS = 1 << 22  # of a rerank: its query is read once for each document
MOST_NUMBERS = 1 << 17  # commas in the tokens of one request: reading them holds the interpreter
LISTS_AT_ONCE = 64  # lists of tokens that are checked at once: they take about a millisecond
PIECE_VALUES = 1 << 14  # numbers that are written at once: they take about a millisecond


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: msgspec.Raw
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    # About the client, not the answer: read and not used
    user: Any = None
    safety_identifier: Any = None


class Document(msgspec.Struct):
    text: str


class RerankBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool = False


_embeddings = msgspec.json.Decoder(EmbeddingsBody).decode
_rerank = msgspec.json.Decoder(RerankBody).decode
_texts = msgspec.json.Decoder(str | list[str]).decode
_tokens = msgspec.json.Decoder(list[int | list[int]]).decode


class _Texts(Handled):
    """One request, whose outputs its handler awaits as arrays."""

    __slots__ = ("outputs",)

    def __init__(self, service: Service, name: str, client: str, peer: str | None) -> None:
        super().__init__(service, name, None, client, peer)
        self.outputs: asyncio.Future[dict[str, NDArray[Any]]] = self.loop.create_future()

    def done(self, outputs: dict[str, NDArray[Any]]) -> None:
        if not self.over:
            self.succeed()
            if not self.outputs.done():  # else its handler was cancelled in the meantime
                self.outputs.set_result(outputs)

    def answered(self, pieces: Pieces, json_length: int | None) -> None:
        raise NotImplementedError("its outputs are answered in another form")

    def refused(self, error: Exception) -> None:
        if not self.outputs.done():
            self.outputs.set_exception(error)


def _begin(request: web.Request, decode: Any, kind: str, body: bytes | memoryview) -> tuple[Any, Served]:
    """The decoded body, and its model."""
    try:
        asked = decode(body)
    except NOT_JSON as e:
        field = str(e).rpartition("`$.")[2].rstrip("`") if "`$." in str(e) else "body"
        raise RequestError(f"the body is not a valid request: {e}", field=field) from None
    model = request.app[SERVICE].registry.ready(asked.model)
    if (model.task or {}).get("kind") != kind:
        said = f"model {model.name!r} does not do this: it takes {', '.join(model.takes)}; use /v2/models/…/infer"
        raise RequestError(said, field="model", given=model.name, limit=kind)
    return asked, model


async def _run(request: web.Request, model: Served, inputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    service = request.app[SERVICE]
    items = len(next(iter(inputs.values())))
    work = _Texts(service, model.name, request[CLIENT], request.remote)
    try:
        try:
            work.submit(work.look(), Request("", items, True, dict(inputs), [], None, None))
        except Exception as e:
            work.fail(e)
        return await work.outputs
    except asyncio.CancelledError:
        work.leave()
        raise
    finally:
        service.counters.leave()


@infers
async def embeddings(request: web.Request) -> web.Response:
    with request.app[SERVICE].held.holding() as claim:
        return await _embed(request, await read(request, request.app[SERVICE], TEXT_BYTES, claim))


async def _embed(request: web.Request, body: bytes | memoryview) -> web.Response:
    asked, model = _begin(request, _embeddings, "embedding", body)
    size = model.gives["embedding"].shape[0]
    if asked.dimensions is not None and not 1 <= asked.dimensions <= size:
        said = f"dimensions is {short(asked.dimensions)}; model {model.name!r} has vectors of {size}"
        raise RequestError(said, field="dimensions", limit=size, given=asked.dimensions)
    found = await _run(request, model, await _inputs(model, asked.input))
    vectors = found["embedding"]
    if asked.dimensions is not None:
        vectors = vectors[:, : asked.dimensions]
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    parts = (
        encode_json({"object": "embedding", "index": k, "embedding": _vector(vector, asked.encoding_format)})
        for k, vector in enumerate(vectors)
    )
    return await _listed("data", parts, max(1, PIECE_VALUES // size), {"model": model.name}, found)


def _vector(vector: NDArray[Any], form: str) -> Any:
    if form == "base64":
        return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
    return vector.tolist()


async def _inputs(model: Served, given: msgspec.Raw) -> dict[str, Any]:
    """The model's values for texts, or its own inputs for tokens."""
    try:
        texts = _texts(given)
    except msgspec.ValidationError:
        return await _token_inputs(model, given)
    except NOT_JSON as e:
        raise RequestError(f"input is not valid: {e}", field="input") from None
    return {"text": _objects("input", [texts] if isinstance(texts, str) else texts)}


def _objects(field: str, texts: list[str]) -> NDArray[Any]:
    if not 1 <= len(texts) <= MOST_TEXTS:
        said = f"{field} has {len(texts)} texts; a request has 1 to {MOST_TEXTS}"
        raise RequestError(said, field=field, limit=MOST_TEXTS, given=len(texts))
    found = np.empty(len(texts), object)
    found[:] = texts
    return found


async def _token_inputs(model: Served, given: msgspec.Raw) -> dict[str, list[NDArray[Any]]]:
    numbers = bytes(given).count(b",") + 1
    if numbers > MOST_NUMBERS:
        said = f"input has {numbers} tokens; a request has up to {MOST_NUMBERS}"
        raise RequestError(said, field="input", limit=MOST_NUMBERS, given=numbers)
    try:
        found = _tokens(given)
    except NOT_JSON:
        said = "input must be a text, a list of texts, a list of tokens, or a list of lists of tokens"
        raise RequestError(said, field="input") from None
    lists = [each for each in found if isinstance(each, list)]
    if not lists:
        lists = [[each for each in found if isinstance(each, int)]]
    elif len(lists) < len(found) or len(lists) > MOST_TEXTS:
        said = f"input must have 1 to {MOST_TEXTS} lists of tokens"
        raise RequestError(said, field="input", limit=MOST_TEXTS, given=len(found))
    assert model.task is not None
    names, length, pad = (model.task[key] for key in ("inputs", "length", "pad"))
    high = model.inputs["input_ids"].high
    each = []
    for k, tokens in enumerate(lists):
        if not 1 <= len(tokens) <= length:
            said = f"input[{k}] has {len(tokens)} tokens; the model takes 1 to {length}"
            raise RequestError(said, field="input", limit=length, given=len(tokens))
        if min(tokens) < 0 or (high is not None and max(tokens) > high):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            said = f"input[{k}] has the token {short(wrong)}; the model takes 0 to {high}"
            raise RequestError(said, field="input", limit=high, given=wrong)
        each.append(encoder_inputs(names, tokens, length, pad))
        if k % LISTS_AT_ONCE == LISTS_AT_ONCE - 1:
            await asyncio.sleep(0)
    return {name: [one[name] for one in each] for name in names}


@infers
async def rerank(request: web.Request) -> web.Response:
    with request.app[SERVICE].held.holding() as claim:
        return await _score(request, await read(request, request.app[SERVICE], TEXT_BYTES, claim))


async def _score(request: web.Request, body: bytes | memoryview) -> web.Response:
    asked, model = _begin(request, _rerank, "rerank", body)
    if asked.top_n is not None and asked.top_n < 1:
        said = f"top_n is {short(asked.top_n)}; it must be at least 1"
        raise RequestError(said, field="top_n", limit=1, given=asked.top_n)
    texts = [each.text if isinstance(each, Document) else each for each in asked.documents]
    documents = _objects("documents", texts)
    count = len(asked.query) * len(texts)
    if count > MOST_CHARACTERS:
        said = f"the query has {len(asked.query)} characters for each of {len(texts)} documents: send fewer documents"
        raise RequestError(said, field="documents", limit=MOST_CHARACTERS, given=count)
    found = await _run(request, model, {"query": np.full(len(texts), asked.query, object), "document": documents})
    order = np.argsort(-found["score"], kind="stable")[: asked.top_n]
    parts = []
    for k in order.tolist():
        result: dict[str, Any] = {"index": k, "relevance_score": float(found["score"][k])}
        if asked.return_documents:
            result["document"] = {"text": texts[k]}
        parts.append(encode_json(result))
    return await _listed("results", parts, PIECE_VALUES, {"model": model.name}, found)


async def _listed(
    name: str, parts: Iterable[bytes], at_once: int, about: dict[str, Any], found: Mapping[str, NDArray[Any]]
) -> web.Response:
    """A JSON answer with a list, of which some elements are written at a time."""
    tokens = int(found["tokens"].sum())
    about = {"object": "list", **about, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    written: list[bytes] = []
    for k, part in enumerate(parts):
        written.append(part)
        if k % at_once == at_once - 1:
            await asyncio.sleep(0)
    body = b'%b,"%b":[%b]}' % (encode_json(about)[:-1], name.encode(), b",".join(written))
    return web.Response(body=body, content_type="application/json")


for _handler in (embeddings, rerank):
    _handler.error_body = error_body  # type: ignore[attr-defined]


def add_embeddings(app: web.Application) -> None:
    app.router.add_post("/v1/embeddings", embeddings)
    app.router.add_post("/v1/rerank", rerank)
