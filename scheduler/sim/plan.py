"""`plan`: chooses models for each GPU and the number of replicas, and predicts the share of requests in time.

Candidate placements are packed by load and memory. The simulator, which models interference, batching and routing,
tells which is best and which attainment to expect. `steps` leads from one placement to another, new replicas first.
"""

from __future__ import annotations

import difflib
import itertools
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import ModelProfile, load_profiles
from paellapy.scheduler.core.values import Rule, check_values, integer, number, or_none
from paellapy.scheduler.sim.cluster import PLACEMENT, simulate_cluster
from paellapy.scheduler.sim.recorded_profiles import mix_profiles
from paellapy.scheduler.sim.simulate import checked_models
from paellapy.scheduler.sim.workload import MOST_SIGMA, SEED, Lognormal

Placement = tuple[tuple[str, ...], ...]

ENOUGH = 0.01  # a placement that is better by less is not worth a move
REQUESTS = 20_000  # in the first simulation
MOST_REQUESTS = 640_000  # in the last simulation
# Standard error of the expected attainment at which no longer simulation is made. Short ones underestimate it: their
# parts are shorter than the queues that a burst leaves.
SURE = 0.002
MOST_GPUS = 4096
LEAST_USE = 0.02  # part of the GPUs' time in use, below which more GPUs do not make requests faster


class PlanError(PaellaError):
    """No plan is possible; the message says what is missing."""


def _by_name(rule: Rule) -> Rule:
    def fits(given: Any) -> bool:
        return isinstance(given, Mapping) and all(isinstance(k, str) and rule.fits(v) for k, v in given.items())

    return Rule(fits, f"a dict by the models' names, each {rule.wanted}")


_GPUS = integer(1, MOST_GPUS)
_SPEED = number(1e-6, 1e6)
_GOAL = number(0, 1, above=True)
_OF_FLEET = {
    "rates": _by_name(number(0, 1e9)),
    "gpus": _GPUS,
    "memory_gb": _by_name(number(0)),
    "gpu_gb": number(0, above=True, infinite=True),
    "speeds": Rule(
        lambda given: isinstance(given, list | tuple) and bool(given) and all(map(_SPEED.fits, given)),
        f"a list, {_SPEED.wanted} each",
    ),
    "sigma": number(0, MOST_SIGMA),
}


