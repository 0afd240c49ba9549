"""`pp.simulate`: runs models, or their recorded profiles, under a workload and a policy, in simulated time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paellapy.instrument.errors import ArgumentError
from paellapy.scheduler.core.profiles import ModelProfile, load_profiles
from paellapy.scheduler.core.values import TRUE_OR_FALSE, check_values, listed
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.pipelines import Pipeline
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.profile import model_profile
from paellapy.scheduler.policies.policy import Policy
from paellapy.scheduler.sim.block_model import OwnKernels
from paellapy.scheduler.sim.chats import Chats, ChatTrace, LanguageProfile, language_profile
from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
from paellapy.scheduler.sim.results import Results
from paellapy.scheduler.sim.simulate import simulate as simulate_profiles
from paellapy.scheduler.sim.simulate import simulated_part
from paellapy.scheduler.sim.workload import Lognormal, Poisson, TraceWorkload, Workload

Simulated = Model | ModelProfile | LanguageProfile | Pipeline
_OF_CHATS: dict[str, type] = {  # numbers in the text of `--chats`
    **dict.fromkeys(("rate", "sigma"), float), **dict.fromkeys(("clients", "prompt", "answer"), int),
}  # fmt: skip
_OF_MODEL: dict[str, type] = {
    **dict.fromkeys(("ttft_ms", "tbt_ms", "kv_gb"), float), **dict.fromkeys(("context", "sequences", "chunk"), int),
}  # fmt: skip


def simulate(
    models: Sequence[Simulated] | Simulated,
    workload: Workload,
    policy: str | Policy = "paella",
    device: str = "virtual:h200",
    *,
    trace: bool = False,
    **options: Any,
) -> Results:
    """Runs the workload on the scheduler's own core with a virtual clock: work is timed, not computed.

    Models are first captured and profiled on the virtual device. `trace=True` places every block of every kernel and
    gives the result a `trace` like that of `engine.trace()`.

    `options`: `fidelity="segments"` (fast) or `"blocks"` (places every block); `seed`; `active` and `max_in_flight`,
    which override the policy's; `demand`, the total demand in GPUs up to which jobs are admitted; `queues`, the number
    of hardware queues; `admission=True`, to refuse requests that would be late; `sm_partitions`; `tenants`, by name;
    `memory_bytes` and `pcie_gbps`, for weights that come and go; `host_launch_ns`, the host's time for a launch;
    `tuning`. `scheduler/sim/simulate.py` describes each.

    >>> from paellapy import Poisson, simulate
    >>> from paellapy.scheduler.sim.recorded_profiles import MIX, mix_profiles
    >>> simulate(mix_profiles(), Poisson(3000, MIX, duration=0.1), "srpt").model().completed > 0
    True
    """
    models = _listed(models)
    check_values({"trace": trace}, {"trace": TRUE_OR_FALSE})
    if trace:
        return _traced(models, workload, policy, device, **options)
    languages = [m for m in models if isinstance(m, LanguageProfile)]
    others = [m for m in models if not isinstance(m, LanguageProfile)]
    profiles = [m for m in others if isinstance(m, ModelProfile)]
    if len(profiles) != len(others):
        profiles = profiles_of(others, device)
    return simulate_profiles([*profiles, *languages], workload, policy, device, **options)


def _listed(models: Any) -> list[Simulated]:
    """Models or profiles as a list; a single one becomes a list of one."""
    single = isinstance(models, Simulated | str) or not isinstance(models, Iterable)
    found = [models] if single else listed(models)
    for each in found:
        if not isinstance(each, Simulated):
            raise ArgumentError(
                f"simulate cannot run a {type(each).__name__}: give a pp.Model, or a profile from "
                "engine.model_profile(name) or pp.load_profiles",
                field="models", given=each,
            )  # fmt: skip
    return found


def _traced(
    models: Sequence[Simulated], workload: Workload, policy: str | Policy, device: str, **options: Any
) -> Results:
    own = [m for m in models if isinstance(m, Model)]
    if len(own) != len(models):
        raise ArgumentError("trace=True needs the models themselves, since profiles have no kernels", field="trace")
    if options.setdefault("fidelity", "blocks") != "blocks":
        raise ArgumentError("trace=True always places every block: leave out fidelity", field="fidelity")
    with Engine(device) as engine:
        for model in own:
            engine.load(model)
        profiles = [_profile(engine, model) for model in own]
        kernels = OwnKernels.of(engine, [model.name for model in own])
        return simulate_profiles(profiles, workload, policy, device, kernels=kernels, **options)


def _profile(engine: Engine, model: Model) -> ModelProfile:
    instances = model.instances or engine.max_active or engine.tuning.default_active
    return model_profile(model, engine.profile(model.name), instances, engine.limits.requests)


def profiles_of(
    models: Sequence[Model | ModelProfile | Pipeline], device: str = "virtual:h200"
) -> list[ModelProfile]:
    """The profiles of models; each model is loaded once on the device."""
    found: list[ModelProfile] = []
    with Engine(device) as engine:
        for model in models:
            if isinstance(model, ModelProfile):
                found.append(model)
                continue
            engine.load(model)
            if isinstance(model, Pipeline):
                found.append(model.profile({each.name: _profile(engine, each) for each in model.models}))
            else:
                found.append(_profile(engine, model))
            engine.unload(model.name)
    return found


def named_models(which: str, batch: Sequence[int] | None, device: str) -> tuple[list[ModelProfile], dict[str, float]]:
    """Profiles and shares of "demo" (the demo models), "mix" (Paella's eight CNNs as measured on an H200), or a file.

    `batch` gives the batch sizes, by default 1; a file has its own.
    """
    sizes = (1,) if batch is None else tuple(batch)
    if which == "mix":
        return mix_profiles(sizes), dict(MIX)
    if which == "demo":
        from paellapy import demo

        models = [demo.load(name, batch=sizes, target_ms=target_ms) for name, target_ms in demo.TARGETS_MS.items()]
        return profiles_of(models, device), dict.fromkeys(demo.TARGETS_MS, 1.0)
    path = Path(which)
    if not path.is_file():
        said = f"there are no models {which!r}: give demo, mix, or a JSON file of profiles"
        raise ArgumentError(said, field="models", given=which)
    profiles = load_profiles(path)
    if batch is not None:
        raise ArgumentError(f"{which} has the batch sizes of its models: leave out --batch", field="batch")
    return profiles, dict.fromkeys((p.name for p in profiles), 1.0)


def chats_of(text: str, seconds: float) -> tuple[LanguageProfile, Workload]:
    """A language model and its chats from a text such as "8B rate=4 prompt=500 answer=100 tbt_ms=20". `trace=` names a
    CSV file in place of `rate` or `clients`.
    """
    shape, *options = text.split() or [""]
    given = dict(each.partition("=")[::2] for each in options)
    trace, chats, model = given.pop("trace", None), dict[str, Any](), dict[str, Any]()
    for name, value in given.items():
        for kinds, into in ((_OF_CHATS, chats), (_OF_MODEL, model)):
            if name in kinds:
                try:
                    into[name] = kinds[name](value)
                except ValueError:
                    raise ArgumentError(f"{name}={value} of chats {text!r} is no number", field=name,
                                        given=value) from None  # fmt: skip
    unknown = given.keys() - chats.keys() - model.keys()
    if unknown or (trace and chats):
        name = min(unknown or chats)
        known = ", ".join(["trace", *_OF_CHATS, *_OF_MODEL])
        raise ArgumentError(f"chats {text!r} cannot have {name!r}: give some of {known}; a trace has rates and lengths",
                            field=name, given=text)  # fmt: skip
    profile = language_profile(shape, **model)
    load = ChatTrace.from_csv(profile.name, trace) if trace else Chats(profile.name, **chats, duration=seconds)
    return profile, load


def caveat(which: str, device: str) -> str | None:
    """A note on how to read the figures when these models are simulated on this device."""
    if which != "mix" or simulated_part(device) == simulated_part("virtual:h200"):
        return None
    return (
        f"the mix was measured on an H200: on {device} its times alone and its targets are still an H200's, and the "
        "device only changes how much work runs at a time"
    )


def arrivals(kind: str, rate: float, shares: dict[str, float], seconds: float, sigma: float) -> Workload:
    """A workload by name, or from a CSV file of times and models."""
    if kind == "poisson":
        return Poisson(rate, shares, duration=seconds)
    if kind == "lognormal":
        return Lognormal(rate, shares, duration=seconds, sigma=sigma)
    if not Path(kind).is_file():
        said = f"no arrivals {kind!r}: give poisson, lognormal, or a CSV file with columns t and model"
        raise ArgumentError(said, field="arrivals", given=kind)
    return TraceWorkload.from_csv(Path(kind))
