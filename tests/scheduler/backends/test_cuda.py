"""The engine's CUDA code over a driver in host memory (fake_cuda.py), each case in a process of its own."""

from __future__ import annotations

import textwrap

import pytest

pytest.importorskip("cuda.bindings.driver")

pytestmark = pytest.mark.xdist_group("fake GPU")  # one process that all are forked from

HEAD = """
import pytest
from failing import failing

def answers(engine, n, names):
    async def main():
        work = [engine.infer(names[k % len(names)], ONES) for k in range(n)]
        return await asyncio.gather(*work, return_exceptions=True)
    return asyncio.run(main())

def check_answers(engine, n, factor=64, names=("six",)):
    for answer in answers(engine, n, names):
        assert (answer["y"] == factor).all()
"""


@pytest.fixture
def run(forked, tmp_path):
    """Runs code in a fresh process with the fake driver and its own profiles."""
    return lambda code: forked.run(HEAD + textwrap.dedent(code), tmp_path)


def test_requests_are_answered_right_and_nothing_is_left_behind(run):
    run("""
        with Engine("cuda", quantum_us=20) as engine:
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2, 4)))
            engine.load(scale_model("wide", 3.0, n=1 << 20, batch=(1,), instances=2))
            assert engine.profile("six")[0].bounds[-1][1] == 8  # six kernels and two copies
            assert engine.profile("six")[0].chain
            rng = np.random.default_rng(0)
            for policy in ("srpt", "streams", "paella"):
                engine.set_policy(policy)
                for _ in range(3):
                    x = random_inputs(engine.models["six"], rng)
                    np.testing.assert_array_equal(engine.infer_sync("six", x)["y"], x["x"] * 64)
                check_answers(engine, 100)
            x = {"x": np.arange(1 << 20, dtype=np.float32)}
            np.testing.assert_array_equal(engine.infer_sync("wide", x)["y"], 3 * x["x"])
            engine.unload("wide")
            engine.load(scale_model("guest", 5.0, batch=(1,)))
            check_answers(engine, 1, 5, ["guest"])
            assert not fake.graphs
        assert not fake.graphs and not fake.executables and not fake.events
    """)


def test_a_graph_halved_again_and_again_gives_the_segments_cut_one_by_one(run):
    run("""
        import random
        from fake_cuda import Graph, Node
        from paellapy.scheduler.backends.cuda_graphs import instantiate, read_graph, segment_graph, segment_graphs

        def program(draw, n):
            graph = Graph()
            nodes = [Node("kernel", number=k) for k in range(n)]
            for k, node in enumerate(nodes):
                node.after = [nodes[i].id for i in {draw.randrange(k) for _ in range(draw.randrange(3))}] if k else []
                graph.nodes[node.id] = node
            fake.graphs[graph.id] = graph
            return read_graph(graph.id)

        def ran(graph):
            return [(node.kind, node.facts) for node in fake.executables[instantiate(graph.handle)]]

        for seed in range(60):
            draw = random.Random(seed)
            n = draw.randrange(1, 40)
            captured = program(draw, n)
            ends = sorted({n, *(draw.randrange(1, n + 1) for _ in range(draw.randrange(12)))})
            bounds = list(zip([0, *ends], ends))
            words = [8 * k for k in range(len(bounds))]
            halved = [ran(graph) for graph in segment_graphs(captured, bounds, words)]
            single = []
            for bound, word in zip(bounds, words):
                with segment_graph(captured, *bound, word) as graph:
                    single.append(ran(graph))
            assert halved == single
            assert list(fake.graphs) == [captured.handle]  # clones are gone, and the program is as it was
            assert len(fake.graphs[captured.handle].nodes) == n
            captured.destroy()
        stopped = segment_graphs(program(draw, 9), [(0, 3), (3, 6), (6, 9)], [0, 8, 16])
        next(stopped)
        stopped.close()
        assert len(fake.graphs) == 1
    """)


