"""Small training jobs for tests: a network with dropout and normalisation, its optimizer, its data, its plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

F = torch.nn.functional


def trainee(device: str = "cpu", width: int = 16, kind: str = "adam", dropout: float = 0.1) -> SimpleNamespace:
    """A network that learns the sum of its inputs, and its training step."""
    torch.manual_seed(1)
    layers: list[Any] = [torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.BatchNorm1d(width)]
    if dropout:
        layers.insert(2, torch.nn.Dropout(dropout))
    net = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).to(device)
    rate: Any = torch.tensor(1e-2, device=device)
    if kind == "adam":
        optimizer: Any = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=device != "cpu")
    else:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=kind == "adam")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.7 if kind == "adam" else 1.0)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    torch.manual_seed(7)
    return SimpleNamespace(net=net, optimizer=optimizer, schedule=schedule, step=step, state=[net, optimizer, scaler])


def batches(n: int, size: int = 32) -> Iterator[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(3)
    for _ in range(n):
        x = torch.randn(size, 8, generator=draw)
        yield x, x.sum(1, keepdim=True)


def plain_losses(n: int, device: str = "cpu", kind: str = "adam") -> list[float]:
    """Losses of a plain training loop."""
    made = trainee(device, kind=kind)
    found = []
    for x, y in batches(n):
        found.append(float(made.step(x.to(device), y.to(device)).detach()))
        made.schedule.step()
    return found


def losses_now_and_then(
    engine: Any, n: int, every: int, device: str = "cpu", dropout: float = 0.1
) -> tuple[list[float], list[float]]:
    """Losses of a plain loop and of a job that is read only after some steps: the steps between follow each other."""
    made = trainee(device, kind="sgd", dropout=dropout)
    plain = [float(made.step(x.to(device), y.to(device)).detach()) for x, y in batches(n)]
    made, found = trainee(device, kind="sgd", dropout=dropout), []
    job = engine.background(made.step, state=made.state, data=batches(n), every=every,
                            callback=lambda job: found.append(float(job.outputs["output"])))  # fmt: skip
    assert job.join(120)
    if job.error is not None:
        raise job.error
    assert job.steps == n
    return plain[every - 1 :: every], found


def job_losses(engine: Any, n: int, device: str = "cpu", kind: str = "adam") -> list[float]:
    """Losses of the same training as a background job."""
    made = trainee(device, kind=kind)
    found: list[float] = []

    def after(job: Any) -> None:
        found.append(float(job.outputs["output"]))
        made.schedule.step()

    job = engine.background(made.step, name="train", state=made.state, data=batches(n), every=1, callback=after)
    assert job.join(120)
    if job.error is not None:
        raise job.error
    assert job.steps == n
    return found
