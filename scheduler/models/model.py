"""`Model`: a function that launches kernels, with its tensors, as a user passes it to the engine."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import CaptureError
from paellapy.scheduler.core.profiles import checked_params, checked_priority
from paellapy.scheduler.models.lengths import Lengths
from paellapy.scheduler.models.tensors import Arrays, ModelFunction, MovableWeights, TensorSpec, Weights, wrong
from paellapy.scheduler.models.torch_tensors import needs_torch, numpy_dtype
from paellapy.scheduler.models.weights import WeightRange, check_mapped, map_weights

__all__ = ["Arrays", "Model", "ModelFunction", "TensorSpec"]

Step = Callable[..., Any]  # before or after a model
MOST_WORKERS = 1024  # threads or processes of one model's steps


class Model:
    """A model to be served: `fn(weights, inputs, outputs)` launches kernels over three dicts of device arrays.

    Inputs and outputs have the batch as their leading axis. The function is captured once per batch size, and on a real
    GPU once per instance, so it must not wait for the GPU, copy to the host or branch on data; `pp.empty` inside it
    takes scratch memory from the instance.

    >>> def double(weights, inputs, outputs):
    ...     scale[(1,)](inputs["x"], outputs["y"], 2.0, N=64)
    >>> model = Model("double", double, inputs={"x": TensorSpec((64,))}, outputs={"y": TensorSpec((64,))}, batch=(1,))
    """

    name: str
    batch: tuple[int, ...]
    target_ms: float | None = None
    priority: int
    share: float
    instances: int | None = None
    params: dict[str, float]
    resident: bool | str
    capture: str
    before: Step | None
    after: Step | None
    takes: dict[str, TensorSpec]
    gives: dict[str, TensorSpec]
    workers: int
    processes: bool
    task: Mapping[str, Any] | None = None  # of an encoder: its kind, and how tokens become its inputs
    lengths: Lengths | None = None  # sizes of an axis that varies; the model's shapes have the largest
    length: int = 0  # the size of these shapes
    base: str = ""  # the name of the model with the largest size, if this is not the one
    quantum_us: float | None = None  # approximate duration of a segment; None: the engine's quantum

    def __init__(  # noqa: PLR0913  the options of a model
        self,
        name: str,
        fn: ModelFunction,
        *,
        inputs: Mapping[str, TensorSpec],
        outputs: Mapping[str, TensorSpec],
        weights: Mapping[str, NDArray[Any]] | Weights | str | Path | None = None,
        batch: Sequence[int] = (1, 2, 4, 8),
        target_ms: float | None = None,
        priority: int = 0,
        share: float = 1.0,
        instances: int | None = None,
        params: Mapping[str, float] | None = None,
        resident: bool | str = "auto",
        capture: str = "ahead",
        before: Step | None = None,
        after: Step | None = None,
        takes: Mapping[str, Any] | None = None,
        gives: Mapping[str, Any] | None = None,
        workers: int = 4,
        processes: bool = False,
    ) -> None:
        """`target_ms` is the target latency of requests without a deadline; models with larger `priority` go first.

        `share` is the model's share of the GPU's time under a fair policy, relative to other models. `instances` is the
        number of batches that may be in flight at once; the default is as many as the engine runs, or as fit its
        memory. `params` are numbers for policies, by name: `params={"request": 0.3, "limit": 0.6}` under the policy
        `token`.

        `weights` are arrays by name, or a safetensors file. `resident` matters in an engine with more models than
        memory: "auto" keeps the weights on the GPU on demand, True always, False only while requests wait or run.

        `capture` says when batch sizes are captured: "ahead", all while the model is loaded, or "on_demand", only the
        smallest and the largest; each other size follows, while the model serves, when a batch first wants it.

        `before` makes the model's inputs from what a request has, and `after` the answer from the model's outputs. Both
        are called for one request at a time, with values by name, and return a dict, or the one value. `takes` and
        `gives` are what requests and answers have, by name: a TensorSpec, or `str`, `bytes` or a number's type. Left
        out, they are the model's own inputs and outputs. The functions run in `workers` threads; with `processes`, each
        thread has a process. A ValueError of `before` refuses the request.

            pp.Model("net", fn, …, before=decode, takes={"jpeg": bytes}, after=best, gives={"label": str})
        """
        self.inputs, self.outputs = _own_specs(name, "inputs", inputs), _own_specs(name, "outputs", outputs)
        self.configure(
            name=name, batch=batch, target_ms=target_ms, priority=priority, share=share, instances=instances,
            params=params or {}, resident=resident, capture=capture, before=before, after=after, workers=workers,
            processes=processes, takes=inputs if takes is None else takes, gives=outputs if gives is None else gives,
        )  # fmt: skip
        if isinstance(weights, str | Path):
            weights = map_weights(weights)
        if not callable(fn):
            raise wrong(name, "fn", fn, "fn must be callable with (weights, inputs, outputs)")
        self.fn = fn
        self.ranges = {key: spec for key, spec in self.inputs.items() if spec.has_range}
        arrays = weights if isinstance(weights, Mapping) else {}
        self.weights = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        # the file or module that holds the weights, if they are not arrays
        self.source = None if isinstance(weights, Mapping) else weights

    def configure(self, **settings: Any) -> None:
        """Sets options by name, once they are checked."""
        name: Any = settings.get("name", getattr(self, "name", None))
        for key, value in settings.items():
            fits, wanted = _SETTINGS[key]
            if not fits(value):
                raise wrong(name, key, value, f"{key}={value!r}; it must be {wanted}")
            try:
                made = _CONVERTED.get(key, lambda given: given)(value)
            except ValueError as e:
                raise wrong(name, key, value, str(e)) from None
            setattr(self, key, specs(name, key, made) if key in ("takes", "gives") else made)
        for key, step, own in (("takes", "before", self.inputs), ("gives", "after", self.outputs)):
            if getattr(self, step) is None and getattr(self, key) != own:
                why = f"without {step}, they are the model's own tensors: give {step}, or leave {key} out"
                raise wrong(name, key, getattr(self, key), why)

    def changed(self, **settings: Any) -> Self:
        """The same model with other options, by their names in `Model`; an option that is None is not changed."""
        if unknown := sorted(settings.keys() - _SETTINGS):
            raise wrong(self.name, "settings", unknown, f"{', '.join(unknown)}: options are {', '.join(_SETTINGS)}")
        made = copy.copy(self)
        if getattr(self.fn, "__self__", None) is self:  # fn is a method of this model: bind it to the new one
            made.fn = getattr(made, self.fn.__name__)
        made.configure(**{key: value for key, value in settings.items() if value is not None})
        return made

    @classmethod
    def from_torch(  # noqa: PLR0913  the options of a module
        cls,
        module: Callable[..., Any],
        example_inputs: Any,
        *,
        name: str | None = None,
        input_names: Sequence[str] | None = None,
        dtype: Any = None,
        autocast: Any = None,
        channels_last: bool = False,
        compile: bool = False,
        weights: str | Path | None = None,
        lengths: Mapping[str, Mapping[int, Sequence[int]]] | None = None,
        outputs: Sequence[str] = (),
        **about: Any,
    ) -> Self:
        """A PyTorch module, or a function of tensors, as a model.

        `example_inputs` is a tensor, a tuple of tensors, or a dict (passed by name), with the batch first. `dtype`
        converts the weights and floating-point inputs; `autocast` runs the module under torch.autocast with that type;
        `channels_last` selects that memory layout for images; `compile` runs the module through torch.compile. `batch`,
        `target_ms` and the other options are those of `Model`.

        `weights` is a safetensors file with the tensors of the module's state_dict(). The module may be on the meta
        device then. The file is mapped into memory and read as the weights are needed.

        `lengths={"input_ids": {1: (32, 64, 128)}}` are the sizes of an axis whose extent varies, in one input and in
        those that vary with it. Requests may have any length up to the largest: they are padded to a size, and a mask
        is made for `attention_mask` if they bring none. The largest size is captured while the model is loaded, the
        others when requests first want them; with `capture="ahead"`, all while it is loaded.

        `outputs` are the names of the results that requests get; the others are computed and dropped.

        The module runs as after `eval()`, and the caller's module is not changed. Weights that are not converted or
        moved share memory with it: training it later changes the model's answers.

            pp.Model.from_torch(resnet18(), torch.zeros(1, 3, 224, 224), name="resnet18", dtype=torch.float16)
        """
        from paellapy.scheduler.models.torch_module import TorchOptions, torch_module

        options = TorchOptions(dtype, autocast, channels_last, compile, tuple(outputs))
        made = torch_module(module, example_inputs, name, input_names, options, weights, lengths)
        signature = made.signature
        if lengths is not None:
            about.setdefault("capture", "on_demand")
        model = cls(made.title, made.run, inputs=signature.inputs, outputs=signature.outputs, weights=made, **about)
        if made.lengths is not None:
            model.lengths, model.length = made.lengths, made.lengths.longest
        return model

    def at_length(self, size: int, placed: Arrays | None = None) -> Self:
        """The model at one of its lengths, with the weights that it has on the device; None: another process runs it.
        """
        assert self.lengths is not None
        made = copy.copy(self)
        made.name, made.length, made.base = f"{self.name}[{size}]", size, self.name
        made.inputs = self.lengths.specs(self.inputs, self.lengths.inputs, size)
        made.outputs = self.lengths.specs(self.outputs, self.lengths.outputs, size)
        made.ranges = {key: spec for key, spec in made.inputs.items() if spec.has_range}
        if placed is not None:
            source: Any = self.source
            cut = source.at_length(made.inputs, made.outputs, placed)
            made.source, made.fn = cut, cut.run
        return made

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        name: str | None = None,
        length: int | Sequence[int] | None = None,
        truncate: bool = False,
        prompt: str | None = None,
        **about: Any,
    ) -> Self:
        """An encoder from a folder of the hub: requests have texts, answers a vector or a score.

        The folder holds an encoder with its tokenizer.json. Files of sentence-transformers say how the tokens' vectors
        become one `embedding` of a `text`; without them it is their mean. A folder with a classifier of one class is a
        reranker: it gives the `score` of a `query` and a `document`. Needs the packages transformers and tokenizers.

        `length` are the sizes in tokens that texts are padded to, as `lengths` of `from_torch`, or one size for all; by
        default 32, 64, … and the most that the model takes. A longer text is refused, or cut with `truncate`. `prompt`
        is put before every text: itself, or the name of one of the folder's prompts. The other options are those of
        `from_torch` and `Model`.

            pp.Model.from_pretrained("models/all-MiniLM-L6-v2", dtype=torch.float16, workers=4)
        """
        needs_torch()
        from paellapy.scheduler.models.encoder import read_encoder

        made = read_encoder(path, length, truncate, prompt)
        about = {"before": made.reader, "takes": made.takes, **about}
        model = cls.from_torch(made.module, made.example, name=name or made.name, lengths=made.lengths, **about)
        model.task = made.task
        return model

    @classmethod
    def from_graph(
        cls, graph: Any, *, inputs: Mapping[str, Any], outputs: Mapping[str, Any], name: str = "graph", **about: Any
    ) -> Self:
        """A CUDA graph that was captured elsewhere, cut and scheduled like any model.

        `graph` is a `torch.cuda.CUDAGraph(keep_graph=True)` or the handle of a `CUgraph`. `inputs` and `outputs` name
        the GPU arrays that it reads and writes; the inputs of a request have the shapes of these arrays. The model has
        one instance and batches of one, since the graph has one set of arrays. Loading runs the graph several times.

            pp.Model.from_graph(graph, inputs={"x": x}, outputs={"y": y}, name="net")
        """

        for key in ("batch", "instances", "weights"):
            if key in about:
                why = f"{key}={about[key]!r}; a graph decides this itself: leave {key} out"
                raise wrong(name, key, about[key], why)
        made = ImportedGraph(name, graph, inputs, outputs)
        specs = [{key: place.spec for key, place in each.items()} for each in (made.inputs, made.outputs)]
        return cls(name, made.run, inputs=specs[0], outputs=specs[1], weights=made, batch=(1,), instances=1, **about)

    @property
    def uses_torch(self) -> bool:
        """Whether the model's function calls PyTorch."""
        return self.source is not None and self.source.uses_torch

    @property
    def stateful(self) -> bool:
        """Whether the model's function changes the weights; if so, only one of its instances runs at a time."""
        return self.source is not None and self.source.stateful

    @property
    def whole_batches(self) -> bool:
        """Whether each request is a batch of its own, whose size chooses the program."""
        return self.source is not None and self.source.whole_batches

    @property
    def functions(self) -> dict[str, Step]:
        """The functions before and after the model."""
        return {name: each for name, each in (("before", self.before), ("after", self.after)) if each is not None}

    @property
    def has_steps(self) -> bool:
        """Whether functions run before or after the model."""
        return self.before is not None or self.after is not None

    @property
    def slot_items(self) -> int:
        """Items that one request may have."""
        return self.max_batch if self.whole_batches else 1

    @property
    def later_batch(self) -> tuple[int, ...]:
        """The batch sizes that are not captured while the model is loaded. A function with state of its own has none:
        trying out a size changes that state, and it can be set back only before the model serves.
        """
        keeps_state = self.source is not None and self.source.keeps_state
        return () if self.capture == "ahead" or keeps_state else self.batch[1:-1]

    def open_shape(self, kind: str, key: str) -> list[int]:
        """The shape of a request's tensor, with -1 where its extent varies; `kind`: "inputs" or "outputs"."""
        specs, step = (self.takes, self.before) if kind == "inputs" else (self.gives, self.after)
        fixed = self.lengths is None or step is not None
        return list(specs[key].shape) if fixed else self.lengths.shape(kind, key, specs[key])  # type: ignore[union-attr]

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        """A context in which runs of the function, made to load the model, leave the weights unchanged."""
        return contextlib.nullcontext() if self.source is None else self.source.preserved()

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights, which all instances share."""
        return sum(array.nbytes for array in self.weights.values()) if self.source is None else self.source.nbytes

    def place(self, device: Device) -> Arrays:
        """The weights in the device's memory, shared by all instances and batch sizes."""
        if self.source is not None:
            return self.source.place(self.name, device)
        check_mapped(self.weights.values())
        return {name: device.array(value) for name, value in self.weights.items()}

    def weight_parts(self, order: Sequence[str] = ()) -> list[NDArray[np.uint8]]:
        """The bytes of each tensor that has its own memory, those named in `order` first; empty if the model changes
        its weights. A language model's steps change only a state apart from them.
        """
        if self.stateful and not self.whole_batches:
            return []
        if self.source is not None:
            return self.source.parts() if isinstance(self.source, MovableWeights) else []
        check_mapped(self.weights.values())
        return [np.ascontiguousarray(value).reshape(-1).view(np.uint8) for value in self._ordered(order).values()]

    def _ordered(self, order: Sequence[str]) -> dict[str, Any]:
        first = {name: self.weights[name] for name in order if name in self.weights}
        return {**first, **self.weights}

    def place_over(self, device: Device, range: WeightRange, order: Sequence[str] = ()) -> Arrays:
        """As `place`, in an address range that holds the parts in the order of `weight_parts`."""
        if isinstance(self.source, MovableWeights):
            byte = np.dtype(np.uint8)
            offsets = range.layout.offsets
            return self.source.place_over(self.name, device, lambda k, n: range.array(offsets[k], (n,), byte))
        pairs = zip(self._ordered(order).items(), range.layout.offsets, strict=True)
        made = {name: range.array(offset, value.shape, value.dtype) for (name, value), offset in pairs}
        return {name: made[name] for name in self.weights}

    @property
    def max_batch(self) -> int:
        """The largest batch size."""
        return self.batch[-1]

    def __repr__(self) -> str:
        return f"<Model {self.name!r}: {len(self.inputs)} inputs, {len(self.outputs)} outputs, batch {self.batch}>"


