"""The token that is chosen on the GPU, against NumPy; and the parameters that a request may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

import paellapy as pp
from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.language import sampling
from paellapy.scheduler.language.kernels import IN_PROMPT, ROW
from paellapy.scheduler.language.sampling import Sampling

VOCABULARY = 200


def choose(logits: Any, options: list[Sampling], *, mask: Any = None, seen: Any = None, seeds: Any = None) -> Any:
    """The kernels' output for rows of logits: tokens, their log probabilities, and three alternatives with theirs."""
    rows = np.zeros(len(options), ROW)
    for k, each in enumerate(options):
        rows[k] = (k + 1, 7, 0, -1, 0, k if seeds is None else seeds[k], *each.parameters)
    rows["logprobs"], rows["masked"] = 4, mask is not None
    with pp.Device("virtual:h200"):
        out = pp.zeros((len(options), 8), np.int32)
        counts = None if seen is None else pp.array(seen)
        sampling.choose(
            pp.array(logits.astype(np.float32)), pp.array(rows.view(np.int32).reshape(len(options), -1)),
            None if mask is None else pp.array(mask), counts, pp.zeros(len(options) + 1, np.int32), out, "float32",
            pp.empty,
        )  # fmt: skip
        found = out.numpy()
        if counts is not None:
            seen[...] = counts.numpy()
    return found[:, 0], found[:, 1::2].copy().view(np.float32), found[:, 2::2]


def allowed(logits: Any, option: Sampling) -> Any:
    """The tokens that may be chosen."""
    order = np.argsort(-logits, kind="stable")
    kept = np.zeros(VOCABULARY, bool)
    kept[order[: option.top_k or VOCABULARY]] = True
    p = np.where(kept, np.exp((logits - logits.max()) / option.temperature), 0)
    total = np.cumsum(p[order]) / p.sum()
    kept[order[np.searchsorted(total, option.top_p - 1e-6) + 1 :]] = False
    return kept & (p >= option.min_p * p.max() * (1 - 1e-6))


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1000), temperature=st.floats(0.2, 3), top_p=st.floats(0.05, 1), min_p=st.floats(0, 0.5),
    top_k=st.integers(0, VOCABULARY),
)  # fmt: skip
def test_only_tokens_that_the_filters_leave_are_chosen(
    seed: int, temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=VOCABULARY) * 3
    option = Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k)
    tokens, _, _ = choose(np.tile(logits, (40, 1)), [option] * 40)
    assert allowed(logits.astype(np.float32), option)[tokens].all()


def test_tokens_come_as_often_as_they_are_probable():
    logits, n = np.random.default_rng(0).normal(size=VOCABULARY) * 3, 3000
    tokens, logprobs, _ = choose(np.tile(logits, (n, 1)), [Sampling()] * n)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    for token in np.argsort(-p)[:5]:
        assert abs((tokens == token).mean() - p[token]) < 4 * np.sqrt(p[token] / n)
    np.testing.assert_allclose(logprobs[:, 0], np.log(p[tokens]), rtol=1e-4, atol=1e-5)


def test_without_temperature_the_most_probable_token_is_chosen_and_alternatives_are_in_order():
    logits = np.random.default_rng(1).normal(size=(4, VOCABULARY))
    logits[0, [5, 9]] = 8.0  # equal: the first
    tokens, logprobs, others = choose(logits, [Sampling(temperature=0)] * 4)
    assert tokens.tolist() == logits.argmax(1).tolist()
    assert tokens[0] == 5
    assert others.tolist() == np.argsort(-logits, 1, kind="stable")[:, :3].tolist()
    np.testing.assert_array_equal(logprobs[:, 0], logprobs[:, 1])


def test_a_token_depends_on_its_own_row_and_seed_only():
    logits = np.random.default_rng(2).normal(size=(3, VOCABULARY))
    options = [Sampling(temperature=0.5 + k) for k in range(3)]
    together, _, _ = choose(logits, options, seeds=[11, 12, 13])
    for k in range(3):
        one, _, _ = choose(logits[k : k + 1], options[k : k + 1], seeds=[11 + k])
        assert one[0] == together[k]
    many, _, _ = choose(np.tile(logits[:1], (50, 1)), [Sampling()] * 50)
    assert len(set(many.tolist())) > 10  # other seeds, other tokens


def test_a_mask_leaves_only_its_tokens():
    logits = np.random.default_rng(3).normal(size=(2, VOCABULARY))
    mask = np.zeros((3, -(-VOCABULARY // 32)), np.int32)
    mask[1, 1], mask[2, 3] = 1 << 4, 1 << 7
    tokens, logprobs, _ = choose(logits, [Sampling(), Sampling(temperature=0)], mask=mask)
    assert tokens.tolist() == [36, 103]
    np.testing.assert_allclose(logprobs[:, 0], 0, atol=1e-6)


def test_tokens_that_were_seen_are_penalised_and_the_chosen_one_is_counted():
    logits = np.zeros((3, VOCABULARY))
    logits[:, 4], logits[:, 8] = 5.0, 4.0
    seen = np.zeros((4, VOCABULARY), np.int32)
    seen[1, 4], seen[2, 4], seen[3, 4] = IN_PROMPT.value, 2, IN_PROMPT.value
    options = [
        Sampling(temperature=0, repetition_penalty=2.0),
        Sampling(temperature=0, frequency_penalty=0.4, presence_penalty=0.3),
        Sampling(temperature=0, presence_penalty=3.0),
    ]  # fmt: skip
    tokens, _, _ = choose(logits, options, seen=seen)
    assert tokens.tolist() == [8, 8, 4]  # presence and frequency look at chosen tokens only
    assert [seen[1, 8], seen[2, 8], seen[3, 4] - IN_PROMPT.value] == [1, 1, 1]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.5),
        ("top_k", 2.5), ("top_k", -1), ("min_p", 2), ("max_tokens", 0), ("logprobs", 21), ("seed", "one"),
        ("repetition_penalty", 0), ("presence_penalty", float("inf")), ("min_tokens", -1), ("max_tokens", True),
    ],
)  # fmt: skip
def test_a_parameter_that_cannot_be_is_refused(field: str, given: Any) -> None:
    with failing(InputError, field=field):
        Sampling(**{field: given})