@pytest.mark.parametrize("in_order", [True, False])
def test_clones_of_nodes_are_found_whatever_the_order_in_which_a_driver_lists_them(run, in_order):
    run(f"""
        from collections import Counter

        listed, find, searches = fake.cuGraphGetNodes, fake.cuGraphNodeFindInClone, []

        def turned(graph, count=0):
            status, nodes, n = listed(graph, n) if (n := len(fake.graphs[int(graph)].nodes)) else listed(graph)
            turn = not {in_order} and fake.graphs[int(graph)].clones
            return status, (nodes[::-1] if turn else nodes)[:count], n

        def counted(*given):
            searches.append(given)
            return find(*given)

        fake.cuGraphGetNodes, fake.cuGraphNodeFindInClone = turned, counted
        with Engine("cuda", quantum_us=20) as engine:
            engine.backend.node_times_ns = lambda program: [2e4] * len(program.nodes)
            engine.load(scale_model("many", 1.5, steps=40, batch=(1,), instances=1))
            bounds = engine.profile("many")[0].bounds
            assert len(bounds) == 42
            for policy in ("srpt", "streams"):
                engine.set_policy(policy)
                np.testing.assert_allclose(engine.infer_sync("many", ONES)["y"], np.float32(1.5**40), rtol=1e-4)
        per_clone = Counter(int(clone) for _, clone in searches)
        assert (max(per_clone.values()) < 20) == {in_order}, per_clone
    """)


def test_nodes_that_are_not_our_launches_are_described_for_the_first_instance_only(run):
    run("""
        copies, read = [], fake.cuGraphMemcpyNodeGetParams
        fake.cuGraphMemcpyNodeGetParams = lambda node: (copies.append(node), read(node))[1]
        with Engine("cuda", quantum_us=20) as engine:
            engine.backend.node_times_ns = lambda program: [5e4] * len(program.nodes)
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=4))
            assert len(copies) == 2 * 2  # an input and an output for each size
            programs = [each.program for instance in engine.core.models.by_name["six"].launches for each in instance]
            for size in (0, 1):
                for each in programs[size::2]:
                    alike = [(node.kind, node.name, node.blocks, node.launch) for node in each.nodes]
                    assert alike == [(n.kind, n.name, n.blocks, n.launch) for n in programs[size].nodes]
            check_answers(engine, 50)
    """)


@pytest.mark.parametrize("alone", [True, False])
def test_on_an_idle_gpu_only_the_first_instance_waits_for_its_first_launches(run, alone):
    run(f"""
        with Engine("cuda", quantum_us=20) as engine:
            backend, seen = engine.backend, []
            launch, ended = backend.launch_first, backend.await_first
            backend.launch_first = lambda launches, wholes, wait: (seen.append(wait), launch(launches, wholes, wait))
            backend.await_first = lambda model: (seen.append("all"), ended(model))
            type(engine.core).is_idle = {alone}
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=3))
            assert seen == [True, not {alone}, not {alone}, "all"] * 2, seen
            check_answers(engine, 1)
    """)


def test_a_long_kernel_is_captured_in_slices(run):
    run("""
        from paellapy.scheduler.backends.cuda import CudaBackend
        CudaBackend.node_times_ns = lambda self, program: [2e5] * len(program.nodes)
        with Engine("cuda", quantum_us=50) as engine:
            engine.load(scale_model("wide", 3.0, n=1 << 20, batch=(1,), instances=2))
            assert len(engine.profile("wide")[0].cuts[0]) == 4
            assert len(engine.profile("wide")[0].bounds) == 6  # four slices and the two copies
            x = {"x": np.arange(1 << 20, dtype=np.float32)}
            for policy in ("srpt", "streams"):
                engine.set_policy(policy)
                np.testing.assert_array_equal(engine.infer_sync("wide", x)["y"], 3 * x["x"])
    """)


@pytest.mark.parametrize("report", [None, "count", "notify"])
def test_the_last_kernel_of_a_segment_tells(run, report):
    run(f"""
        from dataclasses import replace
        from paellapy.scheduler.policies.policy import find_policy
        kernel = pp.kernel(scale.jit, report={report!r})
        with Engine("cuda", quantum_us=50) as engine:
            engine.backend.node_times_ns = lambda program: [5e4] * len(program.nodes)
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=2, kernel=kernel))
            loaded = next(iter(engine.loaded_rows().values()))
            segments = len(engine.profile("six")[0].bounds)
            assert segments == 8  # one each for six kernels and two copies
            for sizes in loaded.launches:
                assert all(each.notified == set(range(1, 7)) for each in sizes)
            engine.set_policy(replace(find_policy("srpt"), max_in_flight=1))
            check_answers(engine, 50)
            told = [instance.draining[:segments].astype(bool).tolist() for instance in loaded.instances]
            assert told == [[0 < k < 7 for k in range(segments)]] * 2, told
    """)


