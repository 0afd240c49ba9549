"""Kernels that Triton compiles and launches itself (PyTorch code, `torch.compile`), instrumented through its hooks.

Triton asks a hook to edit its compilation stages and, per launch, an allocator for the hidden `profile_scratch`
pointer. The pass runs in the first; the second returns a launch descriptor from a table in device
memory. The kernels stay compiled for `trace`; outside a trace they get a descriptor that tells them to
write nothing, unless they go into a CUDA graph, which may be replayed in a trace.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from triton import knobs
from triton.compiler import compiler
from triton.runtime import _allocation

from paellapy.instrument.device.base import Device
from paellapy.instrument.env import ImportHook
from paellapy.instrument.errors import InstrumentError, PaellaError, PtxError
from paellapy.instrument.kernels.triton_source import (
    TRITON_VERSION,
    block_threads,
    compiling,
    exits_of,
    ptx_target,
    ptxas_options,
    triton_ptxas,
)
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.compiled import Source
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.records import DESCRIPTOR, MAGIC, Records

# --- the code of kernels that Triton compiles itself: the report pass on their PTX, and facts about them for traces ---
# Triton's cache on disk keeps the facts in its metadata, beside the machine code. A process that finds a kernel there
# compiles nothing, and reads the facts when Triton loads the kernel.

_CONFIG = PassConfig("trace", pointer_param=-1)
_NAME = "paellapy"  # of the facts in Triton's metadata


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Facts about a reporting kernel; 0 where `ptxas` could not tell."""

    warps: int = 1
    dynamic_shared_bytes: int = 0
    spill_bytes: int = 0
    plain_registers: int = 0  # per thread, before the pass
    plain_spill_bytes: int = 0


def code_key() -> str:
    """A key that changes with the result of `with_report`."""
    return f"paellapy-{_CONFIG.key()}/{_VERSION}"


