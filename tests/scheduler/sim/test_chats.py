"""Chats in simulated time: every text is written, targets are kept, and best effort gets what they leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from failing import failing
from hypothesis import given, settings
from hypothesis import strategies as some

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile
from paellapy.scheduler.sim.chats import Chats, ChatTrace, language_profile
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.simulate import simulate
from paellapy.scheduler.sim.workload import ClosedLoop, Poisson, WorkloadError

OTHER = ModelProfile("other", {1: [SegmentProfile(100e3, 528, 8448, 270336, 0, 8)] * 40}, instances=2)  # 4 ms
BESIDE = ClosedLoop("other", clients=2, duration=2)


def busy(result: Results, name: str) -> float:
    return result.part_of_gpu("models", name)


def test_best_effort_has_the_time_while_no_token_is_due() -> None:
    model = language_profile("8B", ttft_ms=500, tbt_ms=20)
    load = Chats("8B", clients=8, prompt=128, answer=100, duration=2)
    alone = simulate([OTHER, model], load, "slack").chats[0]
    result = simulate([OTHER, model], load + BESIDE, "slack")
    chats = result.chats[0]
    assert chats.tbt_p50_ms > 16 > 3 * alone.tbt_p50_ms
    assert chats.tbt_in_target >= 0.99
    assert chats.ttft_in_target == 1.0
    assert busy(result, "other") > 0.6
    assert result.model("other").p99_ms < 100


def test_without_targets_texts_are_best_effort_themselves() -> None:
    shorter = replace(OTHER, sizes={1: OTHER.sizes[1][:30]})
    result = simulate([shorter, language_profile("8B")], Chats("8B", clients=1, duration=2) + BESIDE, "slack")
    assert busy(result, "other") > 0.5
    assert np.isnan(result.chats[0].tbt_in_target)


def test_texts_that_join_keep_their_pace() -> None:
    model = language_profile("1B", ttft_ms=100, tbt_ms=10)
    load = Chats("1B", rate=40, prompt=200, answer=40, sigma=0.5, duration=2)
    result = simulate([OTHER, model], load + BESIDE, "slack", seed=3)
    assert result.chats[0].tbt_in_target >= 0.99
    assert busy(result, "other") > 0.6


@settings(deadline=None, max_examples=12)
@given(
    rows=some.lists(some.tuples(some.floats(0, 0.3), some.integers(1, 300), some.integers(1, 40)), max_size=20),
    policy=some.sampled_from(["slack", "paella", "fair", "priority", "streams"]),
    kv_gb=some.sampled_from([0.08, 1.0]),
)
def test_every_text_of_a_trace_is_written(rows: list[tuple[float, int, int]], policy: str, kv_gb: float) -> None:
    model = language_profile("8B", tbt_ms=20, kv_gb=kv_gb, context=512, sequences=4, chunk=128)
    result = simulate([OTHER, model], ChatTrace("8B", rows) + Poisson(100, "other", duration=0.2), policy)
    chats = result.chats[0]
    assert chats.texts == chats.completed == len(rows)
    assert chats.tokens_s * result.seconds == pytest.approx(sum(answer for _, _, answer in rows))
    assert result.all.completed == result.all.submitted


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chats.csv"
    file.write_text("t,prompt,answer\n0.5,300,20\n0,100,10\n")
    assert ChatTrace.from_csv("8B", file).rows == ((0.0, 100, 10), (0.5, 300, 20))
    file.write_text("t,prompt\n0,100\n")
    with failing(WorkloadError, field="answer"):
        ChatTrace.from_csv("8B", file)
    file.write_text("t,prompt,answer\n0,100,many\n")
    with failing(WorkloadError, where=f"{file}, line 2"):
        ChatTrace.from_csv("8B", file)
    with failing(WorkloadError, field="answer", given=0):
        ChatTrace("8B", [(0.0, 5, 0)])


def test_what_cannot_be_simulated_is_refused() -> None:
    model, load = language_profile("8B"), Chats("8B", rate=1)
    with failing(WorkloadError, field="model", given="7B"):
        simulate([model], Chats("7B", rate=1))
    for option in ({"fidelity": "blocks"}, {"memory_bytes": 1 << 30}):
        with failing(ArgumentError, field=next(iter(option))):
            simulate([model], load, **option)
    with failing(WorkloadError, field="rate"):
        Chats("8B", rate=1, clients=1)
    for option in ({"tbt_ms": 0}, {"chunk": 1}, {"kv_gb": 1e-9}):
        with failing(ProfileError, field=next(iter(option))):
            language_profile("8B", **option)


def test_results_show_texts_beside_requests() -> None:
    result = simulate([OTHER, language_profile("1B", tbt_ms=10)], Chats("1B", rate=20, duration=0.2), "slack")
    assert "1B" in str(result)
    assert result.chats[0].tokens_s > 0
    assert str(simulate([language_profile("1B")], Chats("1B", rate=20, duration=0.2)))
