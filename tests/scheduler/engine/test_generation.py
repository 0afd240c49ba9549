"""Texts from a language model: each is what it is alone, whatever shares the engine, and ends as it should."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import scale_model
from failing import failing
from language_families import byte_tokenizer, family
from waiting import wait_until

import paellapy as pp
from paellapy.scheduler.core.errors import (
    DeadlineError,
    EngineClosedError,
    InputError,
    ModelError,
    QueueFullError,
    TooManyRequestsError,
    UnknownModelError,
)
from paellapy.scheduler.language.batcher import Sequence
from paellapy.scheduler.language.pages import PAGE
from paellapy.scheduler.models.model_folder import LanguageModelError

pytestmark = pytest.mark.xdist_group("language models")  # their kernels are compiled once

VOCABULARY = 256  # of the tokenizer; the model has more


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    byte_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """The model of transformers whose weights are in the folder."""
    return family("Qwen3", folder)


@pytest.fixture(scope="module", params=["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(where: str, folder: Path, reference: Any) -> Iterator[pp.Engine]:
    with pp.Engine(where) as made:
        made.load(tiny(folder))
        yield made
        check_at_rest(made.state)


def tiny(folder: Path, **options: Any) -> pp.LanguageModel:
    """Few pages: texts must wait, and be computed again."""
    page_gb = PAGE * 2 * 2 * 2 * 32 * 4 * 1e-9
    given = {"name": "tiny", "context": 128, "sequences": 4, "chunk": 64, "kv_gb": 18.5 * page_gb, **options}
    return pp.LanguageModel(folder, **given)


def prompts(n: int) -> list[list[int]]:
    """Prompts of which some begin alike."""
    rng = np.random.default_rng(5)
    begin = rng.integers(0, VOCABULARY, 70).tolist()
    return [begin[: int(rng.integers(0, 70))] + rng.integers(0, VOCABULARY, 3).tolist() for _ in range(n)]


def tokens_of(generation: Any) -> list[int]:
    return [piece.token for piece in generation]


def test_greedy_texts_are_those_of_the_library_whatever_shares_the_engine(
    engine: pp.Engine, where: str, reference: Any
) -> None:
    """Prompts enter in chunks and share pages, texts come and go, and the youngest are computed again."""
    import torch

    given = prompts(100 if where == "cuda" else 10)

    async def texts() -> list[list[int]]:
        async def one(prompt: list[int], n: int) -> list[int]:
            writing = engine.generate("tiny", prompt, max_tokens=n, temperature=0, ignore_eos=True)
            return [piece.token async for piece in writing]

        return await asyncio.gather(*(one(prompt, 6 + k % 30) for k, prompt in enumerate(given)))

    for k, (prompt, found) in enumerate(zip(given, asyncio.run(texts()), strict=True)):
        with torch.no_grad():
            known = torch.tensor([prompt])
            wanted = reference.generate(
                known, attention_mask=torch.ones_like(known), max_new_tokens=6 + k % 30, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )[0, len(prompt) :].tolist()  # fmt: skip
        assert found == wanted
    counts = engine.stats()["language_models"]["tiny"]
    assert counts["shared_tokens"] > 0
    assert counts["free_pages"] == counts["pages"] == 18


def test_a_chunk_runs_at_a_larger_size_until_its_own_is_captured(engine: pp.Engine, where: str, folder: Path) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "repetition_penalty": 1.5}
    prompt = np.random.default_rng(2).integers(0, VOCABULARY, 50).tolist()
    wanted = tokens_of(engine.generate("tiny", prompt, **options))
    with pp.Engine(where) as fresh:
        fresh.load(tiny(folder, name="fresh", chunk=128))
        assert tokens_of(fresh.generate("fresh", prompt, **options)) == wanted


def test_a_seed_gives_the_same_text_beside_others(engine: pp.Engine) -> None:
    drawn = {"temperature": 1.2, "max_tokens": 8, "ignore_eos": True}
    alone = tokens_of(engine.generate("tiny", "abc", seed=7, **drawn))
    begun = [engine.generate("tiny", "abc", seed=seed, **drawn) for seed in (7, 8, 7)]
    texts = [tokens_of(each) for each in begun]
    assert texts[0] == texts[2] == alone != texts[1]


def test_a_paced_model_writes_the_same_beside_a_busy_one(engine: pp.Engine, where: str, folder: Path) -> None:
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    alone = [tokens_of(engine.generate("tiny", "abc" * k, max_tokens=8 + k, **options)) for k in range(1, 6)]
    with pp.Engine(where, policy="slack") as paced, ThreadPoolExecutor(4) as pool:
        paced.load(scale_model("other"))
        paced.load(tiny(folder, name="paced", tbt_ms=30, ttft_ms=1000))
        running = True

        def ask() -> int:
            n = 0
            while running:
                paced.infer_sync("other", {"x": np.ones(64, np.float32)})
                n += 1
            return n

        asking = [pool.submit(ask) for _ in range(4)]
        begun = [paced.generate("paced", "abc" * k, max_tokens=8 + k, **options) for k in range(1, 6)]
        assert [tokens_of(each) for each in begun] == alone
        running = False
        assert all(each.result() > 0 for each in asking)


def test_penalties_count_prompt_and_answer(engine: pp.Engine) -> None:
    often = tokens_of(engine.generate("tiny", [3, 4, 5], max_tokens=24, temperature=0, ignore_eos=True))
    assert len(set(often)) < 24
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    once = tokens_of(engine.generate("tiny", [3, 4, 5], repetition_penalty=100.0, presence_penalty=100.0, **options))
    assert len({3, 4, 5, *once}) == 27


def test_log_probabilities_name_the_chosen_and_the_most_probable(engine: pp.Engine) -> None:
    pieces = list(engine.generate("tiny", "abc", max_tokens=4, temperature=0, logprobs=3, ignore_eos=True))
    for piece in pieces:
        assert piece.top[0] == (piece.token, piece.logprob)
        assert [p for _, p in piece.top] == sorted((p for _, p in piece.top), reverse=True)
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]


def test_a_stop_string_ends_the_text_before_it(engine: pp.Engine) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
    whole = engine.generate("tiny", "Once", **options).text()
    at = next(k for k in range(2, 18) if whole[k : k + 2] not in whole[:k])
    generation = engine.generate("tiny", "Once", stop=(whole[at : at + 2],), **options)
    assert generation.text() == whole[:at]
    assert generation.finish_reason == "stop"


def test_a_text_by_a_schema_is_json_of_that_form(engine: pp.Engine) -> None:
    schema = {
        "type": "object", "properties": {"name": {"enum": ["Anna", "Ben"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"], "additionalProperties": False,
    }  # fmt: skip
    options: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "json_schema": schema}
    begun = [engine.generate("tiny", "abc", seed=seed, **options) for seed in range(3)]
    plain = engine.generate("tiny", "abc", max_tokens=30, ignore_eos=True)
    for each in begun:
        found = json.loads(each.text())
        assert each.finish_reason == "stop"
        assert found["name"] in ("Anna", "Ben")
        assert isinstance(found["old"], bool)
    assert len(tokens_of(plain)) == 30
    with failing(InputError, field="json_schema"):
        engine.generate("tiny", "abc", json_schema={"type": "colour"})


def test_a_trace_has_texts_with_their_tokens(engine: pp.Engine, tmp_path: Path) -> None:
    with engine.trace() as t:
        texts = [list(engine.generate("tiny", "abc", max_tokens=n, ignore_eos=True)) for n in (5, 9)]
    number = t.models.index("tiny")
    jobs = t.jobs[t.jobs["model"] == number]
    tokens = t.segments[t.segments["model"] == number]
    assert [np.count_nonzero(tokens["instance"] == job["instance"]) for job in jobs] == [len(each) for each in texts]
    for job in jobs:
        mine = tokens[tokens["instance"] == job["instance"]]
        assert mine["end_ns"][-1] == job["end_ns"]
        assert (mine["start_ns"][1:] == mine["end_ns"][:-1]).all()
    t.save(tmp_path / "texts.npz")
    assert len(pp.Trace.load(tmp_path / "texts.npz").jobs) == len(t.jobs)


def test_a_text_that_is_left_gives_its_place_to_others(engine: pp.Engine) -> None:
    async def leave() -> None:
        generation = engine.generate("tiny", "a", max_tokens=100, ignore_eos=True)
        async for _ in generation:
            break
        generation.cancel()
        assert [piece async for piece in generation] == [] or generation.tokens < 100
        assert generation.finish_reason == "cancelled"

    asyncio.run(leave())
    del_me = engine.generate("tiny", "b", max_tokens=100, ignore_eos=True)
    next(iter(del_me))
    del del_me
    assert len(tokens_of(engine.generate("tiny", "c", max_tokens=100, ignore_eos=True))) == 100


def test_a_text_that_cannot_begin_in_time_is_refused_or_ends(engine: pp.Engine) -> None:
    begun = [engine.generate("tiny", [1] * 100, max_tokens=20, ignore_eos=True) for _ in range(20)]
    with failing(DeadlineError, field="deadline_ms", given=1):
        engine.generate("tiny", [1] * 100, deadline_ms=1)
    for each in begun:
        each.cancel()
    in_time = engine.generate("tiny", "abc", deadline_ms=1e9, max_tokens=3, ignore_eos=True)
    assert len(tokens_of(in_time)) == 3
    assert 0 < in_time.ttft_ms < 1e9


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ([], {}, "prompt"), ([1] * 128, {}, "prompt"), ([1, -1], {}, "prompt"), ([1, 300], {}, "prompt"),
        (7, {}, "prompt"), ("a", {"temperature": -1}, "temperature"), ("a", {"colour": 1}, "colour"),
        ("a", {"client": []}, "client"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(engine: pp.Engine, prompt: Any, sampling: Any, field: str) -> None:
    with failing(InputError, field=field):
        engine.generate("tiny", prompt, **sampling)


def test_a_client_that_wants_all_places_leaves_some_to_others(engine: pp.Engine) -> None:
    begun = [engine.generate("tiny", [1], client="modest")]

    def want_all(client: str | None) -> None:
        while True:
            begun.append(engine.generate("tiny", [1], client=client))

    with pytest.raises(TooManyRequestsError) as e:
        want_all("greedy")
    assert e.value.given >= 8 * (e.value.limit - e.value.given - 2)
    begun.append(engine.generate("tiny", [1], client="modest"))
    begun.append(engine.generate("tiny", [1], client="new"))
    with pytest.raises(QueueFullError) as e:  # those without a name are one client
        want_all(None)
    assert not isinstance(e.value, TooManyRequestsError)
    begun.append(engine.generate("tiny", [1], client="newer"))
    for each in begun:
        each.cancel()

    def has_place() -> bool:
        try:
            return engine.generate("tiny", [1], max_tokens=1, client="greedy").text() is not None
        except TooManyRequestsError:  # cancelled texts leave at the next step
            return False

    wait_until(has_place)


def test_texts_that_were_left_before_their_deadline_take_no_memory(engine: pp.Engine) -> None:
    for _ in range(8):
        for _ in range(500):
            engine.generate("tiny", [1] * 100, deadline_ms=1e9).cancel()
        engine.generate("tiny", [1], max_tokens=1, deadline_ms=1e12).text()
    gc.collect()
    assert sum(type(each) is Sequence for each in gc.get_objects()) < 3000


def test_the_two_programs_have_profiles(engine: pp.Engine) -> None:
    for name in ("tiny prefill", "tiny decode"):
        sizes = [each.batch for each in engine.profile(name)]
        assert sizes == sorted(engine.model_profile(name).sizes) != []
    with failing(UnknownModelError, model="tiny"):
        engine.profile("tiny")


def test_names_and_options_are_checked(engine: pp.Engine, folder: Path) -> None:
    with failing(UnknownModelError, model="other"):
        engine.generate("other", "a")
    for taken in (tiny(folder), scale_model("tiny")):
        with failing(ModelError, field="name", given="tiny"):
            engine.load(taken)
    for option in ({"kv_gb": 1e-9}, {"tbt_ms": 0}, {"context": 1000}, {"sequences": 0}, {"dtype": "int8"},
                   {"capture": "later"}):  # fmt: skip
        with failing(LanguageModelError, field=next(iter(option))):
            engine.load(tiny(folder, **{"name": "second", **option}))


def test_weights_whose_rows_cannot_be_copied_in_blocks_are_refused(folder: Path, tmp_path: Path) -> None:
    about = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 102}
    (tmp_path / "config.json").write_text(json.dumps(about))
    shutil.copy(folder / "tokenizer.json", tmp_path)
    with failing(LanguageModelError, field="dtype", given="float32"):
        tiny(tmp_path)


def test_texts_end_with_an_engine_and_are_finished_by_an_unload(where: str, folder: Path, reference: Any) -> None:
    with pp.Engine(where) as engine:
        engine.load(scale_model("other"))
        engine.load(tiny(folder))
        begun = [engine.generate("tiny", "abc", max_tokens=20, ignore_eos=True) for _ in range(6)]
        engine.unload("tiny")
        assert [len(tokens_of(each)) for each in begun] == [20] * 6
        assert set(engine.memory()["models"]) == {"other"}
        engine.load(tiny(folder))
        left = engine.generate("tiny", "abc", max_tokens=120, ignore_eos=True)
        next(iter(left))
    with failing(EngineClosedError, model="tiny"):
        tokens_of(left)
