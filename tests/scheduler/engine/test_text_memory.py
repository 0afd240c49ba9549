"""Weights of language models leave the GPU and come back under captured steps; texts and their pages stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_models import scale_model
from language_families import small_model

import paellapy as pp
from paellapy.scheduler.language.pages import PAGE

pytestmark = pytest.mark.xdist_group("language models")

PROMPT = list(range(40, 40 + 2 * PAGE + 3))
MEMORY = 128 << 20  # bytes of the engine


@pytest.fixture(scope="module", params=["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pp.Engine]:
    folder = tmp_path_factory.mktemp("small")
    small_model(folder)
    with pp.Engine(request.param, memory_bytes=MEMORY) as made:
        made.load(model_in(folder))
        yield made


def model_in(folder: Path) -> pp.LanguageModel:
    return pp.LanguageModel(folder, name="small", sequences=4, chunk=64, context=128, kv_gb=0.004)


def text(engine: pp.Engine, n: int = 12, **options: Any) -> Any:
    return engine.generate("small", PROMPT, max_tokens=n, temperature=0, ignore_eos=True, **options)


def tokens(generation: Any) -> list[int]:
    return [piece.token for piece in generation]


def test_a_text_is_the_same_after_its_weights_left(engine: pp.Engine) -> None:
    wanted = tokens(text(engine))
    about = engine.memory()["models"]
    assert about["small"]["weights_bytes"] == engine.language_models["small"].state_bytes(
        engine.stats()["language_models"]["small"]["pages"]
    )
    held = engine.memory()["weights_bytes"]
    assert engine.weights_state("small") == "resident"
    engine.evict("small")
    assert engine.weights_state("small") == "host"
    assert engine.memory()["weights_bytes"] == held - about["small decode"]["weights_bytes"]
    again = text(engine)
    assert tokens(again) == wanted
    assert again.cached_tokens == 2 * PAGE
    engine.evict("small")
    engine.prefetch("small")
    assert engine.weights_state("small") == "resident"
    assert tokens(text(engine)) == wanted


def test_a_text_waits_while_its_weights_are_away(engine: pp.Engine) -> None:
    wanted = tokens(text(engine, 60))
    writing = text(engine, 60)
    found = [next(writing).token for _ in range(5)]
    engine.evict("small")
    assert found + tokens(writing) == wanted


def test_weights_leave_for_those_of_another_model(engine: pp.Engine) -> None:
    def load_other(nbytes: int) -> None:
        like, weights = scale_model("other"), {"w": np.zeros(nbytes, np.uint8)}
        engine.load(pp.Model("other", like.fn, inputs=like.inputs, outputs=like.outputs, weights=weights))

    wanted = tokens(text(engine))
    load_other(1)
    about = engine.memory()
    least = about["models"]["other"]["weights_bytes"]
    engine.unload("other")
    load_other(about["free_bytes"] + least + 1)  # a GPU rounds it up, by less than the other weights take
    assert engine.weights_state("small") == "host"
    assert tokens(text(engine)) == wanted
    assert engine.weights_state("other") == "host"
    engine.infer_sync("other", {"x": np.ones(64, np.float32)})
    engine.unload("other")
    assert tokens(text(engine)) == wanted
