"""Continuous batching: which tokens enter the next chunk, and which sequences the next decode step has.

A sequence waits, is prefilled in chunks, then joins the decode batch until it ends. The next step is planned before the
tokens of the one before are known: the GPU hands them on. Chunks and decode steps are jobs of their own and may run at
once, so pages of a sequence that leaves are given back only when no step that was planned with it is unfinished.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.language.kernels import ROW, TILE
from paellapy.scheduler.language.pages import PAGE, PagePool
from paellapy.scheduler.language.sampling import Sampling

PIECES = 16  # of sequences that one chunk may have
STEPS_AHEAD = 2  # decode steps on their way
_RECENT = 16  # steps
_HELD = 0.05  # of the time between two tokens: how late a step begins that was held back; a guess
# Steps that are remembered. The tail, their latest tenth, is extrapolated: the lead covers all but one step of _BEYOND
# times as many.
_REMEMBERED, _TAIL, _BEYOND = 256, 0.1, 4

Words = NDArray[np.int32]


def most_tiles(chunk: int, tile_tokens: int) -> int:
    """Tiles that a chunk of this size may have."""
    return chunk // tile_tokens + PIECES


@dataclass(slots=True, eq=False)
class Sequence:
    """One text that grows: its prompt and the tokens chosen so far."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    priority: int = 0
    owner: Any = None  # the caller's own
    tokens: list[int] = field(default_factory=list)  # chosen, and known to the host
    finish: str | None = None  # why it ended: "stop", "length", "cancelled", "failed"
    shared_tokens: int = 0  # of the prompt, found in kept pages
    recomputed: int = 0  # how often its pages were taken away
    # the batcher's own
    number: int = 0  # of its row in the state on the GPU; 0: it has none
    arrival: int = -1
    pages: list[int] = field(default_factory=list)
    chains: list[int] = field(default_factory=list)  # of its full pages
    computed: int = 0  # tokens whose keys and values are in the pages, or will be by a step that was planned
    decoding: bool = False
    in_flight: int = 0  # steps that were planned and have not ended
    evicted: bool = False  # its pages are to be given back as soon as no step uses them
    most: int = 0  # tokens that may be chosen
    ends: frozenset[int] = frozenset()  # tokens that end it

    @property
    def known(self) -> int:
        """Tokens that the host knows."""
        return len(self.prompt) + len(self.tokens)

    def text(self, first: int, end: int) -> tuple[int, ...]:
        """Tokens of prompt and answer."""
        n = len(self.prompt)
        return (*self.prompt[first:end], *self.tokens[max(0, first - n) : max(0, end - n)])


@dataclass(slots=True)
class Batch:
    """A decode step: its sequences, and a record for each."""

    sequences: list[Sequence]
    rows: NDArray[Any]  # of ROW


@dataclass(slots=True)
class Chunk:
    """A prefill step: pieces of sequences, packed. Arrays have their full sizes; unused entries say so."""

    pieces: list[tuple[Sequence, int]]  # sequence and number of its tokens
    ends: list[Sequence]  # those whose last known token the chunk has, in the order of `rows`
    tokens: Words
    positions: Words
    slots: Words
    tiles: Words
    rows: NDArray[Any]
    entries: list[tuple[int, int, Words]]  # to be written to the table before: sequence, first place, pages


