"""The launch descriptor in PTX: an added parameter, or a pointer that other code passes; and loads of its fields."""

from __future__ import annotations

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.module import Function
from paellapy.instrument.records import DESCRIPTOR, MAGIC, field_offset


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
                    "descriptor"
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
