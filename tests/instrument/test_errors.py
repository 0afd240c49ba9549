"""Errors carry their facts, also through a pickle; their messages name the cause and the remedy."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from paellapy.instrument.errors import ArgumentError, LaunchError, PaellaError, also
from paellapy.instrument.gpu_model.commands import Kernel
from paellapy.instrument.gpu_model.model import SmModel
from paellapy.instrument.gpu_model.parts import limits_for_capability, occupancy, part
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.module import Module
from paellapy.instrument.traces.session import trace


def test_facts_are_attributes_and_survive_a_pickle() -> None:
    plain = ArgumentError("n=3: at most 2", field="n", given=3, limit=2)
    both = also(LaunchError("too much", field="x"), ValueError, required=4)
    assert isinstance(both, ValueError)
    for error in (plain, both):
        again = pickle.loads(pickle.dumps(error))
        assert again.args == error.args
        assert again.__dict__ == error.__dict__
    assert (plain.field, plain.given, plain.limit, both.required) == ("n", 3, 2, 4)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (lambda: occupancy(limits_for_capability(90), 2048, 32), "this GPU allows 1 to 1024 per block"),
        (lambda: SmModel(part("h200")).launch(3, Kernel(1, 32)), "no stream 3: 0 exist; create one with `stream()`"),
        (lambda: kernel(name="k"), "name='k' picks a kernel from CUDA source: give source=… too"),
        (lambda: PassConfig("all"), "unknown report level 'all'; use one of count, trace, notify"),  # type: ignore[arg-type]
        (lambda: Module.parse(".version 8.0 .visible .entry k() {"), "pass the complete text"),
        (lambda: trace(records_per_sm=3), "the number must be a power of two from 16 to"),
    ],
)
def test_messages_name_the_cause_and_the_remedy(fails: Callable[[], Any], words: str) -> None:
    with pytest.raises(PaellaError) as raised:
        fails()
    assert words in str(raised.value)
