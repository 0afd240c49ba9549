"""PTX → PTX passes: `report` (which block runs on which SM, and when), `slice` (run part of a logical grid), `preempt`.

All communicate with the host through one launch descriptor (records.DESCRIPTOR): passed by value as an added last
parameter where we launch, or through a pointer parameter that a foreign launcher fills (Triton's own, under PyTorch).
"""

from __future__ import annotations

import re

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.descriptor import DescriptorParam, PassConfig, descriptor_name
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.ptx.preempt import preempt_entry, slice_entry
from paellapy.instrument.ptx.ranges import RangePass, has_markers, refuse_outside
from paellapy.instrument.ptx.report import ReportPass, notify_entry, refuse_exit_in_functions


def apply(ptx: str, config: PassConfig, entry: str | None = None, unread: int = 0) -> str:
    """The module's PTX with the passes applied to one entry (the only one, if not named).

    The descriptor takes the place of the last `unread` parameters.
    """
    if entry is not None and not config.changes_anything and _is_plain(ptx, entry):
        return ptx
    module = Module.parse(ptx)
    function = module.entry(entry)
    if descriptor_name(function) in function.param_names() or "%paellapy" in str(function):
        raise InstrumentError(
            f"kernel {function.name!r} is already instrumented: pass the original PTX",
            kernel=function.name, field="instrumented",
        )
    if config.changes_anything:
        function.drop_params(unread)
        _edit(module, function, config)
    return str(module)


def _is_plain(ptx: str, entry: str) -> bool:
    """Whether a module has this entry and no trace of our passes: found in the text, without parsing it."""
    there = re.search(rf"\.entry\s+{re.escape(entry)}(?![\w$])", ptx) is not None
    return there and "%paellapy" not in ptx and f"{entry}_paellapy" not in ptx


def _edit(module: Module, entry: Function, config: PassConfig) -> None:
    """Edits one entry. Reports are inserted first, so that slicing also renumbers their blocks."""
    given = entry.directive(".reqntid")
    threads = [*given, 1, 1][:3] if given else None
    ranges: RangePass | None = None
    if config.report in ("count", "trace"):
        refuse_exit_in_functions(module, entry.name)
    descriptor = DescriptorParam(entry, config.pointer_param)
    if config.report == "trace" and config.pointer_param is None and has_markers(module):
        refuse_outside(module, entry)
        ranges = RangePass(entry, descriptor.load, threads)
        ranges.replace_markers()
    if config.report in ("count", "trace"):
        report = ReportPass(module, entry, config, descriptor, threads, ranges)
        report.report_start_and_end(trace=config.report == "trace")
    if config.preempt:
        preempt_entry(module, entry, descriptor.load, threads, config.sliced)
    elif config.sliced:
        slice_entry(module, entry, descriptor.load)
    if config.notifies:
        notify_entry(entry, config, descriptor, threads)  # after slicing: the last block of *this launch* reports
