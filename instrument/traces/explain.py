"""`t.explain()`: explains in words what limits each kernel of a trace, with the figures behind every claim."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.arguments import Descriptor
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.gpu_model.parts import PARTS, WARP, Occupancy, Part, Timing, limits_for_capability, occupancy
from paellapy.instrument.kernels.triton_source import launch_values
from paellapy.instrument.ptx.compiled import Source
from paellapy.instrument.records import PRODUCTS, Records
from paellapy.instrument.traces import Elsewhere
from paellapy.instrument.traces.summary import KernelSummary, Traced, allowed_by, readable_time, residency_of
from paellapy.instrument.triton_ir import TtirProgram
from paellapy.instrument.triton_ir.lower import follows_data

_WORTH_SAYING = 0.05  # smallest share of a kernel's time that is worth a claim
_LIMITS = 0.25  # smallest share of a kernel's time that a limit takes, for advice on other limits to be of no use
_ACCESSES = ("atomics", "uncoalesced")
_SECTOR = 32  # bytes
_MODELLED = "(virtual)"  # in the title of a device whose times are a model's
_HIDDEN = 4  # times as long as it waits a block works, if its tile is large enough
_MANY_WAVES = 4  # from which on larger tiles leave enough blocks


@dataclass(frozen=True, slots=True)
class Claim:
    """One limit of a kernel. `share` is about the part of its time that it costs; for a roof, the part reached."""

    about: str
    says: str
    share: float
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KernelExplanation:
    kernel: str
    span_ns: int
    claims: tuple[Claim, ...]  # the weightiest first

    def __str__(self) -> str:
        head = f"{self.kernel} ({readable_time(self.span_ns)} from first block to last)"
        if not self.claims:
            return f"{head}\n  Nothing in this trace stands out."
        return "\n".join([head, *(f"  {c.share:4.0%}  {c.about}: {c.says}" for c in self.claims)])

    def brief(self) -> str:
        """One line: the first limit in words, the others by name."""
        if not self.claims:
            return f"{self.kernel}: nothing stands out"
        first, *others = self.claims
        also = f" Also: {', '.join(f'{c.about} {c.share:.0%}' for c in others)}." if others else ""
        return f"{self.kernel}: {first.about} {first.share:.0%}: {first.says}{also}"


@dataclass(frozen=True)
class Explanation:
    """Explanations for all kernels of a trace. `print` it, or `plot()` it."""

    kernels: tuple[KernelExplanation, ...]
    plot = Elsewhere("paellapy.viz.figures:plot_explanation")

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels)) or "The trace has no blocks."

    def brief(self, most: int = 5) -> str:
        """One line per kernel, for the kernels that took longest."""
        longest = sorted(self.kernels, key=lambda k: -k.span_ns)[:most]
        shown = [k.brief() for k in self.kernels if k in longest]
        left = len(self.kernels) - len(shown)
        return "\n".join(shown + [f"and {left} more, which took less time"] * bool(left)) or str(self)

    def to_json(self) -> str:
        """A list with an object for each kernel, of the fields of `KernelExplanation` and `Claim`."""
        return json.dumps(asdict(self)["kernels"], default=float)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def explain(trace: Any) -> Explanation:
    """The limits of the kernels of a trace."""
    found = []
    for summary in trace.summary().kernels:
        numbers = [i for i, name in enumerate(trace.kernels) if name == summary.kernel]
        blocks = trace.blocks[np.isin(trace.blocks["kernel"], numbers)]
        launches = trace.launches[np.isin(trace.launches["launch"], blocks["launch"])]
        claims = [c for c in _claims(trace, summary, blocks, launches) if c.share >= _WORTH_SAYING]
        wasteful = any(c.about in _ACCESSES and c.share >= _LIMITS for c in claims)
        # A roof that is reached by waste explains nothing: the waste comes first.
        ordered = sorted(claims, key=lambda c: (wasteful and c.about not in _ACCESSES, -c.share))
        found.append(KernelExplanation(summary.kernel, summary.span_ns, tuple(ordered)))
    return Explanation(tuple(found))


def _claims(trace: Any, k: KernelSummary, blocks: Records, launches: Records) -> Iterator[Claim]:
    work = _as_often_as_it_ran(trace.work[np.isin(trace.work["launch"], launches["launch"])], blocks, launches)
    accesses = list(_accesses(trace, work, float(_union_ns(blocks))))
    # Smaller tiles make neither addresses lie closer together nor updates fewer.
    tiles_help = not any(c.share >= _LIMITS for c in accesses)
    yield from accesses
    yield from _waves(trace, k, launches, tiles_help)
    if k.waves >= 1:  # a smaller launch has room for all its blocks, whatever limits them
        yield from _occupancy(trace, launches)
    if not trace.device.name.endswith(_MODELLED):  # there the host's time between launches is a constant
        yield from _gaps(trace, k, blocks)
    yield from _imbalance(trace, blocks)
    yield from _spills(work, tiles_help)
    roofs = sorted(_roofs(trace, blocks, work), key=lambda claim: -claim.share)
    # The second one matters too if it is nearly as near: a product of matrices loads while it computes.
    yield from roofs[: 2 if roofs[1:] and roofs[1].share >= roofs[0].share / 2 else 1]
    if roofs and tiles_help:
        yield from _small_tiles(trace, k, blocks, launches, roofs[0].share)
    yield from _widest_range(trace, k)


def _as_often_as_it_ran(work: Records, blocks: Records, launches: Records) -> Records:
    """The work of launches, multiplied for those that a CUDA graph replayed.

    The work of all blocks of a launch is reduced to those that ran: others follow in another launch, or in none.
    """
    ran = np.searchsorted(np.sort(blocks["launch"]), work["launch"], side="right")
    ran = ran - np.searchsorted(np.sort(blocks["launch"]), work["launch"])
    rounds = np.maximum(np.rint(ran / launches["blocks"][np.searchsorted(launches["launch"], work["launch"])]), 1)
    rounds = np.where(work["blocks"] > 0, ran / np.maximum(work["blocks"], 1), rounds)
    repeated = work.copy()
    for name in ("bytes", "flops", "tensor_flops", "wasted_bytes", "updates", "queue_ns"):
        repeated[name] = np.rint(work[name] * rounds)
    return repeated


def _accesses(trace: Any, work: Records, span: float) -> Iterator[Claim]:
    """Limits by the addresses that a kernel accesses; known where its blocks are evaluated."""
    used, wasted = int(work["bytes"].sum()), int(work["wasted_bytes"].sum())
    part = _part(trace.device.name)
    if part is None or not span:
        return
    if updates := int(work["updates"].sum()):
        queue_ns, hottest, per_launch = int(work["queue_ns"].sum()), int(work["hottest"].max()), updates // len(work)
        says = f"{per_launch:,} atomic updates per launch, up to {hottest:,} of them at one address. Updates of one"
        says += f" line of 128 bytes follow each other, for {readable_time(queue_ns)} in all. Combine them within a"
        says += " block, or spread them over more addresses"
        figures = {"updates": updates, "at one address": hottest, "queue ns": queue_ns}
        yield Claim("atomics", f"{says}.", min(queue_ns / span, 1.0), figures)
    moved = used + wasted
    if wasted > used / 4:
        says = f"{moved:,} bytes are moved, in sectors of {_SECTOR}, of which {used / moved:.0%} are used: neighbouring"
        says += " elements of a tile lie apart in memory. Let them be consecutive"
        # Where less than half is used, it is said even if the kernel is too small to be limited by it.
        least = _WORTH_SAYING if wasted >= used else 0.0
        figures = {"bytes moved": moved, "bytes used": used}
        share = min(moved / part.bandwidth_gbps / span, 1.0) * wasted / moved
        yield Claim("uncoalesced", f"{says}.", max(share, least), figures)


def _waves(trace: Any, k: KernelSummary, launches: Records, tiles_help: bool) -> Iterator[Claim]:
    per_launch = int(launches["blocks"].mean())
    figures = {"blocks per launch": per_launch, "waves": round(k.waves, 2), "tail": round(k.tail_share, 3)}
    if k.waves < 1:
        says = f"{per_launch:,} blocks per launch; the GPU holds {per_launch / k.waves:,.0f} at once."
        yield Claim("small grid", says + " Smaller tiles give more blocks." * tiles_help, 1 - k.waves, figures)
    elif k.tail_share >= _WORTH_SAYING:
        last = k.waves % 1 or 1.0
        says = f"the first SM is idle for the last {k.tail_share:.0%} of the time: {k.waves:.2f} waves, the last"
        yield Claim("tail", f"{says} {last:.0%} full.", k.tail_share, figures)


def _occupancy(trace: Traced, launches: Records) -> Iterator[Claim]:
    launch = launches[0]
    allowed = allowed_by(trace, launch)
    if allowed is None:
        return
    needs = {
        "registers": f"{launch['registers']} registers a thread",
        "shared memory": f"{launch['shared_bytes']:,} bytes of shared memory a block",
        "threads": "its threads",
        "blocks": f"blocks of {int(launch['warps']) * WARP} threads",
    }
    figures = {"blocks per SM": allowed.blocks_per_sm, "occupancy": round(allowed.fraction, 3)}
    if allowed.fraction < 1:
        says = f"an SM holds {allowed.blocks_per_sm} blocks, {allowed.warps_per_sm} of {allowed.max_warps} warps"
        yield Claim("occupancy", f"{says}, limited by {needs[allowed.limiter]}.", (1 - allowed.fraction) / 2, figures)
    plain = _plain_occupancy(trace, launch)
    if plain is not None and plain.blocks_per_sm > allowed.blocks_per_sm:
        lost = 1 - allowed.blocks_per_sm / plain.blocks_per_sm
        says = f"the plain kernel has {plain.blocks_per_sm} blocks per SM, this one {allowed.blocks_per_sm}: times"
        yield Claim("reporting", f"{says} are longer than without a trace.", lost, {"plain": plain.blocks_per_sm})


def _plain_occupancy(trace: Any, launch: Any) -> Occupancy | None:
    work = trace.work[trace.work["launch"] == launch["launch"]]
    if not len(work) or not work["plain_registers"][0]:
        return None
    limits = limits_for_capability(trace.device.compute_capability)
    return occupancy(limits, int(launch["warps"]) * WARP, int(work["plain_registers"][0]), int(launch["shared_bytes"]))


def _gaps(trace: Any, k: KernelSummary, blocks: Records) -> Iterator[Claim]:
    """Time between launches in which the GPU ran nothing else either."""
    first, last = blocks["start_ns"].min(), blocks["end_ns"].max()
    during = trace.blocks[(trace.blocks["end_ns"] > first) & (trace.blocks["start_ns"] < last)]
    start, end = during["start_ns"].clip(first), during["end_ns"].clip(None, last)
    idle_ns = int(last - first) - _union_of(start, end)
    if k.launches > 1 and idle_ns > 0:
        says = f"no kernel runs for {readable_time(idle_ns)} between the {k.launches:,} launches"
        figures = {"launches": k.launches, "idle ns": idle_ns}
        yield Claim("gaps between launches", f"{says}. A CUDA graph makes them shorter.", idle_ns / k.span_ns, figures)


def _imbalance(trace: Any, blocks: Records) -> Iterator[Claim]:
    busy = residency_of(blocks, trace.device.n_sm).busy_ns
    used = busy[busy > 0]
    if len(used) > 1 and len(blocks) > len(used):
        lost = 1 - float(used.mean()) / float(used.max())
        says = f"the busiest SM works {readable_time(used.max())}, the mean one {readable_time(used.mean())}"
        yield Claim("imbalance between SMs", f"{says}.", lost, {"SMs used": len(used)})
    lasted = (blocks["end_ns"] - blocks["start_ns"]).astype(float)
    if len(lasted) >= 8 and lasted.max() > 2 * np.median(lasted):
        share = 1 - float(np.median(lasted) / lasted.max())
        says = f"the longest block takes {readable_time(lasted.max())}, the median {readable_time(np.median(lasted))}"
        yield Claim("unequal blocks", f"{says}.", share / 2, {"longest": int(np.argmax(lasted))})


def _spills(work: Records, tiles_help: bool) -> Iterator[Claim]:
    if not len(work):
        return
    plain, ours = int(work["plain_spill_bytes"].max()), int(work["spill_bytes"].max())
    if plain:
        says = f"{plain:,} bytes of registers per thread spill to memory"
        says += "; use smaller tiles or more warps" * tiles_help
        yield Claim("spills", f"{says}.", min(0.5, plain / 512), {"bytes": plain})
    if ours > plain and work["plain_registers"].any():
        says = f"reports and ranges let {ours - plain:,} more bytes of registers per thread spill: the times are longer"
        figures = {"bytes": ours - plain}
        yield Claim("reporting", f"{says} than without a trace.", min(0.5, (ours - plain) / 512), figures)


def _roofs(trace: Any, blocks: Records, work: Records) -> Iterator[Claim]:
    """How near a kernel is to each rate of its part that is known for its work."""
    part, span = _part(trace.device.name), float(_union_ns(blocks))
    if part is None or not len(work) or not work["bytes"].any() or not span:
        return
    moved = float(work["bytes"].sum() + work["wasted_bytes"].sum())
    faster = Timing.for_part(part).l2_speedup
    # Faster than memory can be: then caches delivered most of it, several times.
    cached = moved > part.bandwidth_gbps * span
    memory = ("caches", part.bandwidth_gbps * faster) if cached else ("memory", part.bandwidth_gbps)
    multiplies = work[work["tensor_flops"] > 0]
    kinds = set(multiplies["product"].tolist())
    kind = PRODUCTS[kinds.pop()] if len(kinds) == 1 else ""
    flops, products = float(work["flops"].sum()), float(multiplies["tensor_flops"].sum())
    rates = [(*memory, moved, "bytes", "GB/s", 1.0)]
    if kind == "fma" or not len(multiplies):
        rates.append(("arithmetic", part.fp32_tflops * 1e3, flops + products, "operations", "Tflop/s", 1e3))
    elif rate := part.tensor_tflops(kind):  # of other kinds, no rate is known
        rates.append(("arithmetic", part.fp32_tflops * 1e3, flops, "operations", "Tflop/s", 1e3))
        rates.append(("tensor cores", rate * 1e3, products, f"{kind} operations", "Tflop/s", 1e3))
    for name, per_ns, amount, unit, peak, scale in rates:
        reached = amount / per_ns / span
        says = f"{amount:,.0f} {unit} at {per_ns / scale:,.0f} {peak} take {readable_time(amount / per_ns)}: "
        says += f"{reached:.0%} of the roof is reached"
        says += f"; memory alone has {part.bandwidth_gbps:,.0f} GB/s" * (name == "caches")
        figures: dict[str, float | int | str] = {unit.split()[-1]: amount, "of the roof": round(reached, 3)}
        if name == "tensor cores":
            figures |= {"product": kind, "peak Tflop/s": round(per_ns / scale, 1)}
        yield Claim(f"roof: {name}", f"{says}.", min(reached, 1.0), figures)


def _small_tiles(
    trace: Any, k: KernelSummary, blocks: Records, launches: Records, reached: float
) -> Iterator[Claim]:
    """Blocks that mostly wait, in a launch that has many more of them than the GPU holds at once."""
    per_launch = int(launches["blocks"].mean())
    if k.waves < _MANY_WAVES or reached > 0.5 or not per_launch:
        return
    # A block that only moved data and computed would last as long as its share of the nearest roof. The rest of its
    # time is the same for a larger tile.
    lasts = float(np.median(blocks["end_ns"] - blocks["start_ns"]))
    works = lasts * reached
    enough = max(trace.device.n_sm, round(per_launch * works / (_HIDDEN * max(lasts - works, 1e-9))))
    if enough > per_launch / 2:
        return
    says = f"{per_launch:,} blocks per launch are {k.waves:,.1f} waves; each takes {readable_time(lasts)}, of which its"
    says += f" work needs {readable_time(works)}. Larger tiles cost less: about {enough:,} blocks would do"
    figures = {"blocks per launch": per_launch, "enough blocks": enough, "block ns": lasts, "work ns": round(works)}
    yield Claim("small tiles", f"{says}.", (1 - reached) * (1 - enough / per_launch), figures)


def _widest_range(trace: Any, k: KernelSummary) -> Iterator[Claim]:
    ranges = [r for r in trace.summary().ranges if r.kernel == k.kernel]
    if ranges:
        widest = max(ranges, key=lambda r: r.share)
        says = f"{widest.name!r} takes {widest.share:.0%} of its blocks' time, {readable_time(widest.mean_ns)} each"
        yield Claim("widest range", f"{says}.", min(widest.share, 1.0), {"times": widest.count})


def _union_ns(blocks: Records) -> int:
    """Time during which any of these blocks ran."""
    return _union_of(blocks["start_ns"], blocks["end_ns"])


def _union_of(start: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    gaps: NDArray[np.int64] = np.maximum(start[1:] - end[:-1], 0)
    return int(end[-1] - start[0] - gaps.sum()) if len(order) else 0


def _part(name: str) -> Part | None:
    alike = [p for p in PARTS.values() if p.title in name or name in p.title]
    return alike[0] if alike else None


# --- the work of launches on a real GPU -------------------------------------------------------------------------------
# Some of their blocks are evaluated, with empty memory in place of arrays.

_MOST_BLOCKS = 64  # evaluated per launch
_MOST_FLOPS = 1 << 31  # of matrix products in all evaluated blocks, about: a second of a CPU's time
_FEWEST_BLOCKS = 4  # evaluated per launch; a launch of which fewer can be evaluated in time stays unknown
_LAUNCH_S = 2.0  # time for one launch, about; most take milliseconds
_TRACE_S = 10.0  # time for all launches of a trace; the rest stay unknown
_AT_ONCE = 8  # blocks, so that the pages they store to fit into memory
_ROOM_BYTES = 1 << 36  # address space for an array; it takes memory only where a block stores
_NO_RESERVE = 0x4000  # MAP_NORESERVE, which Python's mmap does not name

Work = tuple[int, int, int]  # bytes, operations, operations of tensor cores


class Counting:
    """Counts the work of launches, once for all launches that differ in nothing but the addresses of their arrays."""

    def __init__(self) -> None:
        self._known: dict[Any, Work | None] = {}
        self._left_s = _TRACE_S

    def count(
        self, source: Source, values: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
    ) -> Work | None:
        """The work of a launch; None where it depends on data, or where its kernel cannot be evaluated in time.

        `values` are the launch's arguments, with addresses in place of arrays.
        """
        begun = time.perf_counter()
        try:
            return self._find(source, values, grid, first, blocks)
        except Exception:  # of any kind: empty memory is no input that the kernel was written for
            return None
        finally:
            self._left_s -= time.perf_counter() - begun

    def _find(
        self, source: Source, values: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
    ) -> Work | None:
        program = _program(source)
        if program is None:
            return None
        given = launch_values(source.metadata["signature"], source.metadata["tiles"], lambda each, _: each, values)
        pointers = [t.kind in ("pointer", "descriptor") for _, t in program.module.entry.args]
        given = [_without_address(v) if is_pointer else v for v, is_pointer in zip(given, pointers, strict=True)]
        cluster = source.cluster  # the evaluator knows whole clusters
        grid, first, blocks = (grid[0] // cluster, *grid[1:]), first // cluster, blocks // cluster
        key = (source.ttir, tuple(given), grid, first, blocks)
        if key not in self._known and self._left_s > 0:
            self._known[key] = None  # if it fails
            self._known[key] = _count(program, given, grid, first, blocks)
        return self._known.get(key)


def _count(
    program: TtirProgram, given: Sequence[Any], grid: tuple[int, int, int], first: int, blocks: int
) -> Work | None:
    """Evaluates blocks that are chosen at random, always the same, and takes them for all; None if that takes too long.
    """
    rooms: list[mmap.mmap] = []
    arguments = []
    for value, (_, kind) in zip(given, program.module.entry.args, strict=True):
        if kind.kind in ("pointer", "descriptor"):
            rooms.append(mmap.mmap(-1, _ROOM_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE))
            rooms[-1].madvise(mmap.MADV_NOHUGEPAGE)
            memory = np.frombuffer(rooms[-1], kind.element.storage)
            value = replace(value, base=memory) if isinstance(value, Descriptor) else memory
        arguments.append(value)
    chosen = first + np.random.default_rng(0).choice(blocks, min(blocks, _MOST_BLOCKS), replace=False)
    found: list[Records] = []
    most, each_s = 1, float("inf")
    while (done := len(found) and sum(map(len, found))) < min(most, len(chosen)):
        ids = np.sort(chosen[done : min(done + _AT_ONCE, most)])
        begun = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):  # the kernel itself has printed its messages
            found.append(program.run(arguments, grid, ids, record=False))
        for room in rooms:
            room.madvise(mmap.MADV_DONTNEED)
        # The first block may also have compiled loops of the evaluator: one more is evaluated before it is given up.
        each_s = min(each_s, (time.perf_counter() - begun) / len(ids))
        if each_s * min(_FEWEST_BLOCKS, len(chosen)) > _LAUNCH_S and done + len(ids) < len(chosen):
            if found[1:]:
                return None
            most = 2
            continue
        affordable = min(_MOST_FLOPS // max(1, int(found[0]["dot_flops"][0])), int(_LAUNCH_S / max(each_s, 1e-9)))
        most = int(np.clip(affordable, _FEWEST_BLOCKS, _MOST_BLOCKS))
    rows = np.concatenate(found)
    scale = blocks / len(rows)
    loaded, stored, flops, dots = (
        round(int(rows[name].sum()) * scale) for name in ("bytes_loaded", "bytes_stored", "flops", "dot_flops")
    )
    return loaded + stored, flops, dots


def _program(source: Source) -> TtirProgram | None:
    if not source.ttir:
        return None  # CUDA C
    return _parsed(source.ttir, source.name, WARP * source.metadata.get("num_warps", 4))


@functools.lru_cache(64)
def _parsed(ttir: str, name: str, threads: int) -> TtirProgram | None:
    """A kernel whose work does not depend on data; None for others."""
    try:
        program = TtirProgram.parse(ttir, name, threads)
    except PaellaError:
        return None
    unknown = program.facts.serial or program.facts.addresses or follows_data(program.module)
    return None if unknown else program


def _without_address(value: Any) -> Any:
    return replace(value, base=None) if isinstance(value, Descriptor) else None
