"""/metrics: the GPU SM by SM, Triton's names, and the process, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from engine_models import scale_model
from serving_server import INFER, ask, infer_body, running, scrape

from paellapy.serving.metrics import _Page
from paellapy.serving.registry import Entry

# What Triton documents for every model and, below, per GPU and machine. Left out: power, energy and response caches,
# which a virtual GPU has not, and summaries and pinned pools, which Triton itself shows only when asked to.
PER_MODEL = (
    "nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count",
    "nv_inference_request_duration_us", "nv_inference_queue_duration_us", "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us", "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
)  # fmt: skip
PER_MACHINE = (
    "nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_memory_used_bytes",
    "nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with running([scale_model(batch=(1, 4)), Entry("absent", scale_model, wanted=False)]) as found:
        yield found


def infer(server, x, status=200, **parameters):
    body = json.dumps(infer_body("x", x, parameters=parameters))
    assert ask(server, "POST", INFER, body)[0] == status


def test_requests_items_and_batches_are_counted(server):
    infer(server, np.ones((1, 64), np.float32))
    infer(server, np.ones((1, 63), np.float32), 400)
    infer(server, np.ones((1, 64), np.float32), 503, timeout=1)
    assert ask(server, "GET", "/metrics")[1]["Content-Type"].startswith("text/plain")

    def label(sample):
        return next((sample.labels[key] for key in ("le", "reason", "resource") if key in sample.labels), None)

    found = {(s.name, s.labels.get("model"), label(s)): s.value for s in scrape(server)}
    answered = found["paellapy_requests_answered_total", "scale", None]
    assert answered >= 1
    assert found["paellapy_request_seconds_count", "scale", None] == answered
    assert found["paellapy_request_seconds_bucket", "scale", "+Inf"] == answered
    assert ("paellapy_queue_seconds_bucket", "scale", "0.0001") in found
    assert found["nv_inference_request_success", "scale", None] == answered
    assert found["nv_inference_count", "scale", None] == found["paellapy_items_total", "scale", None] > 0
    assert found["paellapy_refusals_total", "scale", "predicted_deadline"] >= 1
    assert found["paellapy_batch_size_count", "scale", None] == found["paellapy_batches_total", "scale", None]
    assert found["paellapy_occupancy_ratio", None, "warps"] == 0
    assert found["paellapy_model_ready", "absent", None] == 0
    assert found["paellapy_ready", None, None] == 1


def test_every_sm_tells_how_long_it_held_warps(server):
    def total(samples, name):
        return {s.labels["sm"]: s.value for s in samples if s.name == name}

    before = scrape(server)
    for _ in range(3):
        infer(server, np.ones((4, 64), np.float32))
    after = scrape(server)
    for name in ("paellapy_sm_warp_seconds_total", "paellapy_sm_busy_seconds_total"):
        earlier, later = total(before, name), total(after, name)
        assert len(later) == server.engine.device.sm_ids
        assert sum(later.values()) > sum(earlier.values())
        assert all(later[sm] >= earlier[sm] for sm in later)
    most = next(s.value for s in after if s.name == "paellapy_sm_warps_max")
    busy = total(after, "paellapy_sm_busy_seconds_total")
    assert all(value <= busy[sm] * most for sm, value in total(after, "paellapy_sm_warp_seconds_total").items())


def test_tritons_names_are_there(server):
    infer(server, np.ones((1, 64), np.float32))
    samples = scrape(server)
    of_the_model = {s.name for s in samples if s.labels.get("model") == "scale" and s.labels["version"] == "1"}
    assert set(PER_MODEL) <= of_the_model
    found = {s.name: s for s in samples}
    assert set(PER_MACHINE) <= found.keys()
    assert 0 <= found["nv_cpu_utilization"].value <= 1
    assert found["nv_gpu_memory_used_bytes"].value <= found["nv_gpu_memory_total_bytes"].value
    assert "gpu_uuid" in found["nv_gpu_utilization"].labels
    reasons = {s.labels["reason"] for s in samples if s.name == "nv_inference_request_failure"}
    assert reasons == {"REJECTED", "CANCELED", "BACKEND", "OTHER"}


def test_the_process_tells_of_itself(server):
    found = {s.name: s.value for s in scrape(server)}
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert found["process_open_fds"] > 3


def test_every_reader_gets_a_page_made_after_it_asked():
    """Whenever it asks: while a page is made, right after it is made, and while the next one waits to begin."""

    class Slow(_Page):
        made = 0

        async def _make(self):
            self.made += 1
            number = self.made
            await asyncio.sleep(0)
            return str(number).encode()

    async def read_all() -> None:
        page = Slow(None, None)
        found = []
        for k in range(200):
            found.append((page.made, asyncio.create_task(page.text())))
            for _ in range(k % 4):
                await asyncio.sleep(0)
        for before, task in found:
            assert int(await task) > before

    asyncio.run(read_all())
