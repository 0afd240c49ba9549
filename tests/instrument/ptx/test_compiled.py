"""Building a kernel: how often `ptxas` runs."""

from __future__ import annotations

import pytest
from ptx_pieces import entry, module

from paellapy.instrument.errors import PtxError
from paellapy.instrument.ptx import compiled
from paellapy.instrument.ptx.compiled import Assembled
from paellapy.instrument.ptx.descriptor import PassConfig


@pytest.mark.parametrize(
    ("directives", "times"),
    [(".reqntid 128", 3), (".maxntid 128", 3), ("", 3), (".maxnreg 64", 1), (".minnctapersm 2", 1)],
)
def test_fewer_registers_are_asked_for_unless_the_kernel_limits_them(
    monkeypatch: pytest.MonkeyPatch, directives: str, times: int
) -> None:
    asked: list[str] = []

    def assemble(ptx: str, arch: str, name: str, options: tuple[str, ...], path: str | None) -> Assembled:
        asked.append(ptx)
        return Assembled(b"", 54 if "paellapy" in ptx and ".maxnreg 48" not in ptx else 48, 0, 0, 0)

    monkeypatch.setattr(compiled, "assemble", assemble)
    ptx = module(entry("ret;", directives=directives))
    made = compiled.Source("k", ptx, "sm_80", "", 128).build(PassConfig("trace"))
    assert len(asked) == times
    assert made.registers == (48 if times == 3 else 54)
    assert made.ptx == asked[-1 if times == 3 else 0]  # the text that the machine code was made of


def test_a_refused_limit_of_registers_is_dropped_and_products_of_warp_groups_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def assemble(ptx: str, arch: str, name: str, options: tuple[str, ...], path: str | None) -> Assembled:
        asked.append(ptx)
        if ".maxnreg" in ptx:
            raise PtxError("refused")
        return Assembled(b"", 54 if "paellapy" in ptx else 48, 0, 0, 0)

    monkeypatch.setattr(compiled, "assemble", assemble)
    made = compiled.Source("k", module(entry("ret;")), "sm_80", "", 128).build(PassConfig("trace"))
    assert len(asked) == 3
    assert made.registers == 54
    assert made.ptx == asked[0]
    asked.clear()
    ptx = module(entry("wgmma.fence.sync.aligned;\n ret;"))
    assert compiled.Source("k", ptx, "sm_90a", "", 128).build(PassConfig("trace")).registers == 54
    assert len(asked) == 1
