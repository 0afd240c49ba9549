"""`t.explore()`: the figure of `t.plot()` in Jupyter, binned again for every part that is zoomed into."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections import defaultdict
from importlib.resources import files
from typing import Any

import numpy as np

from paellapy.instrument.errors import ArgumentError, PaellaError
from paellapy.instrument.traces.trace import Trace
from paellapy.scheduler.core.errors import EngineClosedError
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.monitor import Monitor
from paellapy.viz import data
from paellapy.viz.data import BINS, By
from paellapy.viz.figures import all_views, build
from paellapy.viz.palette import OTHERS, Theme, colours, need


def explore(trace: Trace, *, by: By | None = None, bins: int = BINS, theme: Theme = "light") -> Any:
    """A live figure for Jupyter. Zoomed in far enough, it shows single blocks with their numbers instead of bins.

        with pp.trace() as t: ...
        t.explore()
    """
    need("anywidget", "explore()")
    go = need("plotly.graph_objects", "explore()")
    whole = data.prepare(trace, by, bins=bins)
    axis = whole.axis
    # A kernel keeps its colour in parts where others do not run.
    colour: dict[str, str] = defaultdict(lambda: OTHERS, colours(whole.names))
    options: dict[str, Any] = {"by": by, "bins": bins, "theme": theme, "axis": axis, "colour": colour}
    figure = go.FigureWidget(_without_nan(build([trace], all_views(trace), **options)))

    def redraw(_: Any, time_range: tuple[float, float]) -> None:
        start, end = (axis.origin_ns + round(t * axis.ns_per_unit) for t in time_range)
        drawn = build([trace], all_views(trace), start_ns=start, end_ns=max(end, start + 1), **options)
        with figure.batch_update():
            figure.data = ()
            figure.add_traces(_without_nan(drawn).data)

    figure.layout.on_change(redraw, "xaxis.range")
    return figure


def _without_nan(figure: Any) -> Any:
    """Replaces NaN by None: a widget sends heat maps as JSON, which has no NaN. Pages store them as bytes."""
    for trace in figure.data:
        if trace.type == "heatmap" and np.isnan(trace.z).any():
            trace.z = np.where(np.isnan(trace.z), None, trace.z)
    return figure


# `pp.live(engine)`: the dashboard of a running engine in Jupyter.

# Each module comes after those it imports.
_MODULES = (
    "format.js", "colours.js", "tiles.js", "sm_grid.js", "models.js", "texts.js", "tenants.js", "slow.js", "jobs.js",
    "view.js",
)  # fmt: skip
_FRAME = ".pp-widget { background: light-dark(#f4f6f8, #0e1116); padding: 0 14px 14px; border-radius: 10px; }\n"


def live(engine: Engine, *, hz: float = 6.0) -> Any:
    """A widget that shows the engine's SMs, queue and latencies `hz` times per second, and can switch its policy.

        view = pp.live(engine)
        view            # at the end of a cell
        view.close()    # closing the engine does it too

    `view.paused = True` freezes the picture and costs nothing; the engine continues.
    """
    if not isinstance(engine, Engine):
        said = f"live() takes an Engine, not a {type(engine).__name__}: write pp.live(pp.Engine(…))"
        raise ArgumentError(said, field="engine")
    if not 0.1 <= hz <= 30:
        raise ArgumentError(f"hz is {hz}: give from 0.1 to 30 updates per second", field="hz", given=hz)
    if engine.closed:
        raise EngineClosedError("the engine is closed: call live() with an open engine")
    return _widget_class()(engine, 1.0 / hz)


def javascript() -> str:
    """The widget as one ES module: Jupyter loads it from a string, where modules cannot import each other."""
    texts = [(files("paellapy.serving") / "dashboard" / name).read_text(encoding="utf-8") for name in _MODULES]
    texts = [re.sub(r"^export ", "", text, flags=re.M) for text in texts]
    texts.append((files("paellapy.viz") / "live_widget.js").read_text(encoding="utf-8"))
    return "\n".join(re.sub(r'^import \{[^}]*\} from "\./[^"]+";\n', "", text, flags=re.M) for text in texts)


def css() -> str:
    return (files("paellapy.serving") / "dashboard" / "view.css").read_text(encoding="utf-8") + _FRAME


@functools.cache
def _widget_class() -> Any:
    """The widget's class, made on first use: its base class comes with the extra `viz`."""
    anywidget = need("anywidget", "live()")
    traitlets = need("traitlets", "live()")

    class LiveWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        """`snapshot` is the data of `paellapy.scheduler.engine.monitor`; `paused` freezes it."""

        _esm = javascript()
        _css = css()
        snapshot = traitlets.Dict().tag(sync=True)
        paused = traitlets.Bool(False).tag(sync=True)

        def __init__(self, engine: Engine, tick_s: float) -> None:
            self._monitor, self._tick_s = Monitor(engine), tick_s
            self._wake, self._over = threading.Event(), False
            self._monitor.start()
            super().__init__(snapshot=self._monitor.snapshot())
            self.on_msg(self._asked)
            self.observe(self._paused, "paused")
            self._thread = threading.Thread(target=self._run, name="paellapy-live", daemon=True)
            self._thread.start()

        def _run(self) -> None:
            engine = self._monitor.engine
            while not self._over and not engine.closed:
                if self.paused:
                    self._wake.wait(0.5)  # the engine may close in the meantime
                else:
                    self.snapshot = self._monitor.snapshot()
                    self._wake.wait(self._tick_s)
                self._wake.clear()
            self._monitor.stop()
            if not self._over:
                self.snapshot = self._monitor.snapshot()  # says that the engine is closed

        def _paused(self, change: Any) -> None:
            # While the picture is frozen, completions are not read at all.
            (self._monitor.stop if change["new"] else self._monitor.start)()
            self._wake.set()

        def _asked(self, _: Any, message: Any, __: Any) -> None:
            if message.get("kind") != "policy":
                return
            error = None
            try:
                self._monitor.set_policy(str(message.get("name")))
            except PaellaError as e:
                error = str(e)
            self.send({"kind": "policy", "number": message.get("number"), "error": error})

        def close(self) -> None:
            """Ends the monitoring thread; the engine continues."""
            self._over = True
            self._wake.set()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._monitor.stop()
            with contextlib.suppress(RuntimeError):  # the kernel has already ended
                super().close()

    return LiveWidget
