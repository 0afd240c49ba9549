"""`paellapy doctor`: the hardware and tools found here, the features that work, and what to install for the others."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from paellapy.instrument.device import Device, devices
from paellapy.instrument.device.driver import check, driver
from paellapy.instrument.env import cuda_line, install_line, versions
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.ptx.compiled import find_ptxas
from paellapy.scheduler.core.processes import FEW_CORES, usable_cpus
from paellapy.scheduler.core.tuning import Tuning


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; `works` is None for plain facts."""

    name: str
    works: bool | None
    detail: str
    remedy: str = ""


def examine(say: Callable[[str], None] = lambda what: None) -> list[Finding]:
    """Examines everything paellapy can use. Each feature is tried, not guessed; `say` is told before each attempt."""
    found = [Finding(name, None, version) for name, version in versions().items()]
    for release, (major, minor) in sorted({(tool.release, tool.newest_ptx) for tool in find_ptxas()}):
        found.append(Finding("ptxas", None, f"CUDA {release[0]}.{release[1]}, PTX up to {major}.{minor}"))
    found += [_gpu(), _driver(), _cpus()]
    for name, feature, remedy in _FEATURES:
        say(name)
        found.append(_try(name, feature, remedy))
    return found


def report(findings: list[Finding]) -> Table:
    table = Table(title="paellapy doctor")
    for column in ("", "what", "found", "to do"):
        table.add_column(column, overflow="fold")  # a reader must be able to type the whole text
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
    for f in findings:
        remedy = "" if f.works else f.remedy
        # Text, since "[cuda13]" is not markup
        table.add_row(marks[f.works], *(Text(t) for t in (f.name, f.detail, remedy)))
    return table


def tuning_report(tuning: Tuning) -> Table:
    """The scheduler's tuning values for this machine's GPU, with the effect and the source of each."""
    table = Table(title=f"tuning: {tuning.note}")
    for column in ("number", "value", "what it does", "source"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for each in tuning.numbers():
        table.add_row(*(Text(t) for t in (each.name, f"{each.value:g}", each.meaning, each.source)))
    return table


def tuning_here() -> Tuning:
    """Tuning of the GPU if there is one, else of the virtual GPU."""
    return Tuning.for_device(Device.open("auto"))


def _gpu() -> Finding:
    try:
        device = Device.open("cuda")
    except PaellaError as e:
        return Finding("GPU", False, "none", str(e).partition(". ")[2] or str(e))
    return Finding("GPU", True, f"{device.title}, {device.sm_count} SMs, {device.target}")


def _driver() -> Finding:
    try:
        version = check(driver().cuDriverGetVersion(), "asking the driver")
    except PaellaError:
        return Finding("CUDA driver", None, "none", "")
    return Finding("CUDA driver", None, f"CUDA {version // 1000}.{version % 1000 // 10}")


def _cpus() -> Finding:
    """An engine on a GPU keeps one CPU busy. It tells PyTorch in its own process; other libraries take all CPUs."""
    cpus = usable_cpus()
    if cpus <= FEW_CORES:
        return Finding("CPUs", None, f"{cpus:g}", "an engine on a GPU keeps one busy: give it more than 4")
    return Finding("CPUs", None, f"{cpus:g}", f"OMP_NUM_THREADS={int(cpus) - 1} beside an engine on a GPU")


def _try(name: str, feature: Callable[[], str], remedy: str) -> Finding:
    try:
        return Finding(name, True, feature())
    except (PaellaError, ImportError, OSError, RuntimeError) as e:  # a missing library raises OSError
        reason = str(e).splitlines()[0].split(". ")[0]  # the remedy has a column of its own
        return Finding(name, False, reason, remedy)


def _saxpy() -> Any:
    from paellapy.instrument.kernels.decorator import kernel

    code = 'extern "C" __global__ void saxpy(int n, float a, const float* x, float* y)'
    code += "{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] += a * x[i]; }"
    return kernel(source=code, name="saxpy")


def _instrument_triton() -> str:
    from paellapy.demo import kernels

    pool: Any = kernels.max_pool2x2
    compiled = pool.compile("*fp32", "*fp32", 8, H=16, W=16, C=4, BLOCK=256, target="sm_90", report="trace")
    return f"a kernel for sm_90, {compiled.registers} registers, {len(compiled.cubin)} bytes"


def _instrument_cuda() -> str:
    compiled = _saxpy().compile(target="sm_90", report="trace")
    return f"a kernel for sm_90, {compiled.registers} registers, {len(compiled.cubin)} bytes"


def _trace_on(name: str) -> Callable[[], str]:
    def run() -> str:
        from paellapy.demo import kernels
        from paellapy.instrument.traces.session import trace

        pool: Any = kernels.max_pool2x2
        images = np.arange(8192, dtype=np.float32).reshape(8, 16, 16, 4)
        device = Device.open(name)
        with device:
            x, out = device.array(images), device.empty((8, 8, 8, 4))
            with trace() as t:
                pool[(8,)](x, out, 8, H=16, W=16, C=4, BLOCK=256)
            if not np.array_equal(out.numpy(), images[:, 1::2, 1::2]) or len(t.blocks) != 8:
                raise PaellaError("a traced kernel computed a wrong result")
        return f"{len(t.blocks)} blocks seen on {len(np.unique(t.blocks['sm']))} SMs of {device.title}"

    return run


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        raise ImportError("PyTorch is not installed")
    import torch

    if torch.version.cuda is None:
        raise ImportError(f"PyTorch {torch.__version__} was built without CUDA")
    if not torch.cuda.is_available():
        raise ImportError(f"PyTorch {torch.__version__} finds no NVIDIA GPU")
    return "pp.instrument_torch() traces Triton kernels that PyTorch launches"


def _viz() -> str:
    missing = [name for name in ("plotly", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"{', '.join(missing)} not installed")
    return "t.plot(), t.save_figure(path), t.to_perfetto(path)"


_FEATURES: tuple[tuple[str, Callable[[], str], str], ...] = (
    ("instrument Triton kernels", _instrument_triton, "pip install 'triton>=3.6,<3.10'"),
    ("instrument CUDA C kernels", _instrument_cuda, cuda_line()),
    ("run and trace on the virtual GPU", _trace_on("virtual:h200"), "report this as a bug"),
    ("run and trace on the GPU", _trace_on("cuda"), cuda_line() + ", on a machine with an NVIDIA GPU"),
    ("trace PyTorch's kernels", _torch, "install PyTorch with CUDA (pytorch.org), on a machine with an NVIDIA GPU"),
    ("pictures", _viz, install_line("viz")),
)


def available() -> str:
    """The devices that can be opened, and the Python version."""
    return f"devices: {', '.join(devices())}; Python {sys.version.split()[0]}"
