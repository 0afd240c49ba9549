"""Background jobs on a real GPU: captured through PyTorch, cut, replayed; and what a plain loop gives."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.gpu

from engine_models import scale_model  # noqa: E402
from training import batches, job_losses, plain_losses, trainee  # noqa: E402


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_200_captured_steps_lose_what_the_plain_loop_loses_bit_for_bit(kind):
    with pp.Engine("cuda", policy="priority") as engine:
        expected = plain_losses(200, "cuda", kind)
        assert job_losses(engine, 200, "cuda", kind) == expected
    assert np.mean(expected[-20:]) < 0.5 * np.mean(expected[:20])


def test_requests_are_right_beside_a_job():
    with pp.Engine("cuda", policy="priority", quantum_us=20) as engine:
        engine.load(scale_model())
        made = trainee("cuda", width=512)
        job = engine.background(made.step, state=made.state, data=batches(10_000, 256))
        x = np.arange(64, dtype=np.float32)
        for k in range(200):
            assert np.array_equal(engine.infer_sync("scale", {"x": x + k}, priority=1)["y"], 2 * (x + k))
        before = job.steps
        while job.steps < before + 5:
            assert job.error is None
        job.stop()
        assert job.join(30)
        assert job.error is None


def test_an_optimizer_that_counts_on_the_host_is_refused_with_the_remedy():
    net = torch.nn.Linear(4, 4).cuda()
    optimizer = torch.optim.Adam(net.parameters())
    with pp.Engine("cuda") as engine, pytest.raises(pp.PaellaError, match="capturable=True"):
        engine.background(lambda: optimizer.step(), state=[net, optimizer])


def test_a_generator_of_its_own_draws_on():
    draw = torch.Generator("cuda").manual_seed(5)
    expected = [torch.rand(4, device="cuda", generator=draw).cpu().numpy() for _ in range(20)]
    draw.manual_seed(5)
    held = torch.zeros(1, device="cuda")
    found = []
    with pp.Engine("cuda") as engine:

        def step():
            held.add_(1.0)
            return torch.rand(4, device="cuda", generator=draw)

        def note(job):
            found.append(job.outputs["output"].copy())
            if job.steps == 20:
                job.stop()

        job = engine.background(step, state=[held, draw], every=1, callback=note)
        assert job.join(60)
        assert job.error is None
    assert np.array_equal(found, expected)
