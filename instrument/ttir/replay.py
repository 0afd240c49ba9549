"""Compiles a tape to one Python function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paellapy.instrument.ttir.plans import StaticLoad, ViewStore, reinterpret
from paellapy.instrument.ttir.products import join_products
from paellapy.instrument.ttir.tape import COST, BufferRef, Entry, Ref, Replay
from paellapy.instrument.ttir.types import Element


def compile_tape(entries: list[Entry], declared: Sequence[Element | None]) -> Replay:
    """The function `replay(flat arguments, cost table)`. Unneeded entries are left out."""
    entries = join_products(entries)
    for entry in entries:
        if isinstance(entry.fn, StaticLoad):
            entry.fn.offset = entry.fn.mask = None
    live: set[int] = set()
    kept: list[tuple[Entry, list[int]]] = []  # with the values that are read there for the last time
    for entry in reversed(entries):
        if entry.pure and entry.id not in live:
            continue
        last = list(dict.fromkeys(a.id for a in entry.args if type(a) is Ref and a.id not in live))
        live.update(last)
        kept.append((entry, last))
    kept.reverse()
    return _Writer(declared, live).write(kept)


class _Writer:
    def __init__(self, declared: Sequence[Element | None], live: set[int]) -> None:
        self.declared, self.live = declared, live
        self.scope: dict[str, Any] = {"reinterpret": reinterpret}
        self.names: dict[int, str] = {}
        self.prologue: dict[str, str] = {}

    def constant(self, value: Any) -> str:
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"k{len(self.scope)}"
            self.scope[name] = value
        return name

    def buffer(self, ref: BufferRef) -> str:
        own = self.declared[ref.index]
        if own is not None and own.storage == ref.element.storage:
            name = f"b{ref.index}"
            self.prologue[name] = f"flat[{ref.index}]"
        else:
            name = f"b{ref.index}_{ref.element.name}"
            self.prologue[name] = f"reinterpret(flat[{ref.index}], {self.constant(ref.element)})"
        return name

    def argument(self, value: Any) -> str:
        if type(value) is Ref:
            return f"t{value.id}"
        if type(value) is BufferRef:
            return self.buffer(value)
        return "cost" if value is COST else self.constant(value)

    def write(self, kept: list[tuple[Entry, list[int]]]) -> Replay:
        body: list[str] = []
        entries = {entry.id: entry for entry, _ in kept}
        skip: set[int] = set()
        for position, (entry, last) in enumerate(kept):
            if entry.id in skip:
                continue
            args = ", ".join(self.argument(a) for a in entry.args)
            target = self.store_target(kept, position)
            if target is not None:
                store = kept[position + 1][0]
                args += f", out={self.constant(target)}.window({self.argument(store.args[0])})"
                skip.add(store.id)
                body.append(f"{self.constant(entry.fn)}({args})")
            else:
                if (donor := self.donor(entry, last, entries)) is not None:
                    args += f", out=t{donor}"
                result = f"t{entry.id} = " if entry.id in self.live else ""
                body.append(f"{result}{self.constant(entry.fn)}({args})")
            dead = [f"t{i}" for i in last]
            if dead:
                body.append("del " + ", ".join(dead))
        lines = [f"{name} = {text}" for name, text in self.prologue.items()] + body + ["pass"]
        source = "def replay(flat, cost):\n" + "".join(f" {line}\n" for line in lines)
        exec(compile(source, "<ttir tape>", "exec"), self.scope)
        return self.scope["replay"]  # type: ignore[no-any-return]

    @staticmethod
    def donor(entry: Entry, last: list[int], entries: dict[int, Entry]) -> int | None:
        """A dying operand whose memory can hold the result of an elementwise call."""
        if type(entry.fn) is not np.ufunc or not entry.owned:
            return None
        for i in last:
            source = entries.get(i)
            if source is not None and source.owned and source.shape == entry.shape and source.dtype == entry.dtype:
                return i
        return None

    @staticmethod
    def store_target(kept: list[tuple[Entry, list[int]]], position: int) -> ViewStore | None:
        """The window of the store that follows directly and is the only reader, if the ufunc can write into it."""
        entry = kept[position][0]
        if type(entry.fn) is not np.ufunc or position + 1 == len(kept):
            return None
        store, last = kept[position + 1]
        plan = store.fn
        if type(plan) is not ViewStore or plan.element.narrow or entry.id not in last or store.args[1] != Ref(entry.id):
            return None
        return plan if entry.shape == plan.shape and entry.dtype == plan.element.storage else None
