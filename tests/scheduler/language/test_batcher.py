"""Continuous batching against a model that is a function of all tokens so far: whatever shares the batch, whichever
step ends first, and however often pages run out, each text is what it is alone.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as st

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.language.batcher import Batch, Batcher, Chunk, Pace, Sequence
from paellapy.scheduler.language.pages import PAGE, PagePool
from paellapy.scheduler.language.sampling import Sampling

CONTEXT = 96
END = 3


def after(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 97


class FakeGpu:
    """Runs steps as a GPU would: it sees pages, slots and the last tokens, and nothing of the batcher's own."""

    def __init__(self) -> None:
        self.cache: dict[int, int] = {}  # the token in each slot
        self.table: dict[tuple[int, int], int] = {}
        self.last: dict[int, int] = {}

    def chunk(self, chunk: Chunk) -> list[int]:
        for sequence, first, pages in chunk.entries:
            self.table.update({(sequence, first + k): page for k, page in enumerate(pages.tolist())})
        whose = {
            first + i: (position + i, sequence)
            for first, count, position, sequence, _ in chunk.tiles.tolist()
            for i in range(count)
        }
        assert sorted(whose) == list(range(sum(count for _, count in chunk.pieces)))
        for i, (position, sequence) in whose.items():
            assert position == chunk.positions[i]
            assert chunk.slots[i] == self._slot(sequence, position)
            self.cache[int(chunk.slots[i])] = int(chunk.tokens[i])
        assert not chunk.slots[len(whose) :].any()
        for row in chunk.rows[: len(chunk.ends)]:
            assert whose[int(row["token"])] == (row["position"], row["sequence"])
        return [self._next(row) for row in chunk.rows[: len(chunk.ends)]]

    def step(self, batch: Batch) -> list[int]:
        for row in batch.rows:
            sequence, position = int(row["sequence"]), int(row["position"])
            if row["place"] >= 0:
                self.table[sequence, int(row["place"])] = int(row["page"])
            self.cache[self._slot(sequence, position)] = self.last[sequence]
        return [self._next(row) for row in batch.rows]

    def _slot(self, sequence: int, position: int) -> int:
        return self.table[sequence, position // PAGE] * PAGE + position % PAGE

    def _next(self, row: Any) -> int:
        sequence = int(row["sequence"])
        seen = [self.cache[self._slot(sequence, at)] for at in range(int(row["position"]) + 1)]
        self.last[sequence] = after(seen)
        return self.last[sequence]


def alone(sequence: Sequence, context: int) -> list[int]:
    tokens = list(sequence.prompt)
    while True:
        tokens.append(after(tokens))
        new = len(tokens) - len(sequence.prompt)
        if tokens[-1] == END or new == sequence.sampling.max_tokens or len(tokens) == context:
            return tokens[len(sequence.prompt) :]


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_text_is_what_it_is_alone(seed: int) -> None:
    r = random.Random(seed)
    batcher = Batcher(
        PagePool(r.randint(6, 30)), sequences=r.randint(1, 6), context=CONTEXT, chunks=(16, 32, 64), tile_tokens=16,
        eos=(END,),
    )  # fmt: skip
    gpu, base = FakeGpu(), [r.randrange(4) for _ in range(64)]
    texts = [
        Sequence((*base[: r.randint(0, 50)], *(r.randrange(4) for _ in range(r.randint(1, 12)))),
                 Sampling(temperature=0, max_tokens=r.randint(1, 30)), 0, r.randint(0, 1))
        for _ in range(r.randint(1, 12))
    ]  # fmt: skip
    coming, steps, chunks = list(texts), [], []
    for _ in range(20_000):
        if not (coming or steps or chunks) and batcher.idle:
            break
        event = r.random()
        if coming and event < 0.2:
            batcher.add(coming.pop())
        elif event < 0.4 and not chunks:
            chunks += [chunk] if (chunk := batcher.plan_chunk()) else []
        elif event < 0.6 and len(steps) < 2:
            steps += [step] if (step := batcher.plan_step(r.randint(1, 8))) else []
        elif event < 0.8 and chunks:
            batcher.end_chunk(chunks[0], gpu.chunk(chunks.pop(0)))
        elif steps:
            batcher.end_step(steps[0], gpu.step(steps.pop(0)))
        if r.random() < 0.003 and (chosen := r.choice(texts)) not in coming:
            batcher.end(chosen, "cancelled")
        batcher.check()
    for text in texts:
        wanted = alone(text, batcher.context)
        if text.finish == "cancelled":
            assert text.tokens == wanted[: len(text.tokens)]
        else:
            assert text.tokens == wanted
            assert text.finish == ("stop" if text.tokens[-1] == END else "length")


def test_a_prompt_that_fills_the_context_is_refused():
    batcher = Batcher(PagePool(4), sequences=1, context=1 << 20, chunks=(16,), tile_tokens=16)
    with failing(InputError, field="prompt", given=4 * PAGE, limit=4 * PAGE - 1):
        batcher.add(Sequence((1,) * (4 * PAGE), Sampling(), 0))
    with pytest.raises(InputError):
        batcher.add(Sequence((), Sampling(), 0))


def test_a_second_question_shares_the_pages_of_the_first():
    batcher = Batcher(PagePool(8), sequences=2, context=CONTEXT, chunks=(16, 64), tile_tokens=16)
    gpu = FakeGpu()
    for question in (1, 2):
        text = Sequence((*range(40, 40 + 2 * PAGE), question), Sampling(temperature=0, max_tokens=1), 0)
        batcher.add(text)
        chunk = batcher.plan_chunk()
        assert chunk is not None
        batcher.end_chunk(chunk, gpu.chunk(chunk))
        assert text.shared_tokens == (0 if question == 1 else 2 * PAGE)
        assert len(chunk.tokens) == (64 if question == 1 else 16)


class Texts:
    """As much of a batcher as `Pace` asks about."""

    joins = False


def test_a_step_that_is_held_back_waits_alone_unless_a_text_joins():
    pace, texts = Pace(20), Texts()
    assert [pace.plans(n, texts) for n in (0, 1, 2)] == [True, True, False]
    arrival, due_ns = pace.terms([], 1_000_000, 0)
    assert (arrival, due_ns) == (1_000_000, 21_000_000)
    pace.note(1_000_000, 13_000_000, due_ns, 18_000_000)  # it began 12 ms after it could
    assert [pace.plans(n, texts) for n in (0, 1)] == [True, False]
    texts.joins = True
    assert pace.plans(1, texts)
    texts.joins = False
    for at in (18_000_000, 23_000_000):
        pace.note(at, at, at + 20_000_000, at + 5_000_000)
    assert pace.plans(1, texts)


MS = 1_000_000


def held_back(pace: Pace, now: int, late: int, way: int = 0) -> tuple[int, int]:
    """A step that other work holds back until it has to begin, and that then ends late; its lead, and its end."""
    arrival, meant_ns = pace.terms([now], now, 0)
    assert meant_ns == arrival + 20 * MS
    ends = round(meant_ns) + late
    pace.note(now, ends - 5 * MS, meant_ns, ends).reached(ends + way)
    return now - arrival, ends


def test_steps_that_are_late_make_those_that_follow_earlier():
    for late, lead in ((-2 * MS, 0), (3 * MS, 3 * MS)):
        pace, now, leads = Pace(20), 0, []
        for _ in range(20):
            found, now = held_back(pace, now, late)
            leads.append(found)
        assert leads[0] == 0
        assert leads[-1] == lead
    assert pace.terms([now - 30 * MS], now, 0)[1] == NEVER  # it is late already
    for _ in range(3):
        pace.note(now, now, now + 20 * MS, now + 5 * MS)  # nothing held it back: it says nothing about held ones
        now += 5 * MS
    assert now - pace.terms([now], now, 0)[0] == 3 * MS


def test_almost_no_token_is_late_with_its_reader():
    random = np.random.default_rng(3)
    pace, now, late = Pace(20), 0, []
    for _ in range(1000):
        behind, way = (round(each * MS) for each in 0.1 * random.lognormal(0.0, 0.8, 2))
        lead, now = held_back(pace, now, behind, way + MS // 2)
        late.append(behind + way - lead)  # what every token has, half a millisecond, makes none late
    assert np.mean(np.array(late) > 0.05 * MS) < 0.01
    assert np.median(late) > -1.5 * MS


def test_without_a_target_nothing_is_due():
    pace = Pace(None)
    assert pace.terms([5], 7, 1) == (7, NEVER)
    pace.note(7, 9_000_000, NEVER, 10_000_000)
    assert pace.plans(1, Texts())
