"""The `slice` pass: a launch runs part of a logical grid, and every block sees its place in the whole grid."""

from __future__ import annotations

from collections.abc import Callable

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.ptx.module import Function, Module
from paellapy.instrument.ptx.statements import Statement

Load = Callable[[str, str], str]  # (register, field of the descriptor) → the instruction that loads it

_SLICED = {f"%ctaid.{a}": f"%paellapy_c{a}" for a in "xyz"} | {f"%nctaid.{a}": f"%paellapy_g{a}" for a in "xyz"}
_GRID = ("%ctaid", "%nctaid")


def slice_entry(module: Module, entry: Function, load: Load, listed: bool = False) -> None:
    """The launch is a 1-D grid of n blocks; block i takes the place of block `first + i` of the logical grid.

    `listed`: or of the i-th block in the descriptor's list, if there is one.
    """
    for function in module.functions():
        if not function.is_entry and any(_reads_grid(s) for s in function.instructions()):
            raise InstrumentError(
                f"kernel {entry.name!r} cannot be sliced: its device function {function.name!r} reads "
                "blockIdx or gridDim itself. Pass them as arguments, or let the function be inlined."
            )
    cluster = entry.directive(".reqnctapercluster")
    decided_at_launch = cluster is None and entry.directive(".explicitcluster") is not None
    if decided_at_launch or max(cluster or (1,)) > 1:
        raise InstrumentError(
            f"kernel {entry.name!r} cannot be sliced: the blocks of a cluster must be launched together. Launch it "
            "without clusters, or unsliced."
        )
    used: set[str] = set()
    for s in entry.instructions():
        for token in s.tokens[s.first_operand :]:
            if token.text.startswith(("%clusterid", "%nclusterid")):
                raise InstrumentError(
                    f"kernel {entry.name!r} cannot be sliced: it reads numbers of clusters. Launch it unsliced."
                )
            if token.text in _SLICED:
                used.add(token.text)
                token.text = _SLICED[token.text]
            elif token.text.startswith(_GRID):
                raise InstrumentError(
                    f"kernel {entry.name!r} cannot be sliced: it reads {token.text} as a whole vector. "
                    "Read its components one by one."
                )
    if not used:
        return
    entry.insert_prologue(_prologue(used, load, listed))


def _prologue(used: set[str], load: Load, listed: bool) -> str:
    code = """
	.reg .b32 %paellapy_cx, %paellapy_cy, %paellapy_cz, %paellapy_gx, %paellapy_gy, %paellapy_gz, %paellapy_st;
	.reg .pred %paellapy_row;"""
    for axis in "xyz":
        code += f"\n\t{load(f'%paellapy_g{axis}', f'grid_{axis}')}"
    if not used & {"%ctaid.x", "%ctaid.y", "%ctaid.z"}:
        return code
    # A flat grid (the usual case) needs no division; the branch is the same for all threads.
    return f"""{code}
	{load("%paellapy_st", "first")}
	mov.u32 %paellapy_cx, %ctaid.x;{_from_list(load) if listed else ""}
	add.u32 %paellapy_cx, %paellapy_cx, %paellapy_st;
	mov.u32 %paellapy_cy, 0;
	mov.u32 %paellapy_cz, 0;
	setp.lt.u32 %paellapy_row, %paellapy_cx, %paellapy_gx;
	@%paellapy_row bra $paellapy_placed;
	div.u32 %paellapy_cy, %paellapy_cx, %paellapy_gx;
	mul.lo.u32 %paellapy_st, %paellapy_cy, %paellapy_gx;
	sub.u32 %paellapy_cx, %paellapy_cx, %paellapy_st;
	div.u32 %paellapy_cz, %paellapy_cy, %paellapy_gy;
	mul.lo.u32 %paellapy_st, %paellapy_cz, %paellapy_gy;
	sub.u32 %paellapy_cy, %paellapy_cy, %paellapy_st;
$paellapy_placed:"""


def _from_list(load: Load) -> str:
    """Takes the block's number from the list, if there is one; `first` is then 0."""
    return f"""
	.reg .b64 %paellapy_sl;
	{load("%paellapy_sl", "todo")}
	setp.eq.u64 %paellapy_row, %paellapy_sl, 0;
	@%paellapy_row bra $paellapy_in_order;
	mad.wide.u32 %paellapy_sl, %paellapy_cx, 4, %paellapy_sl;
	ld.global.nc.u32 %paellapy_cx, [%paellapy_sl];
$paellapy_in_order:"""


def _reads_grid(s: Statement) -> bool:
    return any(t.text.startswith(_GRID) for t in s.tokens)
