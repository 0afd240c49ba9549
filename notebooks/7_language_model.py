# %% [markdown]
# # 7 · A language model, an embedder and a training job
#
# Three kinds of work share one GPU: a language model that writes, a model that makes vectors of texts, and a training
# loop. One process runs them, and one policy says who goes next: `fair` gives each model its share of the GPU's time.
# The virtual GPU computes every token on the CPU, so the seconds below are not those of a GPU.

# %%
import asyncio
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import paellapy as pp
from paellapy import demo

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## One answer
#
# The demo's model has learned from Jane Austen's novels. Its folder has what folders of the hub have: configuration,
# weights and tokenizer.

# %%
engine = pp.Engine("virtual:h200", policy="fair")
austen = pp.LanguageModel(demo.AUSTEN, sequences=8, chunk=64)
engine.load(austen)
for piece in engine.generate("austen", "It is a truth", max_tokens=16, temperature=0):
    print(piece.text, end="")

# %% [markdown]
# ## Several answers
#
# Texts join the batch when their prompt has entered, and leave it when they end: a short one does not wait for a long
# one. Each dot below is a token.

# %%
prompts = ["My dear Emma,", "Mr. Darcy", "She had", "The house", "I am sure", "Elizabeth"]
lengths = [8, 20, 12, 16, 6, 24]


async def write(prompt, length, began, seed=1):
    times, text = [], ""
    options = {"max_tokens": length, "seed": seed, "ignore_eos": True}
    async for piece in engine.generate("austen", prompt, **options):
        times.append(time.monotonic() - began)
        text += piece.text
    return times, text


async def write_all():
    began = time.monotonic()
    texts = zip(prompts, lengths, strict=True)
    return await asyncio.gather(*(write(*each, began) for each in texts))


written = await write_all()
for prompt, (_, text) in zip(prompts, written, strict=True):
    print(prompt + text.replace("\n", " "))

# %%
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for lane, (times, _) in enumerate(written):
    ax.plot(times, [lane] * len(times), ".", color="#0072B2")
ax.set(xlabel="seconds", yticks=range(len(prompts)), yticklabels=prompts)
plt.show()

# %% [markdown]
# ## An embedder beside it
#
# Its vector of a text is the mean of the language model's own vectors of tokens. Texts about the same thing are alike.

# %%
from paellapy.scheduler.language.weights import read_tensors  # noqa: E402

size = 16
table = read_tensors(demo.AUSTEN)["model.embed_tokens.weight"].astype(np.float32)
table = torch.from_numpy(table - table.mean(0))
vectors = torch.nn.EmbeddingBag.from_pretrained(table, mode="mean")
example = torch.zeros(1, size, dtype=torch.int64)
engine.load(pp.Model.from_torch(vectors, example, name="embedder", priority=1))


def ids(text):
    return np.resize(austen.codec.encode(text), size).astype(np.int64)


texts = ["her sister and her mother", "her mother and her aunt"]
texts += ["the house and the garden", "he went to the house"]
embedded = np.stack([engine.infer_sync("embedder", {"input": ids(t)})["output"] for t in texts])
embedded /= np.linalg.norm(embedded, axis=1, keepdims=True)
figure, ax = plt.subplots(figsize=(5.4, 2.8), layout="constrained")
shown = ax.imshow(embedded @ embedded.T, cmap="Blues", vmin=0, vmax=1)
ax.set(xticks=[], yticks=range(len(texts)), yticklabels=texts)
figure.colorbar(shown, label="cosine")
plt.show()

# %% [markdown]
# ## And a training job
#
# The step is that of lesson 6. It has the time that the others leave.

# %%
net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, fused=True)


def step(x, y):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    return loss


def batches():
    while True:
        x = torch.randn(64, 8)
        yield x, x.sum(1, keepdim=True)


job = engine.background(step, name="train", state=[net, optimizer], data=batches(), priority=-1)

# %%
latency = []


async def embed_until(done):
    while not done.is_set():
        began = time.monotonic()
        await engine.infer("embedder", {"input": ids(texts[0])})
        latency.append((time.monotonic() - began) * 1e3)
        await asyncio.sleep(0.02)


async def everything():
    done = asyncio.Event()
    embedding = asyncio.create_task(embed_until(done))
    found = await write_all()
    done.set()
    await embedding
    return found


with engine.trace() as t:
    beside = await everything()
steps = job.steps
job.stop()
job.join()
same = [a == b for (_, a), (_, b) in zip(written, beside, strict=True)]
print(f"{sum(same)} of {len(same)} texts are the same as before; the job made {steps} steps")
print(f"{len(latency)} texts were embedded, in {np.median(latency):.1f} ms (median)")

# %% [markdown]
# A seed gives the same text, whatever shares the GPU. In the trace, a text is a request whose segments end with its
# tokens; the chunks and steps that wrote it are requests of `austen prefill` and `austen decode`.

# %%
names, counts = np.unique(t.jobs["model"], return_counts=True)
for name, count in zip(names, counts, strict=True):
    print(f"{t.models[name]}: {count} requests")
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for lane, number in enumerate(names):
    mine = t.segments[t.segments["model"] == number]
    ax.plot((mine["end_ns"] - t.span_ns[0]) * 1e-9, [lane] * len(mine), "|", color="#D55E00")
ax.set(xlabel="seconds", yticks=range(len(names)), yticklabels=[t.models[k] for k in names])
plt.show()

# %%
engine.close()

# %% [markdown]
# ## Exercises
#
# 1. Give the language model `share=4`, then try the policy `srpt`. What changes, and for whom?
# 2. Ask for JSON: `engine.generate(…, json_schema={"type": "object", …})`. Why has such a text one step in flight?
# 3. Serve the same folder with `language_model = "…"` in a settings file, and ask it with the `openai` client.
