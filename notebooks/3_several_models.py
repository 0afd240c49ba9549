# %% [markdown]
# # 3 · Several models on one GPU
#
# Two models share a GPU: `short`, which somebody is waiting for, and `long`, which takes its time. The usual way is
# a CUDA stream for each request, and the hardware decides. The other way is to let software decide what enters the
# GPU next. This lesson shows both on the same requests.

# %%
import asyncio

import matplotlib.pyplot as plt
import numpy as np

import paellapy as pp
from paellapy import demo

short, long = demo.rivals()
for model in (short, long):
    print(f"{model.name}: target {model.target_ms} ms")

# %% [markdown]
# A model is a function that launches kernels. Loading it captures what it launches, measures it alone on the GPU,
# and cuts it into *segments*: the pieces that software may put in an order.

# %%
with pp.Engine("virtual:h200") as engine:
    for model in (short, long):
        engine.load(model)
        (profile,) = engine.profile(model.name)
        print(
            f"{model.name}: {profile.whole_ns / 1e6:.2f} ms alone, "
            f"{len(profile.segments)} segments"
        )

# %% [markdown]
# ## A rush
#
# Requests for `long` come in quick succession; meanwhile and afterwards somebody asks for `short` again and again.

# %%
rush = demo.rush()
arrivals = rush.arrivals(["short", "long"], seed=0)
print(
    *[
        f"{n} of {name}"
        for name, n in zip(
            ("short", "long"), np.bincount(arrivals["model"]), strict=True
        )
    ],
    sep=", ",
)
figure, ax = plt.subplots(figsize=(8, 1.4), layout="constrained")
for m, colour in enumerate(("#0072B2", "#E69F00")):
    at_ms = arrivals["time_ns"][arrivals["model"] == m] / 1e6
    ax.plot(
        at_ms,
        np.full(len(at_ms), m),
        "|",
        color=colour,
        markersize=14,
        markeredgewidth=2,
    )
ax.set(
    yticks=[0, 1],
    yticklabels=["short", "long"],
    ylim=(-0.6, 1.6),
    xlabel="arrival (ms)",
)
plt.show()

# %% [markdown]
# ## Streams: the hardware decides
#
# `pp.simulate` runs the real scheduler with a virtual clock, and with `trace=True` places every block of every
# kernel on its SM. Nothing is computed, so it is quick and the same every time.

# %%
streams = pp.simulate([short, long], rush, "streams", trace=True)
streams.trace.picture("requests", size_inches=(9, 4))

# %% [markdown]
# Every bar is a request: pale while it waits, full while it is on the GPU. The tick is its deadline, the stripe
# below says it was late. All jobs are on the GPU at once and each gets a thin slice of it, so a `short` takes as
# long as the `long` ones beside it allow.
#
# ## Paella: software decides
#
# Now at most two jobs are on the GPU, enough to fill it, and whoever has least left to do goes first, segment by
# segment.

# %%
paella = pp.simulate([short, long], rush, "paella", trace=True, active=2)
pp.viz.compare_picture(
    streams.trace,
    paella.trace,
    ["requests", "residency"],
    labels=("streams", "paella"),
    size_inches=(11, 5.2),
)

# %% [markdown]
# The long requests wait before they start instead of crawling all together, and the short ones slip in between two
# segments. In numbers:


# %%
def last_long_ms(t):
    return (
        t.jobs["end_ns"][t.jobs["model"] == t.models.index("long")].max()
        - t.jobs["arrival_ns"].min()
    ) / 1e6


def table(traces):
    print(
        f"{'ms':8} {'short mean':>10} {'short max':>10} {'long mean':>10} "
        f"{'last long':>10} {'late':>5}"
    )
    for name, t in traces.items():
        took_ms, is_short = (
            (t.jobs["end_ns"] - t.jobs["arrival_ns"]) / 1e6,
            t.jobs["model"] == t.models.index("short"),
        )
        of_short, of_long = took_ms[is_short], took_ms[~is_short]
        times = (
            f"{of_short.mean():10.2f} {of_short.max():10.2f} "
            f"{of_long.mean():10.2f} {last_long_ms(t):10.2f}"
        )
        print(f"{name:8} {times} {(t.lateness_ns() > 0).sum():5}")


table({"streams": streams.trace, "paella": paella.trace})

