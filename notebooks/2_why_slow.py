# %% [markdown]
# # 2 · Why is my kernel slow?
#
# Three things keep a GPU from being full, and each has a shape one can learn to recognise: blocks that need too
# much (*occupancy limits*), a last round that is almost empty (*waves*), and a few blocks that take longer than the
# rest (the *tail*). One small kernel shows all three.

# %%
import matplotlib.pyplot as plt
import numpy as np
import triton
import triton.language as tl

import paellapy as pp

device = pp.Device.current()
print(device.title, "with", device.sm_count, "SMs")


# %% [markdown]
# The kernel sums rows of different lengths, one block a row: `first` says where each row begins.


# %%
@pp.kernel
@triton.jit
def row_sums(x, first, out, B: tl.constexpr):
    row = tl.program_id(0)
    begin, end = tl.load(first + row), tl.load(first + row + 1)
    total = tl.zeros((B,), tl.float32)
    for i in range(begin, end, B):
        at = i + tl.arange(0, B)
        total += tl.load(x + at, mask=at < end, other=0.0)
    tl.store(out + row, tl.sum(total))


def run(lengths, B=256, num_warps=8):
    """Sums rows of ones of these lengths; the trace of it."""
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    x, starts, out = (
        pp.array(np.ones(first[-1], np.float32)),
        pp.array(first),
        pp.empty(len(lengths)),
    )
    with pp.trace() as t:
        row_sums[(len(lengths),)](x, starts, out, B=B, num_warps=num_warps)
    assert np.array_equal(out.numpy(), lengths)
    return t


# %% [markdown]
# ## Occupancy limits
#
# An SM has room for a fixed number of threads, registers, bytes of shared memory and blocks. Whichever runs out first
# is the limit. The compiled kernel knows what it needs:

# %%
few = (
    pp.array(np.ones(64, np.float32)),
    pp.array(np.array([0, 64], np.int32)),
    pp.empty(1),
)
for B, num_warps in ((256, 8), (256, 1), (8192, 4), (32768, 4)):
    print(
        f"B={B:5} num_warps={num_warps}: "
        f"{row_sums.theoretical_occupancy(*few, B=B, num_warps=num_warps)}"
    )

# %% [markdown]
# Tiny blocks hit the limit on the number of blocks, greedy ones run out of registers. What that means in time, with
# rows of equal length and one wave of the first kind:

# %%
roomy = row_sums.theoretical_occupancy(*few, B=256, num_warps=8)
wave = roomy.blocks_per_sm * device.sm_count
equal = np.full(wave, 8192)
full, greedy = run(equal), run(equal, B=32768, num_warps=4)
for name, t in (("full", full), ("greedy", greedy)):
    k = t.summary().kernels[0]
    print(
        f"{name}: {k.span_ns / 1000:.1f} µs, occupancy {k.occupancy:.0%}, "
        f"{k.waves:.1f} waves"
    )

# %%
pp.viz.compare_picture(
    full,
    greedy,
    ["heatmap", "residency"],
    labels=("B=256, 8 warps", "B=32768, 4 warps"),
)

# %% [markdown]
# The same rows, but the right-hand kernel never has more than a few warps on an SM: there is nobody to run while
# one waits for memory.
#
# ## Waves
#
# Blocks come in rounds: as many as fit, then the next. One block too many costs a whole round. Let the number of
# equal rows grow and look at the time of the kernel:

# %%
sizes = [int(wave * share) for share in np.arange(0.25, 3.26, 0.25)]
sizes += [wave + 1, 2 * wave + 1]
sizes.sort()
times_us = []
for rows in sizes:
    first, last = run(np.full(rows, 2048)).span_ns
    times_us.append((last - first) / 1000)

figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
ax.plot(np.array(sizes) / wave, times_us, "o-", color="#0072B2")
for k in (1, 2, 3):
    ax.axvline(k, color="#999999", linewidth=0.8, linestyle="--")
ax.set(
    xlabel="blocks ÷ what the GPU holds at once (waves)",
    ylabel="time (µs)",
    ylim=(0, None),
)
figure.suptitle(
    f"{device.title}: a step for every wave", fontsize=10, x=0.01, ha="left"
)
plt.show()

# %% [markdown]
# How large is the step at the edge of the first wave?

# %%
exact, one_more = times_us[sizes.index(wave)], times_us[sizes.index(wave + 1)]
print(
    f"{wave} blocks: {exact:.2f} µs; {wave + 1} blocks: {one_more:.2f} µs, "
    f"{one_more / exact - 1:+.0%}"
)

# %% [markdown]
# ## The tail
#
# Rows are rarely equal. Here are two and a half waves of them, lengths spread as file sizes or sentences are. The
# program that made them sorted them, the shortest first:

# %%
lengths = (
    np.random.default_rng(0)
    .lognormal(np.log(2000), 0.8, wave * 5 // 2)
    .astype(np.int64)
)
ragged = run(np.sort(lengths))
print(ragged.summary())
ragged.picture(["heatmap", "residency"])

# %% [markdown]
# The GPU is full until blocks run out. From then on SMs run dry, and the last ones wait for a few long rows that
# started late. Nothing is wrong with any single block: it is the order.
#
# ## The cure
#
# Long rows first. Short ones then fill the gaps, and everybody is done at about the same time. It is the same work:

# %%
sorted_ = run(np.sort(lengths)[::-1])
for name, t in (("shortest first", ragged), ("longest first", sorted_)):
    k = t.summary().kernels[0]
    print(f"{name:14} {k.span_ns / 1000:5.1f} µs, tail {k.tail_share:.0%} of it")
pp.viz.compare_picture(
    ragged, sorted_, ["heatmap", "residency"], labels=("shortest first", "longest first")
)

# %% [markdown]
# ## On an H200
#
# The same kernel with longer rows in no order, recorded, beside the same rows on this device. A virtual GPU is too fast
# here: it knows how many bytes the memory delivers, but not how long each of these reads takes. How far virtual times
# can be trusted is in `docs/virtual-gpu.md`.

# %%
recorded = pp.recordings.load("tail-effect")
print(pp.recordings.origin(recorded))
print(recorded.summary())
here = run(
    np.random.default_rng(0)
    .lognormal(np.log(6000), 0.5, wave * 5 // 2)
    .astype(np.int64)
)
pp.viz.compare_picture(
    here, recorded, ["heatmap", "residency"], labels=("here", "recorded")
)

# %% [markdown]
# ## Exercises
#
# 1. Where is the sweet spot for `B` and `num_warps`? Try a few and make a table of times.
# 2. Rows as they come, in no order: better or worse than the shortest first? Predict, then look.
# 3. Split long rows in two, so that no block takes more than a given length. What happens to the tail, and what
#    does it cost?
# 4. Run the notebook inside `with pp.Device("virtual:t4"):`. Which of the three effects grows on a small GPU?
