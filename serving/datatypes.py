"""Datatypes of the protocol and their names in NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from paellapy.scheduler.core.errors import ModelError
from paellapy.scheduler.models.model import Model
from paellapy.serving.errors import RequestError

DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def datatype(dtype: np.dtype[Any]) -> str:
    """The protocol's name of a NumPy type.

    >>> datatype(np.dtype("float16"))
    'FP16'
    """
    return NAMES[dtype]


def check_datatype(name: str, wanted: np.dtype[Any], where: str) -> None:
    """Raises RequestError unless the request's datatype is the model's."""
    if DTYPES.get(name) == wanted:
        return
    if name == "BYTES":
        raise RequestError(f"{where} is {datatype(wanted)}; BYTES is not supported for it")
    if name not in DTYPES:
        raise RequestError(f"{where}: the datatype {name!r} does not exist; send {datatype(wanted)}")
    raise RequestError(f"{where} has the datatype {datatype(wanted)}, not {name}")


def check_servable(model: Model) -> None:
    """Raises ModelError unless the protocol has a name for the type of every tensor."""
    for kind, specs in (("input", model.inputs), ("output", model.outputs)):
        for key, spec in specs.items():
            if spec.dtype not in NAMES:
                raise ModelError(
                    f"model {model.name!r}, {kind} {key!r} has the type {spec.dtype.name}, which the protocol cannot "
                    f"carry: use one of {', '.join(DTYPES)}"
                )
