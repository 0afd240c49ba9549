"""The tally of the driver's objects, over a driver in host memory: models that come and go leave nothing behind."""

from __future__ import annotations

import textwrap

import pytest
from places import ROOT

pytest.importorskip("cuda.bindings.driver")

pytestmark = pytest.mark.xdist_group("fake GPU")  # one process that all are forked from

HEAD = f"""
    sys.path.append({str(ROOT / "benchmarks")!r})
    import driver_tally
    driver_tally.driver = lambda: fake
    from paellapy.instrument.device import Device
"""
LOADS = """
    with driver_tally.Tally() as tally:
        before = tally.live()
        with Engine("cuda", quantum_us=20) as engine:
            seen = []
            for _ in range(4):
                engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2, 4), instances=2))
                engine.infer_sync("six", {"x": np.ones(64, np.float32)})
                there = tally.live()
                engine.unload("six")
                seen.append(tally.live())
        closed = tally.live()
    assert there["executable graphs"]["count"] > 2 * 3 * 2, there
    assert there["memory"]["bytes"] > seen[-1]["memory"]["bytes"] > 0, there
    assert seen[1] == seen[2] == seen[3], seen
    for kind in ("executable graphs", "graphs", "events"):
        assert seen[-1][kind]["count"] == 0, seen
    assert closed["streams"]["count"] <= seen[-1]["streams"]["count"]
    assert tally.failed == {}
    fake.cuMemAlloc(8)
    assert tally.live() == closed  # nothing is counted after `with`
"""
THREADS = """
    device = Device("cuda")
    with driver_tally.Tally() as tally:
        array = [device.array(np.ones(64, np.float32))]
        assert tally.live()["memory"]["count"] == 1
        thread = threading.Thread(target=array.clear)
        thread.start()
        thread.join()
        assert tally.live()["memory"]["count"] == 0
        assert tally.failed == {}
"""
LATER = """
    import asyncio, time

    def captured():
        return engine.stats()["models"]["six"]["sizes"]["captured"]

    async def some(n):
        work = [engine.infer("six", {"x": np.full(64, k, np.float32)}) for k in range(n)]
        for k, each in enumerate(await asyncio.gather(*work)):
            assert np.array_equal(each["y"], np.full(64, 64 * k, np.float32)), (n, k)

    with driver_tally.Tally() as tally, Engine("cuda", quantum_us=20) as engine:
        engine._backend.node_times_ns = lambda program: [5e4] * len(program.nodes)  # so that all cuts are alike
        seen = []
        for _ in range(3):
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2, 4, 8), instances=2, capture="on_demand"))
            assert captured() == [1, 8]
            end = time.monotonic() + 60
            while captured() != [1, 2, 4, 8]:
                assert time.monotonic() < end, engine.stats()["models"]
                for n in (2, 3, 4):
                    asyncio.run(some(n))
            for n in range(1, 9):
                asyncio.run(some(n))
            there = tally.live()["executable graphs"]["count"]
            engine.unload("six")
            seen.append(tally.live())
        engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2, 4, 8), instances=2))
        assert tally.live()["executable graphs"]["count"] == there  # as many as of a model captured ahead
        assert seen[1] == seen[2], seen
        assert tally.failed == {}
"""


@pytest.fixture
def run(forked, tmp_path):
    return lambda code: forked.run(textwrap.dedent(HEAD) + textwrap.dedent(code), tmp_path)


def test_a_model_loaded_again_and_again_leaves_nothing_with_the_driver(run):
    run(LOADS)


def test_an_array_is_freed_in_a_thread_that_never_used_the_gpu(run):
    run(THREADS)


def test_sizes_captured_in_service_leave_nothing_with_the_driver(run):
    run(LATER)
