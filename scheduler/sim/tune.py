"""`tune`: chooses the GPU and the largest batch of each model together, by simulated runs.

After IADeep (SC'23): batch sizes and neighbours must be chosen together, since a larger batch takes more of the GPU
that it shares. IADeep predicts interference with a learned model; here the simulator evaluates each choice. Choices are
changed one at a time, as long as the result improves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.values import check_values, integer, number, shortened
from paellapy.scheduler.policies.policy import Policy, Rank
from paellapy.scheduler.sim.simulate import checked_models, simulate
from paellapy.scheduler.sim.workload import MOST_SIGMA, SEED, Lognormal

ITERATIONS, PATIENCE = 50, 10  # IADeep's values
_RATE = number(0, above=True)
_COUNTS = dict.fromkeys(("gpus", "iterations", "patience"), integer(1, 1 << 16))
_RUN = {"seconds": number(0, above=True), "sigma": number(0, MOST_SIGMA), "seed": SEED}
_WORST = 1e4  # slowdown of requests that were not answered


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for one model: the largest batch that it may form, and its GPU, from 0."""

    batch: int
    gpu: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of `tune`. `cost` is the mean over requests of their model's p99 slowdown; `first_cost` is the cost at
    the start: the smallest batches, with the load spread evenly. `history` has the best cost after each iteration.
    """

    choices: Mapping[str, Choice]
    cost: float
    first_cost: float
    history: Sequence[float] = field(repr=False)
    p99_slowdown: Mapping[str, float] = field(repr=False)
    throughput: float = 0.0

    def table(self) -> Any:
        from paellapy.scheduler.sim.results import number_table

        title = f"mean p99 slowdown {self.cost:.2f}, {self.first_cost:.2f} before; {len(self.history)} iterations"
        rows = [
            [name, str(each.gpu), str(each.batch), f"{self.p99_slowdown[name]:.2f}"]
            for name, each in sorted(self.choices.items(), key=lambda pair: (pair[1].gpu, pair[0]))
        ]
        return number_table(title, ["model", "GPU", "largest\nbatch", "p99 ÷\nalone"], rows)

    def __rich__(self) -> Any:
        return self.table()


class _Search:
    """Simulated runs of single GPUs, each made only once."""

    def __init__(self, models: Mapping[str, ModelProfile], rates: Mapping[str, float], run: Mapping[str, Any]) -> None:
        self.models, self.rates, self.run = models, rates, run
        self._known: dict[tuple[tuple[str, int], ...], dict[str, tuple[float, float]]] = {}

    def _gpu(self, members: tuple[tuple[str, int], ...]) -> dict[str, tuple[float, float]]:
        """The p99 slowdown and the answers per second of each model on one GPU."""
        if members not in self._known:
            profiles = [_up_to(self.models[name], batch) for name, batch in members]
            mix = {name: self.rates[name] for name, _ in members}
            load = Lognormal(sum(mix.values()), mix, duration=self.run["seconds"], sigma=self.run["sigma"])
            done = simulate(profiles, load, self.run["policy"], self.run["device"], seed=self.run["seed"])
            found = {}
            for name, _ in members:
                each = done.model(name)
                slow = each.slowdown_p99 if each.completed == each.submitted else _WORST
                found[name] = (1.0 if math.isnan(slow) else slow, each.throughput)
            self._known[members] = found
        return self._known[members]

    def outcome(self, choices: Mapping[str, Choice]) -> dict[str, tuple[float, float]]:
        found: dict[str, tuple[float, float]] = {}
        for gpu in {each.gpu for each in choices.values()}:
            members = tuple(sorted((name, each.batch) for name, each in choices.items() if each.gpu == gpu))
            found |= self._gpu(members)
        return found

    def cost(self, choices: Mapping[str, Choice]) -> float:
        found = self.outcome(choices)
        total = sum(self.rates.values())
        return sum(self.rates[name] / total * slow for name, (slow, _) in found.items())


def _up_to(model: ModelProfile, batch: int) -> ModelProfile:
    return replace(model, sizes={size: program for size, program in model.sizes.items() if size <= batch})


def _key(choices: Mapping[str, Choice]) -> tuple[tuple[str, int, int], ...]:
    return tuple(sorted((name, each.batch, each.gpu) for name, each in choices.items()))


def _spread(models: Mapping[str, ModelProfile], rates: Mapping[str, float], gpus: int) -> dict[str, Choice]:
    """The starting point: the smallest batches; the heaviest models first, each on the GPU with the least load so far.
    """
    load = [0.0] * gpus
    found = {}
    for name in sorted(models, key=lambda name: -rates[name] * models[name].alone_ns(min(models[name].batch))):
        gpu = int(np.argmin(load))
        smallest = min(models[name].batch)
        load[gpu] += rates[name] * models[name].alone_ns(smallest) / smallest
        found[name] = Choice(smallest, gpu)
    return found


def _changes(
    choices: Mapping[str, Choice], models: Mapping[str, ModelProfile], gpus: int, slow: Mapping[str, float]
) -> Iterator[dict[str, Choice]]:
    """Every choice that differs in one respect, for the slowest models first."""
    for name in sorted(choices, key=lambda name: -slow[name]):
        now, sizes = choices[name], models[name].batch
        at = sizes.index(now.batch)
        for k in (len(sizes) - 1, at + 1, at - 1):
            if 0 <= k < len(sizes) and k != at:
                yield {**choices, name: replace(now, batch=sizes[k])}
        for gpu in range(gpus):
            if gpu != now.gpu:
                yield {**choices, name: replace(now, gpu=gpu)}
        for other in choices:  # swap GPUs
            if choices[other].gpu != now.gpu:
                there = choices[other].gpu
                swapped = {name: replace(now, gpu=there), other: replace(choices[other], gpu=now.gpu)}
                yield {**choices, **swapped}


def tune(
    models: Sequence[ModelProfile] | ModelProfile,
    rates: Mapping[str, float],
    gpus: int = 1,
    *,
    policy: str | Policy | Rank = "hrrn",
    device: str = "virtual:h200",
    iterations: int = ITERATIONS,
    patience: int = PATIENCE,
    **run: Any,
) -> Tuned:
    """Chooses batch sizes and placement for models with `rates` requests per second, under lognormal gaps.

    `run`: `seconds` (0.5) and `sigma` (1.5) of the load, and its `seed` (0). The search ends after `iterations`, or
    when `patience` of them in a row have found nothing better. Memory limits are not considered.

    >>> from paellapy.scheduler.sim.recorded_profiles import mix_profiles
    >>> some = [each for each in mix_profiles((1, 4)) if each.name in ("resnet18", "resnet50")]
    >>> tune(some, {"resnet18": 4000, "resnet50": 1000}, seconds=0.05, iterations=3).cost < 100
    True
    """
    known = {each.name: each for each in checked_models(models)}
    if not isinstance(rates, Mapping) or set(rates) != set(known) or not all(map(_RATE.fits, rates.values())):
        text = f"rates={shortened(rates)}: it must be a dict with {_RATE.wanted} for each of {', '.join(known)}"
        raise ArgumentError(text, field="rates", given=rates)
    check_values({"gpus": gpus, "iterations": iterations, "patience": patience}, _COUNTS)
    if unknown := set(run) - set(_RUN):
        text = f"tune has no option {min(unknown)!r}: the options are {', '.join(_RUN)}"
        raise ArgumentError(text, field=min(unknown))
    check_values(run, {name: _RUN[name] for name in run})
    search = _Search(known, rates, {"policy": policy, "device": device, "seconds": 0.5, "sigma": 1.5, "seed": 0, **run})
    best = _spread(known, rates, gpus)
    cost = first = search.cost(best)
    history: list[float] = []
    tried = {_key(best)}
    since = 0
    while len(history) < iterations and since < patience:
        slow = {name: slowdown for name, (slowdown, _) in search.outcome(best).items()}
        fresh = (each for each in _changes(best, known, gpus, slow) if _key(each) not in tried)
        candidate = next(fresh, None)
        if candidate is None:
            break
        tried.add(_key(candidate))
        found = search.cost(candidate)
        since = 0 if found < cost else since + 1
        if found < cost:
            best, cost = candidate, found
        history.append(cost)
    outcome = search.outcome(best)
    slow = {name: each[0] for name, each in outcome.items()}
    return Tuned(best, cost, first, history, slow, sum(each[1] for each in outcome.values()))
