"""`PaellaError`, the base of all our errors, and the errors of kernels, traces and devices: one class per cause."""

from __future__ import annotations


class PaellaError(Exception):
    """Base of all errors raised by paellapy."""


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


class ViewWarning(UserWarning):
    """A kernel on the virtual GPU reached beyond a view it was given, into the array behind it."""


class OutOfBoundsError(PaellaError):
    """A kernel on the virtual GPU touched memory outside its arrays; names kernel, line, block and index."""
