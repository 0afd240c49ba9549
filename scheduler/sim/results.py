"""The results of a run, simulated or real: latencies, slowdowns, targets met, throughput, occupancy; as tables."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import ArgumentError
from paellapy.instrument.traces import Elsewhere
from paellapy.scheduler.core.codes import NEVER, OK, QUEUE_FULL, STATUS
from paellapy.scheduler.core.profiles import ModelProfile
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.values import shortened
from paellapy.scheduler.engine.trace import EngineTrace

if TYPE_CHECKING:
    from rich.table import Table as RichTable

What = Literal["figures", "requests", "occupancy"]
Columns = dict[str, Sequence[Any] | NDArray[Any]]
ALL = "all"  # the row of all requests together
# The columns of each table: unit, and meaning. A number that does not exist is NaN: empty in CSV, null in JSON.
COLUMNS: dict[What, dict[str, tuple[str, str]]] = {
    "figures": {
        "policy": ("", "the run's policy"),
        "device": ("", "the virtual GPU"),
        "name": ("", "the model; the client, if there are several; `all` for all requests"),
        "submitted": ("requests", "that arrived"),
        "completed": ("requests", "that were answered"),
        "refused": ("requests", "refused on arrival"),
        "throughput": ("1/s", "answered requests ÷ the time from 0 to the last answer"),
        "p50_ms": ("ms", "median latency, from the intended arrival to the answer"),
        "p90_ms": ("ms", "90th percentile of the latency"),
        "p99_ms": ("ms", "99th percentile of the latency"),
        "mean_ms": ("ms", "mean latency"),
        "slowdown_p50": ("", "median of latency ÷ time alone at batch 1"),
        "slowdown_p99": ("", "99th percentile of the same"),
        "within_target": ("0 to 1", "part of the requests with a deadline or target that met it; refused ones did not"),
        "mean_batch": ("requests", "mean over requests of the size of their batch"),
        "gpu_share": ("0 to 1", "part of the GPU's busy time"),
        "throughput_ratio": ("", "`throughput` ÷ that of the first run"),
        "p99_ratio": ("", "`p99_ms` ÷ that of the first run"),
    },
    "requests": {
        "policy": ("", "the run's policy"),
        "model": ("", "the model asked for"),
        "client": ("", "the sender, if it has a name"),
        "status": ("", "`ok`, or the reason why there is no answer"),
        "priority": ("", "larger goes first"),
        "batch": ("requests", "size of its batch"),
        "arrival_ms": ("ms", "intended arrival, since the start of the run"),
        "started_ms": ("ms", "launch of its first segment"),
        "finish_ms": ("ms", "its end, answered or not"),
        "latency_ms": ("ms", "from arrival to answer"),
        "limit_ms": ("ms", "the time it may take: its own deadline, otherwise its model's target"),
    },
    "occupancy": {
        "policy": ("", "the run's policy"),
        "time_ms": ("ms", "middle of the period, since the start of the run"),
        "block_slots": ("0 to 1", "part of the blocks that the GPU can hold"),
        "memory_bandwidth": ("0 to 1", "part of the memory's bandwidth"),
        "kernel_issue": ("0 to 1", "part of the kernels that can begin"),
        "running_jobs": ("jobs", "mean number of jobs on the GPU"),
    },
}


@dataclass(frozen=True, slots=True)
class ModelResult:
    """One model's requests, or all requests together. COLUMNS has the meaning of each figure."""

    name: str
    submitted: int
    completed: int
    refused: int
    throughput: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_ms: float
    slowdown_p50: float
    slowdown_p99: float
    within_target: float
    mean_batch: float


@dataclass(frozen=True, slots=True)
class ChatResult:
    """What became of a language model's texts. Times between tokens are of each two tokens that follow each other."""

    name: str
    texts: int
    completed: int
    tokens_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tbt_p50_ms: float
    tbt_p99_ms: float
    ttft_in_target: float  # part of the texts; NaN without a target
    tbt_in_target: float  # part of the tokens after the first of each text


