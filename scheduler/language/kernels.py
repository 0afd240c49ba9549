"""The kernels of a decoder's step, apart from the products that cuBLAS computes.

A step on one token reads each weight once, and its time is the time of these reads; five kernels a layer compute it.
Each is launched while the one before still runs (programmatic dependent launch), starts to read weights, and waits
before it reads anything that the step itself writes. Only constant data may be read before `gdc_wait`: the kernel
before the previous one may still run then.

Keys and values lie in pages of PAGE tokens, (page, head, token, element). Row r of `table` has the pages of sequence
number r. `rows` describes the rows of a batch (`ROW`). Sequence 0 and page 0 are nobody's: rows, slots and entries that
are not used are 0.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paellapy.instrument.kernels.decorator import kernel

# What the host says about each row of a batch.
ROW = np.dtype(
    [
        ("sequence", np.int32),  # its number; 0: the row is not used
        ("position", np.int32),  # of the token that enters the model; the next one is chosen
        ("token", np.int32),  # of a chunk: the token after which the next one is chosen
        ("place", np.int32),  # where a page joins the sequence; -1: none does
        ("page", np.int32),
        ("seed", np.uint32),
        ("temperature", np.float32),  # 0: the most probable token
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("top_k", np.int32),  # 0: all
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("logprobs", np.int32),  # 0: none; n: of the chosen token and of n - 1 alternatives
        ("masked", np.int32),  # whether the sequence's mask says which tokens may be chosen
    ]
)


def _word(name: str) -> tl.constexpr:
    return tl.constexpr(ROW.fields[name][1] // 4)  # type: ignore[index]


WORDS = tl.constexpr(ROW.itemsize // 4)
SEQUENCE, POSITION, TOKEN, PLACE, PAGE_NUMBER = map(_word, ("sequence", "position", "token", "place", "page"))
SEED, PARAMETERS = _word("seed"), _word("temperature")

TILE = tl.constexpr(5)  # words of a tile of a chunk

# How a token of a sequence is counted for penalties: how often it was chosen, and whether the prompt has it.
IN_PROMPT = tl.constexpr(1 << 30)

# Scores of tokens that a query does not see. Not -inf: the difference of two of them must be a number.
UNSEEN = tl.constexpr(-1e30)


@kernel
@triton.jit
def embed(rows, tokens, embeddings, x, table, T, D: tl.constexpr, BLOCK: tl.constexpr):
    """x = the embeddings of the tokens that the rows' sequences have last; enters one new page for each row."""
    b = tl.program_id(0)
    sequence, place = tl.load(rows + b * WORDS + SEQUENCE), tl.load(rows + b * WORDS + PLACE)
    token = tl.load(tokens + sequence).to(tl.int64)
    if (sequence > 0) & (place >= 0):
        tl.store(table + sequence * T + place, tl.load(rows + b * WORDS + PAGE_NUMBER))
    gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    tl.store(x + b * D + i, tl.load(embeddings + token * D + i, mask=i < D), mask=i < D)


@kernel
@triton.jit
def embed_chunk(tokens, embeddings, x, D: tl.constexpr, BLOCK: tl.constexpr):
    """x = the embeddings of given tokens."""
    b = tl.program_id(0)
    token = tl.load(tokens + b)
    i = tl.arange(0, BLOCK)
    tl.store(x + b * D + i, tl.load(embeddings + token.to(tl.int64) * D + i, mask=i < D), mask=i < D)


@kernel
@triton.jit
def clear(counters, N, BLOCK: tl.constexpr):
    """Sets counters to zero."""
    i = tl.arange(0, BLOCK)
    gdc_wait()
    gdc_launch_dependents()
    tl.store(counters + i, 0, mask=i < N)


@kernel
@triton.jit
def forget_tokens(tiles, seen, V: tl.constexpr, BLOCK: tl.constexpr):
    """Clears the counts of sequences that begin in this chunk, if penalties need them."""
    tile = tiles + tl.program_id(0) * TILE
    count, position, sequence, of_prompt = (
        tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    )  # fmt: skip
    if (count > 0) & (position == 0) & (of_prompt >= 0):
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tl.store(seen + sequence.to(tl.int64) * V + i, 0, mask=i < V)


@kernel
@triton.jit
def count_tokens(tokens, tiles, seen, V: tl.constexpr, BLOCK: tl.constexpr):
    """Counts the tokens of a chunk for penalties."""
    tile = tiles + tl.program_id(0) * TILE
    first, count, sequence, of_prompt = tl.load(tile), tl.load(tile + 1), tl.load(tile + 3), tl.load(tile + 4)
    i = tl.arange(0, BLOCK)
    here = (i < count) & (of_prompt >= 0)
    place = seen + sequence.to(tl.int64) * V + tl.load(tokens + first + i, mask=here, other=0)
    tl.atomic_or(place, IN_PROMPT, mask=here & (i < of_prompt))
    tl.atomic_add(place, 1, mask=here & (i >= of_prompt))


