"""The engine on a real GPU: CUDA graphs cut into segments give the right answers, whatever else runs."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace

import numpy as np
import pytest
import triton
import triton.language as tl
from core_check import check_at_rest
from engine_models import mlp_model, mlp_reference, random_inputs, scale, scale_model, scale_reference
from failing import failing
from places import TESTS

import paellapy as pp
from paellapy.instrument.device.driver import CudaEvent, driver
from paellapy.instrument.device.driver import check as check_status
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.errors import CaptureError, InputError, MemoryPlanError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.scheduler.policies.policy import find_policy, policy_names

pytestmark = pytest.mark.gpu

KINDS = {
    "short": (scale_model("short", 3.0, batch=(1, 4)), scale_reference(3.0)),
    "long": (scale_model("long", 2.0, steps=60, batch=(1, 2)), scale_reference(2.0, 60)),
    "mlp": (mlp_model("mlp", layers=6, batch=(1, 2, 4, 8), target_ms=5.0), mlp_reference(6)),
}
ONES = {"x": np.ones(64, np.float32)}


@triton.jit
def scale_slowly(x, out, factor, n, B: tl.constexpr):
    """Like `scale`, but some 50 µs slower, which leaves time after its last block has started."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    value = tl.load(x + i, mask=i < n)
    nothing = value * 0.0
    for _ in range(20_000):
        nothing = nothing * factor + nothing
    tl.store(out + i, (value + nothing) * factor, mask=i < n)