def test_a_crowd_is_confined_to_partitions_which_are_freed_with_the_engine(run):
    run("""
        fake.by_kernel = True
        with Engine("cuda", "srpt", quantum_us=20, max_active=12, sm_partitions=8) as engine:
            times = lambda launches, *how: ([1e4] * len(launches.bounds), 1e5, 1.1e5)
            engine.backend.segment_times_ns = times
            engine.load(scale_model("six", 2.0, steps=6, batch=(1,), instances=12))
            assert engine.profile("six")[0].partition_ns > 0
            assert len(fake.partitions) == 8
            assert {len(each) for each in fake.partitions.values()} == {6}  # groups of eight SMs
            assert len({tuple(each) for each in fake.partitions.values()}) == 8
            partitions = engine.backend._partitions.sms
            assert set().union(*partitions) == set(range(132))
            assert {len(each) for each in partitions} == {48, 52}  # with the SMs that make up no group
            fake.confined.clear()
            fake.ended_inside.clear()
            check_answers(engine, 1)
            assert set(fake.confined) == {0}  # alone, on all SMs
            check_answers(engine, 200)
            assert engine.stats()["confined_launches"] > 0
            assert len(fake.confined) > 4
            segments = sum(fake.ended_inside.values())
            assert fake.at_home > segments / 2 > 0  # on streams of their partitions
            assert 8 + 1 in fake.ended_inside and not fake.ended_inside[8 + 1]  # whole programs end outside
            with engine.trace() as t:
                check_answers(engine, 20)
            assert len(t.jobs) == 20
        assert not fake.graphs and not fake.executables and not fake.partitions and not fake.partition_streams
    """)


@pytest.mark.parametrize(("whole_ns", "wholes"), [(1e5, True), (1e8, False)])
def test_graphs_are_launched_before_requests_come_long_ones_in_segments(run, whole_ns, wholes):
    run(f"""
        fake.by_kernel = True
        with Engine("cuda", "srpt", quantum_us=20, sm_partitions=8) as engine:
            engine.backend.segment_times_ns = lambda launches, *how: (
                [{whole_ns} / len(launches.bounds)] * len(launches.bounds), {whole_ns}, 1.1 * {whole_ns}
            )
            engine.backend.saturated_ns = lambda instances, rounds: {whole_ns}
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=3))
            made = [each for instance in engine.core.models.by_name["six"].launches for each in instance]
            assert len(made) == 6 and all(each.confined for each in made)
            parts = {{h for each in made for some, _ in ((each.handles, 0), *each.confined) for h in some if h}}
            pieces = {{w for each in made for _, w in ((0, each.whole), *each.confined)}}
            assert len(parts) > len(pieces) and parts | pieces == fake.executables.keys()
            assert parts <= fake.launched
            assert pieces & fake.launched == (pieces if {wholes} else set())
            check_answers(engine, 50)
    """)


def test_a_first_launch_that_fails_is_a_load_that_fails_and_nothing_is_left_of_it(run):
    run("""
        with Engine("cuda", quantum_us=20) as engine:
            engine.load(scale_model("other", 3.0, batch=(1,), instances=2))
            before = len(fake.executables), len(fake.graphs)
            launch, backend = engine.backend.launch_first, engine.backend

            def refused(*how):
                fake.fails = 2  # CUDA_ERROR_OUT_OF_MEMORY
                try:
                    launch(*how)
                finally:
                    fake.fails = 0

            backend.launch_first = refused
            with failing(pp.LaunchError, doing="launching a graph for the first time"):
                engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=3))
            assert (len(fake.executables), len(fake.graphs)) == before
            backend.launch_first = launch
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2), instances=3))
            check_answers(engine, 1)
            check_answers(engine, 1, 3, ["other"])
    """)