@kernel
@triton.jit
def norm(x, gain, y, rows, EPS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """y = x / rms(x) * gain. Row i of y is row i of x, or the row of the token that `rows` names."""
    r = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    g = tl.load(gain + i, mask=i < D, other=0.0).to(tl.float32)
    gdc_wait()
    gdc_launch_dependents()
    at = r if rows is None else tl.load(rows + r * WORDS + TOKEN)
    v = tl.load(x + at.to(tl.int64) * D + i, mask=i < D, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 0) / D + EPS)
    tl.store(y + r * D + i, (v * scale).to(y.dtype.element_ty).to(tl.float32) * g, mask=i < D)


@kernel
@triton.jit
def gate(both, y, F: tl.constexpr, BLOCK: tl.constexpr):
    """y = silu(gate) * up, where each row of `both` has the gates first."""
    r = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    gdc_launch_dependents()
    g = tl.load(both + r * 2 * F + i, mask=i < F, other=0.0).to(tl.float32)
    up = tl.load(both + r * 2 * F + F + i, mask=i < F, other=0.0).to(tl.float32)
    tl.store(y + r * F + i, g * tl.sigmoid(g) * up, mask=i < F)


@kernel
@triton.jit
def row_product(
    x, gain, weight, residual, y, EPS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y (N) = f(x (K)) @ weight (N, K) + residual. With NORM, f divides by the root mean square and multiplies by
    `gain`; with GATED, weight is (2 N, K) and y = silu(first N) * last N.

    A block computes BN elements. The weights of its first BK columns are on their way before x is waited for.
    """
    gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    whole: tl.constexpr = (N % BN == 0) and (K % BK == 0)
    places = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(places) if whole else tl.load(places, mask=inside, other=0.0)
    if GATED:
        u = tl.load(places + N * K) if whole else tl.load(places + N * K, mask=inside, other=0.0)
    gdc_wait()
    first = tl.zeros((BN,), tl.float32)
    second = tl.zeros((BN,), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for j in tl.static_range(0, K, BK):
        v = (tl.load(x + j + k) if whole else tl.load(x + j + k, mask=j + k < K, other=0.0)).to(tl.float32)
        if NORM:
            squares += v * v
            g = tl.load(gain + j + k) if whole else tl.load(gain + j + k, mask=j + k < K, other=0.0)
            v *= g.to(tl.float32)
        now = w
        if GATED:
            now_up = u
        if j + BK < K:  # the next columns are read before these are used
            inside = (n < N)[:, None] & (j + BK + k < K)[None, :]
            ahead = places + j + BK
            w = tl.load(ahead) if whole else tl.load(ahead, mask=inside, other=0.0)
            if GATED:
                u = tl.load(ahead + N * K) if whole else tl.load(ahead + N * K, mask=inside, other=0.0)
        first += tl.sum(now.to(tl.float32) * v[None, :], 1)
        if GATED:
            second += tl.sum(now_up.to(tl.float32) * v[None, :], 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + EPS)
        first *= scale
        second *= scale
    if GATED:
        first = first * tl.sigmoid(first) * second
    if residual is not None:
        first += tl.load(residual + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(y + n, first, mask=n < N)


@kernel
@triton.jit(do_not_specialize=["M"])
def product(
    x, weight, residual, y, M, N, K, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TURNED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y (M, N) = x (M, K) @ weight (N, K) + residual. `x` and `weight` are descriptors of blocks BM × BK and BN × BK.

    Blocks with the same weights are neighbours. With TURNED, the transpose is computed: tensor cores take at least 64
    rows, so few rows of x take the place of columns.
    """
    gdc_launch_dependents()
    tiles = tl.cdiv(M, BM)
    first_m, first_n = tl.program_id(0) % tiles * BM, tl.program_id(0) // tiles * BN
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    gdc_wait()
    if TURNED:
        acc = tl.zeros((BN, BM), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = tl.dot(weight.load([first_n, k]), x.load([first_m, k]).T, acc, input_precision=PRECISION)
        at = m.to(tl.int64)[None, :] * N + n[:, None]
        inside = (m < M)[None, :] & (n < N)[:, None]
    else:
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK, num_stages=STAGES):
            acc = tl.dot(x.load([first_m, k]), weight.load([first_n, k]).T, acc, input_precision=PRECISION)
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        inside = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, acc, mask=inside)


