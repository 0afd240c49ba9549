# %% [markdown]
# # 4 · Write your own policy
#
# What enters the GPU next is decided by a *policy*: a plain Python function that gets the facts of a job and
# returns its rank. The job with the least rank goes first. paellapy compiles it, so it costs nanoseconds, and the
# same function runs in simulations and on a real GPU.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

import paellapy as pp
from paellapy import demo
from paellapy.simulation import named_models

models, shares = named_models("mix", batch=(1,), device="virtual:h200")
models = [replace(m, target_ms=4 * m.alone_ns() / 1e6) for m in models]
for m in models:
    print(
        f"{m.name:14} {m.alone_ns() / 1e6:.2f} ms alone, {len(m.sizes[1]):2} "
        f"segments, target {m.target_ms:.1f} ms"
    )

# %% [markdown]
# Eight networks, with profiles made from times measured on an H200 (`scheduler/sim/recorded_profiles.py`). A policy
# sees a profile, not the network: its segments and how long each takes. So a simulation runs thousands of requests in
# no time.
#
# Our load comes in bursts. Each request should be done within four times what it takes alone.

# %%
load = pp.Lognormal(4500, shares, duration=1.0)


def try_policy(policy):
    r = pp.simulate(models, load, policy)
    p50, p99 = r.all.slowdown_p50, r.all.slowdown_p99
    print(
        f"{r.policy}: {r.all.within_target:.1%} in target, slowdown p50 {p50:.1f}, "
        f"p99 {p99:.1f}"
    )
    return r


# %% [markdown]
# ## One line: first come, first served


# %%
@pp.policy
def first_come(job):
    return job.arrival_ns


runs = {"first_come": try_policy(first_come)}

# %% [markdown]
# ## Another line: the shortest first
#
# `remaining_ns` is what the job has still to do, from its profile.


# %%
@pp.policy
def shortest(job):
    return job.remaining_ns


runs["shortest"] = try_policy(shortest)

# %% [markdown]
# Better for most. But does anybody pay for it? Slowdown is latency ÷ time alone; here is the worst hundredth of
# each model, the shortest model first.


# %%
def who_pays(runs):
    ordered = sorted(models, key=lambda m: m.alone_ns())
    _, ax = plt.subplots(figsize=(9, 3), layout="constrained")
    width = 0.8 / len(runs)
    for k, ((name, r), colour) in enumerate(
        zip(runs.items(), ("#0072B2", "#E69F00", "#009E73"), strict=False)
    ):
        at = np.arange(len(ordered)) + (k - (len(runs) - 1) / 2) * width
        ax.bar(
            at,
            [r.model(m.name).slowdown_p99 for m in ordered],
            width,
            label=name,
            color=colour,
        )
    ax.axhline(4, color="#D55E00", linestyle="--", linewidth=1)
    ax.set(xticks=range(len(ordered)), ylabel="slowdown, p99 (dashed: target)")
    ax.set_xticklabels([m.name for m in ordered], rotation=20, ha="right")
    ax.legend(frameon=False)
    plt.show()


who_pays(runs)

# %% [markdown]
# ## Know the target
#
# A job has a `deadline_ns` (its own, or its arrival and its model's target) and it is `now_ns`. *Slack* is what it
# can still afford to wait. Least slack first sounds right, but a job that cannot make it any more should not take
# others down with it: send it to the back.


# %%
@pp.policy
def by_slack(job):
    slack = job.deadline_ns - job.now_ns - job.remaining_ns
    hopeless = 1e12 if slack < 0 else 0.0
    return slack + hopeless


runs["by_slack"] = try_policy(by_slack)
who_pays(runs)

# %% [markdown]
# There is a price again: a job that is given up waits very long. A p99 and a share within the target are
# different questions, and a policy answers one of them.
#
# ## Beside the built-in ones
#
# They are functions of a few lines too, in `scheduler/policies/`; `streams` leaves everything to the hardware. Which
# serves this load best?

# %%
every = [*pp.policy_names(), first_come, shortest, by_slack]
results = {r.policy: r for r in (pp.simulate(models, load, policy) for policy in every)}
ordered = sorted(results, key=lambda name: results[name].all.within_target)
colours = ["#0072B2" if name in runs else "#999999" for name in ordered]

figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
ax.barh(ordered, [results[name].all.within_target for name in ordered], color=colours)
ax.set(xlabel="requests within their target (blue: ours)", xlim=(0, 1))
ax.xaxis.set_major_formatter("{x:.0%}")
plt.show()

# %% [markdown]
# ## See it decide
#
# Averages hide who waited for whom. With models in place of profiles a simulation leaves a trace: here the rush of
# lesson 3, two jobs on the GPU at a time.

# %%
seen = {
    p.name: pp.simulate(demo.rivals(), demo.rush(), p, trace=True, active=2).trace
    for p in (first_come, by_slack)
}
pp.viz.compare_picture(
    *seen.values(), "requests", labels=tuple(seen), size_inches=(11, 3.6)
)

# %% [markdown]
# ## On an H200
#
# On a real GPU a policy decides in the same way. Here is that rush, recorded there under `paella`. Who was launched
# before somebody who had come earlier?

# %%
recorded = pp.recordings.load("mix-paella")
print(pp.recordings.origin(recorded))
jobs = np.sort(recorded.jobs, order="arrival_ns")
latest_before = np.maximum.accumulate(jobs["start_ns"])
passed = (
    jobs["start_ns"] < latest_before
)  # somebody who came earlier was launched later
for m, name in enumerate(recorded.models):
    print(
        f"{name}: {(passed & (jobs['model'] == m)).sum()} of "
        f"{(jobs['model'] == m).sum()} passed somebody"
    )
recorded.picture(
    "requests", end_ns=int(jobs["arrival_ns"][0]) + 7_000_000, size_inches=(9, 3.6)
)

# %% [markdown]
# ## When it is wrong
#
# A policy is compiled and tried when it is made, not when the GPU depends on it. An error names the
# line:

# %%
try:

    @pp.policy
    def typo(job):
        return job.remainig_ns

except pp.PaellaError as error:
    print(error)

# %%
try:

    @pp.policy
    def undecided(job):
        return (job.deadline_ns - job.deadline_ns) / 0.0

except pp.PaellaError as error:
    print(error)

# %% [markdown]
# ## On an engine
#
# The same object, by name or as it is; also while requests are running. A server takes it as
# `package.module:function`.

# %%
image = demo.held_out()[0][0]
with pp.Engine(policy=by_slack) as engine:
    engine.load(demo.load("mlp", batch=(1,), target_ms=50))
    print(
        engine,
        "answers",
        int(engine.infer_sync("mlp", {"image": image})["scores"].argmax()),
    )
    engine.set_policy("paella")
    print(
        engine,
        "answers",
        int(engine.infer_sync("mlp", {"image": image})["scores"].argmax()),
    )

# %% [markdown]
# ## Exercises
#
# 1. `shortest` can starve the long. Let a job's rank fall with the time it has waited, until nobody waits for ever.
# 2. Requests carry a `client`. Give every client its turn with `client_deficit_ns`, and load it with two clients of
#    which one asks ten times as often (`pp.Lognormal(…, clients=2)` and a second load added with `+`).
# 3. `admit=` is a second function: `admit(job, gpu)` says whether the best job may enter now. Let no more in while
#    `gpu.occupancy` is above a half.
# 4. At which rate does each policy break? Sweep the rate of `load` and plot the share within the target.
