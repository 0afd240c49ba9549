"""Models whose requests are whole batches: each runs alone, at its own size, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from core_check import check_at_rest
from engine_models import scale_model, scale_reference

import paellapy as pp
from paellapy.scheduler.engine.ring_client import Waiter

SEQUENCES = 12
UNUSED = (SEQUENCES, 0)  # a row of a batch behind its items
DEVICES = ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)]


@pp.kernel
@triton.jit
def advance(state, words, out):
    """The state of each row's sequence becomes 3 times itself plus the row's number."""
    row = tl.program_id(0)
    place = state + tl.load(words + 2 * row)
    value = tl.load(place) * 3 + tl.load(words + 2 * row + 1)
    tl.store(place, value)
    tl.store(out + row, value)


class Memory:
    """The state, as the weights of a model that changes them."""

    uses_torch = False
    stateful = keeps_state = whole_batches = True
    nbytes = (SEQUENCES + 1) * 4

    def place(self, model: str, device: Any) -> dict[str, Any]:
        self.state = device.array(np.zeros(SEQUENCES + 1, np.int32))
        return {"state": self.state}

    @contextmanager
    def preserved(self) -> Iterator[None]:
        yield
        self.state.set(np.zeros(SEQUENCES + 1, np.int32))


def stepper(batch: tuple[int, ...] = (1, 2, 4, 8), **options: Any) -> pp.Model:
    def step(weights: Any, inputs: Any, outputs: Any) -> None:
        advance[(inputs["words"].shape[0],)](weights["state"], inputs["words"], outputs["value"])

    return pp.Model(
        "steps", step, inputs={"words": pp.TensorSpec((2,), "int32", low=0, high=SEQUENCES)},
        outputs={"value": pp.TensorSpec((1,), "int32")}, weights=Memory(), batch=batch, instances=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "capture"), [("paella", "ahead"), ("srpt", "on_demand"), ("fifo", "ahead")])
def test_steps_that_are_queued_ahead_run_in_order_and_at_their_size(device: str, policy: str, capture: str) -> None:
    rng = np.random.default_rng(3)
    state, wanted = np.zeros(SEQUENCES, np.int64), []
    with pp.Engine(device, policy=policy) as engine, ThreadPoolExecutor(2) as pool:
        engine.load(stepper(capture=capture))
        engine.load(scale_model("other"))
        loaded, sizes = engine.client.find("steps"), []
        engine.watch(lambda entry: sizes.append((int(entry["model"]), int(entry["batch"]))))
        x = np.ones(64, np.float32)
        others = [pool.submit(engine.infer_sync, "other", {"x": x}) for _ in range(8)]
        begun: deque[Any] = deque()
        for _ in range(40):
            n = int(rng.integers(1, 9))
            rows = np.stack([rng.permutation(SEQUENCES)[:n], rng.integers(0, SEQUENCES, n)], 1)
            slot = engine.client.reserve(loaded, items=n)
            slot.inputs["words"][:] = UNUSED
            slot.inputs["words"][:n] = rows
            state[rows[:, 0]] = (state[rows[:, 0]] * 3 + rows[:, 1]) % (1 << 32)
            wanted.append(state[rows[:, 0]].astype(np.uint32).view(np.int32))
            begun.append(slot.begin(Waiter()))
            if len(begun) == 3:
                np.testing.assert_array_equal(begun.popleft()()["value"][:, 0], wanted[-3])
        for left, finish in zip(wanted[-2:], begun, strict=True):
            np.testing.assert_array_equal(finish()["value"][:, 0], left)
        for answer in others:
            np.testing.assert_array_equal(answer.result()["y"], scale_reference()({"x": x})["y"])
        assert [n for model, n in sizes if model == loaded.row] == [len(each) for each in wanted]
        check_at_rest(engine.state)


def test_a_whole_batch_that_is_cancelled_runs_nothing():
    with pp.Engine("virtual:h200") as engine:
        engine.load(stepper())
        loaded = engine.client.find("steps")
        engine.client.reserve(loaded, items=3).cancel()
        with engine.client.reserve(loaded, items=1) as slot:
            slot.inputs["words"][:] = (2, 7)  # only the first row is an item
            assert slot.submit_sync()["value"].tolist() == [[7]]
        check_at_rest(engine.state)