def test_partitions_have_streams_for_every_priority(run):
    run("""
        fake.by_kernel = True
        with Engine("cuda", "srpt", quantum_us=20, max_active=12, sm_partitions=8) as engine:
            engine.backend.segment_times_ns = lambda launches, *how: ([1e4] * len(launches.bounds), 1e5, 1.1e5)
            for name, priority in (("low", 0), ("high", 1)):
                engine.load(scale_model(name, 2.0, steps=6, batch=(1,), instances=8, priority=priority))
            check_answers(engine, 200, names=("low", "high"))
            assert fake.at_home > 0
        assert not fake.partitions and not fake.partition_streams
    """)


def test_a_load_that_lacks_a_stream_leaves_none_and_the_next_load_has_them_all(run):
    run("""
        fake.by_kernel = True
        create, left = fake.cuGreenCtxStreamCreate, [100]

        def fails(*args):
            left[0] -= 1
            return (fake.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None) if left[0] == 0 else create(*args)

        fake.cuGreenCtxStreamCreate = fails
        with Engine("cuda", "srpt", quantum_us=20, max_active=12, sm_partitions=8) as engine:
            engine.backend.segment_times_ns = lambda launches, *how: ([1e4] * len(launches.bounds), 1e5, 1.1e5)
            model = scale_model("six", 2.0, steps=6, batch=(1,), instances=12)
            with failing(pp.LaunchError, doing="creating a stream"):
                engine.load(model)
            assert not fake.partition_streams
            engine.load(model)
            check_answers(engine, 200)
            assert engine.stats()["confined_launches"] > 0
        assert not fake.partitions and not fake.partition_streams
    """)


def test_partitions_are_of_groups_alone_where_the_driver_takes_nothing_beside_them(run):
    run("""
        fake.by_kernel = fake.groups_only = True
        with Engine("cuda", sm_partitions=8) as engine:
            assert len(fake.partitions) == 8
            partitions = engine.backend._partitions.sms
            assert set().union(*partitions) == set(range(120))
            assert {len(each) for each in partitions} == {48}
        assert not fake.partitions
    """)


def test_no_partition_is_left_where_an_engine_does_not_come_about(run):
    run("""
        create = fake.cuGreenCtxCreate

        def interrupted(*given):
            if len(fake.partitions) == 3:
                raise KeyboardInterrupt
            return create(*given)

        for wrong, how in ((PolicyError, {"policy": "srtp"}), (KeyboardInterrupt, {})):
            fake.cuGreenCtxCreate = create if how else interrupted
            with pytest.raises(wrong):
                Engine("cuda", sm_partitions=8, **how)
            assert not fake.partitions
    """)


def test_what_was_made_goes_also_where_a_load_or_a_trace_fails(run):
    run("""
        fake.by_kernel = True
        engine = Engine("cuda", "srpt", quantum_us=20, sm_partitions=8)
        backend = engine.backend
        times = lambda launches, *how: ([1e4] * len(launches.bounds), 1e5, 1.1e5)
        backend.segment_times_ns = times
        model = scale_model("six", 2.0, steps=6, batch=(1, 2), instances=4)
        measured, cut = [], backend.cut

        def fails_at_the_second_size(launches, *how):
            measured.append(launches)
            if len(measured) > 1:
                raise RuntimeError("it went wrong")
            return times(launches)

        backend.segment_times_ns = fails_at_the_second_size
        with pytest.raises(RuntimeError):
            engine.load(model)
        assert not fake.executables, len(fake.executables)
        backend.segment_times_ns = times
        engine.load(model)
        before, calls = set(fake.executables), []

        def fails_later(*what, **how):
            calls.append(1)
            if len(calls) > 5:
                raise RuntimeError("it went wrong")
            return cut(*what, **how)

        backend.cut = fails_later
        with pytest.raises(RuntimeError), engine.trace():
            pass
        assert set(fake.executables) == before
        from paellapy.instrument.traces.session import Session
        assert not Session._captured, "also launches of the program that was not cut are forgotten"
        backend.cut = cut
        with engine.trace():
            engine.close()
            assert fake.partitions  # graphs that the trace made are in them
        assert not fake.graphs and not fake.executables and not fake.partitions
    """)