def check(outputs, expected):
    assert outputs.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(outputs[key], value, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def loaded():
    with Engine("cuda", quantum_us=10) as engine:
        for model, _ in KINDS.values():
            engine.load(model)
        yield engine


@pytest.fixture
def engine():
    with Engine("cuda", quantum_us=10) as engine:
        yield engine


def requests(n, seed=0):
    rng = np.random.default_rng(seed)
    for name in rng.choice(list(KINDS), n):
        model, reference = KINDS[name]
        inputs = random_inputs(model, rng)
        yield str(name), inputs, reference(inputs)


@pytest.mark.alone
def test_programs_are_cut_by_measured_time(engine):
    engine.load(KINDS["long"][0])
    profile = engine.profile("long")[0]
    assert profile.chain
    assert len(profile.segments) > 2
    assert all(segment.time_ns > 0 for segment in profile.segments)
    assert profile.bounds[-1][1] == 62  # sixty kernels and two copies
    assert profile.whole_ns > 0
    assert profile.segmented_ns > 0.5 * profile.whole_ns


def test_one_request_at_a_time_is_one_launch(loaded):
    loaded.set_policy("paella")
    before = loaded.stats()
    for name, inputs, expected in requests(50):
        check(loaded.infer_sync(name, inputs), expected)
    after = loaded.stats()
    assert after["whole_launches"] - before["whole_launches"] == after["launches"] - before["launches"] == 50


@pytest.mark.parametrize("name", policy_names())
def test_every_request_is_answered_right_under_every_policy(loaded, name):
    loaded.set_policy(name)

    async def one(k, model, inputs, expected):
        check(await loaded.infer(model, inputs, priority=k % 3, client=k % 5), expected)

    async def main():
        for seed in range(4):
            await asyncio.gather(*(one(k, *each) for k, each in enumerate(requests(1000, seed))))

    asyncio.run(main())
    assert loaded.stats()["live"] == 0
    check_at_rest(loaded.state)


def test_threads_and_a_loop_share_an_engine(loaded):
    failures = []

    def blocking(seed):
        try:
            for name, inputs, expected in requests(300, seed):
                check(loaded.infer_sync(name, inputs), expected)
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=blocking, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()

    async def one(name, inputs, expected):
        check(await loaded.infer(name, inputs), expected)

    async def main():
        await asyncio.gather(*(one(*each) for each in requests(1000, 9)))

    asyncio.run(main())
    for thread in threads:
        thread.join()
    assert not failures


def test_a_slot_is_written_in_place(loaded):
    slots = [loaded.reserve("short") for _ in range(30)]
    for k, slot in enumerate(slots):
        slot.inputs["x"][:] = k

    async def main():
        return await asyncio.gather(*(slot.submit() for slot in slots))

    for k, outputs in enumerate(asyncio.run(main())):
        assert (outputs["y"] == 3 * k).all()


def test_a_long_kernel_is_sliced_and_still_right():
    n = 1 << 24
    with Engine("cuda", quantum_us=5, policy="srpt") as engine:
        engine.load(scale_model("wide", 3.0, n=n, batch=(1,), instances=2))
        engine.load(scale_model("other", 2.0, batch=(1,), instances=2))
        assert len(engine.profile("wide")[0].cuts[0]) > 1
        x = {"x": np.random.default_rng(0).standard_normal(n).astype(np.float32)}

        async def main():
            wide = [engine.infer("wide", x) for _ in range(4)]
            return await asyncio.gather(*wide, *(engine.infer("other", ONES) for _ in range(50)))

        found = asyncio.run(main())
        for outputs in found[:4]:
            np.testing.assert_array_equal(outputs["y"], 3 * x["x"])
        for outputs in found[4:]:
            assert (outputs["y"] == 2).all()


def test_two_streams_of_a_function_become_a_graph_that_is_no_chain(engine, gpu):
    side = gpu.stream()

    def fn(weights, inputs, outputs):
        main = gpu.current_stream()
        total = inputs["x"].shape[0] * 64
        grid = (triton.cdiv(total, 128),)
        first, left, right = (pp.empty(inputs["x"].shape) for _ in range(3))
        scale[grid](inputs["x"], first, 2.0, total, B=128)
        side.wait(CudaEvent(main))
        with side:
            scale[grid](first, right, 5.0, total, B=128)
            scale[grid](right, outputs["z"], 1.0, total, B=128)
        scale[grid](first, left, 3.0, total, B=128)
        scale[grid](left, outputs["y"], 1.0, total, B=128)
        joined = side.record()  # held until the wait is submitted: an event goes with its object
        check_status(driver().cuStreamWaitEvent(main, joined.handle, 0), "joining")

    specs = {"inputs": {"x": TensorSpec((64,))}, "outputs": {"y": TensorSpec((64,)), "z": TensorSpec((64,))}}
    engine.load(Model("fork", fn, batch=(1, 2), **specs))
    engine.load(scale_model("other", batch=(1,)))
    profile = engine.profile("fork")[0]
    assert not profile.chain
    assert profile.bounds[-1][1] == 8  # five kernels and three copies

    async def main():
        work = [engine.infer("fork", ONES) for _ in range(100)]
        return await asyncio.gather(*work, *(engine.infer("other", ONES) for _ in range(100)))

    for name in ("srpt", "streams"):
        engine.set_policy(name)
        for outputs in asyncio.run(main())[:100]:
            check(outputs, {"y": np.full(64, 6.0), "z": np.full(64, 10.0)})


def test_cupy_calls_are_part_of_a_program(engine):
    cupy = pytest.importorskip("cupy")

    def fn(weights, inputs, outputs):
        x, y = cupy.asarray(inputs["x"]), cupy.asarray(outputs["y"])
        cupy.multiply(x + 1.0, 3.0, out=y)  # the sum is a temporary of CuPy's own
        scale[(1,)](outputs["y"], outputs["y"], 2.0, 64 * inputs["x"].shape[0], B=512)

    specs = {"inputs": {"x": TensorSpec((64,))}, "outputs": {"y": TensorSpec((64,))}}
    engine.load(Model("mixed", fn, batch=(1, 4), **specs))
    rng = np.random.default_rng(1)
    work = [{"x": rng.standard_normal(64).astype(np.float32)} for _ in range(100)]

    async def main():
        return await asyncio.gather(*(engine.infer("mixed", each) for each in work))

    for outputs, inputs in zip(asyncio.run(main()), work, strict=True):
        check(outputs, {"y": 6 * (inputs["x"] + 1)})


def waits(weights, inputs, outputs):
    scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)
    pp.Device.current().synchronize()


