"""A finished trace: which block ran on which SM, when; and the questions one asks of it first."""

from __future__ import annotations

import html
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from instrument.errors import TraceError
from instrument.records import BLOCK, LAUNCH, Records

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The part a trace was taken on, and the versions of what ran there ("driver", "triton", …)."""

    name: str
    n_sm: int
    max_warps_per_sm: int
    compute_capability: tuple[int, int]
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy2D:
    resident: NDArray[np.float64]  # SM x time: mean resident warps in the bin / the most an SM can hold
    edges_ns: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """Resident blocks of each SM; means are over the time from the first start to the last end on any SM."""

    max_blocks: NDArray[np.int64]
    mean_blocks: NDArray[np.float64]
    busy_ns: NDArray[np.int64]  # time with at least one block resident


@dataclass(frozen=True, slots=True)
class KernelSummary:
    kernel: str
    launches: int  # every replay counts
    blocks: int
    mean_ns: float
    median_ns: float
    max_ns: int
    span_ns: int  # from the first start to the last end
    occupancy: float  # mean resident warps / maximum, where and while the kernel has a block on the SM
    waves: float  # blocks of a launch / blocks that all SMs hold at the residency seen
    tail_share: float  # share of a launch's time after the first of its SMs has run dry


@dataclass(frozen=True, slots=True)
class Summary:
    """One row per kernel that ran. `print` it, or hand it to rich."""

    title: str
    kernels: tuple[KernelSummary, ...]

    COLUMNS = ("kernel", "launches", "blocks", "mean", "median", "max", "span", "occupancy", "waves", "tail")

    def cells(self) -> Iterator[tuple[str, ...]]:
        for k in self.kernels:
            times = (_time(ns) for ns in (k.mean_ns, k.median_ns, k.max_ns, k.span_ns))
            shares = f"{k.occupancy:.1%}", f"{k.waves:.2f}", f"{k.tail_share:.1%}"
            yield k.kernel, f"{k.launches:,}", f"{k.blocks:,}", *times, *shares

    def __str__(self) -> str:
        rows = [self.COLUMNS, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join([r[0].ljust(widths[0]), *map(str.rjust, r[1:], widths[1:])]) for r in rows)
        return "\n".join([self.title, *lines])

    def __rich__(self) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(self.title), box=box.SIMPLE_HEAD, padding=0, show_edge=False)
        for name in self.COLUMNS:
            if name == "kernel":
                table.add_column(name, overflow="fold", min_width=8)
            else:
                table.add_column(name, justify="right", no_wrap=True)
        for row in self.cells():
            table.add_row(*map(Text, row))  # Text: a name such as `f[int]` is not markup
        return table


class Trace:
    """What `with pp.trace() as t` leaves behind. Arrays are read-only; times are ns on the device's clock.

    >>> device = DeviceFacts("toy", n_sm=2, max_warps_per_sm=64, compute_capability=(9, 0))
    >>> Trace(np.zeros(0, BLOCK), np.zeros(0, LAUNCH), (), device)
    <Trace toy: 0 blocks, 0 launches of 0 kernels in 0 ns, 0 dropped, 0 unfinished>
    """

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
    ) -> None:
        """Replaces the contents: `trace()` hands a trace out when it starts and fills it when it ends."""
        if blocks.dtype != BLOCK or launches.dtype != LAUNCH:
            raise TraceError("a trace takes arrays of records.BLOCK and records.LAUNCH")
        self.blocks: Records = _frozen(blocks[np.lexsort((blocks["sm"], blocks["start_ns"]))])
        self.launches: Records = _frozen(launches[np.argsort(launches["launch"], kind="stable")])
        self.kernels = tuple(kernels)
        self.device = device
        self.dropped = dropped
        self.unfinished = unfinished
        self._check()
        row = np.searchsorted(self.launches["launch"], self.blocks["launch"])
        self._warps = self.launches["warps"][row].astype(np.int64)

    def _check(self) -> None:
        blocks, launches, ids = self.blocks, self.launches, self.launches["launch"]
        if (ids[1:] == ids[:-1]).any():
            raise TraceError("a launch is listed twice: launch ids must be unique within a trace")
        if not np.isin(blocks["launch"], ids).all():
            raise TraceError("a block belongs to a launch that is not listed: pass every launch of the trace")
        if any((each["kernel"] >= len(self.kernels)).any() for each in (blocks, launches)):
            raise TraceError(f"a kernel index is beyond the {len(self.kernels)} kernel names given")
        if not 0 < self.device.n_sm <= 1 << 16 or self.device.max_warps_per_sm < 1:
            raise TraceError(f"{self.device} is not a possible device: it needs SMs that hold warps")
        if (blocks["sm"] >= self.device.n_sm).any():
            raise TraceError(f"a block ran on an SM that {self.device.name} with {self.device.n_sm} SMs does not have")
        if (blocks["end_ns"] < blocks["start_ns"]).any():
            raise TraceError("a block ends before it starts: its times were not put on one time line")

    def occupancy(
        self,
        bins: int = 200,
        start_ns: int | None = None,
        end_ns: int | None = None,
        kernel: str | int | None = None,
    ) -> Occupancy2D:
        """Resident warps / maximum for each SM and time bin: the exact mean over the bin, not a sample."""
        first, last = self._span()
        first = first if start_ns is None else start_ns
        last = max(first, last) if end_ns is None else end_ns
        if bins < 1 or last < first:
            raise TraceError(f"occupancy needs at least one bin and start_ns <= end_ns, not {bins}, {first}, {last}")
        # Relative to the first edge: ns since 1970 do not fit the 53 bits of a float.
        edges = np.array([(last - first) * i // bins for i in range(bins + 1)], np.int64)
        width = np.diff(edges)
        chosen = self._of_kernel(kernel)
        warps = self._warps[chosen]
        row = self.blocks["sm"][chosen].astype(np.int64) * bins
        area = np.zeros((self.device.n_sm, bins))
        for sign, name in ((1, "start_ns"), (-1, "end_ns")):
            # Warps resident from here on: part of this bin and the whole of every later one.
            at = np.clip(self.blocks[name][chosen], first, last) - first
            bin_ = np.minimum(np.searchsorted(edges, at, side="right") - 1, bins - 1)
            part = np.bincount(row + bin_, warps * (edges[bin_ + 1] - at), area.size).reshape(area.shape)
            whole = np.bincount(row + bin_, warps, area.size).reshape(area.shape)
            area += sign * (part + (np.cumsum(whole, axis=1) - whole) * width)
        return Occupancy2D(area / (np.maximum(width, 1) * self.device.max_warps_per_sm), edges + first)

    def residency(self, kernel: str | int | None = None) -> Residency:
        """The most and the mean number of blocks that each SM held at a time."""
        return self._residency(self._of_kernel(kernel))

    def _residency(self, chosen: NDArray[np.bool_]) -> Residency:
        b = self.blocks[chosen]
        time = np.concatenate((b["start_ns"], b["end_ns"]))
        sm = np.concatenate((b["sm"], b["sm"]))
        step = np.repeat(np.array([1, -1]), len(b))
        # At one instant: ends, then starts, then ends of blocks shorter than a tick of the clock, which did run.
        order = np.concatenate((np.ones(len(b)), np.where(b["start_ns"] == b["end_ns"], 2, 0)))
        by = np.lexsort((order, time, sm))
        time, sm, count = time[by], sm[by], np.cumsum(step[by])  # each SM's steps add up to 0
        lasted = np.diff(time, append=time[-1:])
        lasted[:-1][sm[1:] != sm[:-1]] = 0
        n_sm = self.device.n_sm
        most = np.zeros(n_sm, np.int64)
        np.maximum.at(most, sm, count)
        busy = np.zeros(n_sm, np.int64)
        np.add.at(busy, sm, np.where(count > 0, lasted, 0))
        total = np.zeros(n_sm, np.int64)
        np.add.at(total, b["sm"], b["end_ns"] - b["start_ns"])
        span = int(b["end_ns"].max() - b["start_ns"].min()) if len(b) else 0
        return Residency(most, total / max(span, 1), busy)

    def summary(self) -> Summary:
        """One row per kernel that ran, in the order of their names in `kernels`."""
        run = _runs(self.blocks)
        ran = np.unique(self.blocks["kernel"]).tolist()
        return Summary(repr(self)[1:-1], tuple(self._kernel_summary(k, run) for k in ran))

    def _kernel_summary(self, kernel: int, run: NDArray[np.int64]) -> KernelSummary:
        chosen = self.blocks["kernel"] == kernel
        b, runs = self.blocks[chosen], np.unique(run[chosen])
        duration = b["end_ns"] - b["start_ns"]
        seen = self._residency(chosen)
        listed = np.isin(self.launches["launch"], b["launch"])
        warp_ns = float((duration * self._warps[chosen]).sum())
        return KernelSummary(
            kernel=self.kernels[kernel],
            launches=len(runs),
            blocks=len(b),
            mean_ns=float(duration.mean()),
            median_ns=float(np.median(duration)),
            max_ns=int(duration.max()),
            span_ns=int(b["end_ns"].max() - b["start_ns"].min()),
            occupancy=warp_ns / max(int(seen.busy_ns.sum()) * self.device.max_warps_per_sm, 1),
            waves=float(self.launches["blocks"][listed].mean() / (self.device.n_sm * seen.max_blocks.max())),
            tail_share=_tail_share(b, run[chosen]),
        )

    def select(
        self,
        kernel: str | int | None = None,
        launch: int | None = None,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> Trace:
        """The blocks of a kernel or a launch, or those that were resident between two times.

        Records that were lost cannot be told apart, so `dropped` and `unfinished` stay those of the whole.
        """
        b, rows = self.blocks, np.ones(len(self.launches), bool)
        keep = self._of_kernel(kernel)
        if kernel is not None:
            rows &= np.isin(self.launches["kernel"], self._indices(kernel))
        if launch is not None:
            if launch not in self.launches["launch"]:
                raise TraceError(f"there is no launch {launch} in this trace; see trace.launches")
            keep &= b["launch"] == launch
            rows &= self.launches["launch"] == launch
        if start_ns is not None:
            keep &= (b["end_ns"] > start_ns) | (b["start_ns"] >= start_ns)
        if end_ns is not None:
            keep &= b["start_ns"] < end_ns
        if start_ns is not None or end_ns is not None:
            rows &= np.isin(self.launches["launch"], b["launch"][keep])
        return Trace(b[keep], self.launches[rows], self.kernels, self.device, self.dropped, self.unfinished)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to one compact file, for `Trace.load`: 3 to 6 bytes a block."""
        meta = {
            "blocks": len(self.blocks),
            "launches": len(self.launches),
            "kernels": self.kernels,
            "device": asdict(self.device),
            "dropped": self.dropped,
            "unfinished": self.unfinished,
        }
        header = json.dumps(meta).encode()
        body = header + zlib.compress(_pack(self.blocks) + _pack(self.launches), 6)
        Path(path).write_bytes(_PREAMBLE.pack(_MAGIC, FORMAT_VERSION, len(header), len(body), zlib.crc32(body)) + body)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a file written by `save`. Nothing in the file is ever executed."""
        header, data = _read(Path(path))
        try:
            meta = json.loads(header)
            sizes = [meta["blocks"] * BLOCK.itemsize, meta["launches"] * LAUNCH.itemsize]
            columns = zlib.decompressobj().decompress(data, sum(sizes) + 1)  # never more than the header announces
            if min(sizes) < 0 or len(columns) != sum(sizes):
                raise ValueError("the columns do not have the announced length")
            return cls(
                _unpack(columns[: sizes[0]], BLOCK),
                _unpack(columns[sizes[0] :], LAUNCH),
                [str(name) for name in meta["kernels"]],
                DeviceFacts(**meta["device"] | {"compute_capability": tuple(meta["device"]["compute_capability"])}),
                int(meta["dropped"]),
                int(meta["unfinished"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError, zlib.error) as error:
            raise TraceError(f"{path} is damaged and cannot be read: {error!r}; record the trace again") from error

    def plot(self, bins: int = 400, kernel: str | int | None = None, ax: Any = None) -> Any:
        """Heat map of occupancy, SM x time, on a matplotlib axis, which is returned."""
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise TraceError("plot() needs matplotlib: pip install 'paellapy[viz]'") from error
            ax = pyplot.subplots(figsize=(10, 4), layout="constrained")[1]
        seen = self.occupancy(bins, kernel=kernel)
        width_us = max(float(seen.edges_ns[-1] - seen.edges_ns[0]) / 1e3, 1e-3)
        extent = (0, width_us, self.device.n_sm - 0.5, -0.5)
        image = ax.imshow(seen.resident, aspect="auto", interpolation="none", vmin=0, vmax=1, extent=extent)
        ax.figure.colorbar(image, ax=ax, label="resident warps / maximum")
        ax.set(xlabel="time (µs)", ylabel="SM", title=repr(self)[1:-1])
        return ax

    def __repr__(self) -> str:
        first, last = self._span()
        return (
            f"<Trace {self.device.name}: {len(self.blocks):,} blocks, {len(self.launches):,} launches of "
            f"{len(np.unique(self.launches['kernel'])):,} kernels in {_time(last - first)}, "
            f"{self.dropped:,} dropped, {self.unfinished:,} unfinished>"
        )

    def _repr_html_(self) -> str:
        summary = self.summary()
        head = "".join(f"<th>{name}</th>" for name in summary.COLUMNS)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in summary.cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><caption>{html.escape(summary.title)}</caption><tr>{head}</tr>{body}</table>"

    def _span(self) -> tuple[int, int]:
        if not len(self.blocks):
            return 0, 0
        return int(self.blocks["start_ns"][0]), int(self.blocks["end_ns"].max())

    def _indices(self, kernel: str | int) -> list[int]:
        """A name can stand for several kernels: the same source compiled with other constants."""
        found = [i for i, name in enumerate(self.kernels) if kernel in (i, name)]
        if not found:
            raise TraceError(f"there is no kernel {kernel!r} in this trace, only {', '.join(self.kernels) or 'none'}")
        return found

    def _of_kernel(self, kernel: str | int | None) -> NDArray[np.bool_]:
        if kernel is None:
            return np.ones(len(self.blocks), bool)
        return np.isin(self.blocks["kernel"], self._indices(kernel))


def _runs(blocks: Records) -> NDArray[np.int64]:
    """A number for each block's run of its launch: replays of one launch have the same id, but never overlap."""
    n = len(blocks)
    order = np.lexsort((blocks["start_ns"], blocks["launch"]))
    ordered = blocks[order]
    launch, start, end = ordered["launch"], ordered["start_ns"], ordered["end_ns"]
    by = np.lexsort((ordered["block"], launch))
    same = (launch[by][1:] == launch[by][:-1]) & (ordered["block"][by][1:] == ordered["block"][by][:-1])
    last_seen = np.full(n, -1)
    last_seen[by[1:][same]] = by[:-1][same]
    heads = np.flatnonzero(launch[1:] != launch[:-1]) + 1
    last_seen[heads] = heads - 1
    reach = np.maximum.accumulate(last_seen)
    cuts = [0]
    while (again := int(np.searchsorted(reach, cuts[-1]))) < n:
        # This block ran already since the last cut, so a run begins between then and now: where the launch was quiet
        # longest, because either end of a run may be missing from the trace.
        cut, seen = cuts[-1], int(last_seen[again])
        quiet = start[seen + 1 : again + 1] - np.maximum.accumulate(end[cut:again])[seen - cut :]
        cuts.append(seen + 1 + int(np.argmax(quiet)))
    run = np.empty(n, np.int64)
    run[order] = np.searchsorted(cuts, np.arange(n), side="right")
    return run


