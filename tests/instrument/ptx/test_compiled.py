"""Building a kernel: how often `ptxas` runs."""

from __future__ import annotations

import pytest
from ptx_pieces import entry, module

from paellapy.instrument.ptx import compiled
from paellapy.instrument.ptx.assemble import Assembled
from paellapy.instrument.ptx.pass_config import PassConfig


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
