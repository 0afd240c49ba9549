"""One memory op while it runs: its place in the source, its cost, and the arguments it accesses."""

from __future__ import annotations

import numpy as np

from paellapy.instrument.ttir import elementwise as ew
from paellapy.instrument.ttir import sectors
from paellapy.instrument.ttir.lower import Lowering
from paellapy.instrument.ttir.machine import LOADED, STORED, Active
from paellapy.instrument.ttir.memory import Site
from paellapy.instrument.ttir.tree import Op
from paellapy.instrument.ttir.types import Element
from paellapy.instrument.ttir.values import Ptr, Value

Shape = tuple[int, ...]


class Access:
    """One memory op at run time: makes sites, counts bytes, and covers all arguments that a pointer may point into."""

    def __init__(self, low: Lowering, op: Op, shape: Shape, element: Element) -> None:
        self.kernel, self.line, self.name = low.kernel, low.line(op), op.name
        self.shape, self.element = shape, element
        self.bytes = element.size
        for d in shape:
            self.bytes *= d
        self.threads = low.threads
        self.argument_names = [name.removeprefix("%") for name, _ in low.module.entry.args]

    def site(self, active: Active, base: int) -> Site:
        machine = active.machine
        own = machine.buffers.element[base]
        origin = machine.buffers.origin[base] * (own.size if own else 1) // self.element.size
        return Site(
            self.kernel,
            self.line,
            self.name,
            machine.buffers.name(base, self.argument_names),
            machine.grid,
            machine.ids[active.rows],
            active.rows,
            self.shape,
            origin,
        )

    def bare_site(self, active: Active) -> Site:
        """A site for an op that touches no argument."""
        ids = active.machine.ids[active.rows]
        return Site(self.kernel, self.line, self.name, "", active.machine.grid, ids, active.rows, self.shape)

    def count(self, active: Active, field: int, mask: Value, base: int) -> None:
        if mask is not None:
            active.machine.count(field, mask, self.element.size, self.site(active, base))
        elif field == LOADED:
            active.loaded += self.bytes
        else:
            active.stored += self.bytes

    def count_updates(self, active: Active, p: Ptr, mask: Value) -> None:
        site = self.site(active, p.bases[0])
        active.machine.count_touched(sectors.count_updates, p.offset, mask, self.element, self.threads, site)

    def count_waste(self, active: Active, p: Ptr, mask: Value) -> None:
        if not self.shape:
            return  # of a single element, almost all of its sector is unused, and it does not matter
        site = self.site(active, p.bases[0])
        active.machine.count_touched(sectors.count_waste, p.offset, mask, self.element, site)

    def each(self, active: Active, p: Ptr, mask: Value) -> list[tuple[int, Value]]:
        """(argument, mask) for every argument the pointer may point into."""
        if p.which is None:
            return [(p.bases[0], mask)]
        call, parts = active.machine.call, []
        for k, base in enumerate(p.bases):
            own = call(np.equal, p.which, np.int32(k))
            parts.append((base, own if mask is None else call(np.logical_and, own, mask)))
        return parts

    def load(self, active: Active, p: Ptr, mask: Value, other: Value) -> Value:
        self.count(active, LOADED, mask, p.bases[0])
        self.count_waste(active, p, mask)
        machine, value = active.machine, None
        for base, own in self.each(active, p, mask):
            part = machine.load(
                base, p.offset, own, other if value is None else None, self.element, self.site(active, base)
            )
            value = part if value is None else machine.call(ew.where, own, part, value)
        return value

    def store(self, active: Active, p: Ptr, value: Value, mask: Value) -> None:
        self.count(active, STORED, mask, p.bases[0])
        self.count_waste(active, p, mask)
        for base, own in self.each(active, p, mask):
            active.machine.store(base, p.offset, value, own, self.element, self.site(active, base))