def reads(weights, inputs, outputs):
    scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)
    outputs["y"].numpy()


def uploads(weights, inputs, outputs):
    pp.array(np.zeros(4, np.float32))
    scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)


@pytest.mark.parametrize("fn", [waits, reads, uploads])
def test_what_cannot_be_captured_names_model_and_line(engine, fn):
    specs = {"inputs": {"x": TensorSpec((64,))}, "outputs": {"y": TensorSpec((64,))}}
    with pytest.raises(CaptureError, match=r"'culprit'.*test_gpu_engine.py:\d+"):
        engine.load(Model("culprit", fn, batch=(1,), **specs))
    assert engine.memory.held_bytes == 0
    engine.load(scale_model("after", batch=(1,)))
    check(engine.infer_sync("after", ONES), {"y": np.full(64, 2.0)})


def test_a_synchronizing_library_call_is_refused_and_nothing_is_left_capturing(engine):
    cupy = pytest.importorskip("cupy")

    def fn(weights, inputs, outputs):
        scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)
        cupy.cuda.get_current_stream().synchronize()

    specs = {"inputs": {"x": TensorSpec((64,))}, "outputs": {"y": TensorSpec((64,))}}
    with pytest.raises(CaptureError, match="'culprit'"):
        engine.load(Model("culprit", fn, batch=(1,), **specs))
    engine.load(scale_model("after", batch=(1,)))
    check(engine.infer_sync("after", ONES), {"y": np.full(64, 2.0)})


def test_models_come_and_go_while_others_run(loaded):
    loaded.set_policy("srpt")
    stop, failures = threading.Event(), []

    def load():
        rng = np.random.default_rng(3)
        try:
            while not stop.is_set():
                inputs = random_inputs(KINDS["mlp"][0], rng)
                check(loaded.infer_sync("mlp", inputs), KINDS["mlp"][1](inputs))
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        held = loaded.memory.held_bytes
        for k in range(3):
            loaded.load(scale_model(f"guest{k}", factor=float(k), steps=3, batch=(1, 2)))
            check(loaded.infer_sync(f"guest{k}", ONES), {"y": np.full(64, float(k) ** 3)})
        for k in range(3):
            loaded.unload(f"guest{k}")
        assert loaded.memory.held_bytes == held
    finally:
        stop.set()
        thread.join()
    assert not failures


def test_launches_of_other_threads_are_not_caught_by_a_capture(engine, gpu):
    stop, failures = threading.Event(), []

    def eager():
        try:
            with pp.Device("cuda"):
                x, y = pp.array(np.ones(64, np.float32)), pp.empty(64)
                while not stop.is_set():
                    scale[(1,)](x, y, 4.0, 64, B=64)
                    assert (y.numpy() == 4).all()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=eager)
    thread.start()
    try:
        engine.load(scale_model(steps=50, batch=(1, 2)))
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert engine.profile("scale")[0].bounds[-1][1] == 52  # fifty kernels and two copies
    check(engine.infer_sync("scale", ONES), {"y": np.full(64, 2.0**50)})


def test_a_model_that_does_not_fit_is_refused():
    with Engine("cuda", memory_bytes=1 << 20) as engine, failing(MemoryPlanError, model="large", limit_bytes=1 << 20):
        engine.load(scale_model("large", n=1 << 20))


def test_a_trace_has_requests_segments_and_blocks_on_one_clock(loaded):
    loaded.set_policy("srpt")
    work = list(requests(60, seed=4))

    async def one(name, inputs, expected):
        check(await loaded.infer(name, inputs), expected)

    async def main():
        await asyncio.gather(*(one(*each) for each in work))

    with loaded.trace() as t:
        asyncio.run(main())
    assert len(t.jobs) == 60
    assert (t.jobs["status"] == codes.OK).all()
    assert len(t.blocks) > 0
    assert len(t.segments) > 0
    assert t.dropped == 0
    assert str(t.summary())
    # Without a trace the plain graphs run again, and nothing is left behind.
    for name, inputs, expected in requests(20, seed=5):
        check(loaded.infer_sync(name, inputs), expected)
    with loaded.trace() as t:
        pass
    assert len(t.blocks) == 0


