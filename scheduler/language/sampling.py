"""Choosing the next token on the GPU: the record of each row's parameters, and the kernel.

A token depends on its own row's logits, parameters, seed and position only, so it is the same whatever shares the batch
or the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from paellapy.instrument.kernels.decorator import kernel
from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.language.kernels import IN_PROMPT, PARAMETERS, POSITION, SEED, SEQUENCE, WORDS

MOST_LOGPROBS = 20
LARGEST_TOP_K = 1 << 20
OUT_WORDS = 2 + 2 * MOST_LOGPROBS  # of a row of `sample`'s output


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request's tokens are chosen, and when it ends.

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).penalises
    False
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int | None = None  # None: up to the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | Mapping[str, Any] | None = None  # which the whole text fulfils
    logprobs: int | None = None  # how many alternatives to name beside the token's own; None: no logprobs

    def __post_init__(self) -> None:
        for name, (low, high, whole) in _LIMITS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            kinds = int if whole else int | float
            if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
                kind = "an integer" if whole else "a number"
                raise InputError(
                    f"{name}={value!r}: it must be {kind} from {low:g} to {high:g}", field=name, given=value,
                    limit=(low, high),
                )  # fmt: skip
        if self.top_p == 0 or self.repetition_penalty == 0:
            name = "top_p" if self.top_p == 0 else "repetition_penalty"
            raise InputError(f"{name}=0: it must be above 0", field=name, given=0, limit=0)

    @property
    def penalises(self) -> bool:
        """Whether tokens' counts matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def parameters(self) -> tuple[float, ...]:
        """Those that the kernel reads, in the order of `kernels.ROW`."""
        return (
            self.temperature, self.top_p, self.min_p, self.top_k, self.repetition_penalty, self.presence_penalty,
            self.frequency_penalty, 0 if self.logprobs is None else self.logprobs + 1, self.json_schema is not None,
        )  # fmt: skip


# By parameter: the smallest and the largest value, and whether it is an integer.
_LIMITS: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 100, False), "top_p": (0, 1, False), "top_k": (0, LARGEST_TOP_K, True), "min_p": (0, 1, False),
    "repetition_penalty": (0, 100, False), "presence_penalty": (-100, 100, False),
    "frequency_penalty": (-100, 100, False), "seed": (-(2**63), 2**64 - 1, True), "max_tokens": (1, 2**31 - 1, True),
    "min_tokens": (0, 2**31 - 1, True), "logprobs": (0, MOST_LOGPROBS, True),
}  # fmt: skip
_OPTIONAL = ("seed", "max_tokens", "logprobs")


# How many leading bits of a float32 tell logits of a type apart.
LEVELS = {"bfloat16": 16, "float16": 20, "float32": 32}


@triton.jit
def _penalises(p):
    """Whether the parameters at `p` lower logits of tokens that were seen."""
    repetition = tl.load(p + 4).to(tl.float32, bitcast=True)
    presence, frequency = tl.load(p + 5).to(tl.float32, bitcast=True), tl.load(p + 6).to(tl.float32, bitcast=True)
    return (repetition != 1) | (presence != 0) | (frequency != 0)


