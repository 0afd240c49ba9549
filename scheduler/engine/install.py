"""Writes a loaded model and the windows of SMs into the core's tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paellapy.scheduler.backends.launches import LoadedModel, write_handles
from paellapy.scheduler.core import install as core_install
from paellapy.scheduler.core.state import State
from paellapy.scheduler.models.profile import model_profile


def install(state: State, loaded: LoadedModel, pool: int) -> None:
    """Fills the model's rows, so that it only remains to open it. Its launches use the streams of this pool."""
    model = loaded.model
    profile = model_profile(model, loaded.profiles, len(loaded.lanes), len(state.request))
    loaded.row, rows = core_install.install(state, profile, model.batch)
    loaded.generation = int(state.model["generation"][loaded.row])
    loaded.lane_of = dict(zip(rows, loaded.lanes, strict=True))
    if model.stateful:  # only one of its lanes runs at a time, as if the lanes shared memory
        state.lane["berth"][rows] = rows[0]
    state.model["n_inputs"][loaded.row] = len(model.inputs)
    for k, spec in enumerate(model.inputs.values()):
        state.input_bytes[loaded.row, k] = spec.nbytes
    for lane, row in zip(loaded.lanes, loaded.lane_rows, strict=True):
        lane.words[:] = lane.draining[:] = 0
        state.lane["pool"][row] = pool
        state.lane_window[row, : len(lane.windows)] = lane.windows
        for k, array in enumerate(lane.inputs.values()):
            state.input_address[row, k] = array.ctypes.data
    for each in loaded.profiles:
        _write_launches(state, loaded, each.batch)


def install_size(state: State, loaded: LoadedModel, batch: int) -> None:
    """Adds a batch size to a model that serves; call it between two steps of the core."""
    _write_launches(state, loaded, batch)
    profile = model_profile(loaded.model, loaded.profiles, len(loaded.lanes), len(state.request))
    core_install.install_size(state, loaded.row, profile, batch)


def _write_launches(state: State, loaded: LoadedModel, batch: int) -> None:
    """Writes the launches of one batch size, and the words by which the core learns of their end."""
    size = loaded.model.batch.index(batch)
    at = [each.batch for each in loaded.profiles].index(batch)
    for lane, row, made in zip(loaded.lanes, loaded.lane_rows, loaded.launches, strict=True):
        launches, words, draining = made[at], lane.words, lane.draining
        segments = state.launch[row, size, : len(launches.handles)]
        for i in range(len(launches.handles)):
            segments["word"][i] = words.ctypes.data + 8 * i
            segments["draining"][i] = draining.ctypes.data + 8 * i if i in launches.notified else 0
        state.whole["word"][row, size] = words[-1:].ctypes.data
        state.whole["draining"][row, size] = 0
        write_handles(state, row, size, launches)


def install_windows(state: State, windows: Sequence[Collection[int]]) -> None:
    """Writes the SMs of each window. Where two windows share SMs, a job in one also fills the other."""
    n = state.core["windows"][0] = len(windows)
    state.overlap[:n, :n] = [[len(set(a) & set(b)) for b in windows] for a in windows]
