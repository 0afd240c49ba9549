"""How a simulation runs: its grain, its seed, and what it changes of the policy, the host and the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from paellapy.instrument.device.parts import Part, part
from paellapy.instrument.errors import ArgumentError, NoDeviceError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.tenants import Tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.policies.policy import Policy, Rank, find_policy

Fidelity = Literal["segments", "blocks"]
FIDELITIES: tuple[Fidelity, ...] = ("segments", "blocks")


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of `simulate`.

    `fidelity="segments"`: segments share the GPU like a fluid, a million events per second. `"blocks"`: every block of
    every kernel on its SM, about a thousand times slower. `active` and `look_ahead` override the policy's; `demand`
    lets in jobs until together they would keep that many GPUs busy, however many they are. Where neither they nor the
    policy say how many, it is as in an engine, if the models' demand was measured.

    `queues`: of the hardware (CUDA has 8, paellapy sets 32), to which launches are dealt one after the other, and wait
    there behind long graphs; left out, nobody does. With fidelity "blocks" it is streams that are dealt to them, and
    only under the policy `streams`. `admission`: as in a server, requests that would miss their deadline, or their
    model's target, are refused when they come ("queue full"); for open loads, and segments. `sm_windows`: jobs keep to
    windows of SMs, as with `Engine(sm_windows=8)`, by a rule that was made for one sweep of eight windows on an H200;
    for segments of models whose demand was measured (without windows). `tuning`: numbers of the scheduler, by name, for
    experiments; the others are the part's own. `tenants`: shares and limits of clients that the workload names, as in
    {"alice": Tenant(share=3, limit=0.5)}.

    `memory_bytes`: of weights on the GPU. Others come over a link of `pcie_gbps` when they are asked for, and some
    leave for them; models have `weight_bytes` then. Those given first are on the GPU when it starts, as far as they
    fit. Left out, all weights are there.
    """

    fidelity: Fidelity = "segments"
    seed: int = 0
    active: int | None = None
    look_ahead: int | None = None
    demand: float | None = None
    queues: int | None = None
    admission: bool = False
    sm_windows: int = 0
    host_launch_ns: float | None = None
    memory_bytes: int | None = None
    pcie_gbps: float | None = None
    tuning: Tuning | Mapping[str, float] | None = None
    tenants: Mapping[str, Tenant | Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.fidelity not in FIDELITIES:
            raise ArgumentError(f"fidelity is {' or '.join(FIDELITIES)}, not {self.fidelity!r}")
        if not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise ArgumentError(f"the seed is {self.seed!r}: give a whole number of zero or more")
        if self.queues is not None and not (isinstance(self.queues, int | np.integer) and self.queues >= 1):
            raise ArgumentError(f"queues is {self.queues!r}: give a whole number from 1 up, or leave it out")
        if self.demand is not None and not (self.demand > 0 and math.isfinite(self.demand)):
            raise ArgumentError(f"demand is {self.demand!r}: give GPUs to keep busy, more than 0, or leave it out")
        given = self.host_launch_ns
        if given is not None and not (given >= 0 and math.isfinite(given)):
            raise ArgumentError(f"host_launch_ns is {given!r}: give nanoseconds, 0 or more")
        if self.memory_bytes is not None and not self.memory_bytes >= 1:
            raise ArgumentError(f"memory_bytes is {self.memory_bytes!r}: give the bytes of weights that fit, or None")
        if self.pcie_gbps is not None and not (self.pcie_gbps > 0 and math.isfinite(self.pcie_gbps)):
            raise ArgumentError(f"pcie_gbps is {self.pcie_gbps!r}: give gigabytes a second, more than 0")
        if self.memory_bytes is not None and self.fidelity != "segments":
            raise ArgumentError("memory_bytes is for fidelity 'segments': leave it out, or choose that")
        least, most = codes.LEAST_WINDOWS, codes.WINDOWS
        if self.sm_windows != 0 and not least <= self.sm_windows <= most:
            raise ArgumentError(f"sm_windows={self.sm_windows}: 0, for none, or {least} to {most}")

    def tuning_for(self, gpu: Part) -> Tuning:
        """The part's numbers with those that are set for this run."""
        found = Tuning.for_part(gpu.name, self.tuning)
        set_here = {"host_launch_ns": self.host_launch_ns, "link_gbps": self.pcie_gbps}
        return found.with_changes({name: value for name, value in set_here.items() if value is not None})

    def policy(self, given: str | Policy | Rank) -> Policy:
        """The policy with what overrides it."""
        found = find_policy(given)
        if self.active is not None:
            found = replace(found, active=self.active)
        return found if self.look_ahead is None else replace(found, look_ahead=self.look_ahead)


def simulated_part(device: str) -> Part:
    """The GPU that a device's name stands for."""
    kind, _, name = device.partition(":")
    if kind != "virtual":
        raise NoDeviceError(f"simulate runs on a virtual GPU, not on {device!r}: name one as in 'virtual:h200'")
    return part(name or "h200")
