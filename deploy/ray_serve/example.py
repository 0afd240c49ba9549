"""Two replicas of a demo model behind Ray Serve, routed by predicted finish: `python deploy/ray_serve/example.py`.

Needs `pip install 'paellapy[ray]'`. On GPUs, give each replica one: ray_actor_options={"num_gpus": 1}.
"""

from __future__ import annotations

import numpy as np
import ray
from ray import serve

import paellapy as pp
from paellapy import demo
from paellapy.cluster.ray_serve import engine_deployment


def models() -> list[pp.Model]:
    return [demo.load("mlp")]


def main() -> None:
    ray.init(include_dashboard=False, ignore_reinit_error=True)
    app = engine_deployment(models, "auto", num_replicas=2, ray_actor_options={"num_cpus": 0})
    handle = serve.run(app, name="paellapy", route_prefix=None)
    ((name, image),) = models()[0].inputs.items()
    digits = np.random.default_rng(0).random((8, *image.shape), np.float32)
    answers = [handle.infer.remote("mlp", {name: digit}) for digit in digits]
    for answer in answers:
        print({name: array.shape for name, array in answer.result().items()})
    serve.shutdown()


if __name__ == "__main__":
    main()
