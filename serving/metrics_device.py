"""Metrics of the GPU, of work beside requests and of the machine, with Triton's names as aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from paellapy.instrument.traces.live import counts
from paellapy.scheduler.engine.engine import Engine


def sm_metrics(engine: Engine) -> Iterator[Metric]:
    """Times per SM, whose rate is the occupancy, where they are known (a virtual GPU); else the present counts.

    rate(paellapy_sm_warp_seconds_total[10s]) / on(instance) group_left paellapy_sm_warps_max is each SM's occupancy.
    """
    yield GaugeMetricFamily("paellapy_sm_warps_max", "Warps that one SM can hold", value=engine.device.limits.warps)
    totals = engine.sm_totals()
    if totals is not None:
        _, warp_ns, busy_ns = totals
        warps = CounterMetricFamily("paellapy_sm_warp_seconds", "Sum of resident warps over time", labels=("sm",))
        busy = CounterMetricFamily("paellapy_sm_busy_seconds", "Time with at least one block resident", labels=("sm",))
        for sm, (w, b) in enumerate(zip(warp_ns.tolist(), busy_ns.tolist(), strict=True)):
            warps.add_metric((str(sm),), w * 1e-9)
            busy.add_metric((str(sm),), b * 1e-9)
        yield warps
        yield busy
        return
    if engine.failure is not None or engine.closed:
        return
    found = counts(engine.device)
    if not found.started.any():  # no instrumented kernel has run
        return
    started = CounterMetricFamily("paellapy_sm_blocks", "Blocks of instrumented kernels started", labels=("sm",))
    resident = GaugeMetricFamily("paellapy_sm_resident_warps", "Instrumented kernels' warps on the SM", labels=("sm",))
    for sm, (n, w) in enumerate(zip(found.started.tolist(), found.resident_warps.tolist(), strict=True)):
        started.add_metric((str(sm),), n)
        resident.add_metric((str(sm),), w)
    yield started
    yield resident


def triton_metrics(engine: Engine) -> Iterator[Metric]:
    """Metrics of a GPU under Triton's names: its memory budget, the memory held, and its use."""
    device = str(engine.device.name)
    for name, text, value in (
        ("nv_gpu_utilization", "As Triton: use of the GPU's most used resource, 0 to 1", engine.occupancy().share),
        ("nv_gpu_memory_total_bytes", "As Triton: GPU memory the engine may use", engine.memory.budget_bytes),
        ("nv_gpu_memory_used_bytes", "As Triton: GPU memory that models hold", engine.memory.held_bytes),
    ):
        gauge = GaugeMetricFamily(name, text, labels=("gpu_uuid",))
        gauge.add_metric((device,), min(value, 1.0) if name == "nv_gpu_utilization" else value)
        yield gauge


def weight_metrics(engine: Engine) -> Iterator[Metric]:
    """Metrics of weights that move: where they are, how often they moved, and how long that took."""
    account = engine.memory()
    if "hit_rate" not in account:
        return
    held = GaugeMetricFamily("paellapy_weights_bytes", "Bytes of weights by place", labels=("place",))
    for place, key in (("gpu", "weights_bytes"), ("host", "host_bytes"), ("disk", "file_bytes")):
        held.add_metric((place,), account[key])
    yield held
    yield GaugeMetricFamily("paellapy_weights_hit_rate", "Requests that found their weights on the GPU, 0 to 1",
                            value=account["hit_rate"])  # fmt: skip
    labels = ("model",)
    families = {
        "evicted": CounterMetricFamily("paellapy_evictions", "Times that weights left the GPU", labels=labels),
        "brought": CounterMetricFamily("paellapy_reloads", "Times that weights came to the GPU", labels=labels),
        "reload_s": CounterMetricFamily("paellapy_reload_seconds", "Time to bring weights to the GPU", labels=labels),
        "misses": CounterMetricFamily("paellapy_cold_requests", "Requests that waited for weights", labels=labels),
    }
    for name, about in account["models"].items():
        for key, family in families.items():
            family.add_metric((name,), about.get(key, 0))
    yield from families.values()


def job_metrics(jobs: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Metrics of work that runs beside requests: background jobs, turns, other processes."""
    labels = ("job", "kind")
    running = GaugeMetricFamily("paellapy_job_running", "1: the job runs; 0: paused, held or ended", labels=labels)
    done = CounterMetricFamily("paellapy_job_steps", "Steps, turns, or launches of another process", labels=labels)
    waited = CounterMetricFamily("paellapy_job_waited_seconds", "Time that launches waited at a gate", labels=labels)
    for name, facts in jobs.items():
        which = (name, facts["kind"])
        running.add_metric(which, float(facts["state"] == "running"))
        done.add_metric(which, facts.get("steps", facts.get("launches", 0)))
        if "waited_ms" in facts:
            waited.add_metric(which, facts["waited_ms"] * 1e-3)
    yield from (running, done, waited)


class CpuMetrics:
    """CPU and memory of the whole machine under Triton's names, from /proc where there is one."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def collect(self) -> Iterator[Metric]:
        now = _cpu_times()
        if now is None or self._before is None:
            return
        busy, total = (a - b for a, b in zip(now, self._before, strict=True))
        if total > 0:
            self._before = now
        yield GaugeMetricFamily(
            "nv_cpu_utilization", "As Triton: CPU use since the last scrape, 0 to 1", value=busy / max(1, total)
        )
        memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total_bytes, free_bytes = (int(memory[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
        yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "As Triton: memory of the machine", value=total_bytes)
        yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "As Triton: memory in use", value=total_bytes - free_bytes)


def _cpu_times() -> tuple[int, int] | None:
    """Busy ticks and all ticks since the machine started."""
    try:
        fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    total = sum(fields[:8])  # the first two fields include the time of guests
    return total - fields[3] - fields[4], total