# %% [markdown]
# Even the long ones are done earlier on average: jobs that share a GPU all end late, jobs in a row end one by one.
# There is a price: two jobs at a time keep fewer blocks on the GPU, and the last `long` is done later.
#
# ## How many at once?
#
# One job alone leaves SMs idle between its kernels; many get in each other's way.

# %%
active = [1, 2, 4, 8, 12]
runs = [
    pp.simulate([short, long], rush, "paella", trace=True, active=n) for n in active
]
figure, axes = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
axes[0].plot(active, [r.model("short").p99_ms for r in runs], "o-", color="#0072B2")
axes[0].axhline(short.target_ms, color="#D55E00", linestyle="--", linewidth=1)
axes[0].set(
    xlabel="jobs on the GPU at once",
    ylabel="p99 of short (ms)",
    ylim=(0, None),
    title="dashed: its target",
)
axes[1].plot(active, [last_long_ms(r.trace) for r in runs], "o-", color="#E69F00")
axes[1].set(
    xlabel="jobs on the GPU at once", ylabel="last long done after (ms)", ylim=(0, 20)
)
plt.show()

# %% [markdown]
# ## What the SMs see
#
# A closer look at a part of the rush, block by block, on a few SMs. Everybody's blocks are there at once under
# `streams`:


# %%
def closer(t, sms=(0, 11)):
    """From 5 to 6 ms after the first arrival."""
    start = int(t.jobs["arrival_ns"].min()) + 5_000_000
    return t.picture(
        "gantt", start_ns=start, end_ns=start + 1_000_000, sms=sms, size_inches=(9, 3.4)
    )


closer(streams.trace)

# %% [markdown]
# Under `paella` there are never more than two jobs' blocks, and a `short` finds room as soon as a segment ends:

# %%
closer(paella.trace)

# %% [markdown]
# ## With real data
#
# The engine does the same in real time, with inputs and outputs. On a GPU that is how one serves; on a virtual one
# the host computes the data, so that the times are the host's. Here is a burst of small demo models, digits to
# classify.

# %%
images, labels = demo.held_out()
with pp.Engine(policy="paella") as engine:
    for name in ("mlp", "cnn"):
        engine.load(demo.load(name, batch=(1, 4)))

    await engine.infer(
        "mlp", {"image": images[0]}
    )  # the first request of all compiles what it needs

    async def burst():
        asked = [
            engine.infer(name, {"image": image})
            for image in images[:12]
            for name in ("mlp", "cnn")
        ]
        return await asyncio.gather(*asked)

    with engine.trace() as t:
        answers = await burst()
    print(engine.device.title)

digits = [int(each["scores"].argmax()) for each in answers]
right = np.mean(np.array(digits).reshape(-1, 2) == labels[:12, None])
print(
    f"{len(t.jobs)} requests, in batches of up to {t.jobs['batch'].max()}; "
    f"{right:.0%} right"
)
t.picture("requests", size_inches=(9, 4))

# %% [markdown]
# ## On an H200
#
# The rush, recorded under both policies. The files say where.

# %%
recorded = {name: pp.recordings.load(f"mix-{name}") for name in ("streams", "paella")}
print(pp.recordings.origin(recorded["paella"]))
table(recorded)

# %% [markdown]
# The real GPU is quicker with these kernels than the virtual one, so less piles up and fewer are late. Who gains and
# who pays is the same. The part of the rush with `long` requests:

# %%
part = [
    t.select(end_ns=int(t.jobs["arrival_ns"].min()) + 7_000_000)
    for t in recorded.values()
]
pp.viz.compare_picture(
    *part,
    ["requests", "residency"],
    labels=("streams", "paella"),
    size_inches=(11, 5.2),
)

# %% [markdown]
# ## Exercises
#
# 1. Put `"fifo"`, `"serial"` and `"edf"` in place of `"paella"`. Which requests are late under each?
# 2. `demo.rush(longs=24, shorts=40)` is a longer one. When does `paella` begin to let a `long` starve?
# 3. Give `long` twice the layers (`paellapy/demo/models.py`). Who notices under `streams`, who under `paella`?
# 4. `t.to_perfetto("rush.json")` and open it in ui.perfetto.dev: follow one `short` from its arrival to its
#    blocks.