class Batcher:
    """Plans steps over a pool of pages. The caller runs them, in order per kind, and reports their tokens."""

    def __init__(
        self, pool: PagePool, *, sequences: int, context: int, chunks: Items[int], tile_tokens: int,
        eos: Items[int] = (),
    ) -> None:  # fmt: skip
        """`chunks`: the sizes of chunks, ascending. `context`: the longest sequence, prompt and answer."""
        self.pool, self.context = pool, min(context, pool.count * PAGE)
        self._chunks, self._tile, self._eos = tuple(chunks), tile_tokens, frozenset(eos)
        self._rows = np.zeros(sequences + 1, ROW)  # what stays the same of each sequence's rows
        self._numbers = list(range(sequences, 0, -1))
        self._waiting: list[tuple[int, int, Sequence]] = []  # by priority, then by arrival
        self._running: list[Sequence] = []  # admitted, in order of arrival
        self._arrivals = 0

    # -- sequences

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits for its turn."""
        self.check_length(len(sequence.prompt))
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sampling, room = sequence.sampling, self.context - len(sequence.prompt)
        sequence.most = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        sequence.ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        self._wait(sequence)

    def check_length(self, tokens: int) -> None:
        """InputError: no prompt has this length."""
        if not tokens:
            raise InputError("the prompt is empty: give at least one token", field="prompt", given=0, limit=1)
        if tokens >= self.context:
            raise InputError(
                f"the prompt has {tokens:,} tokens: prompt and answer may have {self.context:,}",
                field="prompt", given=tokens, limit=self.context - 1,
            )  # fmt: skip

    def end(self, sequence: Sequence, why: str) -> None:
        """The sequence takes no further part."""
        if sequence.finish is None:
            self._end(sequence, why)

    def drop(self, step: Chunk | Batch) -> list[Sequence]:
        """A step that was planned failed: its sequences end. Returns those that had not ended before."""
        sequences = [s for s, _ in step.pieces] if isinstance(step, Chunk) else step.sequences
        dropped = [s for s in sequences if s.finish is None]
        for sequence in sequences:
            sequence.in_flight -= 1
            self.end(sequence, "failed")
        self._settle(sequences)
        return dropped

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the texts that wait; any thread may ask."""
        return sum(sequence.known for _, _, sequence in tuple(self._waiting))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def joins(self) -> bool:
        """Whether a sequence decodes that no step on its way has."""
        return any(s.decoding and not s.in_flight and s.finish is None for s in self._running)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    # -- chunks

    def plan_chunk(self) -> Chunk | None:
        """The next chunk: first the rest of sequences that have begun, then those that wait; None if nothing can
        enter.
        """
        room = self._chunks[-1]
        pieces: list[tuple[Sequence, int]] = []
        for sequence in [s for s in self._running if not s.decoding and not s.evicted]:
            if sequence.in_flight or sequence.computed >= sequence.known:
                continue
            room -= self._piece(sequence, room, pieces)
        while room > 0 and len(pieces) < PIECES and self._waiting and self._numbers:
            sequence = self._waiting[0][2]
            if not self._admit(sequence):
                break
            room -= self._piece(sequence, room, pieces)
        return self._packed(pieces) if pieces else None

    def end_chunk(self, chunk: Chunk, chosen: Items[int]) -> list[int]:
        """Takes the tokens that a chunk chose; returns the rows whose sequences have a new one."""
        for sequence, _ in chunk.pieces:
            sequence.in_flight -= 1
            self._keep(sequence)
        changed = []
        for k, (sequence, token) in enumerate(zip(chunk.ends, chosen, strict=True)):
            if sequence.finish is None and not sequence.evicted:
                sequence.decoding = True
                self._append(sequence, token)
                changed.append(k)
        self._settle(s for s, _ in chunk.pieces)
        return changed

    # -- decode steps

    def plan_step(self, most: int) -> Batch | None:
        """The next token of up to `most` sequences, the oldest first. Where pages run out, the youngest sequence gives
        its own away and is computed again later.
        """
        chosen: list[tuple[Sequence, int, int]] = []
        for sequence in list(self._running):
            if len(chosen) == most:
                break
            # The last token does not enter: its place is not needed.
            last = len(sequence.prompt) + sequence.most - 1
            if not sequence.decoding or sequence.evicted or sequence.computed >= last or sequence.finish is not None:
                continue
            if sequence.in_flight and sequence.sampling.json_schema is not None:
                continue  # which tokens may be next depends on the one that is being chosen
            place, page = -1, 0
            if sequence.computed % PAGE == 0:
                if not self._make_room(sequence):
                    continue
                (page,) = self.pool.take(1)
                place = sequence.computed // PAGE
                sequence.pages.append(page)
            chosen.append((sequence, place, page))
        chosen = [(s, place, page) for s, place, page in chosen if not s.evicted]
        if not chosen:
            return None
        rows = self._rows[[sequence.number for sequence, _, _ in chosen]]
        rows["position"] = [sequence.computed for sequence, _, _ in chosen]
        rows["place"], rows["page"] = [place for _, place, _ in chosen], [page for _, _, page in chosen]
        for sequence, _, _ in chosen:
            sequence.computed += 1
            sequence.in_flight += 1
        return Batch([s for s, _, _ in chosen], rows)

    def end_step(self, batch: Batch, chosen: Items[int]) -> list[int]:
        """Takes the tokens that a decode step chose; returns the rows whose sequences have a new one."""
        changed, over = [], []
        for k, (sequence, token) in enumerate(zip(batch.sequences, chosen, strict=True)):
            sequence.in_flight -= 1
            if sequence.finish is None and not sequence.evicted:
                self._append(sequence, token)
                if len(sequence.prompt) + len(sequence.tokens) > (len(sequence.chains) + 1) * PAGE:
                    self._keep(sequence)
                changed.append(k)
            if sequence.finish is not None or sequence.evicted:
                over.append(sequence)
        self._settle(over)
        return changed

    def check(self) -> None:
        """Raises AssertionError if pages or sequences are counted wrongly."""
        self.pool.check()
        held = [page for s in self._running for page in s.pages]
        assert self.pool.count - self.pool.free == len(set(held)), "pages are held by nobody"
        numbers = [s.number for s in self._running] + self._numbers
        assert len(numbers) == len(set(numbers)), "two sequences have one number"

    # -- parts

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, (-sequence.priority, sequence.arrival, sequence), key=lambda entry: entry[:2])

    def _admit(self, sequence: Sequence) -> bool:
        """Gives a waiting sequence a number and the pages that it shares; False while it must wait."""
        wanted = -(-sequence.known // PAGE)
        # Penalties count all tokens of a text, so all of them must pass through chunks.
        penalises = sequence.sampling.penalises
        shared = [] if penalises else self.pool.shared(sequence.text(0, sequence.known - 1))
        # A page in hand for each sequence that decodes: those admitted last would otherwise soon be thrown out again.
        if wanted - len(shared) + sum(s.decoding for s in self._running) > self.pool.free and self._running:
            self.pool.leave(shared)
            return False
        self._waiting.pop(0)
        number = sequence.number = self._numbers.pop()
        self._rows[number] = (number, 0, 0, 0, 0, sequence.seed, *sequence.sampling.parameters)
        sequence.pages = shared
        sequence.chains = [self.pool.chain(page) for page in shared]
        sequence.computed = len(shared) * PAGE
        sequence.shared_tokens = max(sequence.shared_tokens, sequence.computed if not sequence.tokens else 0)
        bisect.insort(self._running, sequence, key=lambda s: s.arrival)
        return True

    def _piece(self, sequence: Sequence, room: int, pieces: list[tuple[Sequence, int]]) -> int:
        """Adds as much of a sequence to a chunk as fits and as has pages; returns the number of tokens."""
        held = len(sequence.pages) * PAGE
        count = min(room, sequence.known - sequence.computed, held + self.pool.free * PAGE - sequence.computed)
        if count <= 0 or len(pieces) == PIECES:
            return 0
        sequence.pages += self.pool.take(-(-(sequence.computed + count) // PAGE) - len(sequence.pages))
        sequence.in_flight += 1
        pieces.append((sequence, count))
        return count

    def _packed(self, pieces: list[tuple[Sequence, int]]) -> Chunk:
        total = sum(count for _, count in pieces)
        size = self._chunks[bisect.bisect_left(self._chunks, total)]
        tokens, positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        slots = np.zeros(size, np.int32)
        tiles = np.zeros((most_tiles(size, self._tile), TILE.value), np.int32)
        rows = np.zeros(PIECES, ROW)
        ends: list[Sequence] = []
        entries: list[tuple[int, int, Words]] = []
        at = tile = 0
        for sequence, count in pieces:
            first, number = sequence.computed, sequence.number
            span = slice(at, at + count)
            place = np.arange(first, first + count)
            tokens[span], positions[span] = sequence.text(first, first + count), place
            slots[span] = np.asarray(sequence.pages)[place // PAGE] * PAGE + place % PAGE
            prompt = len(sequence.prompt)
            for offset in range(0, count, self._tile):
                n, position = min(self._tile, count - offset), first + offset
                counted = min(n, max(0, prompt - position)) if sequence.sampling.penalises else -1
                tiles[tile] = at + offset, n, position, number, counted
                tile += 1
            # The pages from the first that this piece writes; all of them when the sequence has a new number.
            begin = 0 if sequence.in_flight == 1 and first == len(sequence.chains) * PAGE else first // PAGE
            new = sequence.pages[begin : -(-(first + count) // PAGE)]
            entries.append((number, begin, np.array(new, np.int32)))
            sequence.computed += count
            at += count
            if sequence.computed == sequence.known:
                rows[len(ends)] = self._rows[number]
                row = rows[len(ends)]
                row["position"], row["token"], row["place"] = sequence.computed - 1, at - 1, -1
                ends.append(sequence)
        return Chunk(pieces, ends, tokens, positions, slots, tiles, rows, entries)

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees a page for this sequence if none is free; False: it must wait for one."""
        if self.pool.free:
            return True
        youngest = next(s for s in reversed(self._running) if not s.evicted)
        youngest.evicted = True
        youngest.recomputed += 1
        self._settle([youngest])
        return youngest is not sequence and self.pool.free > 0

    def _append(self, sequence: Sequence, token: int) -> None:
        sequence.tokens.append(token)
        count = len(sequence.tokens)
        if token in sequence.ends and count >= sequence.sampling.min_tokens:
            self._end(sequence, "stop")
        elif count == sequence.most:
            self._end(sequence, "length")

    def _end(self, sequence: Sequence, why: str) -> None:
        sequence.finish = why
        if sequence.number == 0:
            place = (-sequence.priority, sequence.arrival)
            del self._waiting[bisect.bisect_left(self._waiting, place, key=lambda entry: entry[:2])]
        self._settle([sequence])

    def _keep(self, sequence: Sequence) -> None:
        """Remembers the full pages whose tokens are known and written."""
        written = min(sequence.known - (1 if sequence.decoding else 0), sequence.computed)
        if sequence.in_flight and not sequence.decoding:
            return
        while (len(sequence.chains) + 1) * PAGE <= written:
            k = len(sequence.chains)
            chain = sequence.chains[-1] if sequence.chains else -1
            made = self.pool.keep(sequence.pages[k], sequence.text(k * PAGE, (k + 1) * PAGE), chain)
            sequence.chains.append(made)

    def _settle(self, sequences: Any) -> None:
        """Takes the pages of sequences that have ended or were evicted, once no step uses them."""
        for sequence in list(sequences):
            if sequence.in_flight or sequence.number == 0 or not (sequence.finish or sequence.evicted):
                continue
            self.pool.leave(sequence.pages)
            self._numbers.append(sequence.number)
            self._running.remove(sequence)
            sequence.number = sequence.computed = 0
            sequence.pages, sequence.chains = [], []
            sequence.decoding = sequence.evicted = False
            if sequence.finish is None:
                self._wait(sequence)


class Delivery:
    """How late the tokens of a step were: there, and with their readers."""

    __slots__ = ("_there_ns", "late_ns", "way_ns")

    def __init__(self, there_ns: int, late_ns: float) -> None:
        self._there_ns, self.late_ns, self.way_ns = there_ns, late_ns, 0

    def reached(self, now: int) -> None:
        """A reader has its token; any thread may say so."""
        self.way_ns = max(self.way_ns, now - self._there_ns)


class Pace:
    """When decode steps are due, and how many are planned ahead.

    A token is due `tbt_ms` after the one before it. Steps are meant to end earlier by a lead: by as much as the tokens
    of almost all steps would be late with their readers. So it covers what the predicted time of a step leaves out, and
    what differs on the way to the readers.
    """

    def __init__(self, tbt_ms: float | None) -> None:
        self._tbt_ns = NEVER if tbt_ms is None else round(tbt_ms * 1e6)
        self._took_ns = 0.0  # of recent steps
        self._lead_ns = 0
        self._recent: deque[Delivery] = deque(maxlen=_REMEMBERED)
        self._ended_ns = self._steps = 0
        self._free = STEPS_AHEAD  # latest steps that were not held back for other work

    def plans(self, steps: int, batcher: Batcher) -> bool:
        """Whether another step is planned behind these. The GPU need not wait for the host while there are two. One
        that is held back waits alone: texts that join meanwhile are in the next one.
        """
        return steps < STEPS_AHEAD and (not steps or self._free >= STEPS_AHEAD or batcher.joins)

    def terms(self, tokens_ns: Items[int], now: int, steps: int) -> tuple[int, float]:
        """The arrival of a step, from which its target counts, and when it is meant to end; NEVER: its tokens cannot be
        in time, or have no target. `tokens_ns`: the latest tokens of its texts that are in none of the steps before it.
        """
        if self._tbt_ns == NEVER:
            return now, NEVER
        since_ns = min(tokens_ns, default=now)
        due_ns = since_ns + self._tbt_ns
        early_ns = self._lead_ns + (round(self._took_ns) if steps and tokens_ns else 0)
        return since_ns - early_ns, due_ns - self._lead_ns if due_ns > now + self._took_ns else NEVER

    def note(self, sent_ns: int, started_ns: int, meant_ns: float, now: int) -> Delivery:
        """Learns from a step that has ended; its readers say when they have its tokens."""
        could_ns = max(sent_ns, self._ended_ns)
        found = Delivery(now, now - max(meant_ns, could_ns + self._took_ns))  # no lead lets it end before it could
        held = started_ns - could_ns > _HELD * self._tbt_ns
        if meant_ns < NEVER and (held or found.late_ns > 0.0):  # on an idle GPU it was early for another reason
            self._lead_ns = self._learned_ns()  # its readers have yet to say
            self._recent.append(found)
        self._ended_ns = now
        self._steps += 1
        self._took_ns += (now - max(started_ns, could_ns) - self._took_ns) / min(self._steps, _RECENT)
        self._free = 0 if held else self._free + 1
        return found

    def _learned_ns(self) -> int:
        """A quantile beyond most steps that are remembered: the excess of the worst over a threshold is taken as
        exponential.
        """
        recent = self._recent
        if len(recent) < 2:
            return 0
        usual_ns = min(each.way_ns for each in recent)  # every token has it, so it does not part two of them
        late = [each.late_ns + each.way_ns - usual_ns for each in recent]
        *worst, threshold = heapq.nlargest(1 + max(1, int(_TAIL * len(late))), late)
        excess = sum(worst) / len(worst) - threshold
        lead = threshold + excess * math.log(_BEYOND * len(worst))
        return min(self._tbt_ns, max(0, round(lead)))
