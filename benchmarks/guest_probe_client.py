"""The client of guest_probe.py: it sends requests and may close the gate itself; the GPU notes the time in each."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
import triton
import triton.language as tl
from background_jobs import RATE, Load
from engine_load import poisson, ring_bell
from triton.language.extra.cuda import globaltimer

import paellapy as pp
from paellapy.instrument.device import launch_hook
from paellapy.instrument.device.driver import check, driver
from paellapy.scheduler.core import codes, rings, tables
from paellapy.scheduler.core.atomics import call_launch, copy_bytes, load_at, store_at
from paellapy.scheduler.core.instances import copy_inputs
from paellapy.scheduler.core.state import front_rows, read_clock

SITES = 7  # stamps of a request
RING = 1 << 18
LEASE_NS = 20_000_000
_ZERO = np.uint64(0)
compiled = numba.njit(nogil=True, error_model="numpy")

ring: Any = None  # on the GPU: rows of time, site, instance
count: Any = None


@triton.jit
def stamp_kernel(ring, count, instance, site, MASK: tl.constexpr):
    i = tl.atomic_add(count, 1) & MASK
    tl.store(ring + 3 * i, globaltimer())
    tl.store(ring + 3 * i + 1, site.to(tl.int64))
    tl.store(ring + 3 * i + 2, instance.to(tl.int64))


def stamp(site: int, instance: int) -> None:
    if ring is not None:
        # The numbers are kept from being 1 or multiples of 16, for which Triton would compile further kernels.
        stamp_kernel[(1,)](ring, count, instance | 1, 2 * site + 33, RING - 1, num_warps=1)


class Stamped(torch.nn.Module):
    """resnet50, with the GPU's time at its start, after each stage, and at its end."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any) -> Any:
        net, instance = self.net, x.data_ptr()
        stamp(0, instance)
        x = net.maxpool(net.relu(net.bn1(net.conv1(x))))
        stamp(1, instance)
        for k, layer in enumerate((net.layer1, net.layer2, net.layer3, net.layer4)):
            x = layer(x)
            stamp(2 + k, instance)
        x = net.fc(torch.flatten(net.avgpool(x), 1))
        stamp(6, instance)
        return x


def stamped() -> pp.Model:
    global ring, count
    from torchvision.models import resnet50

    ring = torch.zeros((RING, 3), dtype=torch.int64, device="cuda")
    count = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch.manual_seed(0)
    return pp.Model.from_torch(Stamped(resnet50().eval().cuda()), torch.zeros(1, 3, 224, 224), name="served",
                               dtype=torch.float16, channels_last=True, batch=(1,), instances=4)  # fmt: skip


