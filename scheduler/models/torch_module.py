"""PyTorch modules and functions as models: `Model.from_torch`.

On a GPU the module is captured, eager or compiled, with its kernels from cuDNN, cuBLAS and Triton. On the virtual GPU,
PyTorch computes the data on the CPU, and estimates place its operations on the SMs (`torch_cpu`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.cache import protect_inductor
from paellapy.instrument.device.base import Device
from paellapy.scheduler.core.errors import CaptureError, ModelError
from paellapy.scheduler.models import torch_capture
from paellapy.scheduler.models.capture import Counting
from paellapy.scheduler.models.lengths import Lengths, asked_lengths
from paellapy.scheduler.models.sync_guard import answering_as_captured, refusing_to_wait, with_remedy
from paellapy.scheduler.models.tensors import Arrays, TensorSpec, wrong
from paellapy.scheduler.models.torch_cpu import Operation, count_operations, record_or_run
from paellapy.scheduler.models.torch_state import Kept, Touched, find_touched, state_behind, watching
from paellapy.scheduler.models.torch_tensors import (
    address_of,
    as_array,
    as_bytes,
    as_tensor,
    by_name,
    change_tensors,
    load_file,
    needs_torch,
    numpy_dtype,
    schema_of,
    storages,
    torch_dtype,
    total_bytes,
)
from paellapy.scheduler.models.weights import check_mapped

T = TypeVar("T")
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options for running a module."""

    dtype: Any = None  # type of the weights and floating-point inputs; None: unchanged
    autocast: Any = None  # dtype of torch.autocast; None: off
    channels_last: bool = False
    compile: bool = False
    outputs: Sequence[str] = ()  # names of the results to keep; none: all

    def checked(self, torch: Any, title: str) -> Self:
        """The same options with PyTorch's types in place of their names."""
        dtype, autocast = (torch_dtype(torch, title, each, getattr(self, each)) for each in ("dtype", "autocast"))
        return replace(self, dtype=dtype, autocast=autocast)

    def casting(self, torch: Any, kind: str) -> contextlib.AbstractContextManager[Any]:
        """The context for runs on this kind of device. The cache of autocast would keep weights that were cast during
        one capture for the next, in memory of the first.
        """
        off = self.autocast is None
        return contextlib.nullcontext() if off else torch.autocast(kind, self.autocast, cache_enabled=False)

    def arrange(self, torch: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs in the requested memory layout."""
        if not self.channels_last:
            return dict(given)
        layout = torch.channels_last
        return {key: t.contiguous(memory_format=layout) if t.dim() == 4 else t for key, t in given.items()}


def torch_module(
    call: Callable[..., Any],
    example_inputs: Any,
    name: str | None = None,
    input_names: Sequence[str] | None = None,
    options: TorchOptions | None = None,
    weights: str | Path | None = None,
    lengths: Any = None,
) -> TorchModule:
    """See `Model.from_torch`."""
    torch = needs_torch()
    if not callable(call):
        text = f"from_torch takes a module or a function, not a {type(call).__name__}"
        raise ModelError(text, field="module", given=call)
    kind = type(call).__name__ if isinstance(call, torch.nn.Module) else getattr(call, "__name__", "model")
    title = str(name or kind)
    given, keywords = named_inputs(torch, title, example_inputs, input_names)
    options = (options or TorchOptions()).checked(torch, title)
    torch_capture.want(torch, call, options.dtype)
    mapped: list[NDArray[Any]] = []
    if isinstance(call, torch.nn.Module):
        module = call = own_module(torch, title, call)
        if weights is not None:
            mapped = load_file(torch, title, module, weights, options.dtype)
        if options.dtype is not None:
            module.to(options.dtype)
        if options.channels_last:
            module.to(memory_format=torch.channels_last)
        home = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0)).device
    elif weights is not None:
        why = f"weights={str(weights)!r}; a function has none of its own: give a module"
        raise wrong(title, "weights", weights, why)
    else:
        home = next(iter(given.values())).device
    if options.dtype is not None:
        given = {key: t.to(options.dtype) if t.is_floating_point() else t for key, t in given.items()}
    given = {key: t[:1].to(home) for key, t in given.items()}
    varying = None
    if lengths is not None:
        varying = Varying(torch, title, call, given, lengths, keywords)
        given = varying.example(varying.sizes[-1])
    inputs = {key: TensorSpec(tuple(t.shape[1:]), numpy_dtype(torch, t.dtype)) for key, t in given.items()}
    made = TorchModule(title, call, Signature(inputs, {}, keywords, options.outputs), options)
    made.mapped = mapped
    with made.preserved():
        outputs, ranges, made.touched = _example_outputs(torch, title, call, made.signature, given, options)
    made.signature.outputs.update(outputs)
    for key, (low, high) in ranges.items():
        inputs[key] = TensorSpec(inputs[key].shape, inputs[key].dtype, low=low, high=high)
    if varying is not None:
        with made.preserved():
            made.lengths = varying.found(made)
    return made


def _example_outputs(
    torch: Any, title: str, call: Any, signature: Signature, given: Mapping[str, Any], options: TorchOptions
) -> tuple[dict[str, TensorSpec], dict[str, Range], Touched]:
    """The outputs for one request of the example, the ranges of its inputs that the run shows, and the memory that it
    touches.
    """
    kind = next(iter(given.values())).device.type
    try:
        with torch.no_grad(), options.casting(torch, kind), answering_as_captured(torch):
            arranged = options.arrange(torch, given)
            run = functools.partial(find_ranges, torch, arranged, lambda: signature.call(call, arranged))
            (returned, ranges), touched = find_touched(torch, arranged.values(), run)
    except Exception as e:
        why = f"it fails on its example inputs: {type(e).__name__}: {e}"
        raise wrong(title, "example_inputs", list(given), why) from e
    outputs, results = {}, named_results(title, returned, options.outputs)
    fits = {key: t.dim() > 0 and t.shape[0] == 1 for key, t in results.items()}
    for key, t in results.items():
        if not fits[key]:
            remedies = [f"outputs={[name for name in fits if fits[name]]}, which leaves it out"] * any(fits.values())
            raise ModelError(
                f"model {title!r}: output {key!r} has shape {tuple(t.shape)} for one request; its first extent must be "
                f"the batch, 1 in this run. Try: {'; or '.join([*remedies, 'a module that returns it so'])}",
                model=title, field=key, given=tuple(t.shape), remedies=remedies,
            )  # fmt: skip
        outputs[key] = TensorSpec(tuple(t.shape[1:]), numpy_dtype(torch, t.dtype))
    return outputs, ranges, touched


class TorchModule:
    """A PyTorch module or function as a model's function and weights."""

    uses_torch = True
    stateful = False

    def __init__(self, title: str, call: Callable[..., Any], signature: Signature, options: TorchOptions) -> None:
        self.title, self._call, self.signature, self.options = title, call, signature, options
        # by batch size, on the virtual GPU: the operations that the module launches
        self.operations: dict[int, list[Operation]] = {}
        self.touched = Touched([], [])  # by the run of the example
        self.drawn: dict[int, int] = {}  # by batch size, on a GPU: how far a run advances the random generator
        self.mapped: list[NDArray[Any]] = []  # weights that are a mapped file
        self.lengths: Lengths | None = None
        self.placed: Arrays | None = None  # by the same module at another length

    whole_batches = False

    @property
    def keeps_state(self) -> bool:
        return bool(self._state(needs_torch()))

    @property
    def nbytes(self) -> int:
        torch = needs_torch()
        if not isinstance(self._call, torch.nn.Module) or self.placed is not None:
            return 0
        return total_bytes([*self._call.parameters(), *self._call.buffers()])

    @property
    def plans_convolutions(self) -> bool:
        """Whether cuDNN plans convolutions for each batch size, and a run in another thread gives the same result:
        nothing is tuned by timing, as modules of other packages may be, and PyTorch has no settings that hold in this
        thread only.
        """
        torch = needs_torch()
        if not isinstance(self._call, torch.nn.Module) or self.options.compile or torch.backends.cudnn.benchmark:
            return False
        modes = (torch.overrides._len_torch_function_stack, torch._C._len_torch_dispatch_stack)  # noqa: SLF001  PyTorch's own
        of_this_thread = (
            torch.is_autocast_enabled(), torch.is_inference_mode_enabled(), *(count() for count in modes),
            torch.cuda.is_available() and torch.cuda.current_device(),
        )  # fmt: skip
        return self._convolutions > 1 and not any(of_this_thread)

    @functools.cached_property
    def _convolutions(self) -> int:
        """The number of convolutions; 0 if other modules than PyTorch's may launch kernels that time themselves."""
        parts = list(self._call.modules())  # type: ignore[attr-defined]
        if not all(type(part).__module__.partition(".")[0] in ("torch", "torchvision") for part in parts):
            return 0
        nn = needs_torch().nn
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
        return sum(isinstance(part, kinds) for part in parts)

    def place(self, model: str, device: Device) -> Arrays:
        """The module on the device, shared by all instances, batch sizes and lengths."""
        if self.placed is not None:
            return dict(self.placed)
        torch = needs_torch()
        where = f"cuda:{device.index}" if device.name.startswith("cuda") else "cpu"  # type: ignore[attr-defined]
        if where != "cpu" and not torch.cuda.is_available():
            why = f"this build of PyTorch ({torch.__version__}) cannot use the GPU; install the CUDA build"
            raise wrong(model, "device", device.name, why)
        check_mapped(self.mapped)
        call = self._call
        if isinstance(call, torch.nn.Module):
            call = own_module(torch, model, call).to(where)
        return {"call": self._compiled(torch, call, where != "cpu")}

    def _compiled(self, torch: Any, call: Any, on_gpu: bool) -> Any:
        if not (self.options.compile and on_gpu):
            return call
        protect_inductor()
        return torch.compile(call, dynamic=False)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Keeps loading without side effects: a function may change a module that it refers to, for example one in
        training mode, and may draw random numbers.
        """
        torch = needs_torch()
        kept = Kept(torch, self._state(torch))
        try:
            yield
        finally:
            kept.put_back()

    def _state(self, torch: Any) -> list[Any]:
        """Objects that a run changes, or may change: of a function, all that it can reach by name."""
        named = [] if isinstance(self._call, torch.nn.Module) else state_behind(torch, self._call)
        return [*named, *self.touched.changed]

    def at_length(self, inputs: dict[str, TensorSpec], outputs: dict[str, TensorSpec], placed: Arrays) -> TorchModule:
        """The module for tensors of another length, with the weights that it has on the device."""
        made = copy.copy(self)
        made.signature = replace(self.signature, inputs=inputs, outputs=outputs)
        made.operations, made.drawn, made.placed = {}, {}, placed
        return made

    def parts(self) -> list[Any]:
        """Storages, each once, in the order in which the example used them; none where another length has them."""
        if self.placed is not None:
            return []
        torch = needs_torch()
        check_mapped(self.mapped)
        return [as_bytes(torch, storage) for storage in self._in_order(list(storages(torch, self._call).values()))]

    def _in_order(self, values: list[T]) -> list[T]:
        """Values for each storage of the module, in the order of use instead of the order of its parameters."""
        at = {address: k for k, address in enumerate(self.touched.used)}
        addresses = list(storages(needs_torch(), self._call))
        order = sorted(range(len(values)), key=lambda k: at.get(addresses[k], len(at)))
        return [values[k] for k in order]

    def place_over(self, model: str, device: Device, at: Callable[[int, int], Any]) -> Arrays:
        """The module with its weights in given memory; tensors that share memory still do."""
        torch = needs_torch()
        call = self._call
        if not isinstance(call, torch.nn.Module):
            return self.place(model, device)
        call = own_module(torch, model, call)
        # The copy has its storages in the same order, at other addresses if it was moved.
        held = self._in_order(list(storages(torch, call).items()))
        places = {ptr: (k, s.nbytes()) for k, (ptr, s) in enumerate(held)}

        def move(tensor: Any) -> Any:
            found = places.get(tensor.untyped_storage().data_ptr())
            if found is None:  # moved already, or without memory
                return tensor
            bytes_there = as_tensor(torch, at(*found))
            made = torch.empty(0, dtype=tensor.dtype, device=bytes_there.device)
            first = bytes_there.storage_offset() // tensor.element_size() + tensor.storage_offset()
            return made.set_(bytes_there.untyped_storage(), first, tensor.size(), tensor.stride())

        change_tensors(call, move)
        return {"call": self._compiled(torch, call, not device.name.startswith("virtual"))}

    def run(self, weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
        """The model's function."""
        torch = needs_torch()
        try:
            self._run(torch, weights["call"], inputs, outputs)
        except CaptureError as e:
            first = next(iter(weights["call"].parameters()), None) if isinstance(self._call, torch.nn.Module) else None
            raise with_remedy(e, self._call, getattr(first, "dtype", None), inputs) from e.__cause__

    def _run(self, torch: Any, call: Any, inputs: Arrays, outputs: Arrays) -> None:
        capture = Device.current().capture
        if isinstance(next(iter(inputs.values())), np.ndarray):
            given, found = ({key: array.view(np.ndarray) for key, array in each.items()} for each in (inputs, outputs))
            run = functools.partial(self.compute, torch, call, given, found)
            record_or_run(functools.partial(self._operations_of, torch, call, given, run), run)
        elif capture is None:  # libraries may still tune themselves
            self._compute(torch, call, inputs, outputs)
        elif not isinstance(capture, Counting):
            self.compute(torch, call, inputs, outputs)
        else:
            first = next(iter(inputs.values()))
            generator = torch.cuda.default_generators[first.device.index]
            before = generator.get_offset()
            with refusing_to_wait():
                self.compute(torch, call, inputs, outputs)
            self.drawn[first.shape[0]] = generator.get_offset() - before

    def _operations_of(self, torch: Any, call: Any, inputs: Arrays, run: Callable[[], None]) -> list[Operation]:
        """The operations for these inputs; they are the same for every instance."""
        batch = len(next(iter(inputs.values())))
        if batch not in self.operations:
            weights = [*call.parameters(), *call.buffers()] if isinstance(call, torch.nn.Module) else []
            memory = [array.ctypes.data for array in inputs.values()] + list(map(address_of, weights))
            self.operations[batch] = count_operations(torch, run, memory)
        return self.operations[batch]

    def compute(self, torch: Any, call: Callable[..., Any], inputs: Arrays, outputs: Arrays) -> None:
        """Runs the module as it runs in a capture, on our arrays, and copies its results to the outputs."""
        with answering_as_captured(torch):
            self._compute(torch, call, inputs, outputs)

    def _compute(self, torch: Any, call: Callable[..., Any], inputs: Arrays, outputs: Arrays) -> None:
        given = {key: as_tensor(torch, array) for key, array in inputs.items()}
        with torch.no_grad(), self.options.casting(torch, next(iter(given.values())).device.type):
            results = self.signature.call(call, self.options.arrange(torch, given))
            for key, value in self.signature.name_results(results).items():
                target = as_tensor(torch, outputs[key])
                if value.shape != target.shape:
                    raise CaptureError(
                        f"output {key!r} has shape {tuple(value.shape)}, but the example gave {tuple(target.shape)}: "
                        "only the first extent of a shape may depend on the batch", field=key,
                        given=tuple(value.shape), limit=tuple(target.shape),
                    )  # fmt: skip
                target.copy_(value)


def own_module(torch: Any, title: str, module: Any) -> Any:
    """A copy of the module over the same weights, so that changes to the copy do not affect the caller's module.

    Its tensors are new objects over the same memory: either module can be converted or moved without the other.
    """
    # includes tensors that are attributes, such as those of weight_norm
    attributes = [value for part in module.modules() for value in vars(part).values()]
    held = [*module.parameters(), *module.buffers(), *attributes]
    plain = [t for t in held if type(t) in (torch.Tensor, torch.nn.Parameter)]
    # lazy, quantised and other special tensors have their own way to be copied
    shared = {id(t): t.detach() for t in plain}
    shared |= {id(t): torch.nn.Parameter(shared[id(t)], False) for t in plain if type(t) is torch.nn.Parameter}
    try:
        return copy.deepcopy(module, shared).eval()
    except Exception as e:
        remedy = "call eval() on the module, move it to the device, and pass a function that calls it"
        why = f"its module cannot be copied ({type(e).__name__}: {e}); {remedy}"
        raise wrong(title, "module", module, why) from e


# -- inputs whose length varies

_PADDED_ALIKE = {2: 5e-2, 4: 2e-3, 8: 2e-3}  # difference ÷ largest value, by bytes of an element


class Varying:
    """Finds what follows from the length of a module's inputs, by runs of its example at several lengths."""

    def __init__(
        self, torch: Any, title: str, call: Any, given: dict[str, Any], lengths: Any, keywords: bool
    ) -> None:
        self._torch, self._title, self._call = torch, title, call
        self.sizes, self._axes = asked_lengths(title, lengths, {key: tuple(t.shape) for key, t in given.items()})
        forward = call.forward if isinstance(call, torch.nn.Module) else call
        self._mask = next((key for key in self._axes if "mask" in key), None)
        if self._mask is None and keywords and "attention_mask" in inspect.signature(forward).parameters:
            self._mask = "attention_mask"
            self._axes[self._mask] = -1
            home = next(iter(given.values())).device
            given = {**given, self._mask: torch.ones(1, self.sizes[-1], dtype=torch.int64, device=home)}
        self._given = given

    def example(self, length: int) -> dict[str, Any]:
        """The example at a length: its elements again and again."""
        torch, found = self._torch, dict(self._given)
        for key, axis in self._axes.items():
            t = found[key]
            found[key] = t.index_select(axis, torch.arange(length, device=t.device) % t.shape[axis])
        return found

    def found(self, made: TorchModule) -> Lengths:
        """The axes of outputs that follow the length. Raises ModelError if padding changes the answers."""
        inputs, outputs, longest = made.signature.inputs, made.signature.outputs, self.sizes[-1]
        pad = getattr(getattr(self._call, "config", None), "pad_token_id", None)
        pads = {key: inputs[key].neutral for key in self._axes}
        pads |= {key: pad for key in pads if isinstance(pad, int) and pad >= 0 and key.endswith("input_ids")}
        size = self.sizes[0] if len(self.sizes) > 1 else max(1, longest // 2)
        length = max(1, size - size // 3)
        whole = self._random(inputs, size)
        short = {key: t.narrow(self._axes[key], 0, length) if key in self._axes else t for key, t in whole.items()}
        for key in self._axes:
            whole[key].narrow(self._axes[key], length, size - length).fill_(pads[key] if key != self._mask else 0)
        padded, wanted = (self._run(made, each) for each in (whole, short))
        axes: dict[str, int] = {}
        for key, spec in outputs.items():
            shape = tuple(padded[key].shape[1:])
            differ = [k - len(shape) for k, (a, b) in enumerate(zip(shape, spec.shape, strict=True)) if a != b]
            if len(differ) > 1 or any(spec.shape[k] * n % longest for k in differ for n in self.sizes):
                raise wrong(
                    self._title, "lengths", (shape, spec.shape), f"output {key!r} has shape {shape} at length {size} "
                    f"and {spec.shape} at {longest}; one extent may vary, in proportion to the length"
                )  # fmt: skip
            axes |= dict.fromkeys([key] if differ else [], differ[0] if differ else 0)
        lengths = Lengths(self.sizes, dict(self._axes), axes, pads, self._mask)
        cut = lengths.cut({key: as_array(self._torch, t) for key, t in padded.items()}, length, size)
        for key, t in wanted.items():
            self._check_alike(key, cut[key], as_array(self._torch, t))
        return lengths

    def _random(self, inputs: Mapping[str, TensorSpec], size: int) -> dict[str, Any]:
        """Inputs with random values in their ranges, so that padding is not like them."""
        found = {}
        for key, t in self.example(size).items():
            spec = inputs[key]
            if key == self._mask:
                t = self._torch.ones_like(t)
            elif t.is_floating_point():
                t = self._torch.randn_like(t)
            elif spec.low is not None and spec.high is not None and spec.low < spec.high:
                t = self._torch.randint_like(t, max(0, int(spec.low)), int(spec.high) + 1)
            found[key] = t.clone()
        return found

    def _run(self, made: TorchModule, given: dict[str, Any]) -> dict[str, Any]:
        torch, kind = self._torch, next(iter(given.values())).device.type
        with torch.no_grad(), made.options.casting(torch, kind), answering_as_captured(torch):
            return made.signature.name_results(made.signature.call(self._call, made.options.arrange(torch, given)))

    def _check_alike(self, key: str, cut: NDArray[Any], wanted: NDArray[Any]) -> None:
        alike = cut.shape == wanted.shape
        if alike and cut.size and cut.dtype.kind not in "iub":
            a, b = cut.astype(np.float32), wanted.astype(np.float32)
            alike = np.abs(a - b).max() <= _PADDED_ALIKE.get(cut.dtype.itemsize, 5e-2) * max(np.abs(b).max(), 1e-6)
        if not alike:
            raise wrong(
                self._title, "lengths", key, f"padding changes its output {key!r}, so requests of different lengths "
                "cannot share a size: give the module a mask of the padding (an example input whose name has "
                "'mask' in it), or return only outputs that do not depend on padding"
            )  # fmt: skip


# -- inputs and outputs by name


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs by name, and how the module takes them."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    keywords: bool  # whether inputs are passed by name
    kept: Sequence[str] = ()  # names of the results that are outputs; none: all

    def call(self, call: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        return call(**given) if self.keywords else call(*given.values())

    def name_results(self, results: Any) -> dict[str, Any]:
        return dict(zip(self.outputs, named_results("", results, self.kept).values(), strict=True))


def named_results(title: str, results: Any, kept: Sequence[str] = ()) -> dict[str, Any]:
    """The tensors that a module returned, by name; with `kept`, those of these names."""
    torch = needs_torch()
    if not isinstance(results, torch.Tensor | Mapping | tuple | list):
        why = "a model must return a tensor, a tuple of tensors, or a dict of them"
        raise wrong(title, "outputs", results, f"it returns a {type(results).__name__}; {why}")
    if isinstance(results, tuple) and hasattr(results, "_fields"):
        results = results._asdict()  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for key, each in by_name(results, "output").items():
        found |= {f"{key}.{k}": e for k, e in enumerate(each)} if isinstance(each, tuple | list) else {key: each}
    found = {key: each for key, each in found.items() if each is not None}
    if missing := [key for key in kept if key not in found]:
        raise wrong(title, "outputs", list(kept), f"it returns no {', '.join(missing)}; there are {', '.join(found)}")
    found = {key: found[key] for key in kept} or found
    for key, each in found.items():
        if not isinstance(each, torch.Tensor):
            why = f"its result {key!r} is a {type(each).__name__}; wrap it in a module that returns tensors only"
            raise wrong(title, key, each, why)
    return found


def named_inputs(torch: Any, title: str, example: Any, names: Sequence[str] | None) -> tuple[dict[str, Any], bool]:
    if isinstance(example, Mapping):
        given, keywords = dict(example), True
    else:
        values = list(example) if isinstance(example, tuple | list) else [example]
        default = ["input"] if len(values) == 1 else [f"input{k}" for k in range(len(values))]
        if names is not None and len(names) != len(values):
            why = f"{len(names)} input_names were given for {len(values)} inputs; give one name per input"
            raise wrong(title, "input_names", names, why)
        given, keywords = dict(zip(names or default, values, strict=True)), False
    if not given:
        why = "there are no example inputs: give example_inputs, the tensors of one request"
        raise wrong(title, "example_inputs", example, why)
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            why = f"example input {key!r} is a {type(value).__name__}: it must be a tensor"
            raise wrong(title, key, value, why)
        if value.dim() == 0 or value.shape[0] < 1:
            shape = tuple(value.shape)
            why = f"example input {key!r} has shape {shape}; its first extent must be the batch, at least 1"
            raise wrong(title, key, value, why)
    return given, keywords


# -- ranges of inputs: an input that is an index into a table must lie within the table
#
# A GPU does not check indices: beyond the table it reads other memory, or fails for all requests. The example run shows
# which inputs (unchanged, reshaped or converted) are indices for `embedding`, `gather` and similar operations. The
# range of such an input is the size of the table.

# Operations with the argument positions of their table, of their indices, and of the table's dimension (None: dimension
# 0).
_LOOKUPS: dict[str, tuple[int, int, int | None]] = {
    "aten::embedding": (0, 1, None),
    "aten::_embedding_bag": (0, 1, None),
    "aten::_embedding_bag_forward_only": (0, 1, None),
    "aten::index_select": (0, 2, 1),
    "aten::gather": (0, 2, 1),
    **{
        f"aten::{name}{in_place}": (0, 2, 1)
        for name in ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
        for in_place in ("", "_")
    },
}
# Operations that do not change values.
_SAME = {
    "aten::_to_copy", "aten::alias", "aten::clone", "aten::contiguous", "aten::detach", "aten::expand", "aten::flatten",
    "aten::lift_fresh", "aten::permute", "aten::repeat", "aten::reshape", "aten::select", "aten::slice", "aten::split",
    "aten::squeeze", "aten::t", "aten::transpose", "aten::unbind", "aten::unsqueeze", "aten::view",
    "aten::_unsafe_view",
}  # fmt: skip


def find_ranges(torch: Any, given: Mapping[str, Any], run: Callable[[], Any]) -> tuple[Any, dict[str, Range]]:
    """The result of the run, and the ranges of its inputs as far as the run shows them."""
    whose = {id(t): name for name, t in given.items() if not t.is_floating_point() and t.dtype is not torch.bool}
    kept: list[Any] = []  # keeps tensors alive, so that their ids stay unique
    found: dict[str, Range] = {}

    def see(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name = schema_of(func).name
        if name in _SAME and args and (source := whose.get(id(args[0]))) is not None:
            for each in out if isinstance(out, tuple | list) else (out,):
                if not each.is_floating_point():
                    whose[id(each)] = source
                    kept.append(each)
        for indices, least, most in _looked_up(name, args):
            if (source := whose.get(id(indices))) is not None:
                low, high = found.get(source, (least, most))
                found[source] = max(low, least), min(high, most)
        return out

    if not whose:
        return run(), {}
    with watching(see):
        results = run()
    return results, found


def _looked_up(name: str, args: Any) -> list[tuple[Any, int, int]]:
    """The indices of an operation, each with the smallest and the largest valid index of its table."""
    if name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"):
        table, indices = args[0], args[1]
        return [(each, -table.shape[k], table.shape[k] - 1) for k, each in enumerate(indices) if each is not None]
    if name not in _LOOKUPS:
        return []
    table_at, index_at, along_at = _LOOKUPS[name]
    table = args[table_at]
    size = int(table.shape[0 if along_at is None else args[along_at]])
    return [(args[index_at], 0, size - 1)]
