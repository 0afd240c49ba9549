"""The file format of traces: 1 to 6 bytes per block, checked when read; nothing in it is ever executed."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, LAUNCH, Records

T = TypeVar("T")
Tables = dict[str, Records]

# A trace file: this preamble (magic, version, bytes of the header, bytes and CRC of header and columns), the header as
# JSON, and the columns of its tables in one zlib stream. Version 1 has BLOCK and LAUNCH; version 2 has more tables
# after them, which the header describes ("tables": name, rows, fields). Raise the version whenever one of them changes.
PLAIN, WITH_TABLES = 1, 2
FORMAT_VERSION = WITH_TABLES
_MAGIC = b"\x89PAELLA\n"
_PREAMBLE = struct.Struct("<8sIIQI")


def write(path: Path, blocks: Records, launches: Records, facts: Mapping[str, Any], more: Tables | None = None) -> None:
    """Writes records.BLOCK, records.LAUNCH, `more` tables, and facts about them in JSON.

    A file without more tables has version 1, which every paellapy reads.
    """
    meta = {"blocks": len(blocks), "launches": len(launches), **facts}
    if more:
        meta["tables"] = [[name, len(table), table.dtype.descr] for name, table in more.items()]
    header = json.dumps(meta).encode()
    columns = b"".join(_pack(table) for table in (blocks, launches, *(more or {}).values()))
    body = header + zlib.compress(columns, 6)
    version = WITH_TABLES if more else PLAIN
    path.write_bytes(_PREAMBLE.pack(_MAGIC, version, len(header), len(body), zlib.crc32(body)) + body)


def read(path: Path, build: Callable[[Records, Records, Tables, dict[str, Any]], T]) -> T:
    """The result of `build` from blocks, launches, other tables and facts; facts that it cannot use count as damage."""
    header, data = _read(path)
    try:
        meta = json.loads(header)
        layout = [("blocks", meta["blocks"], BLOCK), ("launches", meta["launches"], LAUNCH)]
        layout += [(str(name), rows, _dtype(fields)) for name, rows, fields in meta.get("tables", ())]
        sizes = [rows * dtype.itemsize for _, rows, dtype in layout]
        columns = zlib.decompressobj().decompress(data, sum(sizes) + 1)  # never more than the header announces
        if min(sizes) < 0 or len(columns) != sum(sizes):
            raise ValueError("the columns do not have the announced length")
        tables, at = {}, 0
        for (name, _, dtype), size in zip(layout, sizes, strict=True):
            tables[name] = _unpack(columns[at : at + size], dtype)
            at += size
        return build(tables.pop("blocks"), tables.pop("launches"), tables, meta)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
        raise TraceError(f"{path} is damaged and cannot be read: {error!r}; record the trace again") from error


def _dtype(fields: Any) -> np.dtype[Any]:
    """The dtype of a table in the file: plain integers only."""
    dtype = np.dtype([(str(name), str(kind)) for name, kind in fields])
    if any(dtype[name].kind not in "iu" for name in dtype.names or ()):
        raise ValueError(f"a table has fields that are not integers: {fields}")
    return dtype


def _read(path: Path) -> tuple[bytes, bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    if content[: len(_MAGIC)] != _MAGIC:
        raise TraceError(f"{path} is not a paellapy trace: give a file that Trace.save wrote")
    if len(content) < _PREAMBLE.size:
        raise TraceError(f"{path} is truncated; copy or record it again")
    _, version, header_bytes, body_bytes, checksum = _PREAMBLE.unpack_from(content)
    if version > FORMAT_VERSION:
        raise TraceError(
            f"{path} has format {version}, but this paellapy reads up to {FORMAT_VERSION}: upgrade paellapy"
        )
    body = content[_PREAMBLE.size :]
    if len(body) < body_bytes:
        raise TraceError(f"{path} is truncated: {body_bytes - len(body):,} bytes are missing; copy or record it again")
    if len(body) > body_bytes or zlib.crc32(body) != checksum:
        raise TraceError(f"{path} is damaged: its checksum does not match; copy or record it again")
    return body[:header_bytes], body[header_bytes:]


def _pack(records: Records) -> bytes:
    """Columns of small numbers in planes of equal bytes, which zlib compresses far better than the records themselves.
    """
    packed = []
    for name, width, count in _columns(records.dtype):
        values = np.ascontiguousarray(records[name]).view(f"<u{width}").reshape(len(records), count).T
        if name == "end_ns":
            steps = values - records["start_ns"].view("<u8")  # the duration
        else:
            steps = np.diff(values, axis=1, prepend=np.zeros((count, 1), values.dtype))
        signed = np.ascontiguousarray(steps).view(f"<i{width}")
        small = (signed << 1) ^ (signed >> (8 * width - 1))  # zigzag: small for positive and negative numbers
        packed.append(small.view(np.uint8).reshape(-1, width).T.tobytes())
    return b"".join(packed)


def _unpack(packed: bytes, dtype: np.dtype[Any]) -> Records:
    """The inverse of `_pack`; unsigned arithmetic wraps, so every value is restored exactly."""
    n, at = len(packed) // dtype.itemsize, 0
    records = np.zeros(n, dtype)
    for name, width, count in _columns(dtype):
        planes = np.frombuffer(packed, np.uint8, n * count * width, at).reshape(width, n * count)
        small = np.ascontiguousarray(planes.T).view(f"<u{width}").reshape(count, n)
        steps = (small >> 1) ^ (~(small & 1) + 1)
        if name == "end_ns":
            values = steps + records["start_ns"].view("<u8")
        else:
            values = np.cumsum(steps, axis=1, dtype=steps.dtype)
        records[name] = values.T.reshape(records[name].shape).view(records[name].dtype)
        at += n * count * width
    return records


def _columns(dtype: np.dtype[Any]) -> Iterator[tuple[str, int, int]]:
    """Name, bytes per number and numbers per record of each column."""
    for name in dtype.names or ():
        base = dtype[name].base
        yield name, base.itemsize, dtype[name].itemsize // base.itemsize
