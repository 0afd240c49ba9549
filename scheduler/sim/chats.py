"""Chats with language models in simulated time: their load, their steps, and what became of them.

The texts of a model are planned by the engine's own `Batcher` and paced by its `Pace`; steps are jobs of the simulated
GPU like any others. A decode step takes the time of its profile, and the time to read its keys and values.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.core.codes import OK
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import MOST_NS, ModelProfile, SegmentProfile, install, open_model
from paellapy.scheduler.core.state import State
from paellapy.scheduler.core.values import check_values, integer, number, one_of, or_none
from paellapy.scheduler.sim import tables
from paellapy.scheduler.sim.results import ChatResult
from paellapy.scheduler.sim.segment_model import DONE, MORE_RECORDS, run_segments
from paellapy.scheduler.sim.workload import MODEL, Workload, WorkloadError, csv_rows, parts_of, wrong

if TYPE_CHECKING:
    from paellapy.scheduler.language.batcher import Batch, Chunk
    from paellapy.scheduler.language.batcher import Sequence as Text

RECORDED = Path(__file__).parent / "recorded" / "language_models.json"
_MOST_TOKENS = 1 << 20
_TILE = 128  # tokens: the simulated GPU computes nothing
_SEGMENT_NS, _MOST_SEGMENTS = 100e3, 256
_LENGTH = integer(1, _MOST_TOKENS)
_ABOVE = or_none(number(0, MOST_NS / 1e6, above=True))


# --- load


@dataclass(frozen=True, slots=True)
class Chats(Workload):
    """Texts for a language model: `rate` per second at random times, or `clients` that ask again when answered.

    `prompt` and `answer` are median lengths in tokens; `sigma` is the spread of lognormal lengths, 0: all are equal.

    >>> Chats("8B", rate=2, prompt=500, answer=100, duration=3).seconds
    3
    """

    model: str
    rate: float | None = None
    clients: int | None = None
    prompt: int = 512
    answer: int = 128
    sigma: float = 0.0
    duration: float = 1.0

    def __post_init__(self) -> None:
        rules = {
            "model": MODEL, "rate": or_none(number(0, 1e6, above=True)), "clients": or_none(integer(1, 1 << 16)),
            "prompt": _LENGTH, "answer": _LENGTH, "sigma": number(0, 5),
            "duration": number(0, MOST_NS / 1e9, above=True),
        }  # fmt: skip
        check_values(self, rules, WorkloadError)
        if (self.rate is None) == (self.clients is None):
            text = "give Chats either a rate or a number of clients"
            raise WorkloadError(text, field="rate", given=self.rate)

    @property
    def seconds(self) -> float:
        return self.duration

    def texts(self, seed: int) -> tuple[list[_Asked], Callable[[], _Asked] | None]:
        """The texts that come at fixed times; for clients that ask again, the first of each, and how a next one is
        made.
        """
        random = np.random.default_rng(seed)

        def asked(at_ns: float = 0.0) -> _Asked:
            spread = np.exp(self.sigma * random.standard_normal(2))
            lengths = np.clip(np.round((self.prompt, self.answer) * spread), 1, _MOST_TOKENS)
            return int(at_ns), int(lengths[0]), int(lengths[1])

        if self.rate is None:
            return [asked() for _ in range(self.clients or 0)], asked
        n = random.poisson(self.rate * self.duration)
        return [asked(at) for at in np.sort(random.random(n)) * self.duration * 1e9], None


_Asked = tuple[int, int, int]  # when a text comes, in ns, and its tokens: of the prompt, and of the answer


@dataclass(frozen=True, slots=True)
class ChatTrace(Workload):
    """Recorded texts for a language model: (seconds, tokens of the prompt, of the answer) each, in any order.

    >>> ChatTrace("8B", ((0.5, 100, 20), (0.0, 300, 40))).rows[0]
    (0.0, 300, 40)
    """

    model: str
    rows: Sequence[tuple[float, int, int]]

    def __post_init__(self) -> None:
        rules = {"t": number(0, MOST_NS / 1e9), "prompt": _LENGTH, "answer": _LENGTH}
        check_values(self, {"model": MODEL}, WorkloadError)
        if not isinstance(self.rows, Sequence) or isinstance(self.rows, str | bytes):
            raise wrong("rows", self.rows, "it must be a list of (seconds, tokens of the prompt, tokens of the answer)")
        for k, row in enumerate(self.rows):
            if not isinstance(row, Sequence) or len(row) != 3:
                raise wrong("rows", row, "a text must be (seconds, tokens of the prompt, tokens of the answer)")
            check_values(dict(zip(rules, row, strict=True)), rules, WorkloadError, f"text {k}: ", where=k)
        object.__setattr__(self, "rows", tuple(sorted(map(tuple, self.rows))))

    @classmethod
    def from_csv(cls, model: str, path: str | Path) -> ChatTrace:
        """Columns `t` (seconds), `prompt` and `answer` (tokens)."""
        rows = []
        for where, row in csv_rows(path, "t", "prompt", "answer"):
            try:
                rows.append((float(row["t"]), int(row["prompt"]), int(row["answer"])))
            except (TypeError, ValueError) as e:
                raise WorkloadError(f"{where}: {e}", where=where) from e
        return cls(model, rows)

    @property
    def seconds(self) -> float:
        return self.rows[-1][0] if self.rows else 0.0

    def texts(self, seed: int) -> tuple[list[_Asked], None]:
        return [(int(t * 1e9), prompt, answer) for t, prompt, answer in self.rows], None


# --- profiles


@dataclass(frozen=True, slots=True)
class LanguageProfile:
    """A language model for `simulate`: its programs, as `engine.model_profile("NAME prefill")` returns them, their
    targets, and its pages. `context_ns`: time of a decode step for each token of its texts.
    """

    name: str
    prefill: ModelProfile
    decode: ModelProfile
    pages: int
    context: int = 4096
    context_ns: float = 0.0
    about: str = ""

    @property
    def programs(self) -> tuple[ModelProfile, ModelProfile]:
        return self.prefill, self.decode


def language_profile(
    shape: str, *, name: str | None = None, ttft_ms: float | None = None, tbt_ms: float | None = None,
    kv_gb: float = 32.0, context: int = 4096, sequences: int = 64, chunk: int = 1024,
) -> LanguageProfile:  # fmt: skip
    """A language model of this shape on an H200, "0.6B", "1B" or "8B", with the options of `pp.LanguageModel`.

    `about` says which times `benchmarks/language_models.py` has measured; others are estimates.

    >>> round(language_profile("8B").decode.alone_ns() / 1e6, 1)
    3.9
    """
    from paellapy.scheduler.language.model import PACED, chunk_sizes, step_sizes
    from paellapy.scheduler.language.pages import PAGE

    recorded = json.loads(RECORDED.read_text())
    given = {"shape": shape, "ttft_ms": ttft_ms, "tbt_ms": tbt_ms, "kv_gb": kv_gb, "context": context,
             "sequences": sequences, "chunk": chunk}  # fmt: skip
    rules = {
        "shape": one_of(*recorded["shapes"]), "ttft_ms": _ABOVE, "tbt_ms": _ABOVE, "kv_gb": number(0, 1e4, above=True),
        "context": integer(PAGE, _MOST_TOKENS), "sequences": integer(1, 1024), "chunk": integer(64, 8192),
    }  # fmt: skip
    check_values(given, rules, ProfileError)
    context, sequences, chunk = int(context), int(sequences), int(chunk)  # NumPy's lack methods of Python's
    steps = recorded["shapes"][shape]
    name = name or shape
    pages = int(kv_gb * 1e9) // (PAGE * steps["token_bytes"])
    if pages < 1:
        raise ProfileError(f"kv_gb={kv_gb} is less than one page: give more memory", field="kv_gb", given=kv_gb)

    def program(
        kind: str, sizes: Sequence[int], target_ms: float | None, instances: int, **options: Any
    ) -> ModelProfile:
        curve = {int(size): us * 1e3 for size, us in steps[f"{kind}_us"].items()}
        times = np.interp(sizes, list(curve), list(curve.values()))
        slope = max(curve.values()) / max(curve)  # beyond the largest that was recorded
        times = np.where(np.array(sizes) > max(curve), slope * np.array(sizes), times)
        programs = {size: _segments(float(ns), steps["weight_bytes"]) for size, ns in zip(sizes, times, strict=True)}
        return ModelProfile(f"{name} {kind}", programs, target_ms=target_ms, instances=instances, **options,
                            demand=dict.fromkeys(sizes, 1.0))  # fmt: skip

    return LanguageProfile(
        name, program("prefill", chunk_sizes(chunk), ttft_ms, 1),
        program("decode", step_sizes(sequences), tbt_ms, 2, params=PACED), pages, context, steps["context_ns"],
        recorded["about"],
    )  # fmt: skip


def _segments(ns: float, weight_bytes: float) -> list[SegmentProfile]:
    """A step that fills the GPU, cut as the engine cuts it."""
    gpu = part("h200")
    n = min(_MOST_SEGMENTS, max(1, round(ns / _SEGMENT_NS)))
    warps = gpu.sms * gpu.sm.warps
    return [SegmentProfile(ns / n, gpu.sms * 4, warps, warps * 32, 0, 8, weight_bytes / n)] * n


# --- texts


class _Told:
    """A text's tokens, by when they were there."""

    __slots__ = ("again", "arrival_ns", "ended", "token_ns")

    def __init__(self, arrival_ns: int, again: Callable[[], _Asked] | None) -> None:
        self.arrival_ns, self.again = arrival_ns, again
        self.token_ns: list[int] = []
        self.ended = False


