"""`/metrics`: Prometheus text, made from the counters on request. Triton's names are aliases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
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

from paellapy.scheduler.core.errors import EngineAwayError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.stats import RESOURCES
from paellapy.serving.counters import (
    CpuMetrics,
    Histogram,
    ModelCounters,
    job_metrics,
    sm_metrics,
    triton_metrics,
    weight_metrics,
)
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
    def __init__(self, service: Service) -> None:
        self._service, self._cpu = service, CpuMetrics()

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
        yield from self._gauges()
        engine = self._service.engine
        if isinstance(engine, Engine):
            yield from sm_metrics(engine)
            yield from triton_metrics(engine)
            yield from weight_metrics(engine)
            yield from job_metrics(engine.job_stats())
            yield from self._cpu.collect()

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
    registry = CollectorRegistry(auto_describe=False)
    service = app[SERVICE]
    registry.register(ServiceCollector(service))
    if isinstance(service.engine, Engine):  # with several processes, it would describe whichever one is asked
        ProcessCollector(registry=registry)  # process_resident_memory_bytes, process_open_fds, …

    page = _Page(service, registry)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await page.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app.router.add_get("/metrics", metrics)
