"""Recorded arrivals as a workload, for example from a CSV file: columns t, model[, deadline, priority, client]."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.sim.fluid_state import ARRIVAL
from paellapy.scheduler.sim.workload import MOST_MS, Workload, WorkloadError, check_priority, model_index, priority_of

MOST_KEPT = 1 << 30  # numbers of clients have 32 bits in the tables

Row = tuple[float, str, float | None, int | None, int | str]


def _row(row: Mapping[str, str | None], where: str) -> Row:
    try:
        at, deadline = float(row["t"] or ""), float(row["deadline"] or "") if row.get("deadline") else None
        _check_times(at, deadline)
        priority = int(row["priority"] or "") if row.get("priority") else None
        check_priority(priority)
        client = row.get("client") or "0"
        return at, row["model"] or "", deadline, priority, int(client) if client.isdecimal() else client
    except ValueError as e:
        raise WorkloadError(f"{where}: {e}") from e


def _check_times(at: float, deadline: float | None) -> None:
    if not 0 <= at < MOST_MS / 1e3:
        raise ValueError(f"the arrival time is {at} s, and must be at least 0 and below {MOST_MS / 1e3:g}")
    if deadline is not None and not 0 < deadline < MOST_MS:
        raise ValueError(f"the deadline is {deadline} ms, and must be above 0 and below {MOST_MS:g}, or None")


def _checked(row: Row, where: str) -> Row:
    try:
        at, model, deadline, priority, client = row
        _check_times(at, deadline)
        if not isinstance(model, str):
            raise ValueError(f"the model is {model!r}, and must be a name")
        if not isinstance(client, int | np.integer | str):
            raise ValueError("the client must be an integer or a name")
        check_priority(priority)
    except (TypeError, ValueError) as e:
        form = "(seconds, model, deadline in ms or None, priority or None, client)"
        raise WorkloadError(f"{where} is {row!r}, but a row must be {form}: {e}") from e
    return row


@dataclass(frozen=True, slots=True)
class TraceWorkload(Workload):
    """Recorded arrivals: (seconds, model, deadline in ms after that or None, priority, client) each, in any order."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        checked = [_checked(row, f"row {k} of the trace") for k, row in enumerate(self.rows)]
        object.__setattr__(self, "rows", tuple(sorted(checked, key=lambda each: each[0])))

    @classmethod
    def from_csv(cls, path: str | Path) -> TraceWorkload:
        """Columns `t` (seconds), `model`, and optionally `deadline` (ms after t), `priority`, `client`."""
        rows = []
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
                reader = csv.DictReader(file)
                missing = " and ".join(sorted({"t", "model"} - set(reader.fieldnames or ())))
                if missing:
                    raise WorkloadError(
                        f"{path} has no column {missing}: its first line must name the columns, separated by commas"
                    )
                for number, row in enumerate(reader, 2):
                    rows.append(_row(row, f"{path}, line {number}"))
        except OSError as e:
            reason = e.strerror or e
            raise WorkloadError(f"{path} cannot be read ({reason}): give a CSV file with columns t and model") from e
        except (UnicodeDecodeError, csv.Error) as e:
            raise WorkloadError(f"{path} is not a file of comma-separated values: {e}") from e
        return cls(tuple(rows))

    @property
    def seconds(self) -> float:
        return max((each[0] for each in self.rows), default=0.0)

    def arrivals(self, models: Sequence[str], seed: int) -> Table:
        found, numbers = np.zeros(len(self.rows), ARRIVAL), self._numbers()
        for k, (t, model, deadline, priority, client) in enumerate(self.rows):
            at = int(t * 1e9)
            due = NEVER if deadline is None else at + int(deadline * 1e6)
            found[k] = (at, due, model_index(models, model), priority_of(priority), numbers[client], 0.0)
        return found

    def _numbers(self) -> dict[int | str, int]:
        """Numbers of all clients: clients given as numbers keep them if they fit, and others get the numbers after
        those.
        """
        given = {each[4] for each in self.rows}
        kept = sorted(each for each in given if not isinstance(each, str) and abs(each) < MOST_KEPT)
        numbers: dict[int | str, int] = {each: int(each) for each in kept}
        names = sorted((each for each in given if each not in numbers), key=str)
        return {**numbers, **{name: k for k, name in enumerate(names, max(numbers.values(), default=0) + 1)}}

    def clients_named(self) -> dict[int, str | None]:
        return {k: str(each) if isinstance(each, str) or k else None for each, k in self._numbers().items()}
