"""Counts the objects and bytes that this process holds from the CUDA driver, by kind: memory, graphs, streams, modules.

    with Tally() as tally:
        ...
        print(tally.live())      # {"executable graphs": {"count": 24}, "memory": {"count": 7, "bytes": 14680064}, …}

The driver does not tell who holds its memory. So the functions of cuda-bindings that create and free objects are
replaced by ones that count; code that calls the driver in another way, such as PyTorch, is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from paellapy.instrument.device.driver import driver


@dataclass(frozen=True, slots=True)
class Kind:
    """Functions that create objects of a kind, and the function that frees one."""

    made_by: tuple[str, ...]
    freed_by: str
    bytes_at: int | None = None  # which argument of the first functions is the number of bytes
    by_address: bool = False  # the first argument of both functions is the object, and nothing is returned


KINDS = {
    "memory": Kind(("cuMemAlloc",), "cuMemFree", 0),
    "memory of weights": Kind(("cuMemCreate",), "cuMemRelease", 0),
    "mapped weights": Kind(("cuMemMap",), "cuMemUnmap", 1, by_address=True),
    "reserved addresses": Kind(("cuMemAddressReserve",), "cuMemAddressFree", 0),
    "pinned host memory": Kind(("cuMemHostAlloc",), "cuMemFreeHost", 0),
    "registered host memory": Kind(("cuMemHostRegister",), "cuMemHostUnregister", 1, by_address=True),
    "executable graphs": Kind(("cuGraphInstantiate",), "cuGraphExecDestroy"),
    "graphs": Kind(("cuGraphCreate", "cuGraphClone", "cuStreamEndCapture"), "cuGraphDestroy"),
    "streams": Kind(("cuStreamCreateWithPriority", "cuGreenCtxStreamCreate"), "cuStreamDestroy"),
    "events": Kind(("cuEventCreate",), "cuEventDestroy"),
    "modules": Kind(("cuModuleLoadData",), "cuModuleUnload"),
}


class Tally:
    """Counts from `with` on: objects that exist before are not known, and their end is ignored."""

    def __init__(self) -> None:
        self._cu = driver()
        self._plain: dict[str, Callable[..., Any]] = {}
        self._live: dict[str, dict[int, int]] = {kind: {} for kind in KINDS}  # bytes by handle or address
        self._lock = threading.Lock()
        self.failed: dict[str, int] = {}  # calls that should have freed an object, and failed

    def __enter__(self) -> Self:
        for name, kind in KINDS.items():
            for function in kind.made_by:
                self._replace(function, self._made(name, kind))
            self._replace(kind.freed_by, self._freed(name, kind))
        return self

    def __exit__(self, *_: object) -> None:
        for function, plain in self._plain.items():
            setattr(self._cu, function, plain)

    def live(self) -> dict[str, dict[str, int]]:
        """The number of objects of each kind, and their bytes where the driver is asked for bytes."""
        with self._lock:
            found = {name: {"count": len(each), "bytes": sum(each.values())} for name, each in self._live.items()}
        return {
            name: each if KINDS[name].bytes_at is not None else {"count": each["count"]} for name, each in found.items()
        }

    def _replace(self, function: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        plain = getattr(self._cu, function, None)
        if plain is not None:  # older bindings lack some
            self._plain[function] = plain
            setattr(self._cu, function, around(plain))

    def _made(self, name: str, kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                found = plain(*given)
                if not int(found[0]):
                    key = int(given[0] if kind.by_address else found[1])
                    with self._lock:
                        self._live[name][key] = 0 if kind.bytes_at is None else int(given[kind.bytes_at])
                return found

            return call

        return around

    def _freed(self, name: str, kind: Kind) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                with self._lock:  # before the call: another thread may get the same address right after it
                    held = self._live[name].pop(int(given[0]), None)
                found = plain(*given)
                if int(found[0]):
                    with self._lock:
                        self.failed[kind.freed_by] = self.failed.get(kind.freed_by, 0) + 1
                        if held is not None:
                            self._live[name][int(given[0])] = held
                return found

            return call

        return around
