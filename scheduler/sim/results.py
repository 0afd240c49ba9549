"""The results of a run, simulated or real: latencies, slowdowns, targets met, throughput, occupancy; as a table."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.traces import Elsewhere
from paellapy.scheduler.core.codes import NEVER, OK, QUEUE_FULL, STATUS
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.engine.trace import EngineTrace

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model's requests, or all requests together. Latency counts from the intended arrival."""

    name: str
    submitted: int
    completed: int
    refused: int  # refused on arrival
    throughput: float  # completed per second
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    slowdown_p50: float  # latency ÷ time alone at batch 1
    slowdown_p99: float
    # fraction of requests with a deadline or target that met it; refused and late ones did not; NaN without any
    within_target: float
    mean_batch: float


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one run. `jobs` has one row per request (sim.tables.RECORD): model, arrival, start, finish, …"""

    policy: str
    device: str
    models: Sequence[ModelProfile]
    jobs: Table
    seconds: float  # from 0 to the last completion
    occupancy: NDArray[np.float64] = field(repr=False)  # [bins, 4]: slots, memory, issue (0 … 1), running jobs
    bin_ms: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    admission: bool = False  # whether requests that would be late were refused
    trace: EngineTrace | None = field(default=None, repr=False)  # of every block, if it was asked for
    clients: tuple[str, ...] = ()  # names, by the numbers in `jobs`
    numbers: Mapping[str, int] = field(default_factory=dict)  # `job.tenant` of these clients in policies
    # GPU time by user: "busy" of "", and "models" and "clients" by name
    gpu_ms: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)

    plot = Elsewhere("paellapy.viz.static:plot_run")

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """Latencies of completed requests."""
        done = self.jobs[self.jobs["status"] == OK]
        latency: NDArray[np.float64] = (done["finish_ns"] - done["arrival_ns"]) / 1e6
        return latency

    def model(self, name: str | None = None) -> ModelResult:
        """Figures of one model, or of all models together without a name."""
        names = [each.name for each in self.models]
        if name is not None and name not in names:
            text = f"no model {name!r} in this run: the models are {', '.join(names)}"
            raise ArgumentError(text, field="model", given=name)
        if name is None:
            return self._figures("all", self.jobs)
        return self._figures(name, self.jobs[self.jobs["model"] == names.index(name)])

    def tenant(self, name: str) -> ModelResult:
        """Figures of one client's requests, over all models."""
        if name not in self.clients:
            text = f"no client {name!r} in this run: the clients are {', '.join(self.clients)}"
            raise ArgumentError(text, field="client", given=name)
        return self._figures(name, self.jobs[self.jobs["client"] == self.clients.index(name)])

    @property
    def per_tenant(self) -> list[ModelResult]:
        return [self.tenant(name) for name in self.clients]

    def gpu_share(self, name: str) -> float:
        """The fraction of the GPU's busy time that went to the client or the model of this name."""
        for who in ("clients", "models"):
            if name in self.gpu_ms.get(who, {}):
                return self.part_of_gpu(who, name)
        known = ", ".join([*self.gpu_ms.get("clients", {}), *self.gpu_ms.get("models", {})])
        text = f"no client and no model {name!r} in this run: there are {known}"
        raise ArgumentError(text, field="name", given=name)

    def part_of_gpu(self, who: str, name: str) -> float:
        """`gpu_share` among "clients" or "models" only, where both may have the same names."""
        return self.gpu_ms[who][name] / max(self.gpu_ms["busy"][""], 1e-9)

    def compare(self, *others: Results) -> Comparison:
        """This run and others of the same models or clients, side by side; ratios are relative to this run."""
        if wrong := [each for each in others if not isinstance(each, Results)]:
            text = f"compare cannot use a {type(wrong[0]).__name__}: give results of simulate, one by one"
            raise ArgumentError(text, field="others", given=wrong[0])
        return Comparison((self, *others))

    def _figures(self, name: str, jobs: Table) -> ModelResult:
        alone = np.array([each.alone_ns() for each in self.models])
        target = np.array([np.nan if each.target_ms is None else each.target_ms for each in self.models])
        done = jobs[jobs["status"] == OK]
        ms = (done["finish_ns"] - done["arrival_ns"]) / 1e6
        slow = ms * 1e6 / alone[done["model"]]
        limit = np.where(jobs["deadline_ns"] < NEVER, jobs["deadline_ns"] - jobs["arrival_ns"], np.inf) / 1e6
        limit = np.where(np.isfinite(limit), limit, target[jobs["model"]])  # a request's own deadline takes precedence
        met = (ms <= limit[jobs["status"] == OK]).sum()
        with_target = np.isfinite(limit).sum()

        def at(values: NDArray[np.float64], q: float) -> float:
            return float(np.percentile(values, q)) if len(values) else float("nan")

        return ModelResult(
            name=name,
            submitted=len(jobs),
            completed=len(done),
            refused=int((jobs["status"] == QUEUE_FULL).sum()),
            throughput=len(done) / self.seconds if self.seconds else 0.0,
            p50_ms=at(ms, 50),
            p90_ms=at(ms, 90),
            p99_ms=at(ms, 99),
            mean_ms=float(ms.mean()) if len(ms) else float("nan"),
            slowdown_p50=at(slow, 50),
            slowdown_p99=at(slow, 99),
            within_target=float(met / with_target) if with_target else float("nan"),
            mean_batch=float(done["batch"].mean()) if len(done) else float("nan"),
        )

    @property
    def per_model(self) -> list[ModelResult]:
        return [self.model(each.name) for each in self.models]

    @property
    def all(self) -> ModelResult:
        return self.model()

    @property
    def has_limits(self) -> bool:
        """Whether any model has a target, or any request a deadline."""
        return any(each.target_ms is not None for each in self.models) or bool((self.jobs["deadline_ns"] < NEVER).any())

    def statuses(self) -> dict[str, int]:
        """The number of requests by how they ended."""
        numbers, counts = np.unique(self.jobs["status"], return_counts=True)
        return {STATUS[k]: int(n) for k, n in zip(numbers, counts, strict=True)}

    def table(self) -> Any:
        """A rich table: one line per model, and one for all."""
        title = f"{self.policy} on {self.device}, {self.seconds:.2f} s"
        refusals = ["refused"] if self.admission or self.all.refused else []
        # Short enough for a terminal of 80 columns.
        columns = [
            "model", "done", *refusals, "/s", "p50\nms", "p90\nms", "p99\nms", "p99 ÷\nalone", "in\ntarget", "batch"
        ]  # fmt: skip
        rows = [
            [
                each.name, f"{each.completed}/{each.submitted}", *(str(each.refused) for _ in refusals),
                f"{each.throughput:.0f}", _cell(each.p50_ms, ".2f"), _cell(each.p90_ms, ".2f"),
                _cell(each.p99_ms, ".2f"), _cell(each.slowdown_p99, ".1f"), _cell(each.within_target, ".1%"),
                _cell(each.mean_batch, ".1f"),
            ]
            for each in [*self.per_model, self.all]
        ]  # fmt: skip
        return number_table(title, columns, rows, total=True)

    def __str__(self) -> str:
        return _text(self.table())

    def __rich__(self) -> Any:
        return self.table()

    def __repr__(self) -> str:
        done = self.all
        return (
            f"<Results of {self.policy} on {self.device}: {done.completed:,} of {done.submitted:,} requests in "
            f"{self.seconds:.2f} s, p99 {_cell(done.p99_ms, '.2f')} ms>"
        )

    def _repr_html_(self) -> str:
        """HTML for notebooks: the table."""
        from rich.console import Console

        console = Console(width=110, record=True, file=io.StringIO())
        console.print(self.table())
        return console.export_html(inline_styles=True, code_format="<pre style='line-height:1.2'>{code}</pre>")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; `str()` gives a table."""

    runs: tuple[Results, ...]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row per run and client, or per run and model with one client; ratios are to the first run."""
        found: list[dict[str, Any]] = []
        for run in self.runs:
            who = "clients" if len(run.clients) > 1 else "models"
            for each in run.per_tenant if who == "clients" else run.per_model:
                first = next((row for row in found if row["name"] == each.name), None)
                found.append(
                    {
                        "policy": run.policy,
                        "name": each.name,
                        "throughput": each.throughput,
                        "p50_ms": each.p50_ms,
                        "p99_ms": each.p99_ms,
                        "gpu_share": run.part_of_gpu(who, each.name) if run.gpu_ms else float("nan"),
                        "throughput_ratio": _ratio(each.throughput, first["throughput"] if first else None),
                        "p99_ratio": _ratio(each.p99_ms, first["p99_ms"] if first else None),
                    }
                )
        return found

    def table(self) -> Any:
        columns = ["policy", "who", "/s", "÷ first", "p50\nms", "p99\nms", "÷ first", "of the\nGPU"]
        rows = [
            [
                row["policy"], row["name"], f"{row['throughput']:.0f}", _cell(row["throughput_ratio"], ".2f"),
                _cell(row["p50_ms"], ".2f"), _cell(row["p99_ms"], ".2f"), _cell(row["p99_ratio"], ".2f"),
                _cell(row["gpu_share"], ".1%"),
            ]
            for row in self.rows
        ]  # fmt: skip
        return number_table("Runs side by side", columns, rows)

    def __str__(self) -> str:
        return _text(self.table())

    def __rich__(self) -> Any:
        return self.table()


def _ratio(value: float, to: float | None) -> float:
    return value / to if to else float("nan")


def _text(table: Any) -> str:
    from rich.console import Console

    console = Console(width=110, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _cell(value: float, form: str) -> str:
    return "–" if np.isnan(value) else format(value, form)


def number_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], total: bool = False) -> RichTable:
    """A table for a terminal: names, which may be wrapped, then numbers, which are never cut. `total`: the last row is
    set apart.
    """
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(columns[0], overflow="fold", min_width=8)
    for k, name in enumerate(columns[1:], 1):
        widest = max(len(text) for text in (*name.split("\n"), *(row[k] for row in rows)))
        table.add_column(name, justify="right", no_wrap=True, min_width=widest)
    for number, row in enumerate(rows, 1):
        # Text, so that "[x]" is not read as markup
        table.add_row(*map(Text, row), end_section=total and number == len(rows) - 1)
    return table
