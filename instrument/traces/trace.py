"""A finished trace: which block ran on which SM, and when; with methods for the most common questions."""

from __future__ import annotations

import functools
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from paellapy.instrument.errors import TraceError
from paellapy.instrument.records import BLOCK, LAUNCH, RANGE, WORK, Records, widened
from paellapy.instrument.traces import Elsewhere
from paellapy.instrument.traces.explain import Explanation, explain
from paellapy.instrument.traces.summary import (
    Comparison,
    Residency,
    Summary,
    TracedRanges,
    compare,
    counted,
    readable_time,
    residency_of,
    summarize,
    time_means,
    times_launched,
)

# --- the file format of traces: 1 to 6 bytes per block, checked when read; nothing in it is ever executed -------------

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
        raise TraceError(
            f"{path} is damaged and cannot be read: {error!r}; record the trace again", field="tables", path=path
        ) from error


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
        raise TraceError(
            f"the trace {path} cannot be read: {error.strerror or error}", field="file", path=path
        ) from error
    if content[: len(_MAGIC)] != _MAGIC:
        raise TraceError(f"{path} is not a paellapy trace: give a file that Trace.save wrote", field="magic", path=path)
    if len(content) < _PREAMBLE.size:
        raise TraceError(f"{path} is truncated; copy or record it again", field="length", path=path)
    _, version, header_bytes, body_bytes, checksum = _PREAMBLE.unpack_from(content)
    if version > FORMAT_VERSION:
        raise TraceError(
            f"{path} has format {version}, but this paellapy reads up to {FORMAT_VERSION}: upgrade paellapy",
            field="version", path=path, given=version, limit=FORMAT_VERSION,
        )
    body = content[_PREAMBLE.size :]
    if len(body) < body_bytes:
        raise TraceError(
            f"{path} is truncated: {body_bytes - len(body):,} bytes are missing; copy or record it again",
            field="length", path=path, given=len(body), limit=body_bytes,
        )
    if len(body) > body_bytes or zlib.crc32(body) != checksum:
        raise TraceError(
            f"{path} is damaged: its checksum does not match; copy or record it again", field="checksum", path=path
        )
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


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The part on which a trace was taken, and the versions of the software there ("driver", "triton", …)."""

    name: str
    n_sm: int
    max_warps_per_sm: int
    compute_capability: tuple[int, int]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy2D:
    """Occupancy over SMs and time. NumPy can use it as an array: `np.asarray(t.occupancy())`."""

    resident: NDArray[np.float64]  # SM x time: mean resident warps in the bin / the maximum of an SM
    edges_ns: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.resident.shape

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        return np.array(self.resident, dtype, copy=copy)


class Trace:
    """The result of `with pp.trace() as t`. Arrays are read-only; times are ns on the device's clock.

    >>> device = DeviceFacts("toy", n_sm=2, max_warps_per_sm=64, compute_capability=(9, 0))
    >>> Trace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), device)
    <Trace toy: 0 blocks, 0 launches of 0 kernels in 0 ns, 0 dropped, 0 unfinished>
    """

    # Pictures, and exports to formats of other tools.
    plot = Elsewhere("paellapy.viz.figures:plot")
    plot_heatmap = Elsewhere("paellapy.viz.figures:plot_heatmap")
    plot_gantt = Elsewhere("paellapy.viz.figures:plot_gantt")
    plot_residency = Elsewhere("paellapy.viz.figures:plot_residency")
    plot_requests = Elsewhere("paellapy.viz.figures:plot_requests")
    plot_ranges = Elsewhere("paellapy.viz.figures:plot_ranges")
    explore = Elsewhere("paellapy.viz.widgets:explore")
    save_figure = Elsewhere("paellapy.viz.static:save_figure")
    picture = Elsewhere("paellapy.viz.static:picture")
    to_perfetto = Elsewhere("paellapy.viz.perfetto:to_perfetto")
    to_html = Elsewhere("paellapy.viz.figures:to_html")

    def __init__(
        self,
        blocks: Records,
        launches: Records,
        kernels: Sequence[str],
        device: DeviceFacts,
        dropped: int = 0,
        unfinished: int = 0,
    ) -> None:
        self.fill(blocks, launches, kernels, device, dropped, unfinished)

    def fill(
        self,
        blocks: Records,
        launches: Records,
        kernels: Sequence[str],
        device: DeviceFacts,
        dropped: int = 0,
        unfinished: int = 0,
        unseen: Sequence[str] = (),
    ) -> None:
        """Replaces the contents: `trace()` returns a trace when it starts and fills it when it ends.

        `unseen` names kernels that ran meanwhile and do not report.
        """
        if blocks.dtype != BLOCK or launches.dtype != LAUNCH:
            raise TraceError(
                f"blocks of {blocks.dtype} and launches of {launches.dtype}: give arrays of records.BLOCK and "
                "records.LAUNCH", field="dtype", given=(blocks.dtype, launches.dtype)
            )
        self.blocks: Records = _frozen(blocks[np.lexsort((blocks["sm"], blocks["start_ns"]))])
        self.launches: Records = _frozen(launches[np.argsort(launches["launch"], kind="stable")])
        self.kernels = tuple(kernels)
        self.device = device
        self.dropped = dropped
        self.unfinished = unfinished
        self.unseen = tuple(unseen)
        self.ranges = TracedRanges()
        self.recording = False  # True inside the `with` block of a trace
        self.count_work: Callable[[], Records] = lambda: np.zeros(0, WORK)
        self.__dict__.pop("work", None)
        self._check()
        row = np.searchsorted(self.launches["launch"], self.blocks["launch"])
        self.warps = self.launches["warps"][row].astype(np.int64)

    @functools.cached_property
    def work(self) -> Records:
        """Facts about the machine code and the work of launches (records.WORK), found when they are first asked for."""
        return self.count_work()

    def _check(self) -> None:
        blocks, launches, ids = self.blocks, self.launches, self.launches["launch"]
        if (ids[1:] == ids[:-1]).any():
            raise TraceError("a launch is listed twice: launch ids must be unique within a trace", field="launches")
        if not np.isin(blocks["launch"], ids).all():
            raise TraceError(
                "a block belongs to a launch that is not listed: pass every launch of the trace", field="blocks"
            )
        if any((each["kernel"] >= len(self.kernels)).any() for each in (blocks, launches)):
            raise TraceError(
                f"a kernel index exceeds the {len(self.kernels)} kernel names: pass a name for every kernel",
                field="kernels", limit=len(self.kernels),
            )
        if not 0 < self.device.n_sm <= 1 << 16 or self.device.max_warps_per_sm < 1:
            raise TraceError(
                f"{self.device} is not a possible device: n_sm must be 1 to 65536, and max_warps_per_sm at least 1",
                field="device", given=self.device,
            )
        if (blocks["sm"] >= self.device.n_sm).any():
            raise TraceError(
                f"a block has an SM number beyond the {self.device.n_sm} SMs of {self.device.name}",
                field="sm", limit=self.device.n_sm,
            )
        if (blocks["end_ns"] < blocks["start_ns"]).any():
            raise TraceError("a block ends before it starts: put its times on one time line first", field="end_ns")

    def occupancy(
        self,
        bins: int = 200,
        start_ns: int | None = None,
        end_ns: int | None = None,
        kernel: str | int | None = None,
    ) -> Occupancy2D:
        """Resident warps / maximum for each SM and time bin: the exact mean over the bin, not a sample."""
        self._check_ended()
        first, last = self.span_ns
        first = first if start_ns is None else start_ns
        last = max(first, last) if end_ns is None else end_ns
        if bins < 1 or last < first:
            raise TraceError(
                f"bins={bins}, start_ns={first}, end_ns={last}: there must be at least one bin, and start_ns <= end_ns",
                field="bins", given=(bins, first, end_ns),
            )
        chosen = self._of_kernel(kernel)
        b, warps = self.blocks[chosen], self.warps[chosen]
        means, edges = time_means(b["sm"], b["start_ns"], b["end_ns"], warps, self.device.n_sm, first, last, bins)
        return Occupancy2D(means / self.device.max_warps_per_sm, edges)

    def residency(self, kernel: str | int | None = None) -> Residency:
        """The maximum and the mean number of blocks that each SM held at a time."""
        self._check_ended()
        return residency_of(self.blocks[self._of_kernel(kernel)], self.device.n_sm)

    def summary(self) -> Summary:
        """One row per kernel that ran, in the order of their names in `kernels`."""
        self._check_ended()
        return summarize(self)

    @overload
    def explain(self, json: Literal[False] = False) -> Explanation: ...
    @overload
    def explain(self, json: Literal[True]) -> str: ...
    def explain(self, json: bool = False) -> Explanation | str:
        """Explains what limits each kernel, in words: `print(t.explain())`; as a picture: `t.explain().plot()`; for
        programs: `t.explain(json=True)`.
        """
        self._check_ended()
        return explain(self).to_json() if json else explain(self)

    def compare(self, other: Trace) -> Comparison:
        """This trace and another side by side: `print(t.compare(other))`; in pictures: `pp.compare(t, other)`."""
        self._check_ended()
        other._check_ended()
        return compare(self, other)

    def select(
        self,
        kernel: str | int | None = None,
        launch: int | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> Trace:
        """The blocks of a kernel or a launch, or the blocks that were resident between two times.

        Lost records cannot be assigned, so `dropped`, `unfinished` and `unseen` stay those of the whole trace.
        """
        self._check_ended()
        b, rows = self.blocks, np.ones(len(self.launches), bool)
        keep = self._of_kernel(kernel)
        if kernel is not None:
            rows &= np.isin(self.launches["kernel"], self._indices(kernel))
        if launch is not None:
            if launch not in self.launches["launch"]:
                raise TraceError(
                    f"there is no launch {launch} in this trace; trace.launches lists all", field="launch", given=launch
                )
            keep &= b["launch"] == launch
            rows &= self.launches["launch"] == launch
        if start_ns is not None:
            keep &= (b["end_ns"] > start_ns) | (b["start_ns"] >= start_ns)
        if end_ns is not None:
            keep &= b["start_ns"] < end_ns
        if start_ns is not None or end_ns is not None:
            rows &= np.isin(self.launches["launch"], b["launch"][keep])
        chosen = Trace(b[keep], self.launches[rows], self.kernels, self.device, self.dropped, self.unfinished)
        chosen.unseen, chosen.ranges = self.unseen, self.ranges.of_blocks(chosen.blocks)
        chosen.count_work = lambda: self.work[np.isin(self.work["launch"], chosen.launches["launch"])]
        return chosen

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace to one compact file, for `Trace.load`: 3 to 6 bytes per block.

        The work of launches is in it if it is known: after `explain()`, or once `work` was asked for.
        """
        self._check_ended()
        facts = {
            "kernels": self.kernels,
            "device": asdict(self.device),
            "dropped": self.dropped,
            "unfinished": self.unfinished,
            "unseen": self.unseen,
        }
        more, about = self.own_tables()
        if self.ranges.names:
            more = {**more, "ranges": self.ranges.records}
            facts |= {"ranges": self.ranges.names, "ranges_lost": self.ranges.lost}
        if len(work := self.__dict__.get("work", ())):
            more = {**more, "work": work}
        write(Path(path), self.blocks, self.launches, facts | about, more)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a file written by `save`, as a trace of the right class. Nothing in the file is ever executed."""

        def build(blocks: Records, launches: Records, more: Tables, facts: dict[str, Any]) -> Trace:
            given = facts["device"]
            device = DeviceFacts(**given | {"compute_capability": tuple(given["compute_capability"])})
            kernels = [str(name) for name in facts["kernels"]]
            kind = Trace.kinds.get(facts.get("kind", ""))
            if kind is None:
                raise TraceError(
                    f"{path} is a trace of kind {facts['kind']!r}: import paellapy first, or upgrade it",
                    field="kind", path=path, given=facts["kind"],
                )
            found = kind(blocks, launches, kernels, device, int(facts["dropped"]), int(facts["unfinished"]))
            found.unseen = tuple(str(name) for name in facts.get("unseen", ()))
            if "ranges" in more:
                records = more.pop("ranges").astype(RANGE)
                found.ranges = TracedRanges(records, tuple(map(str, facts["ranges"])), int(facts["ranges_lost"]))
            if "work" in more:
                found.work = widened(more.pop("work"), WORK)
            found.take_tables(more, facts)
            return found

        return read(Path(path), build)

    # Traces with more than blocks, such as an engine's, have their own class, and their own tables in the file.
    kinds: ClassVar[dict[str, type[Trace]]] = {}

    def __init_subclass__(cls, kind: str, **others: Any) -> None:
        super().__init_subclass__(**others)
        Trace.kinds[kind] = cls

    def own_tables(self) -> tuple[Tables, dict[str, Any]]:
        """Tables and facts beyond those that every trace has."""
        return {}, {}

    def take_tables(self, more: Tables, facts: Mapping[str, Any]) -> None:
        """The inverse of `own_tables`."""

    def __repr__(self) -> str:
        if self.recording:
            return f"<Trace {self.device.name}: recording until its `with` block ends>"
        first, last = self.span_ns
        blocks = counted(len(self.blocks), "block")
        launches = counted(times_launched(self.blocks), "launch", "launches")
        kernels = counted(len(np.unique(self.blocks["kernel"])), "kernel")
        lost = f", {self.ranges.lost:,} events of ranges lost" if self.ranges.lost else ""
        unseen = f"; not traced: {', '.join(self.unseen)}" if self.unseen else ""
        return (
            f"<Trace {self.device.name}: {blocks}, {launches} of {kernels} in {readable_time(last - first)}, "
            f"{self.dropped:,} dropped, {self.unfinished:,} unfinished{lost}{unseen}>"
        )

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    @property
    def span_ns(self) -> tuple[int, int]:
        """The first start and the last end; (0, 0) without blocks."""
        if not len(self.blocks):
            return 0, 0
        return int(self.blocks["start_ns"][0]), int(self.blocks["end_ns"].max())

    def _check_ended(self) -> None:
        if self.recording:
            raise TraceError(
                "this trace is filled when its `with` block ends: read it behind the block", field="recording"
            )

    def _indices(self, kernel: str | int) -> list[int]:
        """A name can stand for several kernels: the same source compiled with different constants."""
        found = [i for i, name in enumerate(self.kernels) if kernel in (i, name)]
        if not found:
            raise TraceError(
                f"there is no kernel {kernel!r} in this trace; its kernels are {', '.join(self.kernels) or 'none'}",
                field="kernel", given=kernel, limit=self.kernels,
            )
        return found

    def _of_kernel(self, kernel: str | int | None) -> NDArray[np.bool_]:
        if kernel is None:
            return np.ones(len(self.blocks), bool)
        return np.isin(self.blocks["kernel"], self._indices(kernel))


Trace.kinds[""] = Trace


def _frozen(array: Records) -> Records:
    array.flags.writeable = False
    return array
