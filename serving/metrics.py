"""`/metrics`: Prometheus text, made from the counters on request. Triton's names are aliases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from paellapy.instrument.traces.session import counts
from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.stats import RESOURCES
from paellapy.serving.access import for_operators
from paellapy.serving.counters import Histogram, ModelCounters
from paellapy.serving.registry import READY, VERSION
from paellapy.serving.service import SERVICE, Service

ENGINE_S = 1.0  # seconds to wait for the engine process's part; without it, the page has the rest

_Number = Callable[[ModelCounters], float]

# name, help, value
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("paellapy_requests_answered", "Requests answered with 200", lambda c: c.answered),
    ("paellapy_requests_failed", "Requests answered with an error, refusals included", lambda c: c.failed),
    ("paellapy_requests_abandoned", "Requests whose client left before the answer", lambda c: c.left),
    ("paellapy_items", "Items run; a request has one or more", lambda c: c.items),
    ("paellapy_batches", "Batches run", lambda c: c.batches),
    ("paellapy_target_misses", "Items whose latency exceeded their model's target", lambda c: c.target_misses),
)

# Triton's names do not end in _total as Prometheus' counters do, so they are exported without a type.
_TRITON: tuple[tuple[str, str, _Number], ...] = (
    ("nv_inference_request_success", "As Triton: requests answered", lambda c: c.answered),
    ("nv_inference_count", "As Triton: items run", lambda c: c.items),
    ("nv_inference_exec_count", "As Triton: batches run", lambda c: c.batches),
    ("nv_inference_request_duration_us", "As Triton: sum of request times", lambda c: c.answered_ns / 1e3),
    ("nv_inference_queue_duration_us", "As Triton: sum of queue times", lambda c: c.queue_ns / 1e3),
    ("nv_inference_compute_infer_duration_us", "As Triton: sum of compute times", lambda c: c.compute_ns / 1e3),
    # Copies to and from the GPU are part of the model's program, and so of its compute time.
    ("nv_inference_compute_input_duration_us", "As Triton: part of compute_infer here, so 0", lambda c: 0.0),
    ("nv_inference_compute_output_duration_us", "As Triton: part of compute_infer here, so 0", lambda c: 0.0),
)

_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelCounters], Histogram]], ...] = (
    ("paellapy_request_seconds", "Time from a request's headers to its answer", lambda c: c.request_s),
    ("paellapy_queue_seconds", "Time from an item's arrival in the engine to its first launch", lambda c: c.queue_s),
    ("paellapy_compute_seconds", "Time from an item's first launch to its end", lambda c: c.compute_s),
    ("paellapy_batch_size", "Number of items that ran together", lambda c: c.batch_size),
)

_LABELS = ("model", "version")


class ServiceCollector(Collector):
    """What every process of a server knows."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        models = list(self._service.counters.models.items())
        for name, text, number in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for model, counters in models:
                counter.add_metric((model, VERSION), number(counters))
            yield counter
        for name, text, number in _TRITON:
            alias = UnknownMetricFamily(name, text, labels=_LABELS)
            for model, counters in models:
                alias.add_metric((model, VERSION), number(counters))
            yield alias
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=_LABELS)
            for model, counters in models:
                found = histogram(counters)
                family.add_metric((model, VERSION), found.buckets(), found.total)
            yield family
        yield from self._refusals(models)
        yield from self._http()
        yield from self._gauges()

    def _refusals(self, models: list[tuple[str, ModelCounters]]) -> Iterator[Metric]:
        refused = CounterMetricFamily("paellapy_refusals", "Requests refused, by reason", labels=(*_LABELS, "reason"))
        failed = UnknownMetricFamily(
            "nv_inference_request_failure", "As Triton: requests that failed", labels=(*_LABELS, "reason")
        )
        for model, counters in models:
            known = dict(counters.refused)
            for reason, count in known.items():
                refused.add_metric((model, VERSION, reason), count)
            lost = known.get("device_failed", 0)
            rejected = sum(known.values()) - lost
            failed.add_metric((model, VERSION, "REJECTED"), rejected)
            failed.add_metric((model, VERSION, "OTHER"), counters.failed - rejected - lost)
            failed.add_metric((model, VERSION, "CANCELED"), counters.left)
            failed.add_metric((model, VERSION, "BACKEND"), lost)
        yield refused
        yield failed

    def _http(self) -> Iterator[Metric]:
        """The server as its clients see it, and what its processes hold together."""
        counters = self._service.counters
        answers = CounterMetricFamily("paellapy_http_responses", "Answers by HTTP status", labels=("status",))
        for status, count in counters.statuses.items():
            answers.add_metric((str(status),), count)
        yield answers
        refused = CounterMetricFamily(
            "paellapy_http_refusals", "Refused requests by reason and client; '' is all others",
            labels=("reason", "client"),
        )  # fmt: skip
        for (reason, client), count in counters.refusals.items():
            refused.add_metric((reason, client), count)
        yield refused
        for name, text, value in (
            ("paellapy_connections_open", "Open connections", counters.gauge("connections")),
            ("paellapy_held_bytes", "Bytes of requests that are held", counters.gauge("held_bytes")),
            ("paellapy_unsent_bytes", "Bytes of answers that clients have not taken", counters.gauge("unsent_bytes")),
            ("paellapy_open_descriptors", "Open file descriptors of the HTTP processes", counters.gauge("descriptors")),
            ("paellapy_event_loop_lag_seconds", "Largest lag of an event loop in the last ten seconds",
             counters.gauge("loop_lag_ns") * 1e-9),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, text, value=value)

    def _gauges(self) -> Iterator[Metric]:
        service = self._service
        stats, occupancy = service.engine.stats(), service.engine.occupancy()
        shares = GaugeMetricFamily(
            "paellapy_occupancy_ratio", "Share of the GPU that launched work holds", labels=("resource", "kind")
        )
        for resource in RESOURCES:
            use = getattr(occupancy, resource)
            shares.add_metric((resource, "resident"), use.resident / use.capacity)
            shares.add_metric((resource, "pending"), use.pending / use.capacity)
        yield shares
        for name, text, value in (
            ("paellapy_items_live", "Items waiting or running", stats["live"]),
            ("paellapy_items_queued", "Items that wait for a slot in a batch", stats["queued"]),
            ("paellapy_batches_active", "Batches that are being launched", stats["active"]),
            ("paellapy_requests_in_flight", "Inference requests being handled", service.in_flight),
            ("paellapy_memory_held_bytes", "GPU memory that models hold", stats["memory"]["held_bytes"]),
            ("paellapy_memory_budget_bytes", "GPU memory the engine may use", stats["memory"]["budget_bytes"]),
            ("paellapy_ready", "1: the server is ready", float(service.ready)),
            ("paellapy_start_time_seconds", "When the server started, Unix time", service.since),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        for name, text, value in (
            ("paellapy_launches", "Launches on the GPU", stats["launches"]),
            ("paellapy_whole_launches", "Launches of a whole program", stats["whole_launches"]),
            ("paellapy_confined_launches", "Launches confined to an SM partition", stats["confined_launches"]),
            ("paellapy_segments", "Segments completed", stats["segments"]),
            ("paellapy_preemptions", "Times a job gave way to another", stats["preemptions"]),
        ):
            yield CounterMetricFamily(name, text, value=value)
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "As Triton: items not done", labels=_LABELS)
        loaded = GaugeMetricFamily("paellapy_model_ready", "1: the model is loaded", labels=_LABELS)
        for name, entry in service.registry.entries.items():
            loaded.add_metric((name, VERSION), float(entry.state == READY))
            if name in stats["models"]:
                pending.add_metric((name, VERSION), stats["models"][name]["live"])
        yield loaded
        yield pending
        yield from _gpu_times(stats)
        if not isinstance(service.engine, Engine):
            return  # each worker has its own admission limits, and any worker may be asked
        sizes = GaugeMetricFamily(
            "paellapy_admission_limit", "Requests of the model that may be in flight", labels=_LABELS
        )
        for name, limit in list(service.admission.limits.items()):
            sizes.add_metric((name, VERSION), limit.size)
        yield sizes


