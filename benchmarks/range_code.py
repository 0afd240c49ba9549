"""The machine code of in-kernel ranges: instructions, clocks, stores and registers of the kernels of range_cost.py.

    python benchmarks/range_code.py          # needs no GPU: kernels are compiled for an H200, not run

The counts are of the main loop of each kernel, traced without ranges and with eight. Issue cycles are the sum of the
cycles that ptxas has a warp wait after each instruction: the shortest time of a round, if nothing else delays it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import save
from range_cost import attention_plain, attention_ranges, gemm_plain, gemm_ranges

import paellapy as pp
from paellapy.instrument.kernels.triton_kernel import TritonKernel, _NoDevice, split_options
from paellapy.instrument.ptx import sass
from paellapy.instrument.ptx.compiled import Compiled, blocks_by_registers
from paellapy.instrument.ptx.descriptor import PassConfig
from paellapy.instrument.ptx.flow import FlowGraph
from paellapy.instrument.ptx.module import Module
from paellapy.instrument.ptx.ranges import Sites

HALF = "*fp16:16"
CASES: dict[str, tuple[Any, Any, tuple[Any, ...], dict[str, int]]] = {
    "gemm": (
        gemm_plain,
        gemm_ranges,
        (HALF, HALF, HALF, 4096, 4096, 4096, 128, 128, 64),
        {"num_warps": 8, "num_stages": 3},
    ),
    "attention": (
        attention_plain,
        attention_ranges,
        (HALF, HALF, HALF, HALF, 4096, 64, 128, 64, 1.4426950408889634 * 64**-0.5),
        {"num_warps": 4, "num_stages": 3},
    ),
}


def compiled(fn: Any, args: tuple[Any, ...], options: dict[str, int], target: str) -> Compiled:
    """The kernel as a trace launches it, with its ranges."""
    kernel = pp.kernel(fn)
    assert isinstance(kernel, TritonKernel)
    values, key, rest = kernel._bind(_NoDevice, args, dict(options))
    key = kernel._with_options(key, rest)
    rest = split_options(rest, kernel.name, kernel.arg_names)
    source = kernel._source.source(values, key, rest, target, kernel._source.has_ranges)
    return source.build(PassConfig("trace", exits=kernel.exits))


def counted(build: Compiled) -> dict[str, int]:
    code = sass.instructions(build.cubin, build.name)
    start, end = max(
        ((x.target, i) for i, x in enumerate(code) if x.kind == "jump" and 0 <= x.target < i),
        key=lambda loop: loop[1] - loop[0],
    )
    loop = code[start : end + 1]
    graph = FlowGraph.of(Module.parse(build.ptx).entry(build.name))
    assert graph is not None
    inside = [graph.code[i].operands() for i in max(graph.loops(), key=len, default=())]
    sites = Sites.in_text(build.ptx).moments
    stored = [int(given[-1]) for given in inside if given[:1] == ["%paellapy_rs"] and given[-1].isdigit()]
    assert build.source.threads is not None
    return {
        "events": sum(len(tags) for site in stored for tags in sites[site]),
        "clocks": sum("%clock" in given for given in inside),
        "stores": sum(x.kind == "store" for x in loop),
        "instructions": len(loop),
        "issue_cycles": sum(x.stall for x in loop),
        "waits": sum(x.awaits != 0 for x in loop),
        "barriers": sum(x.kind == "barrier" for x in loop),
        "branches": sum(x.kind == "jump" for x in loop),
        "registers": build.registers,
        "blocks_by_registers": blocks_by_registers(build.registers, build.source.threads),
        "spill_bytes": build.code.spill_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90", help="the GPU to compile for")
    parser.add_argument("--earlier", type=Path, help="results of another version of paellapy, to store beside these")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    rows: dict[str, dict[str, dict[str, int]]] = {}
    for name, (without, with_, args, options) in CASES.items():
        rows[name] = {
            "without": counted(compiled(without, args, options, given.target)),
            "with": counted(compiled(with_, args, options, given.target)),
        }
        print(name, rows[name], flush=True)
    results: dict[str, Any] = {"target": given.target, **rows}
    if given.earlier:
        earlier = json.loads(given.earlier.read_text())
        results["earlier"] = {"commit": earlier["on"]["commit"]} | {n: earlier["results"][n]["with"] for n in rows}
    save("range_code", results, None, given.out)


if __name__ == "__main__":
    main()
