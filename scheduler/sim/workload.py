"""Workloads: arrival times of requests. Open loops (Poisson, lognormal) and closed loops, by seed.

Poisson(4000, {"resnet18": 3, "resnet50": 1}, duration=10)     # requests per second, mixed 3 : 1; a list: equal parts
Lognormal(4000, mix, duration=10, sigma=1.5) + ClosedLoop("batch_model", clients=16, client="alice")
"""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.codes import NEVER
from paellapy.scheduler.core.profiles import MOST_NS
from paellapy.scheduler.core.tables import Table
from paellapy.scheduler.core.values import Rule, check_values, integer, number, or_none, shortened
from paellapy.scheduler.sim.tables import ARRIVAL, LOOP_CLIENT, MODELS_PRIORITY

Mix = str | Mapping[str, float] | Sequence[str]
# Above this, nearly all gaps are close to zero, and the rate deviates from the given one: at 7, 4000 becomes 500,000.
MOST_SIGMA = 5.0
MOST_MS = MOST_NS / 1e6
MOST_REQUESTS = 10**8  # of one workload
MOST_CLIENTS = 1 << 20
MOST_KEPT = 1 << 30  # numbers of clients have 32 bits in the tables
Row = tuple[float, str, float | None, int | None, int | str]  # as in TraceWorkload


class WorkloadError(PaellaError, ValueError):
    """A workload cannot be generated; the message says why."""


class Workload(ABC):
    """A source of requests for models. `a + b` combines two."""

    def arrivals(self, models: Sequence[str], seed: int) -> Table:
        """Requests with fixed arrival times (ARRIVAL), by time."""
        return np.zeros(0, ARRIVAL)

    def loop_clients(self, models: Sequence[str]) -> Table:
        """Clients that send their next request after each answer (LOOP_CLIENT)."""
        return np.zeros(0, LOOP_CLIENT)

    def clients_named(self) -> dict[int, str | None]:
        """The clients of the requests: the numbers in the column `client`, with their names or None."""
        return {0: None}

    @property
    @abstractmethod
    def seconds(self) -> float:
        """The duration of the workload."""

    def __add__(self, other: Workload) -> Workload:
        if not isinstance(other, Workload):
            return NotImplemented
        return Mixed((*parts_of(self), *parts_of(other)))


def parts_of(workload: Workload) -> tuple[Workload, ...]:
    """The workloads of a combined one, so that each part of `a + b + c` has a seed of its own."""
    return workload.parts if isinstance(workload, Mixed) else (workload,)


def wrong(field: str, given: Any, why: str) -> WorkloadError:
    """The error for an option that a workload cannot have."""
    return WorkloadError(f"{field}={shortened(given)}: {why}", field=field, given=given)


SEED = integer(0, (1 << 64) - 1)
MODEL = Rule(lambda value: isinstance(value, str), "a model's name")
_DEADLINE = or_none(number(0, MOST_MS, above=True))
_PRIORITY = or_none(integer(-NEVER + 1, NEVER - 1))
_ARRIVES = number(0, MOST_MS / 1e3)
_RULES = {
    "rate": number(0, above=True),
    "duration": number(0, MOST_MS / 1e3, above=True),
    "deadline_ms": _DEADLINE,
    "priority": _PRIORITY,
    "clients": integer(1, MOST_CLIENTS),
    "client": or_none(Rule(lambda value: isinstance(value, str) and bool(value), "a name")),
    "sigma": number(0, MOST_SIGMA),
    "model": MODEL,
    "think_ms": number(0, MOST_MS),
    "gap_us": number(0, MOST_MS),
}


def _check(workload: Workload, *names: str, **others: Rule) -> None:
    check_values(workload, {name: _RULES[name] for name in names} | others, WorkloadError)


def model_index(models: Sequence[str], name: str) -> int:
    if name not in models:
        known = ", ".join(map(shortened, models))
        text = f"the workload requests model {shortened(name)}, which does not exist; the models are {known}"
        raise WorkloadError(text, field="model", given=name)
    return list(models).index(name)


def priority_of(priority: int | None) -> int:
    return MODELS_PRIORITY if priority is None else priority


def _weights(mix: Mix) -> dict[str, float]:
    """Weights by model; models given by name only have equal weights."""
    names = [mix] if isinstance(mix, str) else mix
    if not isinstance(names, Mapping | Sequence) or not all(isinstance(name, str) for name in names):
        raise wrong("mix", mix, "it must be a model's name, a list of names, or a dict of weights by name")
    weights = dict(names) if isinstance(names, Mapping) else {name: float(names.count(name)) for name in names}
    if not all(map(number(0).fits, weights.values())) or not number(0, above=True).fits(sum(weights.values())):
        raise wrong("mix", weights, "the weights must be finite, at least 0, and not all 0")
    return weights