def with_report(ptx: str, metadata: dict[str, Any], options: Any, arch: int) -> str:
    """The kernel with reports, and with the resident blocks of the plain one where `ptxas` can keep them.

    Adds to Triton's metadata. A kernel that cannot be instrumented is returned as it is, because it must still run.
    """
    try:
        reported = passes.apply(ptx, PassConfig(_CONFIG.report, exits=exits_of(ptx), pointer_param=-1))
    except PaellaError:
        return ptx
    # One byte per block: the allocator is then asked for as many bytes as there are blocks.
    metadata["profile_scratch_size"] = 1
    metadata["profile_scratch_align"] = 8
    threads, shared = block_threads(ptx) or 32 * metadata.get("num_warps", 1), metadata.get("shared", 0)
    source = Source(
        name=metadata["name"],
        ptx=ptx,
        arch=ptx_target(ptx, arch),
        param_format="",
        threads=threads,
        dynamic_shared_bytes=shared,
        ptxas_options=(*ptxas_options(options.enable_fp_fusion), *(options.ptx_options or "").split()),
        ptxas_path=triton_ptxas(arch),
    )
    facts = CodeFacts(-(-threads // 32), shared)
    try:
        made = source.assembled(_CONFIG, reported)
        plain = source.build(PassConfig()).code
        spilled = made.code.spill_bytes
        reported, facts = made.ptx, CodeFacts(facts.warps, shared, spilled, plain.registers, plain.spill_bytes)
    except (PtxError, OSError):
        pass  # Triton assembles the kernel too, and raises its own error if that fails
    metadata[_NAME] = asdict(facts)
    return reported


class LoadedKernels:
    """Facts about kernels that Triton has loaded, by CUDA's handle of the function."""

    def __init__(self) -> None:
        self._facts: dict[int, CodeFacts] = {}

    def loaded(self, module: Any, function: int, name: str, files: Mapping[str, str], digest: str) -> None:
        """Triton's hook after it has loaded a kernel; `files` are the kernel's in Triton's cache."""
        self._facts.pop(function, None)
        found = next((path for file, path in files.items() if file.endswith(".json")), None)
        try:
            stored = json.loads(Path(found).read_text()).get(_NAME) if found else None
            if stored is not None:
                self._facts[function] = CodeFacts(**stored)
        except (OSError, ValueError, TypeError):
            return  # the cache was removed or damaged meanwhile: nothing is known

    def of(self, function: int) -> CodeFacts:
        return self._facts.get(function, CodeFacts())


_VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


# Descriptors of launches that Triton makes itself: rows of tables in device memory, filled when a trace begins.
#
# A launch needs no copy and no wait, so launches can be captured. A row that went into a CUDA graph is never given to
# another launch: the graph's replays read it for as long as the graph lives. Each trace gives it a new number, by which
# it recognises the replays. A server captures tens of thousands of launches, so graphs get a further table when theirs
# are full; all other launches of a trace share the first table.


_TABLE = 8192  # rows of a table


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a launch that traces record."""

    kernel: str
    blocks: int
    warps: int
    registers: int
    shared_bytes: int
    stream: int
    spill_bytes: int = 0
    plain_registers: int = 0  # 0: unknown
    plain_spill_bytes: int = 0


class Rows:
    """The tables of one GPU. Row 0 of the first has no magic number: a kernel that reads it writes nothing."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._tables: list[tuple[Records, Any]] = []  # each on the host and on the GPU
        self._next = 1
        self._graphs: list[Facts | None] = []  # launches inside graphs: their rows follow the first table
        self._add_table(None)

    def _add_table(self, session: Any) -> None:
        """A further table, made without disturbing a capture in progress."""
        rows = np.zeros(_TABLE, DESCRIPTOR)
        if session is not None:
            self._fill(rows, session)
        self._tables.append((rows, self._device.array_beside(rows)))

    def _fill(self, rows: Records, session: Any) -> None:
        device = self._device
        rows["lines"], rows["rings"] = device.lines.ptr, device.rings.ptr
        rows["ring_mask"] = device.rings.shape[1] - 1
        rows["launch"] = session.reserve(_TABLE)
        rows["magic"] = MAGIC

    def begin(self, session: Any) -> None:
        """Begins a trace on an idle GPU: every row gets a launch number of the trace, and the address of its rings."""
        for number, (rows, memory) in enumerate(self._tables):
            self._fill(rows, session)
            if number == 0:
                rows[0] = 0
            memory.set(rows)
        self._next = 1
        for row, facts in enumerate(self._graphs, _TABLE):
            if facts is not None:
                session.may_replay(self.launch(row), facts)

    def take(self, in_graph: bool, session: Any) -> int:
        """A row for a launch, permanently if it goes into a graph; 0 if none is left."""
        if in_graph:
            row = _TABLE + len(self._graphs)
            self._graphs.append(None)
            if row == _TABLE * len(self._tables):
                self._add_table(session)
            return row
        if session is None or self._next == _TABLE:
            return 0
        self._next += 1
        return self._next - 1

    def name(self, row: int, facts: Facts, session: Any) -> None:
        """Records the launch for which a row was taken. One inside a graph is of a trace only if it is replayed."""
        if row >= _TABLE:
            self._graphs[row - _TABLE] = facts
        if session is not None:
            (session.may_replay if row >= _TABLE else session.add_foreign)(self.launch(row), facts)

    def launch(self, row: int) -> int:
        """The number under which the row's launch reports."""
        return int(self._tables[row // _TABLE][0]["launch"][row % _TABLE])

    def address(self, row: int) -> int:
        return int(self._tables[row // _TABLE][1].ptr) + row % _TABLE * DESCRIPTOR.itemsize


_INDUCTOR = "torch._inductor.config"
_active: _Hook | None = None
_kernels = LoadedKernels()  # also of an earlier hook: its kernels keep reporting


def instrument_torch(enable: bool = True) -> None:
    """Makes every Triton kernel compiled from now on report inside `pp.trace()`, whichever code launches it.

    Kernels that were compiled before run unreported; a trace names them in `t.unseen`. Caches that `torch.compile` left
    on disk from plain runs are not used, because the instrumentation is part of Inductor's keys. While this is enabled,
    Inductor compiles in this process, and launches through Triton.
    """
    global _active
    if not enable:
        if _active is not None:
            _active.remove()
            _active = None
        return
    if _active is None:
        hook = _Hook()
        hook.install()
        _active = hook


class _Hook:
    def __init__(self) -> None:
        self.key = code_key()
        self.hash = hashlib.sha256(self.key.encode()).hexdigest()
        self._lock = threading.Lock()
        self._rows: dict[Any, Rows] = {}  # by GPU: an address is valid on its own alone
        self._before: Any = None
        self._pending = threading.local()  # the launch whose descriptor was requested and whose name is not known yet

    def install(self) -> None:
        if knobs.runtime.add_stages_inspection_hook is not None:
            raise InstrumentError(
                "another tool, possibly Proton, has already hooked Triton's compilation; stop it before calling "
                "pp.instrument_torch()", field="hook"
            )
        knobs.runtime.add_stages_inspection_hook = self.stages
        if TRITON_VERSION < (3, 7):
            # Triton 3.6 leaves the hook out of its cache keys and would return the plain binary. This option is in the
            # key of launched kernels; the key of the cache on disk, which Inductor uses directly, is extended below.
            self._before = knobs.compilation.instrumentation_mode, compiler.get_cache_key
            knobs.compilation.instrumentation_mode = "paellapy"
            compiler.get_cache_key = self._cache_key
        _allocation.set_profile_allocator(self.descriptor)
        knobs.runtime.launch_enter_hook.add(self.entered)
        knobs.runtime.kernel_load_end_hook.add(_kernels.loaded)
        Device.at_traces.append(self.begin_trace)
        for device in Device.opened():
            if device.session is not None:
                self.begin_trace(device, device.session)
        self._inductor = _InductorSettings(self.hash[:16])

    def remove(self) -> None:
        if knobs.runtime.add_stages_inspection_hook == self.stages:
            knobs.runtime.add_stages_inspection_hook = None
        if TRITON_VERSION < (3, 7):
            knobs.compilation.instrumentation_mode, compiler.get_cache_key = self._before
        self._inductor.restore()
        _allocation.set_profile_allocator(None)
        knobs.runtime.launch_enter_hook.remove(self.entered)
        knobs.runtime.kernel_load_end_hook.remove(_kernels.loaded)
        Device.at_traces.remove(self.begin_trace)

    def stages(self, *args: Any) -> Any:
        """Triton's hook: without arguments it returns the cache key (3.7 and later), otherwise it edits the stages."""
        ours = getattr(compiling, "plain", False)
        if not args:
            return ("", "") if ours else (self.key, self.hash)
        _, stages, options, _, arch = args
        if "ptx" in stages and not ours:
            stages["ptx"] = self._with_report(stages["ptx"], options, arch)
        return None

    def _cache_key(self, *args: Any, **kwargs: Any) -> str:
        return f"{self._before[1](*args, **kwargs)}{self.stages()[0]}"

    def _with_report(self, make_ptx: Callable[..., str], options: Any, arch: int) -> Callable[..., str]:
        def ptx_stage(source: Any, metadata: dict[str, Any]) -> str:
            ptx = make_ptx(source, metadata)
            if metadata.get("profile_scratch_size"):
                return ptx  # Proton instruments this kernel and uses the slot
            return with_report(ptx, metadata, options, arch)

        return ptx_stage

    def begin_trace(self, device: Any, session: Any) -> None:
        """Begins a trace on a device; Triton itself launches only on a GPU."""
        if isinstance(device, Device.kinds["cuda"]):
            with self._lock:
                self._rows_of(device).begin(session)

    def _rows_of(self, device: Any) -> Rows:
        if device not in self._rows:
            self._rows[device] = Rows(device)
        return self._rows[device]

    def descriptor(self, size: int, alignment: int, stream: int | None) -> int:
        """Triton's allocator: the address of this launch's descriptor, as a plain int, which Triton's launchers accept.
        """
        kind: Any = Device.kinds["cuda"]
        device, stream = kind.of_thread(), stream or 0
        with self._lock:
            rows, session = self._rows_of(device), device.session
            row = rows.take(device.is_capturing(stream), session)
            self._pending.launch = (device, session, row, size, stream) if row else None
            if session is not None and not row:
                session.unreported += size
            return rows.address(row)

    def entered(self, launch_metadata: Any) -> None:
        """Triton's launch hook: receives the kernel's name, after the descriptor was requested."""
        pending = getattr(self._pending, "launch", None)
        if pending is None:
            return
        device, session, row, blocks, stream = pending
        self._pending.launch = None
        facts = launch_metadata.get()
        code = _kernels.of(facts["function"])
        registers, shared = device.function_resources(facts["function"])
        shared += code.dynamic_shared_bytes
        plain = code.plain_registers, code.plain_spill_bytes
        launch = Facts(facts["name"], blocks, code.warps, registers, shared, stream, code.spill_bytes, *plain)
        with self._lock:
            self._rows[device].name(row, launch, session)


class _InductorSettings:
    """Inductor's settings while kernels are instrumented, set when it is imported; `restore` brings back the previous.
    """

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._before: list[tuple[Any, str, Any]] = []
        self._importing = ImportHook(_INDUCTOR, self._choose)
        loaded = sys.modules.get(_INDUCTOR)
        if loaded is not None:
            self._choose(loaded)
        else:
            self._importing.add()

    def _choose(self, inductor: Any) -> None:
        self._importing.remove()
        from torch.compiler import config as compiler_config

        # Part of the key of every cache of torch.compile. Without it, a graph compiled in a plain run would bring its
        # plain kernels along.
        before = getattr(compiler_config, "cache_key_tag", None)
        if before is not None:
            self._set(compiler_config, "cache_key_tag", f"{before}paellapy-{self._tag}")
        else:
            self._set(inductor, "force_disable_caches", True)
        self._set(inductor, "compile_threads", 1)  # other processes do not have the hook
        if hasattr(inductor, "use_static_cuda_launcher"):
            self._set(inductor, "use_static_cuda_launcher", False)  # the static launcher passes no descriptor

    def _set(self, config: Any, name: str, value: Any) -> None:
        self._before.append((config, name, getattr(config, name)))
        setattr(config, name, value)

    def restore(self) -> None:
        self._importing.remove()
        for config, name, value in reversed(self._before):
            setattr(config, name, value)