def test_kernels_that_belong_to_a_context_stay_on_all_sms(run):
    run("""
        with Engine("cuda", "srpt", quantum_us=20, sm_partitions=8) as engine:
            engine.load(scale_model("six", 2.0, steps=6, batch=(1,), instances=12))
            assert engine.profile("six")[0].partition_ns == 0
            check_answers(engine, 50)
            assert engine.stats()["confined_launches"] == 0
    """)


@pytest.mark.parametrize("sends", [0, 1, 25])
def test_a_program_of_which_the_driver_refuses_to_confine_a_kernel_stays_on_all_sms(run, sends):
    run(f"""
        fake.by_kernel, fake.sends = True, {sends}
        with Engine("cuda", "srpt", quantum_us=20, sm_partitions=8) as engine:
            engine.backend.segment_times_ns = lambda launches, *how: ([1e4] * len(launches.bounds), 1e5, 0.0)
            engine.load(scale_model("six", 2.0, steps=6, batch=(1,), instances=12))
            assert engine.profile("six")[0].partition_ns == 0
            check_answers(engine, 50)
            assert engine.stats()["confined_launches"] == 0
        assert not fake.graphs and not fake.executables and not fake.partitions
    """)


def test_a_driver_without_green_contexts_says_what_to_do(run):
    run("""
        fake.cuDeviceGetDevResource = lambda device, kind: (fake.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)
        with failing(pp.LaunchError, field="sm_partitions"):
            Engine("cuda", sm_partitions=8)
        Engine("cuda").close()
    """)


def test_a_trace_swaps_graphs_in_and_out(run):
    run("""
        with Engine("cuda", quantum_us=5) as engine:
            engine.load(scale_model("six", 2.0, steps=6, batch=(1, 2)))
            before = engine.state.launch["handle"].copy()
            with engine.trace() as t:
                assert (engine.state.launch["handle"] != before).any()
                check_answers(engine, 20)
            assert (engine.state.launch["handle"] == before).all()
            assert len(t.jobs) == 20 and t.models == ("six",)
            check_answers(engine, 1)
        assert not fake.graphs and not fake.executables
    """)


@pytest.mark.parametrize(
    "act", ["outputs['y'].numpy()", "pp.Device.current().synchronize()", "pp.array(np.ones(4))", "1 / 0"]
)
def test_a_refused_model_leaves_no_capture_behind(run, act):
    run(f"""
        def fn(weights, inputs, outputs):
            scale[(1,)](inputs["x"], outputs["y"], 2.0, 64, B=64)
            {act}
        with Engine("cuda") as engine:
            with failing(CaptureError, model="bad"):
                engine.load(Model("bad", fn, inputs={{"x": TensorSpec(64)}}, outputs={{"y": TensorSpec(64)}}))
            assert not any(stream.capturing for stream in fake.streams.values())
            assert engine.memory.held_bytes == 0 and not fake.graphs and not fake.executables
            engine.load(scale_model(batch=(1,)))
            check_answers(engine, 1, 2, ["scale"])
    """)


@pytest.mark.parametrize("fault", ["fake.fails = 700", "fake.silent = True"])
def test_a_fault_answers_everybody_and_nothing_hangs(run, fault):
    run(f"""
        engine = Engine("cuda")
        engine.load(scale_model(batch=(1, 2)))
        check_answers(engine, 1, 2, ["scale"])
        {fault}
        for answer in answers(engine, 10, ["scale"]):
            assert isinstance(answer, EngineFailedError)
            assert answer.__cause__.status == 700  # an illegal address
        with pytest.raises(EngineFailedError):
            engine.infer_sync("scale", ONES)
        engine.close()
    """)


def test_an_idle_loop_sleeps(run):
    run("""
        import threading
        with Engine("cuda") as engine:
            engine.load(scale_model(batch=(1,)))
            engine.infer_sync("scale", ONES)
            while not engine.backend._bell.armed:
                threading.Event().wait(0.01)
            before = int(engine.state.core["steps"][0])
            threading.Event().wait(0.3)
            assert int(engine.state.core["steps"][0]) == before
            check_answers(engine, 1, 2, ["scale"])
    """)


