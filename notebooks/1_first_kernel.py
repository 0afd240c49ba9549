# %% [markdown]
# # 1 · Your first instrumented kernel
#
# A GPU runs a kernel as many small *blocks*. Which of its processors (*SMs*) got which block, and when? Normally
# nobody can say. In this lesson one decorator makes a Triton kernel report it, and we look at the answer.
#
# No GPU is needed: without one the same code runs on a *virtual* GPU, which computes real results with NumPy and
# places and times the blocks by a model of the part.

# %%
import tempfile
from pathlib import Path

import numpy as np
import triton
import triton.language as tl

import paellapy as pp

device = pp.Device.current()
print(device.title, "with", device.sm_count, "SMs")

# %% [markdown]
# ## The kernel
#
# An ordinary Triton kernel that adds two vectors. `@pp.kernel` is all we add.


# %%
@pp.kernel
@triton.jit
def add(x, y, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    inside = i < n
    tl.store(
        out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside
    )


# %% [markdown]
# It launches as it always did. `pp.array` puts data where the kernel runs; CuPy arrays and PyTorch tensors work
# too.

# %%
n, B = 1 << 21, 1024
rng = np.random.default_rng(0)
a, b = rng.random(n, np.float32), rng.random(n, np.float32)
x, y, out = pp.array(a), pp.array(b), pp.empty(n)

grid = (triton.cdiv(n, B),)
add[grid](x, y, out, n, B=B)
print("right:", np.array_equal(out.numpy(), a + b))

# %% [markdown]
# ## The trace
#
# Inside `pp.trace()` every block of every decorated kernel leaves a record.

# %%
with pp.trace() as t:
    add[grid](x, y, out, n, B=B)
print(t.summary())

# %% [markdown]
# One row for each kernel. *Waves* says how often the GPU was filled: the blocks of the launch ÷ what all SMs hold
# at once. *Tail* is the share of the time after the first SM has run dry.
#
# The records themselves are a NumPy array, one row a block:

# %%
print(t.blocks.dtype.names)
first = t.blocks[0]
print(
    f"block {first['block']} ran on SM {first['sm']} for "
    f"{first['end_ns'] - first['start_ns']} ns"
)

# %% [markdown]
# So questions are one line of NumPy each. Did every SM get its part? Which block took longest?

# %%
per_sm = np.bincount(t.blocks["sm"], minlength=device.sm_count)
print(f"each SM ran {per_sm.min()} to {per_sm.max()} of the {len(t.blocks)} blocks")
duration_ns = t.blocks["end_ns"] - t.blocks["start_ns"]
slowest = t.blocks[np.argmax(duration_ns)]
print(
    f"slowest: block {slowest['block']}, {duration_ns.max() / 1000:.2f} µs on SM "
    f"{slowest['sm']}"
)

# %% [markdown]
# ## The picture
#
# Each line is an SM, time goes to the right, and the colour says how many of the warps it can hold are there.
# Below, the same for the whole GPU, against the most that this kernel's registers, threads and shared memory allow
# (dashed).

# %%
t.picture(["heatmap", "residency"])

# %% [markdown]
# The first blocks do not start together: the GPU hands them out one after the other. At the end, SMs run dry.
#
# From close by, blocks are bars, each in a lane of its SM. Here are the first six SMs:

# %%
t.picture("gantt", sms=(0, 5))

# %% [markdown]
# In Jupyter, `t.plot()` shows all of this at once, to zoom and hover. (Where this notebook is only read, there is a
# line of text in its place.)

# %%
t.plot(height=700)

# %% [markdown]
# ## How full could it be?
#
# What a block needs decides how many fit on an SM. This asks the compiled kernel, nothing is launched:

# %%
limit = add.theoretical_occupancy(x, y, out, n, B=B)
print(limit)
print(
    f"seen: {t.summary().kernels[0].occupancy:.1%} of an SM's warps, while it had "
    f"a block"
)

# %% [markdown]
# ## On an H200
#
# A trace can be kept in a file and looked at elsewhere. Some come with paellapy: this one is the same kernel,
# launched with exactly two waves of blocks. Where it was recorded, the file says itself.

# %%
recorded = pp.recordings.load("add-two-waves")
print(pp.recordings.origin(recorded))
print(recorded.summary())
recorded.picture(["heatmap", "residency"])

# %% [markdown]
# ## Keep it
#
# `save` and `Trace.load` for later; `to_perfetto` for [ui.perfetto.dev](https://ui.perfetto.dev); `to_html` for a
# page that works offline.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "add.pptrace"
    t.save(path)
    same = np.array_equal(pp.Trace.load(path).blocks, t.blocks)
    print(
        f"{path.stat().st_size / len(t.blocks):.1f} bytes a block, read back the "
        f"same: {same}"
    )

# %% [markdown]
# ## Exercises
#
# 1. Launch `add` with `B=256` and `num_warps=4`. How many blocks does an SM hold now, and what limits it?
# 2. Make `n` so small that only every second SM gets a block. What does the heat map look like?
# 3. `pp.trace(records_per_sm=16)` keeps only the last sixteen records of each SM. What does the picture say about
#    that?
# 4. Open another part: `with pp.Device("virtual:t4"):` around arrays and launch. How many waves are the same blocks
#    there?