def _own_specs(model: str, what: str, given: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors of the model's function, which are of numbers."""
    for key, spec in (given or {}).items():
        if not isinstance(spec, TensorSpec):
            raise wrong(model, what, spec, f"{what}[{key!r}] is a {type(spec).__name__}: it must be a TensorSpec")
        if spec.is_text:
            why = f"{what}[{key!r}] holds {spec.dtype.name}, which no GPU takes: use before, after, takes and gives"
            raise wrong(model, what, spec, why)
    return specs(model, what, given)


def specs(model: str, what: str, given: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """Tensors by name, each given as a TensorSpec, as a type, or as a table of a settings file."""
    if not given or not isinstance(given, Mapping):
        raise wrong(model, what, given, f"it has no {what}: give at least one tensor by name")
    found = {}
    for key, each in given.items():
        about = each if isinstance(each, Mapping) else {"dtype": each}
        if unknown := sorted(about.keys() - {"shape", "dtype"}):
            raise wrong(model, what, each, f"{what}[{key!r}] has {', '.join(unknown)}: it may have shape and dtype")
        made = each
        if not isinstance(each, TensorSpec):
            made = TensorSpec(about.get("shape", ()), about.get("dtype", "float32"))
        if made.dtype.kind not in "biufcSUV" or (made.dtype.kind in "SU" and made.dtype.itemsize):
            raise wrong(model, what, each, f"{what}[{key!r}] is {made.dtype}: give str, bytes or a number's type")
        found[key] = made
    return found


def _are_sizes(given: Any) -> bool:
    sizes = tuple(given) if isinstance(given, Iterable) else ()
    return bool(sizes) and all(isinstance(b, int) and b >= 1 for b in sizes) and list(sizes) == sorted(set(sizes))


def _any(given: Any) -> bool:
    return True


# By option: whether a value is valid, and the valid values in words.
_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda given: isinstance(given, str) and bool(given), "a non-empty string"),
    "batch": (_are_sizes, "batch sizes: increasing integers from 1 up"),
    "target_ms": (lambda given: given is None or 0 < given < math.inf, "finite and above 0, or None"),
    "priority": (_any, ""),
    "share": (lambda given: 0 < given < math.inf, "finite and above 0"),
    "instances": (lambda n: n is None or (isinstance(n, int) and n >= 1), "an integer of at least 1, or None"),
    "params": (_any, ""),
    "resident": (lambda given: given in ("auto", True, False), "'auto', True or False"),
    "capture": (lambda given: given in ("ahead", "on_demand"), "'ahead' or 'on_demand'"),
    "before": (lambda given: given is None or callable(given), "a function, or None"),
    "after": (lambda given: given is None or callable(given), "a function, or None"),
    "takes": (_any, ""),
    "gives": (_any, ""),
    "workers": (lambda n: isinstance(n, int) and 1 <= n <= MOST_WORKERS, f"an integer from 1 to {MOST_WORKERS}"),
    "processes": (lambda given: isinstance(given, bool), "True or False"),
}
# The stored form of an option. A ValueError says what is wrong.
_CONVERTED: dict[str, Callable[[Any], Any]] = {
    "batch": tuple, "share": float, "priority": checked_priority, "params": checked_params
}  # fmt: skip


