"""PTX → machine code with `ptxas`: choosing one, and reading its report on the result.

Triton's wheel brings one or two `ptxas`; these, a toolkit's and that of NVIDIA's `nvidia-cuda-nvcc` wheel are
candidates. The first one that supports the module's PTX version is used: NVRTC is often newer than the `ptxas` beside
it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from paellapy.instrument import cache
from paellapy.instrument.errors import PtxError, also

_RESOURCES = re.compile(
    r"Function properties for (?P<name>[\w$]+)\s*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<store>\d+) bytes spill stores, (?P<load>\d+) bytes spill loads\s*\n"
    r"[^\n]*: Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)

_LONGEST_S = 600  # the largest kernels of flash-linear-attention take tens of seconds


@dataclass(frozen=True, slots=True)
class Assembled:
    """Machine code of one entry, and the resources of a block."""

    cubin: bytes
    registers: int  # per thread
    static_shared_bytes: int
    spill_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class Ptxas:
    path: str
    release: tuple[int, int]

    @property
    def newest_ptx(self) -> tuple[int, int]:
        """The newest PTX ISA that a CUDA release reads (PTX ISA manual, release history)."""
        major, minor = self.release
        if major == 12 and minor >= 6:  # 12.5 and 12.6 read the same PTX
            minor -= 1
        return major - 4, minor


@functools.cache
def find_ptxas() -> tuple[Ptxas, ...]:
    """Every `ptxas` on this machine, the one in $PAELLAPY_PTXAS and Triton's first."""
    paths: list[Path] = []
    if configured := os.environ.get("PAELLAPY_PTXAS"):
        if _release(Path(configured)) is None:
            raise PtxError(f"PAELLAPY_PTXAS={configured} is not a ptxas that runs on this machine; correct or unset it")
        paths.append(Path(configured))
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin:
        bundled = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
        paths += [bundled / "ptxas", bundled / "ptxas-blackwell"]
    if home := os.environ.get("CUDA_HOME"):
        paths.append(Path(home) / "bin" / "ptxas")
    if on_path := shutil.which("ptxas"):
        paths.append(Path(on_path))
    paths.append(Path("/usr/local/cuda/bin/ptxas"))
    different: dict[Path, Path] = {}  # $CUDA_HOME, $PATH and the usual place may be the same
    for path in paths:
        different.setdefault(path.resolve(), path)
    return tuple(Ptxas(str(path), release) for path in different.values() if (release := _release(path)))


def _release(path: Path) -> tuple[int, int] | None:
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def choose_ptxas(ptx_version: tuple[int, int], preferred: str | None = None) -> Ptxas:
    """The first `ptxas` that reads `ptx_version`; `preferred` is tried before all others."""
    known = find_ptxas()
    ordered = sorted(known, key=lambda p: p.path != preferred)
    for candidate in ordered:
        if candidate.newest_ptx >= ptx_version:
            return candidate
    have = ", ".join(f"{p.path} (CUDA {p.release[0]}.{p.release[1]})" for p in known) or "none"
    raise PtxError(
        f"no ptxas on this machine reads PTX {ptx_version[0]}.{ptx_version[1]} (found: {have}). Install a newer "
        "Triton, "
        "or `pip install nvidia-cuda-nvcc` and set PAELLAPY_PTXAS to its ptxas."
    )


def assemble(ptx: str, arch: str, entry: str, options: tuple[str, ...] = (), preferred: str | None = None) -> Assembled:
    """Machine code for one entry, cached on disk. `arch` is a name such as "sm_90a"."""
    version = re.search(r"^\s*\.version\s+(\d+)\.(\d+)", ptx, re.M)
    if version is None:
        raise PtxError("the PTX module has no .version line: pass a complete module")
    tool = choose_ptxas((int(version[1]), int(version[2])), preferred)
    key = cache.digest("cubin", ptx, arch, entry, " ".join(options), f"{tool.path} {tool.release}")
    if stored := cache.read(key):
        head, _, cubin = stored.partition(b"\n")
        return Assembled(cubin, **json.loads(head))
    result = _run(tool, ptx, arch, entry, options)
    facts = {n: getattr(result, n) for n in ("registers", "static_shared_bytes", "spill_bytes", "stack_bytes")}
    cache.write(key, json.dumps(facts).encode() + b"\n" + result.cubin)
    return result


def _run(tool: Ptxas, ptx: str, arch: str, entry: str, options: tuple[str, ...]) -> Assembled:
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        command = [tool.path, "-v", f"--gpu-name={arch}", *options, str(source), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            raise PtxError(
                f"ptxas {tool.release[0]}.{tool.release[1]} has not assembled kernel {entry!r} for {arch} within "
                f"{_LONGEST_S} s. Use smaller blocks, or another ptxas with PAELLAPY_PTXAS."
            ) from None
        log = done.stderr + done.stdout
        if done.returncode:
            raise _refused(f"ptxas {tool.release[0]}.{tool.release[1]} refused kernel {entry!r} for {arch}:\n{log}")
        for found in _RESOURCES.finditer(log):
            if found["name"] == entry:
                shared = re.search(r"(\d+) bytes smem", found["rest"])
                return Assembled(
                    cubin=output.read_bytes(),
                    registers=int(found["registers"]),
                    static_shared_bytes=int(shared[1]) if shared else 0,
                    spill_bytes=int(found["store"]) + int(found["load"]),
                    stack_bytes=int(found["stack"]),
                )
    raise PtxError(f"the output of ptxas does not list the resources of kernel {entry!r}:\n{log}")


def _refused(message: str) -> PtxError:
    from triton.runtime.errors import PTXASError

    return also(PtxError(message), PTXASError, error_message=message)