def test_a_slow_look_at_the_clock_does_not_set_it_off(run):
    run("""
        import time
        device, launch, slow = pp.Device("cuda"), fake.cuLaunchKernel, iter([0.1, 0.1, 0.1])

        def late(*args):
            time.sleep(next(slow, 0))
            return launch(*args)

        fake.cuLaunchKernel = late
        device.clock_ns()
        assert next(slow, None) is None
        assert abs(device.to_device_ns(0)) < 20_000_000, device.to_device_ns(0)  # the fake's clock is the host's
    """)


def test_nothing_is_collected_inside_a_capture(run):
    run("""
        import gc
        seen = []
        model = scale_model("six", 2.0, steps=2, batch=(1, 2))
        inner = model.fn

        def fn(weights, inputs, outputs):
            seen.append(gc.isenabled())
            inner(weights, inputs, outputs)

        object.__setattr__(model, "fn", fn)
        with Engine("cuda") as engine:
            engine.load(model)
            assert not all(seen) and any(seen)  # off in captures, on in warm-up runs
            assert gc.isenabled()
            check_answers(engine, 1, 4)
            assert engine.backend._streams.pools
        assert not engine.backend._streams.pools  # gone with the engine, not when the collector comes by
    """)


def test_long_inputs_that_wait_for_an_instance_are_copied_beside_the_core(run):
    run("""
        from core_check import check_at_rest
        with Engine("cuda") as engine:
            engine.load(scale_model("long", 3.0, n=1 << 14, batch=(1, 2), instances=1))

            async def main():
                rng = np.random.default_rng(0)
                x = [rng.standard_normal(1 << 14, np.float32) for _ in range(60)]
                work = [asyncio.ensure_future(engine.infer("long", {"x": each})) for each in x]
                await asyncio.sleep(0)
                for k in range(0, 60, 7):
                    work[k].cancel()
                for k, answer in enumerate(await asyncio.gather(*work, return_exceptions=True)):
                    if k % 7:
                        np.testing.assert_array_equal(answer["y"], np.float32(3) * x[k])

            asyncio.run(main())
            assert engine.state.copy_ring[0, 0] > 0
            assert engine.state.copy_ring[0, 0] == engine.state.copy_ring[1, 0]
            check_at_rest(engine.state)
            assert engine.stats()["launch_ms"] > 0
            assert 0 < engine.stats()["longest_launch_ms"] <= engine.stats()["launch_ms"]
            assert 0 < engine.stats()["longest_copy_ms"] < 60_000
    """)


def test_a_graph_captured_elsewhere_is_cut_and_gives_what_it_gave(run):
    run("""
        from paellapy.instrument.device.driver import CudaStream
        with Engine("cuda", quantum_us=1) as engine:
            device = engine.device
            x, y, z = (device.array(np.zeros(64, np.float32)) for _ in range(3))
            stream = CudaStream(device, 0)
            fake.cuStreamBeginCapture(stream.handle, 0)
            with device, stream:
                scale[(1,)](x, y, 3.0, 64, B=128)
                scale[(1,)](y, z, 3.0, 64, B=128)
            _, graph = fake.cuStreamEndCapture(stream.handle)
            for k, given in enumerate((int(graph), graph, type("Graph", (), {"graph": int(graph)})())):
                model = Model.from_graph(given, inputs={"x": x}, outputs={"z": z}, name=f"g{k}")
                engine.load(model)
                assert len(engine.profile(f"g{k}")[0].bounds) >= 1
                for value in (1.0, 2.0):
                    one = np.full(64, value, np.float32)
                    assert (engine.infer_sync(f"g{k}", {"x": one})["z"] == 9 * value).all()
            for bad in (object(), 0, None):
                with failing(ModelError, field="graph", given=bad):
                    Model.from_graph(bad, inputs={"x": x}, outputs={"z": z})
        assert set(fake.graphs) == {int(graph)}, "the other's graph is left, and nothing else"
        assert not fake.executables
    """)


def test_turns_are_granted_by_a_graph_and_ended_by_the_host(run):
    run("""
        with Engine("cuda", policy="serial") as engine:
            engine.load(scale_model())
            for _ in range(3):
                with engine.lease("script", give_back_ms=5) as lease:
                    check_answers(engine, 1, 2, ["scale"])
                    assert lease.over
        assert not fake.executables
    """)