def _gpu_times(stats: Mapping[str, Any]) -> Iterator[Metric]:
    """The GPU's busy time by model and tenant, as the core accounts for it."""
    busy = "Time during which launched work was on the GPU"
    yield CounterMetricFamily("paellapy_gpu_busy_seconds", busy, value=stats["gpu_ms"] / 1e3)
    by_model = CounterMetricFamily("paellapy_model_gpu_seconds", "A model's part of the busy time", labels=_LABELS)
    for name, each in stats["models"].items():
        by_model.add_metric((name, VERSION), each["gpu_ms"] / 1e3)
    yield by_model
    label = ("tenant",)
    had = CounterMetricFamily("paellapy_tenant_gpu_seconds", "A tenant's part of the busy time", labels=label)
    done = CounterMetricFamily("paellapy_tenant_items", "Items of a tenant that are done", labels=label)
    live = GaugeMetricFamily("paellapy_tenant_items_live", "Items of a tenant waiting or running", labels=label)
    held = GaugeMetricFamily(
        "paellapy_tenant_items_held_back", "Items of a tenant that its limit or `admit` holds back", labels=label
    )
    for name, each in stats["tenants"].items():
        held.add_metric((name,), each["held_back"])
        had.add_metric((name,), each["gpu_ms"] / 1e3)
        done.add_metric((name,), each["completed"])
        live.add_metric((name,), each["live"])
    yield from (had, done, live, held)