@dataclass(frozen=True, slots=True)
class Results:
    """The results of one simulated run: `print(run)` shows a table, `run.plot()` draws it.

    `run.all`, `run.model(name)` and `run.tenant(name)` have the figures of all requests, of a model and of a client.
    `to_dataframe`, `to_csv` and `to_json` give three tables: `"figures"`, a row per model (or client) and one for all;
    `"requests"`, a row per request; `"occupancy"`, the use of the GPU over time. `run.seconds` is the time from 0 to
    the last answer, `run.counters` has the core's launches, steps, decisions and preemptions.

        run = pp.simulate(models, pp.Poisson(4000, shares, duration=1.0), "srpt")
        run.all.p99_ms
        run.to_csv("requests.csv", "requests")
    """

    policy: str
    device: str
    models: Sequence[ModelProfile]
    jobs: Table  # one row per request (sim.tables.RECORD)
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
    chats: tuple[ChatResult, ...] = ()  # of language models

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
        if name is not None and not (isinstance(name, str) and name in names):
            text = f"no model {shortened(name)} in this run: the models are {', '.join(names)}"
            raise ArgumentError(text, field="model", given=name)
        if name is None:
            return self._figures(ALL, self.jobs)
        return self._figures(name, self.jobs[self.jobs["model"] == names.index(name)])

    def jobs_of(self, name: str | None) -> Table:
        """The requests of one row of a comparison: a client, a model, or all."""
        if name is None:
            return self.jobs
        column, known = ("client", self.clients) if len(self.clients) > 1 else ("model", [m.name for m in self.models])
        found: Table = self.jobs[self.jobs[column] == (known.index(name) if name in known else -1)]
        return found

    def tenant(self, name: str) -> ModelResult:
        """Figures of one client's requests, over all models."""
        if not isinstance(name, str) or name not in self.clients:
            text = f"no client {shortened(name)} in this run: the clients are {', '.join(self.clients)}"
            raise ArgumentError(text, field="client", given=name)
        return self._figures(name, self.jobs[self.jobs["client"] == self.clients.index(name)])

    @property
    def per_tenant(self) -> list[ModelResult]:
        return [self.tenant(name) for name in self.clients]

    def gpu_share(self, name: str) -> float:
        """The fraction of the GPU's busy time that went to the client or the model of this name."""
        for who in ("clients", "models"):
            if isinstance(name, str) and name in self.gpu_ms.get(who, {}):
                return self.part_of_gpu(who, name)
        known = ", ".join([*self.gpu_ms.get("clients", {}), *self.gpu_ms.get("models", {})])
        text = f"no client and no model {shortened(name)} in this run: there are {known}"
        raise ArgumentError(text, field="name", given=name)

    def part_of_gpu(self, who: str, name: str) -> float:
        """`gpu_share` among "clients" or "models" only, where both may have the same names."""
        return self.gpu_ms[who][name] / max(self.gpu_ms["busy"][""], 1e-9)

    def compare(self, *others: Results) -> Comparison:
        """This run and others of the same models or clients, side by side; ratios are relative to this run.

        `print` shows the comparison; it has `to_dataframe`, `to_csv` and `to_json` too, with the rows of all runs.
        """
        if wrong := [each for each in others if not isinstance(each, Results)]:
            text = f"compare cannot use a {type(wrong[0]).__name__}: give results of simulate, one by one"
            raise ArgumentError(text, field="others", given=wrong[0])
        return Comparison((self, *others))

    def to_dataframe(self, what: What = "figures") -> Any:
        """A table as a pandas DataFrame, or as a polars one where only polars is installed."""
        return self.compare().to_dataframe(what)

    def to_csv(self, path: str | os.PathLike[str], what: What = "figures") -> Path:
        """Writes a table as CSV."""
        return self.compare().to_csv(path, what)

    def to_json(self, path: str | os.PathLike[str], what: What = "figures") -> Path:
        """Writes a table as a JSON list of rows."""
        return self.compare().to_json(path, what)

    def request_columns(self) -> Columns:
        """The table "requests"."""
        jobs, named = self.jobs, np.array(["", *self.clients], object)
        answered = jobs["status"] == OK
        at = {name: np.where(jobs[name] < NEVER, jobs[name], np.nan) / 1e6 for name in _TIMES}
        client = np.where(jobs["client"] < len(self.clients), jobs["client"], -1)
        return {
            "policy": [self.policy] * len(jobs),
            "model": np.array([each.name for each in self.models], object)[jobs["model"]],
            "client": named[client + 1],
            "status": np.array(STATUS, object)[jobs["status"]],
            "priority": jobs["priority"],
            "batch": jobs["batch"],
            "arrival_ms": at["arrival_ns"],
            "started_ms": at["started_ns"],
            "finish_ms": at["finish_ns"],
            "latency_ms": np.where(answered, at["finish_ns"] - at["arrival_ns"], np.nan),
            "limit_ms": self.limit_ms(jobs),
        }

    def occupancy_columns(self) -> Columns:
        """The table "occupancy"."""
        bins = len(self.occupancy)
        names = tuple(COLUMNS["occupancy"])[2:]
        used = {name: self.occupancy[:, k] for k, name in enumerate(names)}
        return {"policy": [self.policy] * bins, "time_ms": (np.arange(bins) + 0.5) * self.bin_ms, **used}

    def limit_ms(self, jobs: Table) -> NDArray[np.float64]:
        """The time that each of the requests may take: its own deadline, otherwise its model's target; NaN: any."""
        target = np.array([np.nan if each.target_ms is None else each.target_ms for each in self.models])
        own = np.where(jobs["deadline_ns"] < NEVER, jobs["deadline_ns"] - jobs["arrival_ns"], np.nan) / 1e6
        limit: NDArray[np.float64] = np.where(np.isnan(own), target[jobs["model"]], own)
        return limit

    def _figures(self, name: str, jobs: Table) -> ModelResult:
        alone = np.array([each.alone_ns() for each in self.models])
        done = jobs[jobs["status"] == OK]
        ms = (done["finish_ns"] - done["arrival_ns"]) / 1e6
        slow = ms * 1e6 / alone[done["model"]]
        limit = self.limit_ms(jobs)
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
        if not self.chats:
            return number_table(title, columns, rows, total=True)
        from rich.console import Group

        chats = self._chat_table(title if not self.models else None)
        return Group(number_table(title, columns, rows, total=True), chats) if self.models else chats

    def _chat_table(self, title: str | None) -> Any:
        columns = [
            "language\nmodel", "texts\ndone", "tokens\n/s", "TTFT\np50 ms", "p99\nms", "in\ntarget", "TBT\np50 ms",
            "p99\nms", "in\ntarget",
        ]  # fmt: skip
        rows = [
            [
                each.name, f"{each.completed}/{each.texts}", f"{each.tokens_s:.0f}", _cell(each.ttft_p50_ms, ".1f"),
                _cell(each.ttft_p99_ms, ".1f"), _cell(each.ttft_in_target, ".1%"), _cell(each.tbt_p50_ms, ".2f"),
                _cell(each.tbt_p99_ms, ".2f"), _cell(each.tbt_in_target, ".1%"),
            ]
            for each in self.chats
        ]  # fmt: skip
        return number_table(title or "Texts", columns, rows)

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


