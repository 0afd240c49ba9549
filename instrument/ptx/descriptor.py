"""The launch descriptor in PTX: an added parameter, or a pointer that other code passes; and loads of its fields."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from paellapy.instrument import records
from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.module import Function
from paellapy.instrument.records import DESCRIPTOR, MAGIC, field_offset

Load = Callable[[str, str], str]  # (register, field of the descriptor) → the instruction that loads it


def descriptor_name(entry: Function) -> str:
    return f"{entry.name}_paellapy"


class DescriptorParam:
    """The parameter of an entry that holds the descriptor, or points to it (`pointer_param`: its number)."""

    def __init__(self, entry: Function, pointer_param: int | None) -> None:
        self._pointer = pointer_param is not None
        if pointer_param is None:
            self._param = descriptor_name(entry)
            entry.add_param(f".param .align 8 .b8 {self._param}[{DESCRIPTOR.itemsize}]")
        else:
            names = entry.param_names()
            if not -len(names) <= pointer_param < len(names):
                raise InstrumentError(
                    f"kernel {entry.name!r} has no parameter {pointer_param} that could point to a "
                    "descriptor", kernel=entry.name, field="pointer_param", given=pointer_param, limit=len(names)
                )
            self._param = names[pointer_param]

    def load(self, register: str, field: str) -> str:
        """Loads one field of the descriptor. Passed by value, it is in constant memory and causes no traffic."""
        bits = DESCRIPTOR[field].itemsize * 8
        offset = field_offset(DESCRIPTOR, field)
        if not self._pointer:
            return f"ld.param.u{bits} {register}, [{self._param}+{offset}];"
        return f"ld.global.u{bits} {register}, [%paellapy_desc+{offset}];"

    def guard(self, skip: str) -> str:
        """Checks the magic number: the pointer may be null, or point to other scratch memory."""
        if not self._pointer:
            return ""
        return f"""
	ld.param.u64 %paellapy_desc, [{self._param}];
	setp.eq.u64 %paellapy_foreign, %paellapy_desc, 0;
	@%paellapy_foreign bra {skip};
	{self.load("%paellapy_magic", "magic")}
	setp.ne.u64 %paellapy_foreign, %paellapy_magic, {MAGIC};
	@%paellapy_foreign bra {skip};"""


Report = Literal["count", "trace", "notify"]
Exits = Literal["auto", "barrier", "spare-barrier", "count-out"]


@dataclass(frozen=True, slots=True)
class PassConfig:
    """The changes to make to a kernel. Part of every cache key.

    `also_notify` makes a kernel that counts or traces also report when its last block starts. `exits` says how the end
    of a block is detected: "auto" decides from the code (report.py). `pointer_param` names the parameter that points to
    the descriptor; None adds a parameter passed by value. `preempt` makes blocks look at a flag when they start, and
    not run while it is set; with `sliced`, a launch may then run any list of blocks.
    """

    report: Report | None = None
    sliced: bool = False
    exits: Exits = "auto"
    pointer_param: int | None = None
    also_notify: bool = False
    preempt: bool = False

    def __post_init__(self) -> None:
        if self.report is not None and self.report not in get_args(Report):
            raise InstrumentError(
                f"unknown report level {self.report!r}; use one of {', '.join(get_args(Report))}",
                field="report", given=self.report, limit=get_args(Report),
            )
        if self.exits not in get_args(Exits):
            raise InstrumentError(
                f"unknown kind of exits {self.exits!r}; use one of {', '.join(get_args(Exits))}",
                field="exits", given=self.exits, limit=get_args(Exits),
            )
        for field, asked, cannot_be in (("slice", self.sliced, "sliced"), ("preempt", self.preempt, "preempted")):
            if asked and self.pointer_param is not None:
                raise InstrumentError(
                    f"a kernel launched by other code (pointer_param) cannot be {cannot_be}: launch it as a pp.kernel",
                    field=field, given="pointer_param",
                )

    @property
    def changes_anything(self) -> bool:
        return self.report is not None or self.sliced or self.also_notify or self.preempt

    @property
    def notifies(self) -> bool:
        return self.report == "notify" or self.also_notify

    def notifying(self) -> PassConfig:
        """The same configuration, and the kernel reports when its last block starts."""
        return self if self.notifies else replace(self, also_notify=True)

    def key(self) -> str:
        return (
            f"{self.report}/{self.sliced}/{self.exits}/{self.pointer_param}/{self.also_notify}/{self.preempt}/"
            f"{pass_version()}"
        )


def pass_version() -> str:
    """A digest of the sources that determine the passes' output: changing them invalidates compiled results."""
    return _VERSION


_PATHS = (*sorted(Path(__file__).parent.glob("*.py")), Path(records.__file__))
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _PATHS)).hexdigest()[:16]


def thread_index_bits(threads: Sequence[int] | None, result: str, scratch: str) -> str:
    """Computes a number that is 0 only in the block's first thread, which reports for all."""
    code = f"mov.u32 {result}, %tid.x;"
    for axis, extent in zip("yz", threads[1:] if threads else (0, 0), strict=True):
        if extent != 1:
            code += f"""
	mov.u32 {scratch}, %tid.{axis};
	or.b32 {result}, {result}, {scratch};"""
    return code


def linear_index(out: str, extent: str, index: str, of: str = "ctaid") -> str:
    """Computes a block's number in its grid, x fastest; of="tid": a thread's number in its block."""
    return f"""mov.u32 {out}, %{of}.z;
	mov.u32 {extent}, %n{of}.y;
	mov.u32 {index}, %{of}.y;
	mad.lo.u32 {out}, {out}, {extent}, {index};
	mov.u32 {extent}, %n{of}.x;
	mov.u32 {index}, %{of}.x;
	mad.lo.u32 {out}, {out}, {extent}, {index};"""


def count_warps(out: str, extent: str) -> str:
    """Computes the number of warps of a block whose size the launch decides."""
    return f"""mov.u32 {out}, %ntid.x;
	mov.u32 {extent}, %ntid.y;
	mul.lo.u32 {out}, {out}, {extent};
	mov.u32 {extent}, %ntid.z;
	mad.lo.u32 {out}, {out}, {extent}, 31;
	shr.u32 {out}, {out}, 5;"""
