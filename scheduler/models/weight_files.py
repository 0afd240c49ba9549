"""Weights in safetensors files, which are written once and mapped into memory for reading.

    8 bytes: length of the header | header: JSON with each tensor's type, shape and place | the tensors, without gaps
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
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
_LONGEST_HEADER = 100 << 20  # the limit of the format's own library


class WeightFileError(PaellaError, ValueError):
    """A weight file is missing, truncated, or in another format."""


def write_weights(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes the whole file or none: a process that dies leaves no partial file under this name."""
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise WeightFileError(
                f"{name!r} is {array.dtype.name}, which safetensors files cannot hold: convert it to another type"
            )
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
            f"{at:,} bytes of weights cannot be written to {path} ({e.strerror}): free disk space, or keep more "
            "weights in host memory (host_bytes)"
        ) from e


def map_weights(path: str | Path, private: bool = False) -> dict[str, NDArray[Any]]:
    """The tensors of a file by name, in its order: read-only, and read from the disk when they are accessed. `private`:
    they can be written to, which does not change the file.

    The file's length is compared with its header now, because reading a part that is truncated later would end the
    process; `check_mapped` looks again.
    """
    path = Path(path)
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or not 2 <= length <= min(_LONGEST_HEADER, nbytes - 8):
                raise WeightFileError(
                    f"{path} is not a safetensors file, or is truncated: its header is longer than the file"
                )
            header = json.loads(file.read(length))
    except OSError as e:
        raise WeightFileError(
            f"the weights in {path} cannot be read ({e.strerror}): check that the file exists and is readable"
        ) from e
    except ValueError as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: its header is not JSON") from e
    if not isinstance(header, dict):
        raise WeightFileError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    begin = 8 + length
    try:
        places = sorted(((*about["data_offsets"], name) for name, about in header.items()))
        end = max((place[1] for place in places), default=0)
        if begin + end != nbytes:
            raise WeightFileError(
                f"{path} has {nbytes:,} bytes, but its header says {begin + end:,}: the file is truncated or damaged"
            )
        flat = np.memmap(path, np.uint8, "c" if private else "r", begin, (end,)) if end else np.empty(0, np.uint8)
        return {name: _tensor(flat[first:last], header[name]) for first, last, name in places}
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        if isinstance(e, WeightFileError):
            raise
        raise WeightFileError(f"{path} is not a safetensors file: {e}") from e


def check_mapped(arrays: Iterable[NDArray[Any]]) -> None:
    """Raises WeightFileError if a file that is mapped became shorter: reading the rest would end the process."""
    found: dict[int, mmap.mmap] = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            found[id(base)] = base
    for each in found.values():
        if each.size() < len(each):
            raise WeightFileError(
                f"the file of the weights was truncated to {each.size():,} bytes after the model was created: write "
                "the file again, in place of the old one, and create the model again"
            )


def _tensor(raw: NDArray[np.uint8], about: Mapping[str, Any]) -> NDArray[Any]:
    name = _TYPES[about["dtype"]]
    dtype = np.dtype(getattr(ml_dtypes, name, None) or name)
    if raw.ctypes.data % dtype.itemsize:  # the format does not align tensors; NumPy then needs a copy
        raw = raw.copy()
    return raw.view(dtype).reshape(about["shape"])
