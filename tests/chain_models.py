"""Models of several layers for engines with a memory budget, and their right answers."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from engine_models import gemm

import paellapy as pp

N, LAYERS = 64, 6
WEIGHTS = N * N * 4 * LAYERS
SMALL = {"chunk_bytes": 2 * N * N * 4}  # two layers


def chain(name, seed, weights=None, batch=(1,), instances=1, **options):
    """x · W1 · W2 …: a kernel and a tensor for each layer."""
    draw = np.random.default_rng(seed)
    made = {f"w{k}": (draw.standard_normal((N, N)) / 8).astype(np.float32) for k in range(LAYERS)}

    def fn(weights, inputs, outputs):
        source = inputs["x"]
        for k in range(LAYERS):
            rows = source.shape[0]
            target = outputs["y"] if k == LAYERS - 1 else pp.empty((rows, N))
            gemm[(-(-rows // 16), 1)](source, weights[f"w{k}"], target, rows, N, N, BM=16, BN=64, BK=64)
            source = target

    specs = {"inputs": {"x": pp.TensorSpec((N,))}, "outputs": {"y": pp.TensorSpec((N,))}}
    return pp.Model(name, fn, weights=weights or made, batch=batch, instances=instances, **specs, **options), made


def expected(made, x):
    for each in made.values():
        x = x @ each
    return x


def ask(server, name, made, seed=0):
    x = np.random.default_rng(seed).standard_normal(N).astype(np.float32)
    found = server.infer_sync(name, {"x": x})["y"]
    np.testing.assert_allclose(found, expected(made, x), rtol=2e-3, atol=2e-3)


def room_for(device, weights):
    """Memory for the weights of this number of models and one instance."""
    with pp.Engine(device, memory_bytes=1 << 30, quantum_us=2, tuning=SMALL) as server:
        server.load(chain("probe", 0)[0])
        account = server.memory()
        return weights * account["weights_bytes"] + account["instances_bytes"] + 256


def settle(server, name, state):
    """Waits until the model's weights have reached their place."""
    end = time.monotonic() + 20
    while server.weights_state(name) != state:
        assert time.monotonic() < end, server.weights_state(name)
        time.sleep(0.001)


def come_and_go(server, made, clients, rounds, at_last=lambda: None):
    """Evicts, prefetches and reloads models at random, while clients ask; then calls `at_last`, and checks all answers.

    `made`: models and their weights by name. The last one is reloaded, so nobody asks it.
    """
    names, over = list(made), threading.Event()

    def client(seed):
        pick = random.Random(seed)
        while not over.is_set():
            name = pick.choice(names[:-1])
            ask(server, name, made[name][1], pick.randrange(100))

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(client, seed) for seed in range(clients)]
        pick = random.Random(7)
        try:
            for _ in range(rounds):
                what = pick.choice([server.evict, server.prefetch, None])
                if what is not None:
                    what(pick.choice(names))
                else:
                    server.unload(names[-1])
                    server.load(made[names[-1]][0])
            at_last()
        finally:
            over.set()
        for each in asked:
            each.result()
