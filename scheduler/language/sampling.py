"""Choosing the next token on the GPU: the record of each row's parameters, and the kernels.

A token depends on its own row's logits, parameters, seed and position only, so it is the same whatever shares the batch
or the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton import next_power_of_2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

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
_LEVELS = {"bfloat16": 16, "float16": 20, "float32": 32}


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
def _noisy(x, n, temperature, seed, position):
    """Logits with Gumbel noise of their own: the token with the largest is a draw from their distribution."""
    bits, _, _, _ = tl.philox(seed, n, position, 0, 0)
    uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / (1 << 24))
    return x / temperature - tl.log(-tl.log(uniform))


@triton.jit
def _of_part(part, PARTS: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr):
    """The tokens of a part of the vocabulary: groups from all over it, since neighbours are about equally frequent."""
    i = tl.arange(0, SIZE)
    return (i // GROUP * PARTS + part) * GROUP + i % GROUP


@kernel
@triton.jit
def weigh(
    logits, rows, mask, seen, tops, masses, V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The largest logit of each part of a row, and the sum of its tokens' weights, where the largest one's is 1."""
    b, part = tl.program_id(0), tl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    p = rows + b * WORDS + PARAMETERS
    temperature = tl.load(p).to(tl.float32, bitcast=True)
    n = _of_part(part, PARTS, SIZE, GROUP)
    x = _logits(logits, mask, seen, b.to(tl.int64) * V, tl.load(rows + b * WORDS + SEQUENCE), n, p, V)
    top = tl.max(x, 0)
    weights = tl.exp((x - top) / tl.where(temperature > 0, temperature, 1.0))
    tl.store(tops + b * PARTS + part, top)
    tl.store(masses + b * PARTS + part, tl.sum(tl.where(x > -float("inf"), weights, 0.0), 0))