def gpu_minus_host_ns() -> int:
    """%globaltimer minus CLOCK_MONOTONIC: from the launch of an empty GPU that was seen complete soonest."""
    best = (1 << 62, 0)
    for _ in range(60):
        torch.cuda.synchronize()
        before = time.monotonic_ns()
        stamp(90, 1 << 40)
        torch.cuda.synchronize()
        after = time.monotonic_ns()
        at = (int(count.item()) - 1) % RING
        best = min(best, (after - before, int(ring[at, 0].item()) - (before + after) // 2))
    return best[1]


KEEP = r"""
extern "C" __global__ void keep(volatile unsigned long long *flag, unsigned long long most_ns) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(began));
    do {
        __nanosleep(500);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - began < most_ns);
}
"""


class Keeper:
    """A graph of one warp that runs until its flag is set, at most 5 ms."""

    def __init__(self) -> None:
        import cupy

        cu = driver()
        self._flag = torch.ones(1, dtype=torch.int64).pin_memory()
        self.flag = int(self._flag.data_ptr())
        kernel = cupy.RawKernel(KEEP, "keep")
        self._stream = cupy.cuda.Stream(non_blocking=True)
        arguments = (np.uint64(self.flag), np.uint64(5_000_000))
        with self._stream:
            kernel((1,), (32,), arguments)  # loads the module; the flag is set
            self._stream.synchronize()
            check(
                cu.cuStreamBeginCapture(self._stream.ptr, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
                "capturing",
            )
            kernel((1,), (32,), arguments)
            graph = check(cu.cuStreamEndCapture(self._stream.ptr), "capturing")
        self._graph = check(cu.cuGraphInstantiate(graph, 0), "capturing")
        self.graph, self.stream = int(self._graph), int(self._stream.ptr)


@compiled
def drive(
    s, front, n, at_ns, which, row, source, priority, out_address, out_bytes, owner, free, buffer, results, arrival,
    posted, finish, instances, status, word, bell, scratch, message, gate_at, ack_at, early, ack_limit_ns, linger_ns,
    keep_graph, keep_stream, keep_flag, keep_closed, changes,
):  # fmt: skip
    """Sends request i at at_ns[i] and waits for all; notes when the gate closed and opened (`changes`)."""
    n_free = free.shape[0]
    start = read_clock(s, scratch)
    sent = done = 0
    n_changes = 0
    closed = False
    closed_at = np.int64(0)
    asked = False  # the gate was closed for the next request
    while done < n:
        now = read_clock(s, scratch)
        if now - start > 60_000_000_000:
            return -1
        if gate_at != _ZERO:
            if keep_closed:
                store_at(gate_at, np.uint64(now + LEASE_NS))
            is_closed = np.int64(load_at(gate_at)) > now
            if closed and not is_closed and linger_ns > 0 and sent == done and load_at(gate_at) == _ZERO:
                store_at(gate_at, np.uint64(now + linger_ns))
                is_closed = True
            if is_closed != closed and n_changes < changes.shape[0]:
                closed = is_closed
                changes[n_changes, 0] = now
                changes[n_changes, 1] = closed
                n_changes += 1
                if closed:
                    closed_at = now
        some = False
        if n_free > 0 and sent < n and at_ns[sent] <= now - start:
            if early and gate_at != _ZERO and (not asked or not closed):
                store_at(gate_at, np.uint64(now + LEASE_NS))
                if not closed:
                    closed, closed_at = True, now
                    if n_changes < changes.shape[0]:
                        changes[n_changes, 0] = now
                        changes[n_changes, 1] = 1
                        n_changes += 1
                asked = True
            waits = (
                ack_limit_ns > 0 and gate_at != _ZERO and np.int64(load_at(ack_at)) < closed_at
                and now < closed_at + ack_limit_ns
            )  # fmt: skip
            if not waits:
                i = sent
                arrival[i] = start + at_ns[i]
                sent += 1
                asked = False
                if keep_graph != _ZERO and load_at(keep_flag) != _ZERO:
                    store_at(keep_flag, _ZERO)
                    call_launch(s.call[0].graph_launch, keep_graph, keep_stream)
                at = rings.claim_slot(s, front, row, 0)
                instance = slot = codes.NONE
                if at >= 0:
                    instance, slot = at // rings.SLOTS, at % rings.SLOTS
                r = free[n_free - 1]
                c = message[0]
                c.request, c.serial, c.model, c.instance, c.slot = r, i + 1, row, instance, slot
                c.client, c.priority, c.arrival_ns, c.deadline_ns = 0, priority, arrival[i], codes.NEVER
                c.source = source[which[i]]
                while not rings.publish(s, front, message.ctypes.data):
                    ring_bell(word, bell, s.call[0].write, scratch[4:])
                if at >= 0:
                    copy_inputs(s, source[which[i]], instance, slot, row)
                    rings.set_ready(s, instance, slot)
                posted[i] = read_clock(s, scratch)
                owner[r] = i
                n_free -= 1
                some = True
        k = rings.take_into(s, front, buffer.ctypes.data, buffer.shape[0])
        for j in range(k):
            entry = buffer[j]
            r = entry.request
            i = owner[r]
            finish[i], instances[i], status[i] = entry.finish_ns, entry.instance, entry.status
            if entry.status == codes.OK:
                where = out_address[entry.instance] + np.uint64(entry.slot * out_bytes)
                copy_bytes(results[i : i + 1].ctypes.data, where, np.uint64(out_bytes))
                rings.clear_hold(s, entry.instance, entry.slot)
            free[n_free] = r
            n_free += 1
            done += 1
        if keep_graph != _ZERO and k > 0 and sent == done:
            store_at(keep_flag, np.uint64(1))
        if some or k > 0:
            ring_bell(word, bell, s.call[0].write, scratch[4:])
    return n_changes


@dataclass(frozen=True)
class Way:
    """A way to hold the script back."""

    name: str
    early: bool = False  # the client closes the gate itself when a request is due
    ack_us: int = 0  # and waits at most this long until the script's stream is empty
    linger_us: int = 0  # the gate stays closed for this long after the last request
    keep: bool = False  # a kernel of one warp runs in the engine's context from a request's arrival to its end
    whole: bool = False  # requests are launched in one piece, also beside others
    in_flight: int = 0  # kernels after which the script waits for the GPU
    closed: bool = False  # the gate is never open


class Client:
    """As `engine_load.Generator`, with the gate in its hands."""

    def __init__(self, engine: Any, load: Load, keeper: Keeper | None) -> None:
        self.engine, self.load, self.keeper = engine, load, keeper
        self._of = load._generator
        self._scratch = np.zeros(8, np.int64)
        self._message = np.zeros(1, tables.SUBMISSION)
        self._message["kind"] = codes.SUBMIT
        self._no_gate = np.zeros(1, np.uint64)
        self.least = int(engine.state.core["least_priority"][0])

    def __call__(self, way: Way, seed: int, seconds: float, gate_at: int = 0, ack_at: int = 0) -> dict[str, Any]:
        state, of = self.engine.state, self._of
        rng = np.random.default_rng(seed)
        n = max(20, int(RATE * seconds))
        which = rng.integers(0, self.load.INPUTS, n)
        at_ns = poisson(rng, RATE, n)
        arrival, posted, finish, instances, status = (np.zeros(n, np.int64) for _ in range(5))
        results = np.zeros((n, int(of._out_bytes[0])), np.uint8)
        changes = np.zeros((8 * n, 2), np.int64)
        keep = self.keeper if way.keep else None
        if keep is not None:
            keep._flag[0] = 1
        state.core["least_priority"][0] = -1 if way.whole else self.least
        bell = self.engine._backend._bell
        before = {key: int(state.core[key][0]) for key in ("whole_launches", "launches")}
        found = drive(
            state, 1, n, at_ns, which, int(of._rows[0]), of._source[0], 1, of._out_address, int(of._out_bytes[0]),
            np.zeros(len(state.request), np.int64), np.array(front_rows(self.engine.limits, 1)),
            np.zeros(256, tables.COMPLETION), results, arrival, posted, finish, instances, status, bell.word, bell.fd,
            self._scratch, self._message, np.uint64(gate_at), np.uint64(ack_at or self._no_gate.ctypes.data),
            way.early, way.ack_us * 1000, way.linger_us * 1000, np.uint64(keep.graph if keep else 0),
            np.uint64(keep.stream if keep else 0), np.uint64(keep.flag if keep else 0), way.closed, changes,
        )  # fmt: skip
        state.core["least_priority"][0] = self.least
        if gate_at:
            words_of(gate_at)[0] = 0
        if found < 0 or (status != codes.OK).any():
            raise RuntimeError(f"{way.name}: not every request was answered")
        expected = self.load._expected
        got = results.view(expected.dtype).reshape(n, *expected.shape[1:]).astype(np.float32)
        wanted = expected[which].astype(np.float32)
        differs = np.abs(got - wanted).reshape(n, -1).max(axis=1)
        wrong = int((~(differs <= 0.02 * np.abs(wanted).max())).sum())
        made = {key: int(state.core[key][0]) - n for key, n in before.items()}
        return {"arrival": arrival, "posted": posted, "finish": finish, "instance": instances,
                "changes": changes[:found], "wrong": wrong, **made}  # fmt: skip


def words_of(address: int) -> Any:
    return np.frombuffer((ctypes.c_uint64 * launch_hook.WORDS).from_address(address), np.uint64)