@triton.jit
def _heads(token, bias, gain, at, i, used, HALF: tl.constexpr, EPS: tl.constexpr):
    """The two halves of heads' elements at the places `at`, with their biases, normed if there is a gain."""
    low = tl.load(token + at + i, mask=used, other=0.0).to(tl.float32)
    high = tl.load(token + at + HALF + i, mask=used, other=0.0).to(tl.float32)
    if bias is not None:
        low += tl.load(bias + at + i, mask=used, other=0.0).to(tl.float32)
        high += tl.load(bias + at + HALF + i, mask=used, other=0.0).to(tl.float32)
    if gain is not None:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + EPS)[:, None]
        low *= scale * tl.load(gain + i).to(tl.float32)
        high *= scale * tl.load(gain + HALF + i).to(tl.float32)
    return low, high


@kernel
@triton.jit
def turn_and_store(
    qkv, bias, q_gain, k_gain, cosines, sines, positions, slots, keys, values,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, PAGE: tl.constexpr, EPS: tl.constexpr, HP: tl.constexpr,
):  # fmt: skip
    """Turns the queries of each token in place; writes its keys and values to its slot, page * PAGE + place.

    `bias`, `q_gain` and `k_gain` may be None.
    """
    t = tl.program_id(0)
    half: tl.constexpr = HD // 2
    h = tl.arange(0, HP)[:, None]
    i = tl.arange(0, half)[None, :]
    gdc_wait()
    gdc_launch_dependents()
    position = tl.load(positions + t)
    slot = tl.load(slots + t)
    c = tl.load(cosines + position * half + i)
    s = tl.load(sines + position * half + i)
    token = qkv + t.to(tl.int64) * (H + 2 * KV) * HD
    low, high = _heads(token, bias, q_gain, h * HD, i, h < H, half, EPS)
    tl.store(token + h * HD + i, low * c - high * s, mask=h < H)
    tl.store(token + h * HD + half + i, high * c + low * s, mask=h < H)
    kept = (h < KV) & (slot >= PAGE)
    to = (((slot // PAGE).to(tl.int64) * KV + h) * PAGE + slot % PAGE) * HD
    low, high = _heads(token, bias, k_gain, (H + h) * HD, i, kept, half, EPS)
    tl.store(keys + to + i, low * c - high * s, mask=kept)
    tl.store(keys + to + half + i, high * c + low * s, mask=kept)
    low, high = _heads(token, bias, None, (H + KV + h) * HD, i, kept, half, EPS)
    tl.store(values + to + i, low, mask=kept)
    tl.store(values + to + half + i, high, mask=kept)


@kernel
@triton.jit
def attend_chunk(
    qkv, tiles, table, keys, values, out, T, SCALE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attention of a chunk's tokens to all earlier ones, whose keys and values are in the pages.

    A tile has up to BM // G tokens of one sequence. `tiles` (tiles, 5) has its first token in the chunk, its number of
    tokens, the position of the first, the sequence, and how many of them are the prompt's (-1: nobody asks). The rows
    of a tile are its tokens times the G heads of queries that share a head of keys.
    """
    kv = tl.program_id(1)
    tile = tiles + tl.program_id(0) * TILE
    first, count, position, row = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    m = tl.arange(0, BM)
    e = tl.arange(0, HD)
    token, head = m // G, kv * G + m % G
    used = token < count
    gdc_wait()
    gdc_launch_dependents()
    at = (first + token).to(tl.int64)
    q = tl.load(qkv + (at * (H + 2 * KV) + head)[:, None] * HD + e[None, :], mask=used[:, None], other=0.0)
    best = tl.full((BM,), UNSEEN, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, HD), tl.float32)
    seen = position + token  # the last position that each row sees
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // BN * BN
    for start in range(begin, position + count, BN):
        n = start + tl.arange(0, BN)
        there = n < position + count
        page = tl.load(table + row * T + n // PAGE, mask=there, other=0)
        place = ((page.to(tl.int64) * KV + kv) * PAGE + n % PAGE) * HD
        k = tl.load(keys + place[None, :] + e[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * SCALE
        visible = n[None, :] <= seen[:, None]
        if WINDOW > 0:
            visible = visible & (n[None, :] > seen[:, None] - WINDOW)
        scores = tl.where(visible, scores, UNSEEN)
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(visible, tl.exp(scores - top[:, None]), 0.0)
        shrink = tl.exp(best - top)
        v = tl.load(values + place[:, None] + e[None, :], mask=there[:, None], other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = top
    result = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + (at * H + head)[:, None] * HD + e[None, :], result, mask=used[:, None])


@kernel
@triton.jit
def attend(
    qkv, bias, q_gain, k_gain, cosines, sines, rows, table, keys, values, parts, sums, arrived, out, T,
    EPS: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    H: tl.constexpr, KV: tl.constexpr, HD: tl.constexpr, PAGE: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    S: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Attention of one new token per row; norms and turns its query and key, and stores its key and value.

    S blocks share the earlier tokens of a row and a head; the last to arrive adds their results, in a fixed order.
    """
    gdc_launch_dependents()
    b = tl.program_id(0)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    half: tl.constexpr = HD // 2
    g = tl.arange(0, GP)
    i = tl.arange(0, half)
    e = tl.arange(0, HD)
    sequence = tl.load(rows + b * WORDS + SEQUENCE)
    position = tl.where(sequence > 0, tl.load(rows + b * WORDS + POSITION), -1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(position + 1 - begin, S), BN) * BN
    first = begin + split * share
    end = tl.minimum(position, first + share)  # of the earlier tokens
    mine = (position >= first) & (position < first + share)  # whether the new token belongs to this block
    c = tl.load(cosines + tl.maximum(position, 0) * half + i)
    s = tl.load(sines + tl.maximum(position, 0) * half + i)
    gdc_wait()
    pages = table + sequence * T
    n = first + tl.arange(0, BN)
    page = tl.load(pages + n // PAGE, mask=n < end, other=0)
    token = qkv + b * (H + 2 * KV) * HD
    used = (g < G)[:, None]
    qa, qb = _heads(token, bias, q_gain, (kv * G + g)[:, None] * HD, i[None, :], used, half, EPS)
    low = (qa * c[None, :] - qb * s[None, :]).to(keys.dtype.element_ty)
    high = (qb * c[None, :] + qa * s[None, :]).to(keys.dtype.element_ty)
    best = tl.full((GP,), UNSEEN, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, HD), tl.float32)
    if mine:
        one = tl.zeros((1, 1), tl.int32)
        ka, kb = _heads(token, bias, k_gain, one + (H + kv) * HD, i[None, :], one == 0, half, EPS)
        key_low = (ka * c[None, :] - kb * s[None, :]).to(keys.dtype.element_ty)
        key_high = (kb * c[None, :] + ka * s[None, :]).to(keys.dtype.element_ty)
        value = tl.load(token + (H + KV + kv) * HD + e).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + (H + KV + kv) * HD + e).to(tl.float32)
        own = tl.load(pages + position // PAGE).to(tl.int64)
        to = ((own * KV + kv) * PAGE + position % PAGE) * HD
        tl.store(keys + to + i[None, :], key_low)
        tl.store(keys + to + half + i[None, :], key_high)
        tl.store(values + to + e, value)
        products = low.to(tl.float32) * key_low.to(tl.float32) + high.to(tl.float32) * key_high.to(tl.float32)
        best = tl.sum(products, 1) * SCALE
        total += 1.0
        acc += value.to(values.dtype.element_ty).to(tl.float32)[None, :]
    for start in range(first, end, BN):
        n = start + tl.arange(0, BN)
        there = n < end
        place = ((page.to(tl.int64) * KV + kv) * PAGE + n % PAGE) * HD
        k_low = tl.load(keys + place[None, :] + i[:, None], mask=there[None, :], other=0.0)
        k_high = tl.load(keys + place[None, :] + half + i[:, None], mask=there[None, :], other=0.0)
        v = tl.load(values + place[:, None] + e[None, :], mask=there[:, None], other=0.0)
        page = tl.load(pages + (n + BN) // PAGE, mask=n + BN < end, other=0)  # of the next tokens
        scores = tl.dot(low, k_low, input_precision=PRECISION)
        scores = tl.dot(high, k_high, scores, input_precision=PRECISION) * SCALE
        scores = tl.where(there[None, :], scores, UNSEEN)
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(best - top)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = top
    to = out + (b * H + kv * G) * HD
    if S == 1:
        tl.store(to + g[:, None] * HD + e[None, :], acc / tl.maximum(total, 1e-30)[:, None], mask=(g < G)[:, None])
    else:
        at = ((b * KV + kv) * S + split) * GP + g
        tl.store(parts + at[:, None] * HD + e[None, :], acc, mask=(g < G)[:, None])
        tl.store(sums + 2 * at, best)
        tl.store(sums + 2 * at + 1, total)
        tl.debug_barrier()  # the block's stores come before its arrival
        if tl.atomic_add(arrived + b * KV + kv, 1) == S - 1:
            z = tl.arange(0, S)
            for head in tl.static_range(G):
                part = ((b * KV + kv) * S + z) * GP + head
                tops = tl.load(sums + 2 * part)
                weight = tl.exp(tops - tl.max(tops, 0))
                whole = tl.sum(weight * tl.load(sums + 2 * part + 1), 0)
                mixed = tl.sum(weight[:, None] * tl.load(parts + part[:, None] * HD + e[None, :]), 0)
                tl.store(to + head * HD + e, mixed / tl.maximum(whole, 1e-30))
            tl.store(arrived + b * KV + kv, 0)
