"""Two replicas of the demo models behind Ray Serve, routed by predicted finish: `python deploy/ray_serve/example.py`.

Needs `pip install 'paellapy[ray]'`; with a GPU, give each replica one: ray_actor_options={"num_gpus": 1}.
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
    ray.init(include_dashboard=False)
    app = engine_deployment(models, "auto", num_replicas=2, ray_actor_options={"num_cpus": 0})
    handle = serve.run(app, name="paellapy", route_prefix=None)
    image = np.zeros(next(iter(demo.load("mlp").inputs.values())).shape, np.float32)
    answers = [handle.infer.remote("mlp", {next(iter(demo.load("mlp").inputs)): image}) for _ in range(8)]
    print([{name: array.shape for name, array in each.result().items()} for each in answers])
    serve.shutdown()


if __name__ == "__main__":
    main()
