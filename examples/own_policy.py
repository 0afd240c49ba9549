"""Write a policy and compare it with CUDA streams on the same simulated requests. No GPU is used.

From a shell: paellapy simulate mix -p streams -p own_policy:shortest_first
"""

import paellapy as pp
from paellapy.simulation import named_models


@pp.policy
def shortest_first(job):
    return job.remaining_ns / job.batch  # the job with the smallest number goes first


if __name__ == "__main__":
    models, shares = named_models("mix", batch=(1,), device="virtual:h200")  # eight CNNs, measured on an H200
    workload = pp.Poisson(4000, shares, duration=0.5)
    for policy in ("streams", shortest_first):
        print(pp.simulate(models, workload, policy))
