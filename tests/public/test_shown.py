"""What a prompt and a notebook show of results, traces and engines: a line, and a table."""

from __future__ import annotations

import paellapy as pp
from paellapy import demo
from paellapy.simulation import named_models


def test_results_are_a_line_at_a_prompt_and_a_table_in_a_notebook() -> None:
    models, shares = named_models("mix", batch=(1,), device="virtual:h200")
    found = pp.simulate(models, pp.Poisson(2000, shares, duration=0.02), "streams")
    assert len(repr(found)) < 120
    assert f"{found.all.completed:,} of {found.all.submitted:,} requests" in repr(found)
    page = found._repr_html_()
    assert all(each.name in page for each in models)
    assert len(page) < 20_000


def test_a_trace_is_a_line_at_a_prompt() -> None:
    for name in pp.recordings.names():
        t = pp.recordings.load(name)
        assert len(repr(t)) < 200, name
        assert t._repr_html_().count("<tr>") == 1 + len(t.summary().kernels)


def test_an_engine_is_a_line_at_a_prompt_and_a_row_for_each_model_in_a_notebook() -> None:
    with pp.Engine("virtual:h200") as engine:
        engine.load(demo.load("mlp"))
        assert len(repr(engine)) < 120
        assert engine._repr_html_().count("<tr>") == 2
        assert "mlp" in engine._repr_html_()
