"""A step of a background job as a model: PyTorch code that changes its own state, run again and again.

On a GPU the step is captured as PyTorch captures whole steps, with its own memory and random numbers. On the virtual
GPU the job's own thread computes each step on the CPU, while the SM model simulates its duration.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Device
from paellapy.scheduler.models.capture import InstanceCapture
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.sync_guard import refusing_to_wait
from paellapy.scheduler.models.tensors import Arrays, TensorSpec
from paellapy.scheduler.models.torch_capture import Draws, TorchPool
from paellapy.scheduler.models.torch_cpu import Operation, count_operations, record_or_run
from paellapy.scheduler.models.torch_state import (
    GROUPS,
    Kept,
    check_capturable,
    check_complete,
    find_unlisted,
    generators_of,
    settings_of,
    tensors_of,
    wrong_job,
)
from paellapy.scheduler.models.torch_tensors import as_array, as_tensor, by_name, needs_torch, numpy_dtype, total_bytes

INSTANCES = 2  # while one runs, the data of the next step are written to the other
_NUMBER_BYTES = 8  # memory up to this size is a single number, such as a count of steps, and may be on the host
_NOTHING = {"nothing": TensorSpec((1,), np.uint8)}  # instances need at least one input and one output


def _spec(torch: Any, tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape) or (1,), numpy_dtype(torch, tensor.dtype))


class Batch:
    """The data of one step: tensors by name, and the form in which the step takes them."""

    def __init__(self, torch: Any, name: str, given: Any) -> None:
        self._torch, self._named = torch, isinstance(given, Mapping)
        self.tensors = {}
        for key, value in by_name(given, "data").items():
            made = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
            if not isinstance(made, torch.Tensor):
                raise wrong_job(
                    name, key, value, f"its data have a {type(value).__name__} as {key!r}: give tensors or arrays, "
                    "alone, in a tuple or in a dict"
                )  # fmt: skip
            self.tensors[key] = made

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {key: _spec(self._torch, t) for key, t in self.tensors.items()}

    def write(self, name: str, slots: Mapping[str, NDArray[Any]]) -> None:
        """Writes the tensors into a slot's inputs; ModelError if they do not fit."""
        if slots.keys() != self.tensors.keys():
            raise wrong_job(
                name, "data", list(self.tensors), f"this batch has {', '.join(self.tensors)}, but the first had "
                f"{', '.join(slots)}: all batches need the same names"
            )  # fmt: skip
        for key, slot in slots.items():
            tensor = self.tensors[key]
            if (tuple(tensor.shape) or (1,)) != slot.shape or numpy_dtype(self._torch, tensor.dtype) != slot.dtype:
                raise wrong_job(
                    name, key, tuple(tensor.shape), f"{key!r} is {tuple(tensor.shape)} of {tensor.dtype}, but the "
                    f"first batch had {slot.shape} of {slot.dtype.name}: all batches need the same shape and type (a "
                    "data loader's drop_last=True, or skip_ragged=True of the job, leaves shorter ones out)"
                )  # fmt: skip
            as_tensor(self._torch, slot).copy_(tensor.reshape(slot.shape))

    def with_tensors(self, tensors: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a step, with other tensors of the same names."""
        given = {key: t.reshape(self.tensors[key].shape) for key, t in tensors.items()}
        return ([], given) if self._named else (list(given.values()), {})


def check_job(name: str, share: float, params: Mapping[str, float] | None) -> None:
    """Raises ModelError for values that no model can have."""
    Model(name, _nothing, inputs=_NOTHING, outputs=_NOTHING, batch=(1,), share=share, params=params)


def results_of(torch: Any, name: str, returned: Any) -> dict[str, Any]:
    """Tensors that a step returned, by name."""
    found = {} if returned is None else by_name(returned, "output")
    for key, each in found.items():
        if not isinstance(each, torch.Tensor):
            why = "return tensors (a loss, not loss.item()), or nothing"
            raise wrong_job(name, key, each, f"its step returns a {type(each).__name__} as {key!r}: {why}")
    return found


class TorchStep:
    """A step and the state it changes, as the function and the weights of a model."""

    uses_torch = True
    stateful = keeps_state = True
    whole_batches = False

    def __init__(self, name: str, step: Callable[..., Any], state: Sequence[Any], batch: Batch | None) -> None:
        self.torch = needs_torch()
        self.name, self._step, self.state, self._batch = name, step, state, batch
        for each in state:
            if isinstance(each, Iterator):
                raise wrong_job(
                    name, "state", each, f"state has a {type(each).__name__}, which can be read only once: give the "
                    "module or a list, for example list(net.parameters())"
                )  # fmt: skip
        if not list(tensors_of(self.torch, list(state))):
            raise wrong_job(
                name, "state", list(state), f"state={list(state)!r} holds no tensors: give everything that the step "
                "changes, for example state=[net, optimizer]"
            )  # fmt: skip
        check_complete(self.torch, name, step, list(state))
        check_capturable(self.torch, name, list(state))
        self.pool: TorchPool | None = None  # shared by all instances, because only one of them runs at a time
        self.draws: Draws | None = None
        self._operations: list[Operation] | None = None
        # The first step runs here, outside a capture, so that PyTorch can create its lazy state. Its autograd graph is
        # dropped: while it exists, the nodes that accumulate gradients belong to this stream, and a capture on another
        # stream cannot wait for them.
        before = self._generator_states()
        self._results = {key: value.detach().clone() for key, value in self.compute(batch).items()}
        self.drew = not all(map(self.torch.equal, before, self._generator_states()))
        self.settings = settings_of(self.torch, list(state))
        given = [] if batch is None else list(batch.tensors.values())
        self._unlisted = find_unlisted(self.torch, name, step, lambda: self.compute(batch), list(state), given)

    @property
    def first(self) -> dict[str, NDArray[Any]]:
        """The results of the first step."""
        return {key: as_array(self.torch, value) for key, value in self._results.items()}

    def _generator_states(self) -> list[Any]:
        """The states of the generators on the host: PyTorch's own, and those in the step's state."""
        own = [g for g in generators_of(self.torch, list(self.state)) if g.device.type == "cpu"]
        return [each.get_state() for each in (self.torch.default_generator, *own)]

    def compute_arrays(self, batch: Batch | None) -> dict[str, NDArray[Any]]:
        """Runs one step where there is no GPU. Its results must be like the first step's, as those of a captured step.
        """
        found = {key: as_array(self.torch, value) for key, value in self.compute(batch).items()}
        shapes, first = ({key: tuple(each.shape) for key, each in some.items()} for some in (found, self._results))
        if shapes != first:
            raise wrong_job(
                self.name, "step", shapes, f"its step returned tensors of shapes {shapes}, and {first} the first time: "
                "a captured step returns the same tensors every time; let its code not depend on data or counters"
            )  # fmt: skip
        return found

    def compute(self, batch: Batch | None) -> dict[str, Any]:
        """Runs one step outside a capture and returns its results. The batch is moved to the device of the state."""
        if batch is None:
            return self._call(None, {})
        where = next(tensors_of(self.torch, list(self.state))).device
        return self._call(batch, {key: t.to(where) for key, t in batch.tensors.items()})

    def _call(self, batch: Batch | None, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the step with these tensors, in the form of the batch; returns its results by name."""
        given, named = ([], {}) if batch is None else batch.with_tensors(tensors)
        return results_of(self.torch, self.name, self._step(*given, **named))

    def check_settings(self) -> None:
        """Raises ModelError if an optimizer's number has changed, because a captured step keeps the old one."""
        found = settings_of(self.torch, list(self.state))
        for key, then in self.settings.items():
            now = found.get(key)
            if now != then:
                remedy = (
                    "a captured step does not know the new parameters: stop the job, and start another one"
                    if key.endswith(GROUPS)
                    else "a captured step keeps the old number: make it a tensor (lr=torch.tensor(1e-3), with "
                    "fused=True or capturable=True), and change the tensor between steps"
                )
                why = f"{key} was {then} when the step was captured and is {now} now; {remedy}"
                raise wrong_job(self.name, key, now, why)

    def model(self, quantum_us: float | None, **about: Any) -> Model:
        outputs = {key: _spec(self.torch, t) for key, t in self._results.items()}
        inputs = _NOTHING if self._batch is None else self._batch.specs
        made = Model(self.name, self.run, inputs=inputs, outputs=outputs or _NOTHING, weights=self, batch=(1,),
                     instances=INSTANCES, **about)  # fmt: skip
        made.quantum_us = quantum_us
        return made

    # -- as weights

    @property
    def nbytes(self) -> int:
        return 0  # the weights stay where the user put them

    @property
    def state_bytes(self) -> int:
        return total_bytes(tensors_of(self.torch, list(self.state)))

    def place(self, model: str, device: Device) -> Arrays:
        torch = self.torch
        on_gpu = device.name.startswith("cuda")
        where = f"cuda:{device.index}" if on_gpu else "cpu"  # type: ignore[attr-defined]
        for tensor in tensors_of(torch, list(self.state)):
            if tensor.dim() and str(tensor.device) != where:
                why = f"its state is on {tensor.device}, but the engine runs on {where}: move the state there"
                raise wrong_job(model, "state", str(tensor.device), why)
        for memory in self._unlisted:
            if str(memory.device) != where:
                raise wrong_job(
                    model, "step", str(memory.device), f"its step changes a tensor on {memory.device}, but the engine "
                    f"runs on {where}, and a captured step would not change it again: move the tensor there, or change "
                    "it in the callback"
                )  # fmt: skip
        if on_gpu:
            index: int = device.index  # type: ignore[attr-defined]
            own = [g for g in generators_of(torch, list(self.state)) if g.device.type == "cuda"]
            self.draws = Draws(torch, own, index)
        return {}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """A context in which runs of the step, made to load it, leave its state unchanged."""
        wait = self.torch.cuda.synchronize if self.torch.cuda.is_available() else _nothing
        wait()
        kept = Kept(self.torch, [*self.state, *self._unlisted])
        try:
            yield
        finally:
            wait()
            kept.put_back()
            wait()
        if settings_of(self.torch, list(self.state)) != self.settings:
            self.check_settings()

    # -- as the model's function

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        if isinstance(next(iter(inputs.values())), np.ndarray):
            record_or_run(self._counted, _nothing)
            return
        if isinstance(Device.current().capture, InstanceCapture):
            self._into(inputs, outputs)
            return
        assert self.draws is not None
        before = self.draws.offsets()
        # on PyTorch's default stream: kernels on a second stream slow all graphs of the process
        with refusing_to_wait():
            self._into(inputs, outputs)
        self.draws.note(before)

    def _into(self, inputs: Arrays, outputs: Arrays) -> None:
        """Runs the step on our arrays."""
        torch, given = self.torch, inputs if self._batch is not None else {}
        results = self._call(self._batch, {key: as_tensor(torch, array) for key, array in given.items()})
        with torch.no_grad():
            for key, value in results.items():
                target = as_tensor(torch, outputs[key])
                target.copy_(value.reshape(target.shape))

    def _counted(self) -> list[Operation]:
        """The operations that a GPU would launch for a step, found by running one on the CPU."""
        if self._operations is None:
            memory = Kept(self.torch, list(self.state)).addresses
            memory += [each.data_ptr() for each in self._unlisted if each.numel() > _NUMBER_BYTES]
            if self._batch is not None:
                memory += [t.untyped_storage().data_ptr() for t in self._batch.tensors.values()]
            self._operations = count_operations(self.torch, lambda: self.compute(self._batch), memory)
        return self._operations


def _nothing(*_: Any) -> None:
    """A placeholder: the job's thread computes the data, and a CPU has nothing to wait for."""
