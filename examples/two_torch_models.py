"""Two PyTorch models share one GPU. Each has a latency target, and the policy `slack` orders work by it."""

import asyncio

import numpy as np
import torch

import paellapy as pp


def small() -> pp.Model:
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    return pp.Model.from_torch(net, torch.zeros(1, 64), name="small", batch=(1, 4), target_ms=20)


def large() -> pp.Model:
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
        torch.nn.Linear(256, 10),
    )  # fmt: skip
    return pp.Model.from_torch(net, torch.zeros(1, 3, 32, 32), name="large", batch=(1, 4), target_ms=200)


async def ask(engine: pp.Engine) -> None:
    image, vector = np.zeros((3, 32, 32), np.float32), np.zeros(64, np.float32)
    answers = await asyncio.gather(
        *(engine.infer("large", {"input": image}) for _ in range(4)),
        *(engine.infer("small", {"input": vector}, deadline_ms=10_000) for _ in range(4)),
    )
    print(len(answers), "answers of", answers[0]["output"].shape)


if __name__ == "__main__":
    with pp.Engine(policy="slack") as engine:  # on the GPU if there is one, else on the virtual GPU
        for model in (small(), large()):
            engine.load(model)
        with engine.trace() as t:
            asyncio.run(ask(engine))
    print(t)  # t.plot() shows which request waited for which
