"""Models that run one after the other as one: the outputs of each stay on the GPU as inputs of the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from paellapy.instrument.device.base import Device
from paellapy.scheduler.models.model import ImportedGraph, Model
from paellapy.scheduler.models.tensors import Arrays, TensorSpec


def can_follow(models: Sequence[Model], model: Model, readers: Callable[[str], int]) -> bool:
    """Whether the model can take outputs of the models where they are: shapes and batch sizes are the same, nobody else
    reads them, since a model may overwrite its inputs, and the host need not check their ranges. `readers`: how many
    steps read the values of a name.
    """
    made = _all_outputs(models)
    passed = made.keys() & model.inputs.keys()
    known = made.keys() | outside_inputs(models).keys()
    return (
        bool(passed)
        and all(made[key] == model.inputs[key] and readers(key) == 1 for key in passed)
        and not any(model.inputs[key].has_range for key in passed)
        and not known & (model.inputs.keys() - passed)
        and not known & model.outputs.keys()
        and all(_is_plain(each) and each.batch == model.batch for each in (*models, model))
    )


def _is_plain(model: Model) -> bool:
    """Whether the model is no more than its function: nothing before or after it, one shape, and fixed weights."""
    varies = model.has_steps or model.lengths is not None or model.stateful or model.whole_batches
    return not varies and not isinstance(model.source, ImportedGraph)


def _all_outputs(models: Sequence[Model]) -> dict[str, TensorSpec]:
    return {key: spec for each in models for key, spec in each.outputs.items()}


def outside_inputs(models: Sequence[Model]) -> dict[str, TensorSpec]:
    """The inputs that none of the models makes."""
    made = _all_outputs(models)
    return {key: spec for each in models for key, spec in each.inputs.items() if key not in made}


def joined(name: str, models: Sequence[Model], weights: Sequence[Arrays], priority: int, share: float) -> Model:
    """The models as one, over the weights that they have on the device. It gives what none of them takes."""
    chain = Chain(models, weights)
    taken = {key for each in models for key in each.inputs}
    outputs = {key: spec for key, spec in _all_outputs(models).items() if key not in taken}
    on_demand = any(each.capture == "on_demand" for each in models)
    return Model(
        name, chain.run, inputs=outside_inputs(models), outputs=outputs, weights=chain, batch=models[0].batch,
        priority=priority, share=share, instances=min((n for each in models if (n := each.instances)), default=None),
        params={key: value for each in models for key, value in each.params.items()},
        capture="on_demand" if on_demand else "ahead",
    )  # fmt: skip


class Chain:
    """The functions and the weights of several models."""

    stateful = whole_batches = False
    nbytes = 0  # the weights are those of the models, which are loaded

    def __init__(self, models: Sequence[Model], weights: Sequence[Arrays]) -> None:
        self._models, self._weights = models, weights
        self.uses_torch = any(each.uses_torch for each in models)

    @property
    def keeps_state(self) -> bool:
        return any(each.source is not None and each.source.keeps_state for each in self._models)

    @property
    def drawn(self) -> dict[int, int]:
        """By batch size: how far a run advances PyTorch's random generator."""
        each = [getattr(model.source, "drawn", {}) for model in self._models]
        return {batch: sum(one.get(batch, 0) for one in each) for batch in self._models[0].batch}

    def place(self, model: str, device: Device) -> Arrays:
        return {str(k): weights for k, weights in enumerate(self._weights)}

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in self._models:
                stack.enter_context(each.preserved())
            yield

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        """The models' functions. Values that pass from one to the next are scratch memory."""
        batch = next(iter(inputs.values())).shape[0]
        device, values = Device.current(), {**inputs, **outputs}
        for k, model in enumerate(self._models):
            for key, spec in model.outputs.items():
                if key not in values:
                    values[key] = device.empty((batch, *spec.shape), spec.dtype)
            given, made = ({key: values[key] for key in each} for each in (model.inputs, model.outputs))
            model.fn(weights[str(k)].copy(), given, made)