# -- graphs that were captured elsewhere: by PyTorch, by CuPy, or through the driver


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in GPU memory that a graph uses."""

    address: int
    spec: TensorSpec
    keep: Any


class ImportedGraph:
    """A captured graph as a model's weights, with the places of its inputs and outputs.

    A graph reads and writes the addresses with which it was captured. So the model has one instance and takes whole
    tensors; it copies a request's inputs to the graph's input addresses, and the outputs from its output addresses.
    """

    uses_torch = False
    stateful = keeps_state = whole_batches = False
    nbytes = 0

    def __init__(self, name: str, graph: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        for what, given in (("inputs", inputs), ("outputs", outputs)):
            if not isinstance(given, Mapping):
                raise wrong(name, what, given, f"{what} is a {type(given).__name__}; give a dict of arrays by name")
        self.handle = graph_handle(name, graph)
        self.inputs = {key: _place(name, key, each) for key, each in inputs.items()}
        self.outputs = {key: _place(name, key, each) for key, each in outputs.items()}
        self._keep = graph

    def place(self, model: str, device: Device) -> Arrays:
        if not device.name.startswith("cuda"):
            why = f"it is a CUDA graph, which needs an engine on a CUDA GPU, and this one runs on {device.title}"
            raise wrong(model, "device", device.name, why)
        return {}

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        raise CaptureError("is already a captured graph and cannot be captured again")


def graph_handle(name: str, graph: Any) -> int:
    """The driver's handle of a captured graph that still exists beside its executable form."""
    if hasattr(graph, "raw_cuda_graph"):  # PyTorch
        try:
            return int(graph.raw_cuda_graph())
        except RuntimeError as e:
            remedy = "create it with torch.cuda.CUDAGraph(keep_graph=True)"
            raise wrong(name, "graph", graph, f"PyTorch kept only its executable form ({e}); {remedy}") from e
    if type(graph).__module__.partition(".")[0] == "cupy":
        raise wrong(
            name, "graph", graph, "CuPy keeps only the executable form of this graph; end the capture with handle = "
            "cupy.cuda.runtime.streamEndCapture(stream.ptr), and give the handle"
        )  # fmt: skip
    found = getattr(graph, "graph", graph)  # other libraries' graphs have their handle in this attribute
    try:
        handle = int(found)
    except (TypeError, ValueError):
        handle = 0
    if handle <= 0:
        raise wrong(
            name, "graph", graph, f"a {type(graph).__name__} is not a captured graph: give a torch.cuda.CUDAGraph made "
            "with keep_graph=True, or the handle of a CUgraph"
        )  # fmt: skip
    return handle


def _place(name: str, key: str, tensor: Any) -> Place:
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        if not (tensor.is_cuda and tensor.is_contiguous()):
            why = f"{key!r} is not a contiguous tensor on the GPU; give the graph's own tensor"
            raise wrong(name, key, tensor, why)
        shape, dtype, address = tuple(tensor.shape), numpy_dtype(torch, tensor.dtype), tensor.data_ptr()
    else:
        facts = getattr(tensor, "__cuda_array_interface__", None)
        if facts is None or facts.get("strides") is not None:
            why = "give the contiguous array on the GPU that the graph was captured with"
            raise wrong(name, key, tensor, f"{key!r} is a {type(tensor).__name__}; {why}")
        shape, dtype, address = tuple(facts["shape"]), np.dtype(facts["typestr"]), facts["data"][0]
    if not math.prod(shape):
        why = f"{key!r} has shape {shape} and no elements; give the tensor that the graph uses"
        raise wrong(name, key, tensor, why)
    return Place(int(address), TensorSpec(shape or (1,), dtype), tensor)
