"""Capture on the virtual GPU: launches are recorded with their arrays, and the record of one lane serves the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from paellapy.instrument.device.virtual import VirtualDevice
from paellapy.scheduler.backends.virtual_memory import VirtualMemory
from paellapy.scheduler.models.capture import call_model, capturing
from paellapy.scheduler.models.guarded_array import GuardedArray
from paellapy.scheduler.models.lane_memory import Lane
from paellapy.scheduler.models.program import Cuts, Marks, Program
from paellapy.scheduler.models.recording import Recording
from paellapy.scheduler.models.tensors import Arrays


def record(device: VirtualDevice, lane: Lane, weights: Arrays, batch: int, cuts: Cuts, marks: Marks) -> Program:
    """Runs the model's function once and records its launches, between the copies of inputs and outputs."""
    model = lane.model
    recording = Recording(lane, cuts)
    inputs, outputs = lane.device_inputs(batch), lane.device_outputs(batch)
    for name, array in inputs.items():
        recording.copy("h2d", array.view(np.ndarray), lane.inputs[name][:batch])
    with capturing(device, recording):
        call_model(model, _guarded(weights), _guarded(inputs), _guarded(outputs), batch, "while it was captured")
    for name, array in outputs.items():
        recording.copy("d2h", lane.outputs[name][:batch], array.view(np.ndarray))
    nodes = [item.node for item in recording.items]
    return Program(model, lane.index, batch, nodes, True, recording.items, marks=marks)


def moved(program: Program, of: Lane, lane: Lane, marks: Marks) -> Program | None:
    """The recorded launches with the other lane's arrays, if all can be found. Marks do not change the recording."""
    here, there = of.memory, lane.memory
    assert isinstance(here, VirtualMemory)
    assert isinstance(there, VirtualMemory)
    if any(item.compute is not None for item in program.body):  # the arrays that it computes on cannot be seen
        return None

    def move(value: Any) -> Any:
        return here.moved(value, there)

    try:
        body = program.body if here is there else [item.moved(move) for item in program.body]
    except TypeError:
        return None
    return program.for_lane(lane.index, body, marks)


def _guarded(arrays: Arrays) -> Arrays:
    return {name: a.view(GuardedArray) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
