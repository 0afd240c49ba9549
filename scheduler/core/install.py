"""Models in the core's tables: rows that are filled from a profile, opened, and freed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import TOGETHER, ModelProfile, SegmentProfile, set_params, usual_demand
from paellapy.scheduler.core.residency import KEEP
from paellapy.scheduler.core.rings import Message, post
from paellapy.scheduler.core.state import State


def estimate(state: State, program: Sequence[SegmentProfile]) -> float:
    """The part of the GPU that one run keeps busy: its fullest resource, segment by segment."""
    gpu = state.gpu[0]
    capacity = [gpu[f"capacity_{each}"] or np.inf for each in ("warps", "registers", "shared_bytes", "issue")]
    total = used = 0.0
    for each in program:
        needs = (each.warps, each.registers, each.shared_bytes, each.kernels / each.time_ns * 1e9)
        total += each.time_ns
        used += each.time_ns * max(need / most for need, most in zip(needs, capacity, strict=True))
    return min(max(used / total, 0.01), 1.0)


def _check_limits(state: State, profile: ModelProfile) -> None:
    _, sizes, segments = state.segment.shape
    rows = int(((state.model["state"] == codes.ABSENT) & (state.model["n_instances"] == 0)).sum())
    instances = int((state.instance["model"] == codes.NONE).sum())
    for field, given, most in (
        ("sizes", len(profile.sizes), sizes),
        ("batch", max(profile.batch), state.slot.shape[1]),
        ("segments", max(len(each) for each in profile.sizes.values()), segments),
        ("instances_per_model", profile.instances, state.model_instance.shape[1]),
        ("instances", profile.instances, instances),
        ("models", 1, rows),
    ):
        if given > most:
            raise ProfileError(
                f"{profile.name}: {field}={given}, but the tables have room for {most}: give larger Limits",
                model=profile.name, field=field, given=given, limit=most,
            )  # fmt: skip


def install(state: State, profile: ModelProfile, batch: Sequence[int] = ()) -> tuple[int, list[int]]:
    """Fills a free model row and free instances from a profile; returns their numbers. `open_model` then lets requests
    in. `batch` also names sizes that `install_size` adds later; the smallest and the largest must be in the profile.

    Completion words are the state's own. A backend that writes to other words sets `launch` and `whole` of the
    instances, their inputs, and `n_inputs`, before it opens the model.
    """
    _check_limits(state, profile)
    rows = np.flatnonzero((state.model["state"] == codes.ABSENT) & (state.model["n_instances"] == 0))
    instances = np.flatnonzero(state.instance["model"] == codes.NONE)[: profile.instances]
    m = int(rows[0])
    row = state.model[m]
    row["priority"], row["share"], row["target_ns"] = profile.priority, profile.share, profile.target_ns
    sizes = sorted({*profile.batch, *batch})
    row["queue_limit"], row["n_sizes"], row["n_instances"] = profile.queue_limit, len(sizes), len(instances)
    row["n_inputs"] = 0
    row["generation"] += 1
    state.outcome[m] = 0
    state.model["trial_ns"][m] = 0.0
    set_params(state, m, profile.params)
    for k, each in enumerate(sizes):
        state.size[m, k] = (each, 0, codes.LATER, 0.0, 0.0)
        if each in profile.sizes:
            install_size(state, m, profile, each)
    _install_weights(state, m, profile, int(state.tuning["chunk_bytes"][0]))
    state.model_instance[m, : len(instances)] = instances
    state.instance["model"][instances] = m
    n_words = state.segment.shape[2] + 1
    words = state.word.ctypes.data + 8 * (np.arange(n_words) + n_words * instances[:, None])
    state.launch["word"][instances] = words[:, None, :-1]
    state.whole["word"][instances] = words[:, -1:]
    state.instance_partition[instances] = codes.NONE
    state.instance["arena"][instances] = codes.NONE
    if state.core["partitions"][0]:
        state.confined[instances] = 0
    state.word[instances] = 0
    return m, [int(instance) for instance in instances]


def install_size(state: State, m: int, profile: ModelProfile, batch: int) -> None:
    """Fills the rows of one batch size of a model. If the model is open, call it between two steps of the core, and
    after its handles are written.
    """
    program, chunk = profile.sizes[batch], int(state.tuning["chunk_bytes"][0])
    k = int(np.flatnonzero(state.size["batch"][m, : state.model["n_sizes"][m]] == batch)[0])
    times = np.array([each.time_ns for each in program])
    seen = profile.demand.get(batch)
    demand = usual_demand(seen, profile.together.get(batch, TOGETHER)) if seen else estimate(state, program)
    size, segment = state.size[m, k], state.segment[m, k, : len(program)]
    segment["tail_ns"] = times[::-1].cumsum()[::-1]
    for name in ("time_ns", "blocks", "warps", "registers", "shared_bytes", "kernels"):
        segment[name] = [getattr(each, name) for each in program]
    segment["compute"] = [each.compute for each in program]
    capacity = state.gpu["capacity_memory"][0] or np.inf
    segment["memory"] = [each.memory or min(each.bytes / each.time_ns / capacity, 1.0) for each in program]
    segment["occupancy"] = [_occupancy(state, each) for each in program]
    segment["copy_bytes"] = 0.0
    segment["copy_bytes"][0] = batch * profile.input_bytes
    segment["chunks"] = -(-np.array(profile.needs.get(batch, (profile.weight_bytes,) * len(program))) // chunk)
    size["total_ns"], size["demand"], size["segments"] = times.sum(), demand, len(program)


def _occupancy(state: State, segment: SegmentProfile) -> float:
    """The part of the GPU's blocks, warps, registers or shared memory that a segment holds at once: the largest."""
    gpu = state.gpu[0]
    names = ("blocks", "warps", "registers", "shared_bytes")
    return float(max(getattr(segment, name) / (gpu[f"capacity_{name}"] or np.inf) for name in names))


