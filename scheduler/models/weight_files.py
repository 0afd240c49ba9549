"""Weights in files: the safetensors format, written once and mapped into memory to be read.

    8 bytes: length of the header | header: JSON with each tensor's type, shape and place | the tensors, without gaps
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_NAMES = {name: short for short, name in _TYPES.items()}
_LONGEST_HEADER = 100 << 20  # as the format's own library has it


class WeightFileError(PaellaError, ValueError):
    """A file of weights is missing, cut off, or not one."""


def write_weights(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """All of it or nothing: a process that dies leaves no half of a file under this name."""
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise WeightFileError(f"{name!r} is {array.dtype.name}, which safetensors files do not hold")
        end = at + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    half = path.with_suffix(".part")
    try:
        with half.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                np.ascontiguousarray(array).reshape(-1).view(np.uint8).tofile(file)
        os.replace(half, path)
    except OSError as e:
        half.unlink(missing_ok=True)
        raise WeightFileError(
            f"{at:,} bytes of weights cannot be written to {path} ({e.strerror}): free disk space, or keep more in the "
            "host's memory (host_bytes)"
        ) from e


def map_weights(path: str | Path) -> dict[str, NDArray[Any]]:
    """The tensors of a file by name, in its order: read from the disk when they are looked at, and not to be written.

    The file's length is compared with its header now: what is cut off later ends the process that reads it.
    """
    path = Path(path)
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or not 2 <= length <= min(_LONGEST_HEADER, nbytes - 8):
                raise WeightFileError(f"{path} is not a safetensors file, or is cut off: its header does not fit in it")
            header = json.loads(file.read(length))
    except OSError as e:
        raise WeightFileError(f"the weights in {path} cannot be read ({e.strerror}): was the file removed?") from e
    except ValueError as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: its header is no JSON") from e
    header.pop("__metadata__", None)
    begin = 8 + length
    try:
        places = sorted(((*about["data_offsets"], name) for name, about in header.items()))
        end = max((place[1] for place in places), default=0)
        if begin + end != nbytes:
            raise WeightFileError(f"{path} has {nbytes:,} bytes where its header says {begin + end:,}: it is cut off")
        flat = np.memmap(path, np.uint8, "r", begin, (end,)) if end else np.empty(0, np.uint8)
        return {name: _tensor(flat[first:last], header[name]) for first, last, name in places}
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: {e}") from e


def _tensor(raw: NDArray[np.uint8], about: Mapping[str, Any]) -> NDArray[Any]:
    name = _TYPES[about["dtype"]]
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if raw.ctypes.data % dtype.itemsize:  # the format does not align tensors; NumPy reads them so or not
        raw = raw.copy()
    return raw.view(dtype).reshape(about["shape"])