def test_cancelled_requests_free_their_slots(loaded):
    async def main():
        tasks = [asyncio.create_task(loaded.infer("long", ONES)) for _ in range(300)]
        await asyncio.sleep(0)
        for task in tasks[20:]:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in found) == 280

    asyncio.run(main())
    while loaded.core.ring.waiting:
        loaded.core.ring.drain()
    assert loaded.stats()["live"] == 0
    check_at_rest(loaded.state)


def test_an_idle_engine_uses_almost_no_cpu(loaded):
    loaded.infer_sync("short", ONES)
    while not loaded.backend._bell.armed:
        threading.Event().wait(0.01)
    before = resource.getrusage(resource.RUSAGE_SELF)
    steps = int(loaded.state.core["steps"][0])
    threading.Event().wait(1.0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert int(loaded.state.core["steps"][0]) - steps <= 5
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 0.1


def test_wrong_inputs_are_refused(loaded):
    with pytest.raises(InputError):
        loaded.infer_sync("short", {"x": np.ones(3, np.float32)})


def test_a_fault_answers_everybody_and_nothing_hangs():
    # In a process of its own: a fault takes the CUDA context with it.
    code = """
        import asyncio
        import numpy as np
        from paellapy.scheduler.engine.engine import Engine
        from paellapy.scheduler.core.errors import EngineFailedError
        from engine_models import faulty_model, scale_model

        engine = Engine("cuda")
        engine.load(faulty_model())
        engine.load(scale_model(steps=30, batch=(1,), instances=1))
        good, bad = {"x": -np.ones(64, np.float32)}, {"x": np.ones(64, np.float32)}
        assert (engine.infer_sync("faulty", good)["y"] == -1).all()

        async def main():
            work = [engine.infer("scale", good) for _ in range(20)]
            return await asyncio.gather(engine.infer("faulty", bad), *work, return_exceptions=True)

        first, *others = asyncio.run(main())
        assert isinstance(first, EngineFailedError), first
        assert "CUDA_ERROR" in str(first.__cause__), first.__cause__
        assert all(isinstance(each, (dict, EngineFailedError)) for each in others)
        try:
            engine.infer_sync("scale", good)
        except EngineFailedError:
            print("refused")
        engine.close()
        print("closed")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout.split() == ["refused", "closed"], run.stderr


@pytest.mark.alone  # a segment must still run when the host sends the next
@pytest.mark.parametrize(("report", "told"), [(None, True), ("count", True), ("notify", True), (None, False)])
def test_the_next_segment_is_sent_before_this_one_ends(engine, report, told):
    """One segment on the GPU at a time, and yet the next does not wait for the end of the one before: it is sent when
    the last block has started, or, where the core is not told of that, when the end is predicted.
    """
    model = scale_model("long", 2.0, steps=8, batch=(1, 2), kernel=pp.kernel(scale_slowly, report=report))
    engine.load(model)
    if not told:
        engine.state.launch["draining"] = 0
    engine.set_policy(replace(find_policy("srpt"), name="careful", max_in_flight=1))
    instances = next(iter(engine.loaded_rows().values())).instances
    state, ahead = engine.state, []

    def note(entry):
        instance = state.instance[int(entry["instance"])]
        if not instance["whole"] and instance["segments"] > 2:
            times = state.segment_ns[int(entry["instance"]), : int(instance["segments"])]
            ahead.append(bool((times[1:, 0] < times[:-1, 1]).any()))

    stop = engine.watch(note)
    rng = np.random.default_rng(7)

    async def main():
        work = [random_inputs(model, rng) for _ in range(400)]
        found = await asyncio.gather(*(engine.infer("long", inputs) for inputs in work))
        for outputs, inputs in zip(found, work, strict=True):
            check(outputs, scale_reference(2.0, 8)(inputs))

    asyncio.run(main())
    stop()
    assert any(instance.draining.any() for instance in instances) or not told
    assert any(ahead)
    check_at_rest(state)
