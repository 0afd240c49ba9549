# %% [markdown]
# # 5 · Serving and targets
#
# A server makes a promise: this model answers within a given number of milliseconds. This lesson starts a server, asks
# it, puts load on it, and shows what keeps the promise and what breaks it.

# %%
import atexit
import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import paellapy as pp
from paellapy import demo
from paellapy.simulation import named_models

# %% [markdown]
# ## A configuration
#
# Models, each with a target, and a policy. On a machine without a GPU the virtual one computes the answers on the
# host, so the targets here leave room for that.

# %%
folder = Path(tempfile.mkdtemp())
config = folder / "serve.toml"
config.write_text("""
device = "auto"
policy = "slack"

[server]
port = 0            # any that is free

[[models]]
factory = "paellapy.demo:load"
arguments = { name = "mlp", batch = [1, 4] }
target_ms = 100

[[models]]
factory = "paellapy.demo:load"
arguments = { name = "cnn", batch = [1, 4] }
target_ms = 200
""")
paellapy = [
    sys.executable,
    "-c",
    "from paellapy.cli import main; main()",
]  # `paellapy` on a command line
log = folder / "server.log"
with log.open("w") as file:
    server = subprocess.Popen([*paellapy, "serve", str(config)], stderr=file)
    atexit.register(server.kill)  # whatever becomes of this notebook

# %% [markdown]
# It listens at once, says where, and is ready when its models are loaded.


# %%
def ready():
    assert server.poll() is None, log.read_text()
    if "url=" not in log.read_text():
        return None
    url = log.read_text().split("url=")[1].split()[0]
    try:
        urllib.request.urlopen(f"{url}/v2/health/ready").close()
    except urllib.error.URLError:
        return None
    return url


while not (url := ready()):
    time.sleep(0.2)
with urllib.request.urlopen(f"{url}/v2/models/cnn") as answer:
    print(json.load(answer)["inputs"])

# %% [markdown]
# ## Ask it
#
# The protocol is the Open Inference Protocol, which Triton Inference Server and KServe speak: any of their clients
# works. A plain HTTP request does too.


# %%
def ask(model, image, **parameters):
    body = {
        "inputs": [
            {
                "name": "image",
                "shape": [1, 8, 8],
                "datatype": "FP32",
                "data": image.ravel().tolist(),
            }
        ],
        "parameters": parameters,
    }
    request = urllib.request.Request(
        f"{url}/v2/models/{model}/infer", json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["outputs"][0]["data"]


images, labels = demo.held_out()
figure, axes = plt.subplots(1, 8, figsize=(9, 1.7), layout="constrained")
for ax, image, label in zip(axes, images, labels, strict=False):
    ax.imshow(image, cmap="gray_r")
    ax.set_title(
        f"mlp {np.argmax(ask('mlp', image))}, cnn "
        f"{np.argmax(ask('cnn', image))}\nis {label}",
        fontsize=8,
    )
    ax.axis("off")
plt.show()

# %% [markdown]
# ## Refuse rather than be late
#
# A request may bring its own deadline, `timeout` in µs. One that cannot be met is refused at once (503), with a
# hint when to come back, instead of answered when nobody waits any more.

# %%
try:
    ask("cnn", images[0], timeout=1)
except urllib.error.HTTPError as refusal:
    print(refusal.code, json.load(refusal)["error"])
    print("Retry-After:", refusal.headers["Retry-After"], "s")

# %% [markdown]
# ## Put load on it
#
# `paellapy bench` sends requests at a rate, whether or not answers come back in time, as the world does. It works
# on any server of this protocol.


# %%
def bench(rate):
    out = folder / f"{rate}.json"
    options = ["--rate", str(rate), "--duration", "1", "--warmup", "1", "--json", str(out)]
    subprocess.run([*paellapy, "bench", url, *options], check=True, capture_output=True)
    return json.loads(out.read_text())


rates = [20, 200]
results = {rate: bench(rate) for rate in rates}
print(f"{'rate':>5} {'model':6} {'answered':>8} {'p50 ms':>8} {'p99 ms':>8}")
for rate, r in results.items():
    for name, m in r["models"].items():
        print(
            f"{rate:5} {name:6} {m['answered']:8} {m['latency_ms']['p50']:8.2f} "
            f"{m['latency_ms']['p99']:8.2f}"
        )

# %% [markdown]
# What the server itself counted, for Prometheus:

# %%
with urllib.request.urlopen(f"{url}/metrics") as metrics:
    lines = metrics.read().decode().splitlines()
wanted = "paellapy_requests_answered_total", "paellapy_refusals_total"
print(*[line for line in lines if line.startswith(wanted)], sep="\n")

# %% [markdown]
# On SIGTERM the server finishes the requests in flight and ends.

# %%
server.terminate()
print("ended with", server.wait(timeout=120))

# %% [markdown]
# ## What keeps the promise?
#
# On a shared GPU, the policy does. Here the eight networks of lesson 4 get more and more requests, in bursts,
# simulated on a virtual H200. The promise: four times what a request takes alone.

# %%
models, shares = named_models("mix", batch=(1,), device="virtual:h200")
models = [replace(m, target_ms=4 * m.alone_ns() / 1e6) for m in models]
offered = list(range(2000, 6001, 500))
within = {}
for policy in ("streams", "fifo", "paella", "slack"):
    runs = [
        pp.simulate(models, pp.Lognormal(rate, shares, duration=0.5), policy)
        for rate in offered
    ]
    within[policy] = [r.all.within_target for r in runs]

figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
colours = {
    "streams": "#999999",
    "fifo": "#56B4E9",
    "paella": "#E69F00",
    "slack": "#0072B2",
}
for policy, met in within.items():
    ax.plot(offered, met, "o-", label=policy, color=colours[policy])
ax.set(xlabel="requests a second", ylabel="within their target", ylim=(0, 1.02))
ax.yaxis.set_major_formatter("{x:.0%}")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Two questions one asks of such a picture: up to which load are 95 % of the requests in time, and what is left
# beyond?

# %%
for policy, met in within.items():
    fine = [rate for rate, m in zip(offered, met, strict=True) if m >= 0.95]
    print(
        f"{policy:8} 95% in time up to {max(fine, default=0):4} a second; at "
        f"{offered[-1]}: {met[-1]:.0%}"
    )

# %% [markdown]
# Batching moves all curves to the right: with `batch=(1, 2, 4, 8)` above, requests of a model that wait together
# run together. That is the first exercise.

# %% [markdown]
# ## Who was late, and why
#
# A trace answers that for every single request. `engine.trace()` makes one of a running engine; here is a recorded
# one, with its slowest request:

# %%
recorded = pp.recordings.load("mix-streams")
print(pp.recordings.origin(recorded))
worst = recorded.jobs[np.argmax(recorded.lateness_ns())]
print(
    f"{recorded.models[worst['model']]}, request {worst['request']}: "
    f"{recorded.lateness_ns().max() / 1e6:.2f} ms late, "
    f"{(worst['end_ns'] - worst['arrival_ns']) / 1e6:.2f} ms in all"
)
recorded.picture("requests", size_inches=(9, 4))

# %% [markdown]
# ## Exercises
#
# 1. Simulate with batches. How far right do the curves go, and does the order of the policies change?
# 2. `paellapy bench --concurrency 8` is a closed loop: clients wait for their answer. Why does it never show an
#    overload?
# 3. Promise twice the time alone instead of four times. Up to which load is that kept?
# 4. Requests may carry a `priority`: serve with `policy = "priority"` and let `mlp` pass `cnn`.
