"""Preemption over a driver in host memory (fake_cuda.py): what launches are told, and that every block runs once."""

from __future__ import annotations

import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from paellapy.instrument.device import driver
from paellapy.instrument.records import DESCRIPTOR

pytest.importorskip("cuda.bindings.driver")
cuda_launch = pytest.importorskip("paellapy.instrument.device.cuda_launch")

pytestmark = pytest.mark.xdist_group("fake GPU")  # one process that all are forked from

HEAD = """
    device = pp.Device("cuda")
    kernel = pp.kernel(scale.jit, report=None)
    N = 128 * 40
    x, out = device.array(np.arange(N, dtype=np.float32)), device.array(np.zeros(N, np.float32))
    seen = []
    set_at = set()

    def look(number):
        seen.append(number)
        if len(seen) in set_at:
            flag.set()
    fake.on_block = look

    def launch(**keywords):
        return kernel.preemptible(**keywords)[(40,)](x, out, 2.0, N, B=128)

    def ran(): return np.flatnonzero(out.numpy()[64::128]).tolist()
"""


def test_the_fields_of_preemption_leave_the_rest_of_a_descriptor_alone():
    raw = bytearray(b"\xff" * DESCRIPTOR.itemsize)
    cuda_launch._LISTS.pack_into(raw, cuda_launch._TODO, 1, 2)
    cuda_launch._FLAG_AND_EPOCH.pack_into(raw, cuda_launch._FLAG, 3, 4)
    found = np.frombuffer(bytes(raw), DESCRIPTOR)[0]
    written = {"todo": 1, "left": 2, "flag": 3, "epoch": 4}
    for name in DESCRIPTOR.names:
        assert found[name] == written.get(name, 2 ** (8 * DESCRIPTOR[name].itemsize) - 1), name


def test_a_driver_that_cannot_preempt_can_be_opened(monkeypatch):
    had = ("cuLaunchKernel", "cuStreamIsCapturing", "cuGraphGetNodes", "cuGraphDestroyNode")
    old = SimpleNamespace(**{name: SimpleNamespace() for name in had})
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: old)
    assert driver.library.__wrapped__() is old


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(forked, cache, tmp_path):
    """Runs code in a fresh process with the fake driver; compiled code is cached for the next run."""

    def in_process(code: str) -> None:
        body = textwrap.indent(textwrap.dedent(code), "    ")
        forked.run(f"{textwrap.dedent(HEAD)}\nwith device:\n{body}\n", tmp_path, cache)

    return in_process


def test_blocks_left_are_run_later_once_each_however_often_they_are_preempted(run):
    run("""
        flag = device.flag()
        set_at = {11, 50, 51, 75}
        job = launch(flag=flag)
        assert not job.done
        assert job.left.tolist() == list(range(10, 40))
        assert ran() == list(range(10))
        rounds = 0
        while not job.done:
            job.resume()
            rounds += 1
        job.synchronize()
        assert rounds == 3, rounds
        assert np.array_equal(out.numpy(), 2 * x.numpy())
        assert len(job.left) == 0
    """)


def test_a_flag_that_is_never_set_changes_nothing(run):
    run("""
        flag = device.flag()
        job = launch()
        job.synchronize()
        assert job.done and np.array_equal(out.numpy(), 2 * x.numpy())
        assert seen == list(range(40))
    """)


def test_launches_made_after_a_flag_was_set_run(run):
    run("""
        flag = device.flag()
        set_at = {1}
        first = launch(flag=flag)
        second = launch(flag=flag)
        assert len(first.left) == 40 and second.done
        flag.clear()
        first.resume()
        assert first.done
    """)


def test_blocks_that_a_flag_kept_out_are_known_after_it_was_cleared(run):
    run("""
        flag = device.flag()
        set_at = {5}
        job = launch(flag=flag)
        flag.clear()
        assert not job.done and job.left.tolist() == list(range(4, 40))
        job.resume()
        assert job.done and np.array_equal(out.numpy(), 2 * x.numpy())
    """)


def test_memory_and_flags_are_used_again(run):
    run("""
        flag = device.flag()
        addresses = set()
        for k in range(30):
            set_at = {len(seen) + 1 + k % 3} if k % 2 else set()
            job = launch(flag=flag)
            addresses.add(job._run.list.ptr if job._run is not None else 0)
            while not job.done:
                job.resume()
        assert len(addresses) <= 3, addresses
        words = set()
        gc.freeze()  # the collector looks at new objects only
        for _ in range(600):
            words.add(launch().flag.address)
            gc.collect()
        assert len(words) <= 256, "flags that nobody holds are given out again"
    """)


def test_a_turnaround_launches_slice_by_slice(run):
    run("""
        flag = device.flag()
        from paellapy.instrument.kernels.preempt import Wave
        job = launch(flag=flag, turnaround=pp.Turnaround(us=50))
        while not job.done: pass
        key = next(iter(kernel._waves))
        kernel._waves[key] = Wave(16, time_ns=10_000, exit_ns=15_000)
        out.set(np.zeros(N, np.float32)); seen.clear()
        job = launch(flag=flag, turnaround=pp.Turnaround(us=50))
        assert seen == list(range(32)), "two waves may leave in time"
        flag.set()
        assert not job.done and job.left.tolist() == list(range(32, 40)), "the next slice is not launched"
        job.resume()
        job.synchronize()
        assert seen == list(range(40)) and np.array_equal(out.numpy(), 2 * x.numpy())
    """)