def _tail_share(blocks: Records, run: NDArray[np.int64]) -> float:
    _, run = np.unique(run, return_inverse=True)
    n = int(run.max()) + 1
    far = np.iinfo(np.int64).max
    first, last, dry = np.full(n, far), np.full(n, -far), np.full(n, far)
    np.minimum.at(first, run, blocks["start_ns"])
    np.maximum.at(last, run, blocks["end_ns"])
    place, at = np.unique((run << 16) | blocks["sm"], return_inverse=True)
    ends = np.full(len(place), -far)
    np.maximum.at(ends, at, blocks["end_ns"])
    np.minimum.at(dry, place >> 16, ends)
    return float((last - dry).sum() / max((last - first).sum(), 1))


def _time(ns: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if ns >= size:
            value = ns / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{ns:.0f} ns"


def _frozen(array: Records) -> Records:
    array.flags.writeable = False
    return array


# A trace file: this preamble (magic, version, bytes of the header, bytes and CRC of header and columns), the header as
# JSON, and the columns of BLOCK and LAUNCH in one zlib stream. Raise the version whenever one of them changes.
FORMAT_VERSION = 1
_MAGIC = b"\x89PAELLA\n"
_PREAMBLE = struct.Struct("<8sIIQI")


def _read(path: Path) -> tuple[bytes, bytes]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror or error}") from error
    if content[: len(_MAGIC)] != _MAGIC:
        raise TraceError(f"{path} is not a paellapy trace")
    if len(content) < _PREAMBLE.size:
        raise TraceError(f"{path} is truncated; copy or record it again")
    _, version, header_bytes, body_bytes, checksum = _PREAMBLE.unpack_from(content)
    if version > FORMAT_VERSION:
        raise TraceError(f"{path} has format {version}, this paellapy reads up to {FORMAT_VERSION}: upgrade paellapy")
    body = content[_PREAMBLE.size :]
    if len(body) < body_bytes:
        raise TraceError(f"{path} is truncated: {body_bytes - len(body):,} bytes are missing; copy or record it again")
    if len(body) > body_bytes or zlib.crc32(body) != checksum:
        raise TraceError(f"{path} is damaged: its checksum does not match; copy or record it again")
    return body[:header_bytes], body[header_bytes:]


def _pack(records: Records) -> bytes:
    """Columns of small numbers in planes of equal bytes, which zlib packs far better than the records themselves."""
    packed = []
    for name, width, count in _columns(records.dtype):
        values = np.ascontiguousarray(records[name]).view(f"<u{width}").reshape(len(records), count).T
        if name == "end_ns":
            steps = values - records["start_ns"].view("<u8")  # the duration
        else:
            steps = np.diff(values, axis=1, prepend=np.zeros((count, 1), values.dtype))
        signed = np.ascontiguousarray(steps).view(f"<i{width}")
        small = (signed << 1) ^ (signed >> (8 * width - 1))  # zigzag: small whether positive or negative
        packed.append(small.view(np.uint8).reshape(-1, width).T.tobytes())
    return b"".join(packed)


def _unpack(packed: bytes, dtype: np.dtype[Any]) -> Records:
    """The inverse of `_pack`; unsigned arithmetic wraps, so every value comes back exactly."""
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
    """Name, bytes of a number and numbers per record."""
    for name in dtype.names or ():
        base = dtype[name].base
        yield name, base.itemsize, dtype[name].itemsize // base.itemsize
