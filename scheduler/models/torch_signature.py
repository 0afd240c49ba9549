"""Inputs and outputs of a PyTorch module by name: from its example inputs, and from the tensors that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.tensors import TensorSpec
from paellapy.scheduler.models.torch_tensors import needs_torch


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs by name, and how the module takes them."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    keywords: bool  # whether inputs are passed by name

    def call(self, call: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        return call(**given) if self.keywords else call(*given.values())

    def name_results(self, results: Any) -> dict[str, Any]:
        return dict(zip(self.outputs, named_results(results).values(), strict=True))


def named_results(results: Any) -> dict[str, Any]:
    """The tensors that a module returned, by name."""
    torch = needs_torch()
    if isinstance(results, torch.Tensor):
        return {"output": results}
    if isinstance(results, Mapping):
        found = dict(results)
    elif isinstance(results, tuple) and hasattr(results, "_fields"):
        found = dict(zip(results._fields, results, strict=True))
    elif isinstance(results, tuple | list):
        found = {f"output{k}": each for k, each in enumerate(results)}
    else:
        raise ModelError(
            f"it returns a {type(results).__name__}; a model must return a tensor, a tuple of tensors, or a dict of "
            "them"
        )
    found = {key: each for key, each in found.items() if each is not None}
    for key, each in found.items():
        if not isinstance(each, torch.Tensor):
            raise ModelError(f"its result {key!r} is a {type(each).__name__}; a model must return tensors only")
    return found


def named_inputs(
    torch: Any, title: str, example: Any, names: Sequence[str] | None
) -> tuple[dict[str, Any], bool]:
    if isinstance(example, Mapping):
        given, keywords = dict(example), True
    else:
        values = list(example) if isinstance(example, tuple | list) else [example]
        default = ["input"] if len(values) == 1 else [f"input{k}" for k in range(len(values))]
        if names is not None and len(names) != len(values):
            raise ModelError(
                f"model {title!r}: {len(names)} input_names were given for {len(values)} inputs; give one name per "
                "input"
            )
        given, keywords = dict(zip(names or default, values, strict=True)), False
    if not given:
        raise ModelError(f"model {title!r} has no example inputs: give example_inputs, the tensors of one request")
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise ModelError(f"model {title!r}, example input {key!r} is a {type(value).__name__}: it must be a tensor")
        if value.dim() == 0 or value.shape[0] < 1:
            raise ModelError(
                f"model {title!r}, example input {key!r} has shape {tuple(value.shape)}; its first extent must be the "
                "batch, at least 1"
            )
    return given, keywords
