"""Batch sizes that are captured on a real GPU while their model serves."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from core_check import check_at_rest
from engine_models import random_inputs, scale_model, scale_reference

import paellapy as pp

pytestmark = pytest.mark.gpu
BATCH = (1, 2, 4, 8)


def captured(engine, name: str) -> list[int]:
    return list(engine.stats()["models"][name]["sizes"]["captured"])


def until_all_are_there(engine, name: str, one) -> None:
    """Runs groups of requests until every size has been wanted and captured. `one(k)` asks, and checks the answer."""

    async def group(n: int) -> None:
        await asyncio.gather(*(one(k) for k in range(n)))

    end = time.monotonic() + 120
    while captured(engine, name) != list(BATCH):
        assert time.monotonic() < end, engine.stats()["models"][name]
        for n in range(1, 9):
            asyncio.run(group(n))
    for n in range(1, 9):
        asyncio.run(group(n))


@pytest.mark.parametrize("instances", [1, 3])
def test_kernels_answer_right_before_and_after_their_sizes_come(instances):
    rng = np.random.default_rng(1)
    with pp.Engine("cuda", quantum_us=20) as engine:
        engine.load(scale_model("other", steps=8))
        model = scale_model(steps=6, batch=BATCH, instances=instances, capture="on_demand")
        reference = scale_reference(steps=6)
        engine.load(model)
        assert captured(engine, "scale") == [1, 8]

        async def one(k: int) -> None:
            inputs = random_inputs(model, rng)
            found, beside = await asyncio.gather(engine.infer("scale", inputs), engine.infer("other", inputs))
            np.testing.assert_allclose(found["y"], reference(inputs)["y"], rtol=1e-6)
            np.testing.assert_allclose(beside["y"], scale_reference(steps=8)(inputs)["y"], rtol=1e-6)

        until_all_are_there(engine, "scale", one)
        with engine.trace():  # captures every size again, under its own index
            for _ in range(5):
                asyncio.run(one(0))
        check_at_rest(engine.state)


def test_a_pytorch_module_answers_right_before_and_after_its_sizes_come():
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).cuda().eval()
    rng = np.random.default_rng(2)
    with pp.Engine("cuda") as engine:
        options = {"batch": BATCH, "capture": "on_demand"}
        engine.load(pp.Model.from_torch(net, torch.zeros(1, 64, device="cuda"), name="net", **options))
        assert captured(engine, "net") == [1, 8]

        async def one(k: int) -> None:
            x = rng.standard_normal(64).astype(np.float32)
            found = (await engine.infer("net", {"input": x}))["output"]
            with torch.no_grad():
                expected = net(torch.from_numpy(x).cuda()[None])[0].cpu().numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)

        until_all_are_there(engine, "net", one)
        check_at_rest(engine.state)