@kernel
@triton.jit
def narrow(
    logits, rows, mask, seen, tops, counts, few, names, V: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr, MOST: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    """Finds in each part of a row the tokens that may be the chosen one, and counts them: `few` has their logits and
    `names` their numbers, as far as MOST of them.

    Without filters it is one, the most probable token or, with a temperature, the one that is drawn. With filters they
    are those above a bound on the last token that the filters leave.
    """
    b, part = tl.program_id(0), tl.program_id(1)
    gdc_launch_dependents()
    gdc_wait()
    p = rows + b * WORDS
    sequence, position, seed = tl.load(p + SEQUENCE), tl.load(p + POSITION), tl.load(p + SEED)
    p += PARAMETERS
    temperature, top_p = tl.load(p).to(tl.float32, bitcast=True), tl.load(p + 1).to(tl.float32, bitcast=True)
    min_p, top_k = tl.load(p + 2).to(tl.float32, bitcast=True), tl.load(p + 3)
    i = tl.arange(0, POWER)
    largest_of_part = tl.load(tops + b * PARTS + i, mask=i < PARTS, other=-float("inf"))
    largest = tl.max(largest_of_part, 0)
    n = _of_part(part, PARTS, SIZE, GROUP)
    x = _logits(logits, mask, seen, b.to(tl.int64) * V, sequence, n, p, V)
    has_top_k = (top_k > 0) & (top_k < V)
    if (temperature > 0) & (has_top_k | (top_p < 1)):
        # Of the other tokens, all V together have less weight than what top_p cuts off.
        floor = largest - temperature * (tl.log(V * 1.0) - tl.log(1.0 - top_p))
        if has_top_k:
            # At least top_k tokens are as large as the top_k-th of the parts' largest.
            before = tl.sum((largest_of_part[None, :] > largest_of_part[:, None]).to(tl.int32), 1)
            floor = tl.min(tl.where(before < top_k, largest_of_part, float("inf")), 0)
            floor = tl.where(top_k <= PARTS, floor, -float("inf"))
        found = (x >= floor) & (n < V) & (x > -float("inf"))
    else:
        value = x
        if temperature > 0:
            lowest = largest + temperature * tl.log(min_p)  # -inf for a min_p of 0
            value = tl.where(x >= lowest, _noisy(x, n, temperature, seed, position), -float("inf"))
            value = tl.where(x > -float("inf"), value, -float("inf"))
        first = tl.min(tl.where((value == tl.max(value, 0)) & (n < V), n, V), 0)
        found = n == first
    found = found.to(tl.int32)
    slot = tl.cumsum(found, 0) - 1
    to = (b * PARTS + part) * MOST + slot
    tl.store(few + to, x, mask=(found != 0) & (slot < MOST))
    tl.store(names + to, n, mask=(found != 0) & (slot < MOST))
    tl.store(counts + b * PARTS + part, tl.sum(found, 0))


@triton.jit
def _candidates(
    logits, mask, seen, few, names, counts, at, sequence, n, p, FEW: tl.constexpr, V: tl.constexpr,
    PARTS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Logits and numbers of the candidates n: of the few that `narrow` found, or of the vocabulary. -inf: none."""
    if FEW:
        there = n < PARTS * MOST
        there = there & (n % MOST < tl.load(counts + n // MOST, mask=there, other=0))
        return tl.load(few + n, mask=there, other=-float("inf")), tl.load(names + n, mask=there, other=V)
    return _logits(logits, mask, seen, at, sequence, n, p, V), n


@triton.jit
def _draw(
    logits, mask, seen, few, names, counts, at, sequence, position, seed, p, largest, total, FEW: tl.constexpr,
    V: tl.constexpr, LEVELS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A token drawn from those that the filters leave. `total`: the weight of all tokens, where the largest's is 1.

    A threshold is the largest order of floats that leaves enough tokens: `top_k` of them, or `top_p` of their weight.
    Two bits of it are found at a time; only LEVELS of them tell logits apart, or all after a penalty.
    """
    count: tl.constexpr = PARTS * MOST if FEW else V
    i = tl.arange(0, BLOCK)
    temperature, top_p = tl.load(p).to(tl.float32, bitcast=True), tl.load(p + 1).to(tl.float32, bitcast=True)
    min_p, top_k = tl.load(p + 2).to(tl.float32, bitcast=True), tl.load(p + 3)
    levels = 32 if seen is None else tl.where(_penalises(p), 32, LEVELS)
    least = (tl.zeros((), tl.int32)).to(tl.uint32)  # order of the smallest logit that may be chosen
    for by_weight in tl.static_range(2):
        if (top_p < 1) if by_weight else ((top_k > 0) & (top_k < V)):
            floor = least
            wanted = top_k.to(tl.float32)
            if by_weight:
                if floor > 0:
                    sums = tl.zeros((BLOCK,), tl.float32)
                    for start in range(0, count, BLOCK):
                        x, _ = _candidates(
                            logits, mask, seen, few, names, counts, at, sequence, start + i, p, FEW, V, PARTS, MOST
                        )  # fmt: skip
                        sums += tl.where(_order(x) >= floor, tl.exp((x - largest) / temperature), 0.0)
                    total = tl.sum(sums, 0)
                wanted = top_p * total
            least = (tl.zeros((), tl.int32)).to(tl.uint32)
            for bit in range(30, 30 - levels, -2):
                one = tl.full((), 1, tl.uint32) << tl.cast(bit, tl.uint32)
                s1 = tl.zeros((BLOCK,), tl.float32)
                s2 = tl.zeros((BLOCK,), tl.float32)
                s3 = tl.zeros((BLOCK,), tl.float32)
                for start in range(0, count, BLOCK):
                    x, _ = _candidates(
                        logits, mask, seen, few, names, counts, at, sequence, start + i, p, FEW, V, PARTS, MOST
                    )  # fmt: skip
                    o = _order(x)
                    w = tl.exp((x - largest) / temperature) if by_weight else tl.where(x > -float("inf"), 1.0, 0.0)
                    w = tl.where(o >= floor, w, 0.0)
                    s1 += tl.where(o >= least + one, w, 0.0)
                    s2 += tl.where(o >= least + 2 * one, w, 0.0)
                    s3 += tl.where(o >= least + 3 * one, w, 0.0)
                steps = (tl.sum(s1, 0) >= wanted).to(tl.uint32) + (tl.sum(s2, 0) >= wanted).to(tl.uint32)
                least += one * (steps + (tl.sum(s3, 0) >= wanted).to(tl.uint32))
            least = tl.maximum(least, floor)
    lowest = largest + temperature * tl.log(min_p)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = tl.full((BLOCK,), V, tl.int32)
    for start in range(0, count, BLOCK):
        x, n = _candidates(
            logits, mask, seen, few, names, counts, at, sequence, start + i, p, FEW, V, PARTS, MOST
        )  # fmt: skip
        allowed = (_order(x) >= least) & (x >= lowest) & (x > -float("inf"))
        noisy = tl.where(allowed, _noisy(x, n, temperature, seed, position), -float("inf"))
        place = tl.where((noisy > best) | ((noisy == best) & (n < place)), n, place)
        best = tl.maximum(noisy, best)
    return tl.min(tl.where(best == tl.max(best, 0), place, V), 0)


@kernel
@triton.jit
def sample(
    logits, rows, mask, seen, tops, masses, counts, few, names, tokens, out, V: tl.constexpr, LEVELS: tl.constexpr,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Chooses one token for each row: writes it to `tokens` of its sequence, counts it in `seen`, and fills `out`.

    `out` (B, WIDTH) has the token and, as far as the row wants them, its log probability and alternatives with theirs:
    those of the logits before temperature and filters, after mask and penalties. If `narrow` found more candidates than
    it could note, the whole row is looked at again.
    """
    b = tl.program_id(0)
    gdc_wait()
    p = rows + b * WORDS
    sequence, position, seed = tl.load(p + SEQUENCE), tl.load(p + POSITION), tl.load(p + SEED)
    p += PARAMETERS
    temperature = tl.load(p).to(tl.float32, bitcast=True)
    at = b.to(tl.int64) * V
    i = tl.arange(0, POWER)
    tops, masses, counts = tops + b * PARTS, masses + b * PARTS, counts + b * PARTS
    few, names = few + b * PARTS * MOST, names + b * PARTS * MOST
    top = tl.load(tops + i, mask=i < PARTS, other=-float("inf"))
    largest = tl.max(top, 0)
    if temperature > 0:
        weights = tl.exp((top - largest) / temperature) * tl.load(masses + i, mask=i < PARTS, other=0.0)
        total = tl.sum(tl.where(top > -float("inf"), weights, 0.0), 0)
        if tl.max(tl.load(counts + i, mask=i < PARTS, other=0), 0) <= MOST:
            token = _draw(
                logits, mask, seen, few, names, counts, at, sequence, position, seed, p, largest, total, True, V,
                LEVELS, PARTS, MOST, BLOCK,
            )  # fmt: skip
        else:
            token = _draw(
                logits, mask, seen, few, names, counts, at, sequence, position, seed, p, largest, total, False, V,
                LEVELS, PARTS, MOST, BLOCK,
            )  # fmt: skip
    else:
        first = tl.load(names + i * MOST, mask=(i < PARTS) & (top == largest), other=V)
        token = tl.min(first, 0)

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
        _name(logits, mask, seen, at, sequence, p, largest, token, logprobs, to, V, BLOCK)


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


# Tokens that a part of a vocabulary has, at most; how many neighbours stay together; and of how many one may be noted.
_PART, _GROUP, _NOTED = 2048, 64, 32
_WARPS, _BLOCK = 16, 8192  # of `sample`, which has few blocks


def choose(
    logits: Any, rows: Any, mask: Any, seen: Any, tokens: Any, out: Any, dtype: str,
    empty: Callable[[tuple[int, ...], Any], Any],
) -> None:  # fmt: skip
    """Launches what chooses a token for each row of logits, which have this element type. `empty` makes arrays."""
    kernels: Any = weigh, narrow, sample
    batch, vocabulary = logits.shape
    size = min(_PART, max(_GROUP, next_power_of_2(vocabulary) // 8))
    parts, most = -(-vocabulary // size), size // _NOTED
    reals, whole = np.dtype(np.float32), np.dtype(np.int32)
    tops, masses, counts = (empty((batch, parts), dtype) for dtype in (reals, reals, whole))
    few, names = (empty((batch, parts, most), dtype) for dtype in (reals, whole))
    about = {"V": vocabulary, "PARTS": parts}
    kernels[0][batch, parts](
        logits, rows, mask, seen, tops, masses, **about, SIZE=size, GROUP=_GROUP, launch_pdl=True
    )  # fmt: skip
    kernels[1][batch, parts](
        logits, rows, mask, seen, tops, counts, few, names, **about, SIZE=size, GROUP=_GROUP, MOST=most,
        POWER=next_power_of_2(parts), launch_pdl=True,
    )  # fmt: skip
    kernels[2][(batch,)](
        logits, rows, mask, seen, tops, masses, counts, few, names, tokens, out, **about, LEVELS=_LEVELS[dtype],
        WIDTH=out.shape[1], MOST=most, POWER=next_power_of_2(parts), BLOCK=min(_BLOCK, next_power_of_2(vocabulary)),
        num_warps=_WARPS, launch_pdl=True,
    )  # fmt: skip


def seed_of(sampling: Sampling, drawn: int) -> int:
    """32 bits from the request's seed, or from a number that was drawn for it."""
    given = drawn if sampling.seed is None else sampling.seed
    given &= (1 << 64) - 1
    return (given ^ (given >> 32)) & 0xFFFFFFFF

