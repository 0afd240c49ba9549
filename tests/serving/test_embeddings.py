"""`/v1/embeddings` and `/v1/rerank`: texts, tokens, forms of vectors, order of documents, wrong requests."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("torch")

from encoder_families import tokenizer
from served_models import encoders
from serving_server import ask, running

from paellapy.serving.embeddings import LISTS_AT_ONCE, MOST_TEXTS


@pytest.fixture(scope="module")
def server():
    with running(encoders()) as found:
        yield found


def post(server, path, **body):
    status, _, found = ask(server, "POST", f"/v1/{path}", json.dumps(body).encode())
    return status, found


def vectors(server, given, **more):
    status, found = post(server, "embeddings", model="embed", input=given, **more)
    assert status == 200, found
    assert (found["object"], found["model"]) == ("list", "embed")
    assert [each["index"] for each in found["data"]] == list(range(len(found["data"])))
    return [each["embedding"] for each in found["data"]], found["usage"]


def test_texts_and_tokens_have_the_same_vectors(server):
    texts = ["w1 w2 w3", "w4", ""]
    of_texts, usage = vectors(server, texts)
    of_tokens, same = vectors(server, [tokenizer().encode(each).ids for each in texts])
    np.testing.assert_allclose(of_texts, of_tokens, rtol=1e-5, atol=1e-6)
    assert usage == same == {"prompt_tokens": 10, "total_tokens": 10}
    (alone,), _ = vectors(server, texts[0])
    np.testing.assert_allclose(alone, of_texts[0], rtol=1e-5, atol=1e-6)
    (alone,), _ = vectors(server, tokenizer().encode(texts[0]).ids)
    np.testing.assert_allclose(alone, of_texts[0], rtol=1e-5, atol=1e-6)
    ids = tokenizer().encode(texts[0]).ids
    many, _ = vectors(server, [ids] * (2 * LISTS_AT_ONCE + 1))
    np.testing.assert_allclose(many, [of_texts[0]] * len(many), rtol=1e-5, atol=1e-6)


def test_forms_and_dimensions(server):
    (plain,), _ = vectors(server, "w1 w2")
    (packed,), _ = vectors(server, "w1 w2", encoding_format="base64")
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), np.float32), plain, rtol=1e-6)
    (cut,), _ = vectors(server, "w1 w2", dimensions=5, user="me")
    np.testing.assert_allclose(cut, plain[:5] / np.linalg.norm(plain[:5]), rtol=1e-5)


def test_many_texts_in_one_request(server):
    found, usage = vectors(server, [f"w{k % 50}" for k in range(150)])
    np.testing.assert_allclose(found[:50], found[50:100], rtol=1e-4, atol=1e-5)
    assert usage["prompt_tokens"] == 450


def test_documents_are_ordered_by_score(server):
    documents = ["w1", {"text": "w2 w3"}, "w4 w5 w6"]
    status, found = post(server, "rerank", model="rank", query="w9", documents=documents)
    assert (status, found["usage"]["total_tokens"]) == (200, 18)
    scores = [each["relevance_score"] for each in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in found["results"]) == [0, 1, 2]
    best = post(server, "rerank", model="rank", query="w9", documents=documents, top_n=1, return_documents=True)[1]
    (only,) = best["results"]
    assert only["index"] == found["results"][0]["index"]
    assert only["document"] == {"text": ["w1", "w2 w3", "w4 w5 w6"][only["index"]]}


EMBED, RANK = {"model": "embed"}, {"model": "rank", "query": "w1"}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("embeddings", EMBED, 400, "input"),
        ("embeddings", {**EMBED, "input": []}, 400, "0 texts"),
        ("embeddings", {**EMBED, "input": ["a"] * (MOST_TEXTS + 1)}, 400, f"1 to {MOST_TEXTS}"),
        ("embeddings", {**EMBED, "input": 3}, 400, "input"),
        ("embeddings", {**EMBED, "input": ["a", 3]}, 400, "input"),
        ("embeddings", {**EMBED, "input": [[]]}, 400, "0 tokens"),
        ("embeddings", {**EMBED, "input": [64]}, 400, "64"),
        ("embeddings", {**EMBED, "input": [-1]}, 400, "-1"),
        ("embeddings", {**EMBED, "input": [1] * 17}, 400, "17 tokens"),
        ("embeddings", {**EMBED, "input": [1] * 100_000}, 400, "100000 tokens"),
        ("embeddings", {**EMBED, "input": "w1 " * 100_000}, 400, "300000 characters"),
        ("embeddings", {**EMBED, "input": ["w1", "w1 " * 15]}, 400, "17 tokens"),
        ("embeddings", {**EMBED, "input": "a", "dimensions": 33}, 400, "dimensions"),
        ("embeddings", {**EMBED, "input": "a", "dimensions": 0}, 400, "dimensions"),
        ("embeddings", {**EMBED, "input": "a", "encoding_format": "int8"}, 400, "int8"),
        ("embeddings", {**EMBED, "input": "a", "unknown": 1}, 400, "unknown"),
        ("embeddings", {"model": "nobody", "input": "a"}, 404, "nobody"),
        ("embeddings", {"model": "rank", "input": "a"}, 400, "query"),
        ("embeddings", {"model": "scale", "input": "a"}, 400, "does not"),
        ("rerank", {**RANK, "documents": []}, 400, "0 texts"),
        ("rerank", {**RANK, "documents": ["a"], "top_n": 0}, 400, "top_n"),
        ("rerank", {**RANK, "documents": [3]}, 400, "documents"),
        ("rerank", {**RANK, "query": "w1 " * 10_000, "documents": ["a"] * 1000}, 400, "30000 characters"),
        ("rerank", {**RANK, "model": "embed", "documents": ["a"]}, 400, "text"),
    ],
)
def test_a_wrong_request_is_refused_and_others_are_answered(server, path, body, status, says):
    found, said = post(server, path, **body)
    assert (found, says in json.dumps(said)) == (status, True), said
    assert len(vectors(server, "w1")[0]) == 1


def test_a_body_that_is_no_text_or_too_long_is_refused(server):
    assert ask(server, "POST", "/v1/embeddings", b'{"model": "embed", "input": "\xff\xfe"}')[0] == 400
    assert ask(server, "POST", "/v1/embeddings", b'{"model": "embed", "input": "' + b"a" * (2 << 20) + b'"}')[0] == 413