class Writer:
    """Writes the texts of one language model in simulated time, by the rules of the engine's `Generator`."""

    def __init__(self, state: State, profile: LanguageProfile, workload: Workload, seed: int) -> None:
        from paellapy.scheduler.language.batcher import Batcher, Pace
        from paellapy.scheduler.language.pages import PagePool

        self.profile = profile
        rows = [install(state, each, whole_batches=True) for each in profile.programs]
        (self.prefill, _), (self.decode, instances) = rows
        state.instance["arena"][instances] = instances[0]  # one step after the other
        for m, _ in rows:
            open_model(state, m)
        self._batcher = Batcher(
            PagePool(profile.pages), sequences=max(profile.decode.batch), context=profile.context,
            chunks=profile.prefill.batch, tile_tokens=_TILE,
        )  # fmt: skip
        self._pace = Pace(profile.decode.target_ms)
        self._coming: list[tuple[_Asked, Callable[[], _Asked] | None]] = []
        self._until_ns = int(workload.seconds * 1e9)
        for k, each in enumerate(parts_of(workload)):
            if isinstance(each, Chats | ChatTrace) and each.model == profile.name:
                asked, again = each.texts(seed + k)
                self._coming += [(one, again) for one in asked]
        self._coming.sort(key=lambda each: each[0], reverse=True)  # the next one is the last
        self._told: list[_Told] = []
        self._chunks: deque[tuple[int, Chunk]] = deque()  # numbers of records
        self._steps: deque[tuple[int, Batch, float, int]] = deque()
        self._work: dict[int, NDArray[np.float64]] = {}

    @property
    def next_ns(self) -> float:
        """When the next text comes."""
        return float(self._coming[-1][0][0]) if self._coming else np.inf

    @property
    def idle(self) -> bool:
        return self._batcher.idle and not self._coming

    def turn(self, f: tables.SimGpu, s: State) -> None:
        """Takes what has come and what has ended, and submits what may run."""
        now = int(f.sim["now_ns"][0])
        while self._coming and self._coming[-1][0][0] <= now:
            self._add(*self._coming.pop())
        while self._chunks and f.records["status"][self._chunks[0][0]] == OK:
            _, ended = self._chunks.popleft()
            self._hand_on(ended.ends, self._batcher.end_chunk(ended, [0] * len(ended.ends)), now)
        while self._steps and f.records["status"][self._steps[0][0]] == OK:
            k, done, meant_ns, sent_ns = self._steps.popleft()
            self._pace.note(sent_ns, int(f.records["started_ns"][k]), meant_ns, now)
            self._hand_on(done.sequences, self._batcher.end_step(done, [0] * len(done.sequences)), now)
        if not self._chunks and (chunk := self._batcher.plan_chunk()) is not None:
            arrival = min(text.owner.arrival_ns for text, _ in chunk.pieces)
            k = tables.begin_step(f, s, self.prefill, len(chunk.tokens), arrival)
            self._chunks.append((k, chunk))
        while self._pace.plans(len(self._steps), self._batcher):
            batch = self._batcher.plan_step(max(self.profile.decode.batch))
            if batch is None:
                break
            waiting = [text.owner.token_ns[-1] for text in batch.sequences if text.in_flight == 1]
            arrival, meant_ns = self._pace.terms(waiting, now, len(self._steps))
            self._stretch(f, batch)
            k = tables.begin_step(f, s, self.decode, len(batch.rows), arrival)
            self._steps.append((k, batch, meant_ns, now))

    def result(self, seconds: float) -> ChatResult:
        profile, told = self.profile, [each for each in self._told if each.token_ns]
        first = np.array([each.token_ns[0] - each.arrival_ns for each in told]) * 1e-6
        gaps = np.concatenate([np.zeros(0), *(np.diff(each.token_ns) for each in told)]) * 1e-6
        tokens = sum(len(each.token_ns) for each in told)
        return ChatResult(
            profile.name, len(self._told), sum(each.ended for each in told), tokens / seconds if seconds else 0.0,
            *_quantiles(first), *_quantiles(gaps), _within(first, profile.prefill.target_ms),
            _within(gaps, profile.decode.target_ms),
        )  # fmt: skip

    def _add(self, asked: _Asked, again: Callable[[], _Asked] | None) -> None:
        from paellapy.scheduler.language.batcher import Sequence as Text
        from paellapy.scheduler.language.sampling import Sampling

        at, prompt, answer = asked
        told = _Told(at, again)
        number = len(self._told)  # texts have no page in common
        length = min(prompt, self._batcher.context - 1)
        self._told.append(told)
        self._batcher.add(Text((number, *[0] * (length - 1)), Sampling(max_tokens=answer), 0, owner=told))

    def _hand_on(self, texts: Sequence[Text], changed: Sequence[int], now: int) -> None:
        for k in changed:
            told: _Told = texts[k].owner
            told.token_ns.append(now)
            told.ended = texts[k].finish is not None
            if told.ended and told.again is not None and now < self._until_ns:
                _, prompt, answer = told.again()
                self._add((now, prompt, answer), told.again)

    def _stretch(self, f: tables.SimGpu, batch: Batch) -> None:
        """Sets the time of the next decode step of this size: reading keys and values takes time too."""
        m, k = self.decode, int(np.searchsorted(self.profile.decode.batch, len(batch.rows)))
        if k not in self._work:
            self._work[k] = f.work[m, k].copy()
        alone = self._work[k]
        f.work[m, k] = alone * (1.0 + self.profile.context_ns * float(batch.rows["position"].sum()) / alone[-1])


def _quantiles(values: NDArray[np.float64]) -> tuple[float, float]:
    p50, p99 = np.percentile(values, (50, 99)) if len(values) else (np.nan, np.nan)
    return float(p50), float(p99)


def _within(values: NDArray[np.float64], target_ms: float | None) -> float:
    return float((values <= target_ms).mean()) if target_ms is not None and len(values) else np.nan


def run_chats(f: tables.SimGpu, s: State, writers: Sequence[Writer]) -> tables.SimGpu:
    """Runs until no more requests and texts come and all are answered; returns the GPU with its records."""
    while True:
        if len(f.records) - f.sim["records"][0] < 4 * len(writers):
            f = tables.more_records(f)
        for each in writers:
            each.turn(f, s)
        until = min(each.next_ns for each in writers)
        answer = run_segments(f, s, until)
        if answer == MORE_RECORDS:
            f = tables.more_records(f)
        elif answer == DONE and until == np.inf:
            return f


def chat_models(workload: Workload) -> Iterator[str]:
    """The language models that a workload asks for texts."""
    return (each.model for each in parts_of(workload) if isinstance(each, Chats | ChatTrace))