_TIMES = ("arrival_ns", "started_ns", "finish_ns")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side; `str()` gives a table."""

    runs: tuple[Results, ...]

    plot = Elsewhere("paellapy.viz.static:plot_comparison")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """For each run, a row per client, or per model with one client, and one for all; ratios are to the first run.
        """
        found: list[dict[str, Any]] = []
        first: dict[tuple[bool, str], ModelResult] = {}
        for run in self.runs:
            who = "clients" if len(run.clients) > 1 else "models"
            parts = run.per_tenant if who == "clients" else run.per_model
            shares = [run.part_of_gpu(who, each.name) if run.gpu_ms else float("nan") for each in parts]
            for total, each, share in zip(
                [False] * len(parts) + [True], [*parts, run.all], [*shares, sum(shares)], strict=True
            ):
                to = first.setdefault((total, each.name), each)
                row = {"policy": run.policy, "device": run.device, **asdict(each), "gpu_share": share}
                row["throughput_ratio"] = _ratio(each.throughput, to.throughput)
                row["p99_ratio"] = _ratio(each.p99_ms, to.p99_ms)
                found.append(row)
        return found

    def table(self) -> Any:
        columns = [
            "policy", "who", "/s", "÷ first", "p50\nms", "p99\nms", "÷ first", "in\ntarget", "of the\nGPU"
        ]  # fmt: skip
        rows = [
            [
                row["policy"], row["name"], f"{row['throughput']:.0f}", _cell(row["throughput_ratio"], ".2f"),
                _cell(row["p50_ms"], ".2f"), _cell(row["p99_ms"], ".2f"), _cell(row["p99_ratio"], ".2f"),
                _cell(row["within_target"], ".1%"), _cell(row["gpu_share"], ".1%"),
            ]
            for row in self.rows
        ]  # fmt: skip
        return number_table("Runs side by side", columns, rows)

    def columns(self, what: What = "figures") -> Columns:
        """A table by columns: COLUMNS has their units and meanings."""
        if not isinstance(what, str) or what not in COLUMNS:
            text = f"there is no table {shortened(what)}: choose one of {', '.join(COLUMNS)}"
            raise ArgumentError(text, field="what", given=what, limit=tuple(COLUMNS))
        if what == "figures":
            rows = self.rows
            return {name: [row[name] for row in rows] for name in COLUMNS[what]}
        tables = [run.request_columns() if what == "requests" else run.occupancy_columns() for run in self.runs]
        return {name: np.concatenate([np.asarray(each[name]) for each in tables]) for name in COLUMNS[what]}

    def to_dataframe(self, what: What = "figures") -> Any:
        """A table as a pandas DataFrame, or as a polars one where only polars is installed."""
        columns = self.columns(what)
        for library in ("pandas", "polars"):
            with contextlib.suppress(ImportError):
                return importlib.import_module(library).DataFrame(columns)
        text = "to_dataframe needs pandas or polars: pip install pandas, or write a file with to_csv or to_json"
        raise ArgumentError(text, field="pandas")

    def to_csv(self, path: str | os.PathLike[str], what: What = "figures") -> Path:
        """Writes a table as CSV."""
        columns = self.columns(what)
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(["" if each is None else each for each in row] for row in _by_row(columns))
        return Path(path)

    def to_json(self, path: str | os.PathLike[str], what: What = "figures") -> Path:
        """Writes a table as a JSON list of rows."""
        columns = self.columns(what)
        rows = ",\n".join(json.dumps(dict(zip(columns, row, strict=True))) for row in _by_row(columns))
        Path(path).write_text(f"[\n{rows}\n]\n", encoding="utf-8")
        return Path(path)

    def __str__(self) -> str:
        return _text(self.table())

    def __rich__(self) -> Any:
        return self.table()


def _by_row(columns: Columns) -> Iterator[tuple[Any, ...]]:
    """The rows of a table in Python's own types; None for NaN."""
    return zip(*([None if x != x else x for x in np.asarray(each).tolist()] for each in columns.values()), strict=True)


def _ratio(value: float, to: float) -> float:
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
