"""`PaellaError`, the base of all our errors, and the errors of kernels, traces and devices: one class per cause."""

from __future__ import annotations

import functools
from typing import Any, TypeVar


class PaellaError(Exception):
    """Base of all errors raised by paellapy. Facts given by name become attributes.

    `model` or `kernel` failed; `field` is the part of it that is wrong, `given` its value, `limit` what is allowed.

    >>> PaellaError("batch=0: the batch sizes must be integers from 1 up", field="batch", given=0).field
    'batch'
    """

    def __init__(self, *args: object, **facts: Any) -> None:
        super().__init__(*args)
        self.__dict__.update(facts)


class PtxError(PaellaError):
    """A PTX module could not be read or assembled."""


class InstrumentError(PaellaError):
    """A kernel cannot be instrumented; the message names the kernel and the reason."""


class CompileError(PaellaError):
    """A kernel's source does not compile; the message carries the compiler's log."""


class ArgumentError(PaellaError, TypeError):
    """A kernel, a function or a command was given arguments that it does not take."""


class LaunchError(PaellaError):
    """A kernel could not be launched, or failed on the device."""


class NoDeviceError(PaellaError):
    """The requested device does not exist."""


class TraceError(PaellaError):
    """A trace was used in a way that would lose or mix records."""


class UnsupportedOpError(PaellaError):
    """The virtual GPU met an operation it cannot evaluate; the message names op, kernel and source line."""


class PaellaWarning(UserWarning):
    """Base of warnings of ours that carry facts, as `PaellaError` does."""

    def __init__(self, *args: object, **facts: Any) -> None:
        super().__init__(*args)
        self.__dict__.update(facts)


class ViewWarning(PaellaWarning):
    """A kernel on the virtual GPU reached beyond a view it was given, into the array behind it."""


class LaunchWarning(PaellaWarning):
    """An earlier launch of kernel `kernel` was refused with `error`, after its results had been computed."""


class HintWarning(PaellaWarning):
    """`tl.assume`, `tl.multiple_of` or `tl.max_contiguous` promises what does not hold."""


class EstimateWarning(PaellaWarning):
    """A benchmark on the virtual GPU holds PyTorch's own `operations`, whose times are estimated from their work."""


class FolderWarning(PaellaWarning):
    """A folder of compiled code is not used, because other users can write to it."""


class OutOfBoundsError(PaellaError):
    """A kernel on the virtual GPU touched memory outside its arrays; names kernel, line, block and index."""


# --- errors of ours that are of Triton's own classes too, for code that catches those, such as Triton's autotuner -----

Ours = TypeVar("Ours", bound=PaellaError)


def also(ours: Ours, theirs: type[Exception], **facts: Any) -> Ours:
    """The same error, of Triton's class too and with the attributes that it has there."""
    made: Ours = _both(type(ours), theirs)(*ours.args)  # type: ignore[arg-type]
    made.__dict__.update(ours.__dict__ | facts)
    return made


def out_of_resources(message: str, name: str, required: int, limit: int) -> LaunchError:
    """For a block that fits on no SM: Triton's autotuner goes on to the next configuration."""
    from triton.runtime.errors import OutOfResources

    ours = LaunchError(message, field=name, given=required, limit=limit)
    return also(ours, OutOfResources, name=name, required=required)


@functools.cache
def _both(ours: type[PaellaError], theirs: type[Exception]) -> Any:
    def reduce(self: PaellaError) -> tuple[type[PaellaError], tuple[Any, ...], dict[str, Any]]:
        return ours, self.args, self.__dict__  # pickle cannot find a class made at run time

    body = {"__init__": Exception.__init__, "__str__": Exception.__str__, "__reduce__": reduce}
    return type(ours.__name__, (ours, theirs), {**body, "__module__": ours.__module__})