class DeviceCollector(Collector):
    """What only the engine's process knows: its GPU, work beside requests, and the machine."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._cpu = engine, CpuMetrics()

    def collect(self) -> Iterator[Metric]:
        yield from sm_metrics(self._engine)
        yield from triton_metrics(self._engine)
        yield from weight_metrics(self._engine)
        yield from job_metrics(self._engine.job_stats())
        yield from text_metrics(self._engine.text_stats())
        yield from self._cpu.collect()


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
    """Metrics of work that runs beside requests: background jobs, leases, other processes."""
    labels = ("job", "kind")
    running = GaugeMetricFamily("paellapy_job_running", "1: the job runs; 0: paused, held or ended", labels=labels)
    done = CounterMetricFamily("paellapy_job_steps", "Steps, leases, or launches of another process", labels=labels)
    waited = CounterMetricFamily("paellapy_job_waited_seconds", "Time that launches waited at a gate", labels=labels)
    for name, facts in jobs.items():
        which = (name, facts["kind"])
        running.add_metric(which, float(facts["state"] == "running"))
        done.add_metric(which, facts.get("steps", facts.get("launches", 0)))
        if "waited_ms" in facts:
            waited.add_metric(which, facts["waited_ms"] * 1e-3)
    yield from (running, done, waited)


def text_metrics(models: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """Metrics of language models: tokens, latencies, batches, pages of keys and values."""
    if not models:
        return
    for name, text, key in (
        ("paellapy_texts", "Texts begun", "texts"),
        ("paellapy_prompt_tokens", "Tokens of prompts", "prompt_tokens"),
        ("paellapy_cached_tokens", "Tokens of prompts that were found in kept pages", "shared_tokens"),
        ("paellapy_generated_tokens", "Tokens written", "tokens"),
        ("paellapy_prefill_chunks", "Steps that read prompts", "chunks"),
        ("paellapy_decode_steps", "Steps that write a token of each text", "steps"),
        ("paellapy_decode_tokens", "Tokens of these steps; by their rate, the mean batch", "batched"),
    ):
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        for model, about in models.items():
            counter.add_metric((model, VERSION), about[key])
        yield counter
    for name, text, key in (
        ("paellapy_texts_running", "Texts being written", "running"),
        ("paellapy_texts_waiting", "Texts that wait for their turn", "waiting"),
    ):
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        for model, about in models.items():
            gauge.add_metric((model, VERSION), about[key])
        yield gauge
    pages = GaugeMetricFamily("paellapy_pages", "Pages of keys and values, by use", labels=(*_LABELS, "use"))
    for model, about in models.items():
        kept = about["kept_pages"]
        for use, number in (("text", about["pages"] - about["free_pages"]), ("prefix", kept),
                            ("free", about["free_pages"] - kept)):  # fmt: skip
            pages.add_metric((model, VERSION, use), number)
    yield pages
    for name, text, key in (
        ("paellapy_ttft_seconds", "Time from a text's request to its first token", "ttft"),
        ("paellapy_tbt_seconds", "Time between two tokens of a text", "tbt"),
    ):
        family = HistogramMetricFamily(name, text, labels=_LABELS)
        for model, about in models.items():
            found = Histogram(tuple(about[key]["bounds_s"]), about[key]["counts"], about[key]["total_s"])
            family.add_metric((model, VERSION), found.buckets(), found.total)
        yield family


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


class _Page:
    """The page's text. A thread makes it, since that takes milliseconds; requests that wait share the next one."""

    def __init__(self, service: Service, registry: CollectorRegistry) -> None:
        self._service, self._registry = service, registry
        self._now: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None

    async def text(self) -> bytes:
        """Text made after this call."""
        if self._next is None and (self._now is None or self._now.done()):
            self._now = asyncio.create_task(self._make())
            return await asyncio.shield(self._now)
        if self._next is None:
            assert self._now is not None
            self._next = asyncio.create_task(self._after(self._now))
        return await asyncio.shield(self._next)

    async def _after(self, earlier: asyncio.Task[bytes]) -> bytes:
        await asyncio.wait((earlier,))
        self._now, self._next = self._next, None  # this task; who comes from now on waits for another
        return await self._make()

    async def _make(self) -> bytes:
        body = await asyncio.to_thread(generate_latest, self._registry)
        if not isinstance(self._service.engine, Engine):  # the GPU and the rest belong to another process
            with contextlib.suppress(EngineAwayError, TimeoutError):
                async with asyncio.timeout(ENGINE_S):
                    body += (await self._service.call("device_metrics")).encode()
        return body


def add_metrics(app: web.Application) -> None:
    """Adds `/metrics`. Each application has a registry of its own, since one process may hold several applications."""
    registry, service = CollectorRegistry(auto_describe=False), app[SERVICE]
    registry.register(ServiceCollector(service))
    if isinstance(service.engine, Engine):
        registry.register(DeviceCollector(service.engine))
        # process_resident_memory_bytes, …; with several processes, it would describe whichever one is asked
        ProcessCollector(registry=registry)
    page = _Page(service, registry)

    @for_operators
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/metrics", metrics)