_OF_PLAN = {
    "current": or_none(PLACEMENT),
    "seed": SEED,
    "sure": number(0, above=True, infinite=True),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """The GPUs and the load on them. Rates are in requests per second; memory is that of a model's weights."""

    profiles: Sequence[ModelProfile]
    rates: Mapping[str, float]
    gpus: int
    memory_gb: Mapping[str, float] = field(default_factory=dict)
    gpu_gb: float = math.inf
    speeds: Sequence[float] = (1.0,)
    sigma: float = 1.5  # spread of the gaps between arrivals

    def __post_init__(self) -> None:
        check_values(self, _OF_FLEET, PlanError)
        object.__setattr__(self, "profiles", checked_models(self.profiles, "profiles"))
        names = [each.name for each in self.profiles]
        for what in (self.rates, self.memory_gb):
            if unknown := sorted(set(what) - set(names)):
                said = f"there is no profile of {', '.join(unknown)}"
                raise PlanError(f"{said}: add it, or choose models from {', '.join(names)}", field="profiles")
        if not any(self.rates.values()):
            said = "give each model's rate in requests per second, at least one of them above zero"
            raise PlanError(said, field="rates", given=self.rates)
        for name in self.rates:
            if self.gb(name) > self.gpu_gb:
                said = f"model {name!r} takes {self.gb(name):g} GB, and a GPU has {self.gpu_gb:g}"
                raise PlanError(f"{said}: it fits on no GPU", field="memory_gb", given=self.gb(name), limit=self.gpu_gb)
        if sum(map(self.gb, self.rates)) > self.gpus * self.gpu_gb:
            said = "the models together need more memory than all GPUs have: add GPUs or remove models"
            raise PlanError(said, field="memory_gb", limit=self.gpus * self.gpu_gb)

    def gb(self, name: str) -> float:
        return self.memory_gb.get(name, 0.0)

    def work(self, name: str) -> float:
        """GPU time per second that the model needs, running alone in its largest batches."""
        profile = next(each for each in self.profiles if each.name == name)
        batch = max(profile.batch)
        return self.rates[name] * profile.alone_ns(batch) / batch * 1e-9

    def speed(self, gpu: int) -> float:
        return float(self.speeds[gpu % len(self.speeds)])


@dataclass(frozen=True, slots=True)
class Plan:
    """`placement[gpu]` lists the models there; `attainment` is the expected share of requests within target."""

    placement: Placement
    attainment: float
    by_model: dict[str, float]
    p99_ms: float

    def replicas(self, model: str) -> int:
        return sum(model in each for each in self.placement)

    def table(self) -> Any:
        from rich.table import Table

        table = Table(title=f"{len(self.placement)} GPUs, {self.attainment:.1%} expected within target")
        for column in ("model", "replicas", "GPUs", "within target"):
            table.add_column(column)
        for name, part in self.by_model.items():
            there = [str(gpu) for gpu, each in enumerate(self.placement) if name in each]
            table.add_row(name, str(len(there)), ", ".join(there), f"{part:.1%}")
        return table


def plan(fleet: Fleet, current: Placement | None = None, seed: int = 0, sure: float = SURE) -> Plan:
    """The best of several placements in simulated time; the `current` one is kept unless another is clearly better.

    `sure` is the allowed standard error of the expected attainment.

    >>> from paellapy.scheduler.sim.recorded_profiles import mix_profiles
    >>> two = mix_profiles(names=["resnet18", "resnet50"])
    >>> found = plan(Fleet(two, {"resnet18": 500, "resnet50": 100}, gpus=2, memory_gb={"resnet50": 9}, gpu_gb=10))
    >>> found.attainment > 0.9
    True
    """
    check_values({"current": current, "seed": seed, "sure": sure}, _OF_PLAN, PlanError)
    best = _best_at_a_glance(fleet, seed).placement
    if current is not None and len(current) == fleet.gpus and _holds_all(fleet, current):
        kept, other = (_glance(fleet, each, seed, times=4).attainment for each in (current, best))
        if other - kept < ENOUGH:
            best = current
    return expect(fleet, best, seed, sure)


def _glance(fleet: Fleet, placement: Placement, seed: int, times: int = 1) -> Plan:
    """A short simulation. All placements get the same requests, so that few requests tell which is better."""
    return expect(fleet, placement, seed, math.inf, times)


def _best_at_a_glance(fleet: Fleet, seed: int = 0) -> Plan:
    candidates = dict.fromkeys(pack(fleet, spread) for spread in (1.0, 1.5, 3.0, math.inf))
    found = [_glance(fleet, each, seed) for each in candidates]
    return max(found, key=lambda each: (round(each.attainment, 3), -sum(map(len, each.placement))))


def _holds_all(fleet: Fleet, placement: Placement) -> bool:
    there = {name for each in placement for name in each}
    fits = all(sum(map(fleet.gb, each)) <= fleet.gpu_gb for each in placement)
    return set(fleet.rates) <= there and fits


def pack(fleet: Fleet, spread: float) -> Placement:
    """Places every model once, then adds replicas of the busiest model per replica on the least loaded GPU.

    `spread` adds replicas beyond the need of the load; infinite: as many as fit. Heavy models come first, while there
    is memory for them.
    """
    n, names = fleet.gpus, sorted(fleet.rates, key=lambda name: (-fleet.gb(name), -fleet.work(name), name))
    models: list[list[str]] = [[] for _ in range(n)]
    free = [fleet.gpu_gb] * n
    load = np.zeros(n)
    count = dict.fromkeys(names, 0)
    total = sum(map(fleet.work, names)) or 1.0
    wanted = {name: min(n, max(1, math.ceil(min(spread * n * fleet.work(name) / total, n)))) for name in names}

    def place(name: str) -> bool:
        rooms = [gpu for gpu in range(n) if name not in models[gpu] and free[gpu] >= fleet.gb(name)]
        if not rooms:
            return False
        gpu = min(rooms, key=lambda each: (load[each] / fleet.speed(each), -fleet.speed(each), each))
        models[gpu].append(name)
        free[gpu] -= fleet.gb(name)
        count[name] += 1
        load[gpu] += fleet.work(name) / wanted[name]
        return True

    for name in names:
        if not place(name):
            said = f"no GPU has {fleet.gb(name):g} GB left for model {name!r}: add GPUs or memory"
            raise PlanError(said, field="memory_gb", given=fleet.gb(name))
    left = set(names)
    while left:
        name = max(sorted(left), key=lambda each: fleet.work(each) / count[each])
        if count[name] >= wanted[name] or not place(name):
            left.discard(name)
    return tuple(tuple(sorted(each)) for each in models)


def expect(fleet: Fleet, placement: Placement, seed: int = 0, sure: float = SURE, times: int = 1) -> Plan:
    """The result of a placement, in simulated time.

    Near its capacity a fleet is in time for most of one second and for little of the next, and the queues that a burst
    leaves last long. So simulations get four times as long, until the parts of one agree on the attainment.
    """
    rate = sum(fleet.rates.values())
    profiles = [each for each in fleet.profiles if each.name in fleet.rates]
    requests = times * REQUESTS
    while True:
        workload = Lognormal(rate, dict(fleet.rates), duration=max(requests / rate, 0.2), sigma=fleet.sigma)
        found = simulate_cluster(
            profiles, workload, gpus=len(placement), placement=placement, speeds=fleet.speeds, seed=seed
        )
        if requests >= MOST_REQUESTS or found.attainment_error() <= sure:
            break
        requests = min(4 * requests, MOST_REQUESTS)
    by_model = {each.name: found.attainment(each.name) for each in profiles}
    return Plan(placement, found.attainment(), by_model, found.summary()["p99_ms"])


def enough_gpus(fleet: Fleet, goal: float) -> Plan:
    """The plan with the fewest GPUs that meets the goal, starting from the fleet's number."""

    check_values({"goal": goal}, {"goal": _GOAL}, PlanError)
    most = _most_useful(fleet, goal)

    def is_met(gpus: int) -> bool:
        try:
            return _best_at_a_glance(replace(fleet, gpus=gpus)).attainment >= goal
        except PlanError:  # not enough memory
            return False

    low = high = fleet.gpus
    while not is_met(high):
        if high >= most:
            said = f"{high} GPUs do not reach {goal:.0%}: a model may take longer than its target"
            raise PlanError(said, field="goal", given=goal, limit=high)
        low, high = high + 1, min(high * 2, most)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_met(middle) else (middle + 1, high)
    while (found := plan(replace(fleet, gpus=high))).attainment < goal:  # a short simulation may be too optimistic
        if high >= most:
            raise PlanError(f"{high} GPUs do not reach {goal:.0%}", field="goal", given=goal, limit=high)
        high += 1
    return found


def _most_useful(fleet: Fleet, goal: float) -> int:
    """The number of GPUs beyond which more would stay idle; PlanError if some requests are late on an idle GPU and the
    others are too few for the goal.
    """
    best = max(fleet.speeds)
    times = {each.name: (each.alone_ns() / best, each.target_ns) for each in fleet.profiles}
    late = [name for name in fleet.rates if times[name][0] > times[name][1]]
    reachable = 1.0 - sum(map(fleet.rates.__getitem__, late)) / sum(fleet.rates.values())
    if reachable < goal:
        name = late[0]
        ms, target_ms = (each / 1e6 for each in times[name])
        raise PlanError(
            f"goal={goal:g}: at most {reachable:.1%} can be reached, because {name} takes {ms:.3g} ms alone on a GPU "
            f"and has a target of {target_ms:.3g} ms: raise the target, or lower the goal",
            field="goal", given=goal, limit=reachable, model=name,
        )  # fmt: skip
    enough = max(sum(map(fleet.work, fleet.rates)) / min(fleet.speeds) / LEAST_USE, 2 * len(fleet.rates), fleet.gpus)
    memory = sum(map(fleet.gb, fleet.rates)) / fleet.gpu_gb
    return min(MOST_GPUS, math.ceil(enough + 2 * memory))


@dataclass(frozen=True, slots=True)
class Group:
    """Engines with the same models: a deployment of its own."""

    name: str
    models: tuple[str, ...]
    engines: int


def regroup(groups: Sequence[Group], placement: Placement) -> list[Group]:
    """The groups of a placement. Each takes the name of the group with which it has most models in common, so that few
    engines start anew.

    >>> regroup([Group("engines-0", ("a", "b"), 3)], (("a",), ("b",), ("b",)))
    [Group(name='engines-0', models=('b',), engines=2), Group(name='engines-1', models=('a',), engines=1)]
    """
    left = {each.name: set(each.models) for each in groups}
    free = (f"engines-{k}" for k in itertools.count() if f"engines-{k}" not in {each.name for each in groups})
    found = []
    for models, engines in Counter(placement).most_common():
        best = max(left, key=lambda name: len(left[name] & set(models)), default=None)
        shares = best is not None and left[best] & set(models)
        name = best if best is not None and shares else next(free)
        left.pop(name, None)
        found.append(Group(name, models, engines))
    return found


def steps(old: Sequence[Group], new: Sequence[Group]) -> list[list[Group]]:
    """Changes in their order, so that every model is loaded at its new place before it leaves the old one: models are
    loaded beside the others, engines start and end, and models are unloaded.
    """
    had, wanted = ({each.name: each.models for each in groups} for groups in (old, new))

    def with_both(each: Group) -> Group:
        models = {*had.get(each.name, ()), *wanted.get(each.name, ())} if each.name in had else {*each.models}
        return replace(each, models=tuple(sorted(models)))

    found = [[with_both(each) for each in old], [with_both(each) for each in new], list(new)]
    return [now for before, now in itertools.pairwise([list(old), *found]) if now != before] or [list(new)]


def load_fleet(path: Path) -> tuple[Fleet, float | None]:
    """Reads a fleet from a TOML file. Also returns the goal if the file asks for the number of GPUs.

    profiles = "profiles.json"   # or "mix"
    gpus = 4                     # or "auto" with goal = 0.99
    gpu_gb = 80
    [models.resnet50]
    rate = 1200
    memory_gb = 0.2
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise PlanError(f"{path} cannot be read: {e}", field="file", given=path) from None
    models = tree.get("models")
    if not isinstance(models, dict) or not models:
        raise PlanError(f"{path} names no models: add a table [models.NAME] with a rate for each", field="models")
    _check_keys(tree, ("profiles", "gpus", "goal", "gpu_gb", "speeds", "models"), f"{path}")
    for name, each in models.items():
        if not isinstance(each, dict) or "rate" not in each:
            said = f"{path}: [models.{name}] has no rate: give its requests a second, as in rate = 100"
            raise PlanError(said, field="rate", model=name)
        _check_keys(each, ("rate", "memory_gb"), f"{path}: [models.{name}]")
    given = str(tree.get("profiles", "mix"))
    if given != "mix" and not (path.parent / given).is_file():
        said = f"{path}: there are no profiles {given!r}: give mix, or a file that pp.save_profiles has written"
        raise PlanError(said, field="profiles", given=given)
    profiles = mix_profiles() if given == "mix" else load_profiles(path.parent / given)
    goal, gpus = tree.get("goal", 0.99), tree.get("gpus", "auto")
    try:
        check_values({"goal": goal}, {"goal": _GOAL}, PlanError)
        fleet = Fleet(
            profiles,
            {name: each["rate"] for name, each in models.items()},
            MOST_GPUS if gpus == "auto" else gpus,
            {name: each.get("memory_gb", 0.0) for name, each in models.items()},
            tree.get("gpu_gb", math.inf),
            tree.get("speeds", (1.0,)),
        )
    except PlanError as e:
        raise PlanError(f"{path}: {e}", **e.__dict__) from None
    if gpus != "auto":
        return fleet, None
    return replace(fleet, gpus=max(1, math.ceil(sum(map(fleet.gb, models)) / fleet.gpu_gb))), float(goal)


def _check_keys(given: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise PlanError(f"{where} has no setting {name!r}: {hint}The settings are {', '.join(known)}", field=name)