@triton.jit
def _logits(logits, mask, seen, at, sequence, n, p, V: tl.constexpr):
    """Logits of the tokens n: -inf where the sequence's mask forbids them, less penalties for tokens that were seen.
    `p` points to the row's parameters.
    """
    x = tl.load(logits + at + n, mask=n < V, other=-float("inf")).to(tl.float32)
    if mask is not None:
        words: tl.constexpr = (V + 31) // 32
        masked = (n < V) & (tl.load(p + 8) != 0)
        word = tl.load(mask + sequence.to(tl.int64) * words + n // 32, mask=masked, other=-1)
        x = tl.where((word >> (n % 32)) & 1 != 0, x, -float("inf"))
    if seen is not None:
        repetition = tl.load(p + 4).to(tl.float32, bitcast=True)
        presence = tl.load(p + 5).to(tl.float32, bitcast=True)
        frequency = tl.load(p + 6).to(tl.float32, bitcast=True)
        counted = (n < V) & _penalises(p)
        times = tl.load(seen + sequence.to(tl.int64) * V + n, mask=counted, other=0)
        x = tl.where(times != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        chosen = times & (IN_PROMPT - 1)
        x -= tl.where(chosen > 0, presence, 0.0) + frequency * chosen
    return x


@triton.jit
def _order(x):
    """An unsigned integer for each float that compares as the float does."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _threshold(
    logits, mask, seen, at, sequence, p, largest, floor, wanted, COUNT: tl.constexpr, V: tl.constexpr,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest order that leaves enough tokens, of those from `floor` on: `wanted` tokens with COUNT, otherwise that
    part of their probability. Two bits of it are found at a time; only LEVELS of them tell logits apart, or all after a
    penalty.
    """
    i = tl.arange(0, BLOCK)
    levels = 32 if seen is None else tl.where(_penalises(p), 32, LEVELS)
    temperature = tl.load(p).to(tl.float32, bitcast=True)
    if not COUNT:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = _logits(logits, mask, seen, at, sequence, start + i, p, V)
            sums += tl.where(_order(x) >= floor, tl.exp((x - largest) / temperature), 0.0)
        wanted *= tl.sum(sums, 0)
    least = (tl.zeros((), tl.int32)).to(tl.uint32)
    for bit in range(30, 30 - levels, -2):
        one = tl.full((), 1, tl.uint32) << tl.cast(bit, tl.uint32)
        s1 = tl.zeros((BLOCK,), tl.float32)
        s2 = tl.zeros((BLOCK,), tl.float32)
        s3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            x = _logits(logits, mask, seen, at, sequence, start + i, p, V)
            o = _order(x)
            w = tl.where(start + i < V, 1.0, 0.0) if COUNT else tl.exp((x - largest) / temperature)
            w = tl.where(o >= floor, w, 0.0)
            s1 += tl.where(o >= least + one, w, 0.0)
            s2 += tl.where(o >= least + 2 * one, w, 0.0)
            s3 += tl.where(o >= least + 3 * one, w, 0.0)
        steps = (tl.sum(s1, 0) >= wanted).to(tl.uint32) + (tl.sum(s2, 0) >= wanted).to(tl.uint32)
        least += one * (steps + (tl.sum(s3, 0) >= wanted).to(tl.uint32))
    return tl.maximum(least, floor)


@kernel
@triton.jit
def sample(
    logits, rows, mask, seen, tokens, out, V: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Chooses one token for each row: writes it to `tokens` of its sequence, counts it in `seen`, and fills `out`.

    `out` (B, WIDTH) has the token and, as far as the row wants them, its log probability and alternatives with theirs:
    those of the logits before temperature and filters, after mask and penalties.
    """
    b = tl.program_id(0)
    p = rows + b * WORDS
    sequence, position, seed = tl.load(p + SEQUENCE), tl.load(p + POSITION), tl.load(p + SEED)
    p += PARAMETERS
    temperature = tl.load(p).to(tl.float32, bitcast=True)
    top_p, min_p = tl.load(p + 1).to(tl.float32, bitcast=True), tl.load(p + 2).to(tl.float32, bitcast=True)
    top_k = tl.load(p + 3)
    at = b.to(tl.int64) * V
    r = sequence
    i = tl.arange(0, BLOCK)

    # The largest logit, and the first token that has it.
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        x = _logits(logits, mask, seen, at, r, start + i, p, V)
        place = tl.where(x > best, start + i, place)
        best = tl.maximum(x, best)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, place, V), 0)

    if temperature > 0:
        least = (tl.zeros((), tl.int32)).to(tl.uint32)  # order of the smallest logit that may be chosen
        if (top_k > 0) & (top_k < V):
            least = _threshold(
                logits, mask, seen, at, r, p, largest, least, top_k.to(tl.float32), True, V, LEVELS, BLOCK
            )  # fmt: skip
        if top_p < 1:
            least = _threshold(logits, mask, seen, at, r, p, largest, least, top_p, False, V, LEVELS, BLOCK)
        lowest = largest + temperature * tl.log(min_p)  # -inf for a min_p of 0
        # The largest of the logits, each with its own Gumbel noise, is a draw from their distribution.
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        place = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, V, BLOCK):
            x = _logits(logits, mask, seen, at, r, start + i, p, V)
            bits, _, _, _ = tl.philox(seed, start + i, position, 0, 0)
            uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / (1 << 24))
            noisy = x / temperature - tl.log(-tl.log(uniform))
            allowed = (_order(x) >= least) & (x >= lowest) & (x > -float("inf"))
            noisy = tl.where(allowed, noisy, -float("inf"))
            place = tl.where(noisy > best, start + i, place)
            best = tl.maximum(noisy, best)
        top = tl.max(best, 0)
        token = tl.min(tl.where(best == top, place, V), 0)

    to = out + b * WIDTH
    token = tl.minimum(token, V - 1)
    tl.store(to, token)
    if sequence > 0:
        tl.store(tokens + sequence, token)
        if seen is not None:
            count = seen + sequence.to(tl.int64) * V + token
            tl.store(count, tl.load(count) + 1, mask=_penalises(p))
    logprobs = tl.load(p + 7)
    if logprobs > 0:
        _name(logits, mask, seen, at, r, p, largest, token, logprobs, to, V, BLOCK)


@triton.jit
def _name(
    logits, mask, seen, at, r, p, largest, token, logprobs, to, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes the log probabilities of the chosen token and of the most probable ones."""
    i = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = _logits(logits, mask, seen, at, r, start + i, p, V)
        sums += tl.exp(x - largest)
    base = largest + tl.log(tl.sum(sums, 0))
    own = tl.zeros((1,), tl.int32) + token
    chosen = _logits(logits, mask, seen, at, r, own, p, V)
    tl.store(to + 1 + tl.zeros((1,), tl.int32), (chosen - base).to(tl.int32, bitcast=True))
    before = tl.full((), float("inf"), tl.float32)
    last = tl.full((), -1, tl.int32)
    for rank in range(logprobs - 1):  # the next token in order of logit and number
        best = tl.full((BLOCK,), -float("inf"), tl.float32)
        place = tl.full((BLOCK,), V, tl.int32)
        for start in range(0, V, BLOCK):
            x = _logits(logits, mask, seen, at, r, start + i, p, V)
            later = (x < before) | ((x == before) & (start + i > last))
            x = tl.where(later, x, -float("inf"))
            place = tl.where(x > best, start + i, place)
            best = tl.maximum(x, best)
        before = tl.max(best, 0)
        last = tl.min(tl.where(best == before, place, V), 0)
        tl.store(to + 2 + 2 * rank, last)
        tl.store(to + 3 + 2 * rank, (before - base).to(tl.int32, bitcast=True))


def seed_of(sampling: Sampling, drawn: int) -> int:
    """32 bits from the request's seed, or from a number that was drawn for it."""
    given = drawn if sampling.seed is None else sampling.seed
    given &= (1 << 64) - 1
    return (given ^ (given >> 32)) & 0xFFFFFFFF

