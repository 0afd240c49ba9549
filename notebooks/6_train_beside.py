# %% [markdown]
# # 6 · Train beside serving
#
# A GPU that answers requests is idle between them. Here a training loop has that time, and gives way whenever a request
# comes. PyTorch computes on the CPU in this lesson; the virtual GPU says when everything would happen.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import paellapy as pp

torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, fused=True)


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


# %% [markdown]
# ## A job
#
# The step is an ordinary one. `engine.background` captures it, cuts it into segments and runs it again and again;
# `state` names everything that it changes. The loss comes back as an output, and the callback notes it.

# %%
losses = []
with pp.Engine("virtual:h200", policy="priority") as engine:
    job = engine.background(
        step,
        name="train",
        state=[net, optimizer],
        data=batches(200),
        every=1,
        callback=lambda job: losses.append(float(job.outputs["output"])),
    )
    job.join()
    print(job)
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
ax.semilogy(losses, color="#0072B2")
ax.set(xlabel="step", ylabel="loss")
plt.show()

# %% [markdown]
# ## Beside requests
#
# Now the same job runs while somebody asks for another model. The job can be paused and resumed at any time; its steps
# are counted below, and every answer is checked.

# %%
hidden, last = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)
served = torch.nn.Sequential(hidden, torch.nn.ReLU(), last).eval()
x = np.ones(16, np.float32)
with torch.no_grad():
    expected = served(torch.from_numpy(x)[None])[0].numpy()
times, steps, right = [], [], []
with pp.Engine("virtual:h200", policy="priority") as engine:
    engine.load(pp.Model.from_torch(served, torch.zeros(1, 16), name="served", batch=(1,)))
    data = batches(100_000)
    job = engine.background(step, name="train", state=[net, optimizer], data=data, priority=-1)
    began = time.monotonic()
    for k in range(150):
        if k == 50:
            job.pause()
        if k == 100:
            job.resume()
        answer = engine.infer_sync("served", {"input": x}, priority=1)["output"]
        right.append(np.allclose(answer, expected, atol=1e-5))
        times.append(time.monotonic() - began)
        steps.append(job.steps)
        time.sleep(0.005)
    job.stop()
    job.join()
print(f"{sum(right)} of {len(right)} answers are right; the job made {steps[-1]} steps")

# %%
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
ax.plot(times, steps, color="#0072B2")
ax.axvspan(times[50], times[99], color="#E69F00", alpha=0.25, label="paused")
ax.set(xlabel="seconds", ylabel="steps so far")
ax.legend()
plt.show()

# %% [markdown]
# ## What a policy makes of it
#
# In simulated time the question is sharper: how late are requests because of the job, and how much of its speed does
# the job keep? The served model and the step are made-up profiles here; `engine.job_profile` gives measured ones.

# %%
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile  # noqa: E402

models = [
    ModelProfile("net", {1: [SegmentProfile(100e3, blocks=200, warps=1600)] * 9}),
    ModelProfile(
        "train", {1: [SegmentProfile(100e3, blocks=2000, warps=8000)] * 30}, instances=1
    ),
]
ask = pp.Poisson(250, "net", duration=1.0, priority=1)
alone = pp.simulate(models, ask, "priority").model("net").p99_ms
by_itself = pp.Background("train", duration=1.0)
free = pp.simulate(models, by_itself, "priority").model("train").completed
policies = ["streams", "priority", "tally", "reef"]
late, kept = [], []
for policy in policies:
    found = pp.simulate(models, ask + pp.Background("train"), policy)
    late.append(found.model("net").p99_ms / alone)
    kept.append(found.model("train").completed / free)
    print(f"{policy}: p99 {late[-1]:.2f} × alone, the job keeps {kept[-1]:.2f} of its speed")

# %%
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.scatter(kept, late, color="#D55E00")
for policy, a, b in zip(policies, kept, late, strict=True):
    ax.annotate(policy, (a, b), xytext=(6, 4), textcoords="offset points")
ax.set(xlabel="part of the job's speed that it keeps", ylabel="p99 ÷ p99 alone")
plt.show()

# %% [markdown]
# ## Exercises
#
# 1. Give the step an optimizer with a learning-rate schedule. What does the job say if the rate is a plain number?
# 2. Raise an exception in the callback. Which parts of the engine go on?
# 3. Put a loop of your own into `with engine.lease("script") as lease:` and count how often it has to give way.
