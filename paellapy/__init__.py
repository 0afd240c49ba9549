"""See and control which block of which kernel runs on which SM, from Python.

    import paellapy as pp

    @pp.kernel
    @triton.jit
    def add(x, y, out, n, B: tl.constexpr): ...

    with pp.trace() as t:
        add[(grid,)](x, y, out, n, B=1024)
    print(t.summary())
"""

from __future__ import annotations

import lazy_loader as _lazy_loader

from paellapy.instrument.env import ask_for_all_queues as _ask_for_all_queues
from paellapy.instrument.kernels.driver_search import prepare_search as _prepare_search
from paellapy.instrument.traces.late_methods import add_methods as _add_methods

_ask_for_all_queues()
_prepare_search()
_FIGURES = ("plot", "plot_heatmap", "plot_gantt", "plot_residency", "plot_requests")
_add_methods("Trace", {name: f"paellapy.viz.figures:{name}" for name in _FIGURES})
_add_methods(
    "Trace",
    {
        "explore": "paellapy.viz.widgets:explore",
        "save_figure": "paellapy.viz.static:save_figure",
        "picture": "paellapy.viz.static:picture",
        "plot_ranges": "paellapy.viz.figures:plot_ranges",
        "to_perfetto": "paellapy.viz.perfetto:to_perfetto",
        "to_html": "paellapy.viz.figures:to_html",
    },
)
_add_methods("Explanation", {"plot": "paellapy.viz.figures:plot_explanation"})
_add_methods("Results", {"plot": "paellapy.viz.static:plot_run"})

# `__init__.pyi` maps each public name to its module. A module is imported when one of its names is first used, so that
# `import paellapy` is quick and a script pays for Triton, Numba or the server only if it uses them.
__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
