"""Kernels that Triton compiles and launches itself (PyTorch code, `torch.compile`), instrumented through its hooks.

Triton asks a hook to edit its compilation stages and, per launch, an allocator for the hidden `profile_scratch`
pointer. The pass runs in the first (torch_code.py); the second returns a launch descriptor from a table in device
memory (torch_rows.py). The kernels stay compiled for `trace`; outside a trace they get a descriptor that tells them to
write nothing, unless they go into a CUDA graph, which may be replayed in a trace.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

from triton import knobs
from triton.compiler import compiler
from triton.runtime import _allocation

from paellapy.instrument.device.base import Device
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.kernels.torch_code import LoadedKernels, code_key, with_report
from paellapy.instrument.kernels.torch_rows import Facts, Rows
from paellapy.instrument.kernels.triton_ptx import TRITON_VERSION
from paellapy.instrument.kernels.triton_source import compiling

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
        self._rows: Rows | None = None
        self._before: Any = None
        self._pending = threading.local()  # the launch whose descriptor was requested and whose name is not known yet

    def install(self) -> None:
        if knobs.runtime.add_stages_inspection_hook is not None:
            raise InstrumentError(
                "another tool, possibly Proton, has already hooked Triton's compilation; stop it before calling "
                "pp.instrument_torch()"
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
                self._rows = self._rows or Rows(device)
                self._rows.begin(session)

    def descriptor(self, size: int, alignment: int, stream: int | None) -> int:
        """Triton's allocator: the address of this launch's descriptor, as a plain int, which Triton's launchers accept.
        """
        device = Device.open("cuda")
        with self._lock:
            self._rows = rows = self._rows or Rows(device)
            session, stream = device.session, stream or 0
            in_graph = device.is_capturing(stream)
            row = rows.take(in_graph) if in_graph or session is not None else 0
            self._pending.launch = (session, row, size, stream) if row else None
            if session is not None and not row:
                session.unreported += size
            return rows.address(row)

    def entered(self, launch_metadata: Any) -> None:
        """Triton's launch hook: receives the kernel's name, after the descriptor was requested."""
        pending = getattr(self._pending, "launch", None)
        if pending is None or self._rows is None:
            return
        session, row, blocks, stream = pending
        self._pending.launch = None
        facts = launch_metadata.get()
        name = facts["name"]
        code = _kernels.of(facts["function"])
        registers, shared = Device.open("cuda").function_resources(facts["function"])
        shared += code.dynamic_shared_bytes
        launch = Facts(name, blocks, code.warps, registers, shared, stream, code.spill_bytes, code.plain_registers)
        self._rows.name(row, launch)
        if session is not None:
            session.add_foreign(self._rows.launch(row), launch)


class _InductorSettings:
    """Inductor's settings while kernels are instrumented; `restore` brings back the previous ones."""

    def __init__(self, tag: str) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        try:
            from torch._inductor import config as inductor
            from torch.compiler import config as compiler_config
        except ImportError:
            return  # no PyTorch, or one without its compiler: nothing to set
        # Part of the key of every cache of torch.compile. Without it, a graph compiled in a plain run would bring its
        # plain kernels along.
        before = getattr(compiler_config, "cache_key_tag", None)
        if before is not None:
            self._set(compiler_config, "cache_key_tag", f"{before}paellapy-{tag}")
        else:
            self._set(inductor, "force_disable_caches", True)
        self._set(inductor, "compile_threads", 1)  # other processes do not have the hook
        if hasattr(inductor, "use_static_cuda_launcher"):
            self._set(inductor, "use_static_cuda_launcher", False)  # the static launcher passes no descriptor

    def _set(self, config: Any, name: str, value: Any) -> None:
        self._before.append((config, name, getattr(config, name)))
        setattr(config, name, value)

    def restore(self) -> None:
        for config, name, value in reversed(self._before):
            setattr(config, name, value)
