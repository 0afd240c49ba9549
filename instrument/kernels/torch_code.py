"""The code of kernels that Triton compiles itself: the report pass on their PTX, and facts about them for traces.

Triton's cache on disk keeps the facts in its metadata, beside the machine code. A process that finds a kernel there
compiles nothing, and reads the facts when Triton loads the kernel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paellapy.instrument.errors import PaellaError, PtxError
from paellapy.instrument.kernels.triton_ptx import block_threads, exits_of, ptx_target, ptxas_options, triton_ptxas
from paellapy.instrument.ptx import passes
from paellapy.instrument.ptx.compiled import Source
from paellapy.instrument.ptx.pass_config import PassConfig

_CONFIG = PassConfig("trace", pointer_param=-1)
_NAME = "paellapy"  # of the facts in Triton's metadata


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Facts about a reporting kernel; 0 where `ptxas` could not tell."""

    warps: int = 1
    dynamic_shared_bytes: int = 0
    spill_bytes: int = 0
    plain_registers: int = 0  # per thread, before the pass


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
        plain = source.build(PassConfig()).registers
        reported, facts = made.ptx, CodeFacts(facts.warps, shared, made.code.spill_bytes, plain)
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
