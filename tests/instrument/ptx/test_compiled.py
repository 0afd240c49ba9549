"""Building a kernel: how often `ptxas` runs."""

from __future__ import annotations

import pytest
from ptx_pieces import entry, module

from paellapy.instrument.ptx import compiled
from paellapy.instrument.ptx.assemble import Assembled
from paellapy.instrument.ptx.pass_config import PassConfig


@pytest.mark.parametrize(("directives", "times"), [(".reqntid 128", 1), (".maxntid 128", 1), ("", 3)])
def test_fewer_registers_are_only_asked_for_where_ptxas_listens(
    monkeypatch: pytest.MonkeyPatch, directives: str, times: int
) -> None:
    asked: list[tuple[str, ...]] = []

    def assemble(ptx: str, arch: str, name: str, options: tuple[str, ...], path: str | None) -> Assembled:
        asked.append(options)
        return Assembled(b"", 54 if "paellapy" in ptx else 48, 0, 0, 0)

    monkeypatch.setattr(compiled, "assemble", assemble)
    ptx = module(entry("ret;", directives=directives))
    made = compiled.Source("k", ptx, "sm_80", "", 128).build(PassConfig("trace"))
    assert made.registers == 54
    assert len(asked) == times
