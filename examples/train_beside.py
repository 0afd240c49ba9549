"""Run a PyTorch training loop in the GPU time that requests leave free. Requests go first."""

import numpy as np
import torch

import paellapy as pp

gpu = torch.cuda.is_available()
net = torch.nn.Linear(8, 1).to("cuda" if gpu else "cpu")
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, fused=True, capturable=gpu)
served = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def step(x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return loss


def batches(n):
    for _ in range(n):
        x = torch.randn(64, 8)
        yield x, x.sum(1, keepdim=True)


if __name__ == "__main__":
    with pp.Engine(policy="priority") as engine:
        engine.load(pp.Model.from_torch(served, torch.zeros(1, 16), name="served"))
        job = engine.background(step, name="train", state=[net, optimizer], data=batches(100), priority=-1)
        print(engine.infer_sync("served", {"input": np.ones(16, np.float32)})["output"])
        job.join()
        print(job)
