"""Options of a simulation: its level of detail, its seed, and changes to the policy, the host and the GPU."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from paellapy.instrument.device.parts import Part, part
from paellapy.instrument.errors import ArgumentError, NoDeviceError
from paellapy.scheduler.core import codes
from paellapy.scheduler.core.tenants import Tenant
from paellapy.scheduler.core.tuning import Tuning
from paellapy.scheduler.policies.policy import Policy, Rank, find_policy

Fidelity = Literal["segments", "blocks"]
FIDELITIES: tuple[Fidelity, ...] = ("segments", "blocks")
_NUMBERS = {"demand", "sm_windows", "host_launch_ns", "memory_bytes", "pcie_gbps"}


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """Options of `simulate`.

    `fidelity="segments"`: segments share the GPU like a fluid, a million events per second. `"blocks"`: every block of
    every kernel is placed on its SM, about a thousand times slower. `active` and `look_ahead` override the policy's
    settings; `demand` admits any number of jobs up to a total demand of that many GPUs. If neither they nor the policy
    limit the jobs, the limit is the engine's, provided that the models' demand was measured.

    `queues`: number of hardware queues (CUDA has 8, paellapy sets 32) to which launches are assigned in turn, and where
    they wait behind long graphs; without it, no launch waits. With fidelity "blocks", streams are assigned to the
    queues, and only under the policy `streams`. `admission`: requests that would miss their deadline, or their model's
    target, are refused on arrival ("queue full"), as in a server; only for open loads and fidelity "segments".
    `sm_windows`: jobs are confined to windows of SMs, as with `Engine(sm_windows=8)`, by a rule fitted to one sweep of
    eight windows on an H200; only for fidelity "segments" and models with a demand measured without windows. `tuning`:
    the scheduler's tuning numbers by name, for experiments; the others are the part's own. `tenants`: shares and limits
    of clients that the workload names, such as {"alice": Tenant(share=3, limit=0.5)}.

    `memory_bytes`: budget for weights on the GPU. Other weights arrive over a link of `pcie_gbps` on demand, and some
    leave for them; models then need `weight_bytes`. At the start, the first models given are on the GPU, as far as they
    fit. Without it, all weights are on the GPU.
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
            raise ArgumentError(f"fidelity={self.fidelity!r}: it must be {' or '.join(FIDELITIES)}")
        if not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise ArgumentError(f"seed={self.seed!r}: it must be an integer of at least 0")
        if self.queues is not None and not (isinstance(self.queues, int | np.integer) and self.queues >= 1):
            raise ArgumentError(f"queues={self.queues!r}: it must be an integer of at least 1, or None")
        if self.demand is not None and not (self.demand > 0 and math.isfinite(self.demand)):
            raise ArgumentError(f"demand={self.demand!r}: it must be a number of GPUs above 0, or None")
        given = self.host_launch_ns
        if given is not None and not (given >= 0 and math.isfinite(given)):
            raise ArgumentError(f"host_launch_ns={given!r}: it must be a finite number of at least 0")
        if self.memory_bytes is not None and not self.memory_bytes >= 1:
            raise ArgumentError(f"memory_bytes={self.memory_bytes!r}: it must be at least 1, or None")
        if self.pcie_gbps is not None and not (self.pcie_gbps > 0 and math.isfinite(self.pcie_gbps)):
            raise ArgumentError(f"pcie_gbps={self.pcie_gbps!r}: it must be a number of GB/s above 0")
        if self.pcie_gbps is not None and self.memory_bytes is None:
            raise ArgumentError(
                f"pcie_gbps={self.pcie_gbps!r} has no effect without memory_bytes, because no weights move: set "
                "memory_bytes, or leave pcie_gbps out"
            )
        if self.memory_bytes is not None and self.fidelity != "segments":
            raise ArgumentError("memory_bytes needs fidelity='segments': choose that, or leave memory_bytes out")
        if not isinstance(self.tenants, Mapping):
            raise ArgumentError(
                f"tenants={self.tenants!r}: it must be a dict by name, as in tenants={{'alice': pp.Tenant(share=3)}}"
            )
        least, most = codes.LEAST_WINDOWS, codes.WINDOWS
        if self.sm_windows != 0 and not least <= self.sm_windows <= most:
            raise ArgumentError(f"sm_windows={self.sm_windows}: it must be 0, for none, or {least} to {most}")

    def tuning_for(self, gpu: Part) -> Tuning:
        """The part's tuning numbers, with those that are set for this run."""
        found = Tuning.for_part(gpu.name, self.tuning)
        set_here = {"host_launch_ns": self.host_launch_ns, "link_gbps": self.pcie_gbps}
        return found.with_changes({name: value for name, value in set_here.items() if value is not None})

    def policy(self, given: str | Policy | Rank) -> Policy:
        """The policy with the options that override it."""
        found = find_policy(given)
        if self.active is not None:
            found = replace(found, active=self.active)
        return found if self.look_ahead is None else replace(found, look_ahead=self.look_ahead)


def check_names(function: str, given: Iterable[str], options: type[Any]) -> None:
    """Raises ArgumentError for a name that is no field of the class of a function's options."""
    names = [each.name for each in fields(options)]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ArgumentError(f"{function} has no option {name!r}: {hint}The options are {', '.join(names)}")


def asked_options(given: Mapping[str, Any]) -> SimulationOptions:
    """The options by name; ArgumentError for a name or a type that no option has."""
    check_names("simulate", given, SimulationOptions)
    for name, value in given.items():
        if name in _NUMBERS and not isinstance(value, int | float | np.number | None):
            raise ArgumentError(f"{name}={value!r}: it must be a number")
    return SimulationOptions(**given)


def simulated_part(device: str) -> Part:
    """The GPU for a device's name."""
    kind, _, name = str(device).partition(":")
    if kind != "virtual":
        raise NoDeviceError(f"device={device!r}: simulate needs a virtual GPU, such as 'virtual:h200'")
    return part(name or "h200")