def _choose(models: Sequence[str], mix: Mix, n: int, random: np.random.Generator) -> NDArray[np.int64]:
    weights = _weights(mix)
    numbers = np.array([model_index(models, name) for name in weights])
    p = np.array([float(each) for each in weights.values()])
    return numbers[random.choice(len(numbers), n, p=p / p.sum())]


@dataclass(frozen=True, slots=True)
class _OpenLoop(Workload):
    """Requests that do not wait for answers, `rate` per second on average."""

    rate: float
    mix: Mix
    duration: float = 1.0
    deadline_ms: float | None = None
    priority: int | None = None  # None: the model's
    clients: int = 1  # number of clients among which the requests are divided
    client: str | None = None  # name of the client

    def __post_init__(self) -> None:
        _check(self, "rate", "duration", "deadline_ms", "priority", "clients", "client")
        if self.rate * self.duration > MOST_REQUESTS:
            raise wrong("rate", self.rate, f"rate × duration must be at most {MOST_REQUESTS:,} requests")
        _weights(self.mix)

    @abstractmethod
    def gaps(self, n: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Times between arrivals, with mean 1."""

    @property
    def seconds(self) -> float:
        return self.duration

    def clients_named(self) -> dict[int, str | None]:
        if self.clients == 1:
            return {0: self.client}
        return {k: f"{self.client} {k + 1}" if self.client else None for k in range(self.clients)}

    def arrivals(self, models: Sequence[str], seed: int) -> Table:
        random = np.random.default_rng(seed)
        n = int(self.rate * self.duration) + 1
        times = np.cumsum(self.gaps(n, random))
        while times[-1] < self.rate * self.duration:
            times = np.concatenate([times, times[-1] + np.cumsum(self.gaps(n, random))])
        times = times[times < self.rate * self.duration] / self.rate * 1e9
        found = np.zeros(len(times), ARRIVAL)
        found["time_ns"] = times
        found["model"] = _choose(models, self.mix, len(times), random)
        found["client"] = random.integers(0, self.clients, len(times))
        found["priority"] = priority_of(self.priority)
        found["deadline_ns"] = NEVER if self.deadline_ms is None else found["time_ns"] + int(self.deadline_ms * 1e6)
        return found


class Poisson(_OpenLoop):
    """Independent arrivals.

    >>> len(Poisson(1000, "m", duration=2).arrivals(["m"], seed=0))
    1977
    """

    __slots__ = ()

    def gaps(self, n: int, random: np.random.Generator) -> NDArray[np.float64]:
        return random.exponential(1.0, n)


@dataclass(frozen=True, slots=True)
class Lognormal(_OpenLoop):
    """Bursty arrivals: lognormal gaps. Paella is evaluated with sigma 1.5 and 2.

    >>> len(Lognormal(1000, "m", duration=2, sigma=2.0).arrivals(["m"], seed=0)) > 1000
    True
    """

    sigma: float = 1.5

    def __post_init__(self) -> None:
        _OpenLoop.__post_init__(self)  # not super(): with slots, the class is created anew
        _check(self, "sigma")

    def gaps(self, n: int, random: np.random.Generator) -> NDArray[np.float64]:
        return random.lognormal(-(self.sigma**2) / 2, abs(self.sigma), n)  # -0.0 is refused


@dataclass(frozen=True, slots=True)
class ClosedLoop(Workload):
    """Clients that send a request, wait for the answer, think, and repeat, for `duration` seconds, under one name.

    >>> ClosedLoop("net", clients=8, think_ms=2.0, client="alice").seconds
    1.0
    """

    model: str
    clients: int = 1
    think_ms: float = 0.0
    duration: float = 1.0
    priority: int | None = None
    client: str | None = None  # name of the client; each loop without a name is a client of its own

    def __post_init__(self) -> None:
        _check(self, "model", "clients", "think_ms", "duration", "priority", "client")

    @property
    def seconds(self) -> float:
        return self.duration

    def loop_clients(self, models: Sequence[str]) -> Table:
        clients = np.zeros(self.clients, LOOP_CLIENT)
        clients["think_ns"] = int(self.think_ms * 1e6)
        clients["model"] = model_index(models, self.model)
        clients["priority"] = priority_of(self.priority)
        return clients

    def clients_named(self) -> dict[int, str | None]:
        return {0: self.client}


@dataclass(frozen=True, slots=True)
class Background(Workload):
    """A background job: one step after the other, for as long as the workloads beside it last.

    `gap_us` is the host's time between two steps.

    >>> (Poisson(250, "net", duration=2) + Background("train")).seconds
    2
    """

    model: str
    priority: int | None = -1  # None: the model's
    gap_us: float = 60.0
    duration: float = 0.0  # of a job that runs alone

    def __post_init__(self) -> None:
        _check(self, "model", "priority", "gap_us", duration=_ARRIVES)

    @property
    def seconds(self) -> float:
        return self.duration

    def loop_clients(self, models: Sequence[str]) -> Table:
        return ClosedLoop(self.model, 1, self.gap_us * 1e-3, 1.0, self.priority).loop_clients(models)


@dataclass(frozen=True, slots=True)
class Mixed(Workload):
    """Several workloads at once."""

    parts: tuple[Workload, ...]

    @property
    def seconds(self) -> float:
        return max(each.seconds for each in self.parts)

    def arrivals(self, models: Sequence[str], seed: int) -> Table:
        found = [each.arrivals(models, seed + k) for k, each in enumerate(self.parts)]
        together = np.concatenate(self._renumbered(found))
        return together[np.argsort(together["time_ns"], kind="stable")]

    def loop_clients(self, models: Sequence[str]) -> Table:
        return np.concatenate(self._renumbered([each.loop_clients(models) for each in self.parts]))

    def _places(self) -> list[dict[int, int]]:
        """For each part, the overall number of each of its clients: clients of the same name are one."""
        known: dict[str, int] = {}
        places, n = [], 0
        for each in self.parts:
            place = {}
            for k, name in each.clients_named().items():
                if name is None or name not in known:
                    place[k], n = n, n + 1
                    if name is not None:
                        known[name] = place[k]
                else:
                    place[k] = known[name]
            places.append(place)
        return places

    def clients_named(self) -> dict[int, str | None]:
        pairs = zip(self.parts, self._places(), strict=True)
        return {place[k]: name for each, place in pairs for k, name in each.clients_named().items()}

    def _renumbered(self, tables: Sequence[Table]) -> list[Table]:
        for table, place in zip(tables, self._places(), strict=True):
            table["client"] = [place[k] for k in table["client"].tolist()]
        return list(tables)


@dataclass(frozen=True, slots=True)
class TraceWorkload(Workload):
    """Recorded arrivals: (seconds, model, deadline in ms after that or None, priority, client) each, in any order.

    A CSV file has the columns t, model[, deadline, priority, client].

    >>> TraceWorkload(((0.5, "net", 20.0, None, "alice"), (0.0, "net", None, None, "bob"))).rows[0]
    (0.0, 'net', None, None, 'bob')
    """

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Sequence) or isinstance(self.rows, str | bytes):
            raise wrong("rows", self.rows, f"it must be a list of {_FORM}")
        checked = [_checked(row, f"row {k} of the trace") for k, row in enumerate(self.rows)]
        object.__setattr__(self, "rows", tuple(sorted(checked, key=lambda each: each[0])))

    @classmethod
    def from_csv(cls, path: str | Path) -> TraceWorkload:
        """Columns `t` (seconds), `model`, and optionally `deadline` (ms after t), `priority`, `client`."""
        return cls(tuple(_row(row, where) for where, row in csv_rows(path, "t", "model")))

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


def csv_rows(path: str | Path, *columns: str) -> list[tuple[str, dict[str, str]]]:
    """The rows of a CSV file that has at least these columns, each with where it stands."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
            reader = csv.DictReader(file)
            missing = " and ".join(sorted(set(columns) - set(reader.fieldnames or ())))
            if missing:
                text = f"{path} has no column {missing}: its first line must name the columns, separated by commas"
                raise WorkloadError(text, where=str(path), field=missing)
            return [(f"{path}, line {number}", row) for number, row in enumerate(reader, 2)]
    except OSError as e:
        text = f"{path} cannot be read ({e.strerror or e}): give a CSV file with columns {' and '.join(columns)}"
        raise WorkloadError(text, where=str(path)) from e
    except (UnicodeDecodeError, csv.Error) as e:
        raise WorkloadError(f"{path} is not a file of comma-separated values: {e}", where=str(path)) from e


def _row(row: Mapping[str, str | None], where: str) -> Row:
    try:
        at, deadline = float(row["t"] or ""), float(row["deadline"] or "") if row.get("deadline") else None
        priority = int(row["priority"] or "") if row.get("priority") else None
        client = row.get("client") or "0"
        read = at, row["model"] or "", deadline, priority, int(client) if client.isdecimal() else client
    except ValueError as e:
        raise WorkloadError(f"{where}: {e}", where=where) from e
    return _checked(read, where)


def _checked(row: Row, where: str) -> Row:
    if not isinstance(row, Sequence) or len(row) != 5:
        said = f"{where} is {shortened(row)}, but a row must be {_FORM}"
        raise WorkloadError(said, field="rows", where=where, given=row)
    check_values(dict(zip(_OF_ROW, row, strict=True)), _OF_ROW, WorkloadError, f"{where}: ", where=where)
    return row


_FORM = "(seconds, model, deadline in ms or None, priority or None, client)"
_OF_ROW = {
    "t": _ARRIVES,
    "model": MODEL,
    "deadline": _DEADLINE,
    "priority": _PRIORITY,
    "client": Rule(lambda x: isinstance(x, str) or integer(-NEVER, NEVER).fits(x), "an integer of 64 bits or a name"),
}