def _install_weights(state: State, model: int, profile: ModelProfile, chunk: int) -> None:
    state.weights[model] = np.zeros((), state.weights.dtype)
    weights = state.weights[model]
    weights["location"], weights["chunk_bytes"] = codes.RESIDENT, chunk
    if state.residency["managed"][0]:  # until the installer says more, the model has no weights that could leave
        weights["keep"] = codes.PINNED
        state.segment["chunks"][model] = 0
        return
    weights["bytes"], weights["keep"] = profile.weight_bytes, KEEP[profile.resident]
    weights["chunks"] = -(-profile.weight_bytes // chunk)


def remove(state: State, model: int) -> None:
    """Frees the rows of a model: only after its MODEL_CLOSED, or before it was opened.

    Where weights come and go, call it between two steps of the core.
    """
    if state.model["state"][model] != codes.ABSENT:
        raise ProfileError(
            f"model row {model} is in use: post CLOSE_MODEL and wait for MODEL_CLOSED", field="state", given=model
        )
    weights = state.weights[model]
    if state.residency["managed"][0]:
        if weights["location"] in (codes.LOADING, codes.EVICTING):
            raise ProfileError(
                f"the weights of model row {model} are moving: wait until the move is done",
                field="location",
                given=model,
            )
        state.residency["held_bytes"][0] -= weights["bytes"] if weights["location"] == codes.RESIDENT else 0
        state.residency["pending"][0] = 1
    state.weights[model] = np.zeros((), state.weights.dtype)
    state.instance["model"][state.model_instance[model, : state.model["n_instances"][model]]] = codes.NONE
    state.model["n_instances"][model] = 0


def post_message(state: State, kind: int, model: int = 0, *, request: int = 0, serial: int = 0, tag: int = 0) -> None:
    """Posts a message other than SUBMIT: CANCEL, OPEN_MODEL, CLOSE_MODEL, DRAIN, or FAIL (error code as `tag`)."""
    message = Message(kind=kind, request=request, serial=serial, tag=tag, model=model)
    if not post(state, 0, message.address):
        raise ProfileError("the submission ring is full: step the core, then try again", field="submit")


def open_model(state: State, model: int) -> None:
    post_message(state, codes.OPEN_MODEL, model)
