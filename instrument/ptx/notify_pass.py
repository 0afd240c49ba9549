"""The `notify` report: the last block of a launch tells the host that it has started."""

from __future__ import annotations

from collections.abc import Sequence

from paellapy.instrument.ptx.descriptor import DescriptorParam
from paellapy.instrument.ptx.first_thread import thread_index_bits
from paellapy.instrument.ptx.module import Function
from paellapy.instrument.ptx.pass_config import PassConfig


def notify_entry(
    entry: Function, config: PassConfig, descriptor: DescriptorParam, threads: Sequence[int] | None
) -> None:
    """Makes the last block of a launch report that it has started."""
    axes = "x" if config.sliced else "xyz"
    tests = ""
    for axis in axes:
        tests += f"""
	mov.u32 %paellapy_nt, %ctaid.{axis};
	mov.u32 %paellapy_nu, %nctaid.{axis};
	add.u32 %paellapy_nt, %paellapy_nt, 1;
	setp.ne.u32 %paellapy_np, %paellapy_nt, %paellapy_nu;
	@%paellapy_np bra $paellapy_notified;"""
    index = thread_index_bits(threads, "%paellapy_nt", "%paellapy_nu")
    shared = ""  # the report of start and end declares these registers if there is one
    if config.report not in ("count", "trace"):
        shared = """
	.reg .b64 %paellapy_desc, %paellapy_magic;
	.reg .pred %paellapy_foreign;"""
    entry.insert_prologue(f"""
	.reg .b32 %paellapy_nt, %paellapy_nu;
	.reg .b64 %paellapy_na, %paellapy_nw;
	.reg .pred %paellapy_np;{shared}{tests}
	{index}
	setp.ne.u32 %paellapy_np, %paellapy_nt, 0;
	@%paellapy_np bra $paellapy_notified;{descriptor.guard("$paellapy_notified")}
	{descriptor.load("%paellapy_na", "notify")}
	mov.u64 %paellapy_nw, %globaltimer;
	st.relaxed.sys.global.u64 [%paellapy_na], %paellapy_nw;
$paellapy_notified:""")
