"""Puts models on engines as the plan wants: loads over HTTP, and unloads only once a model is loaded elsewhere."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.cluster_file import ClusterFile
from paellapy.cluster.plan import Fleet, moves, plan
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.profiles import load_profiles
from paellapy.serving.logs import log
from paellapy.serving.outlook import Outlook
from paellapy.serving.registry import READY, UNAVAILABLE

LOAD_S = 600.0
LOOK_S = 1.0
MOST_ENGINES = 1024
FEWEST = 100  # requests between two plans; fewer do not show the load

Placed = Mapping[str, tuple[str, ...]]  # models of each engine

_decode = msgspec.json.Decoder(Outlook).decode


class Placer:
    """Makes one change at a time on each engine, on all engines in parallel."""

    def __init__(self, file: ClusterFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._pool = ThreadPoolExecutor(MOST_ENGINES)  # its threads start on demand
        self._lookers = ThreadPoolExecutor(16)  # separate, so that a check never waits for a load
        self._busy: dict[str, Future[None]] = {}
        self._planned_at, self._counted = clock(), {}  # type: ignore[var-annotated]
        self._planning: Future[dict[str, tuple[str, ...]] | None] | None = None
        self.why: dict[str, str] = {}  # errors of models that could not be loaded

    def place(self, urls: Mapping[str, str], wanted: Placed) -> None:
        states = self._lookers.map(self._states, urls.values())
        seen = {name: found for name, found in zip(urls, states, strict=True) if found is not None}
        everywhere = all(seen.get(name, {}).get(model) == READY for name, models in wanted.items() for model in models)
        for name, found in seen.items():
            if name in self._busy and not self._busy[name].done():
                continue
            hopeless = {model for model in found if f"{name}/{model}" in self.why}
            missing = [m for m in wanted.get(name, ()) if found.get(m) == UNAVAILABLE and m not in hopeless]
            extra = [m for m, state in found.items() if state == READY and m not in wanted.get(name, ())]
            if missing:
                self._busy[name] = self._pool.submit(self._change, name, urls[name], missing[0], "load")
            elif extra and everywhere:  # requests have other engines to go to
                self._busy[name] = self._pool.submit(self._change, name, urls[name], extra[0], "unload")

    def _call(self, url: str, path: str, data: bytes | None = None, within_s: float = LOOK_S) -> bytes:
        headers = {} if self._file.key is None else {"X-API-Key": self._file.key}
        request = urllib.request.Request(url + path, data, headers, method="GET" if data is None else "POST")
        with urllib.request.urlopen(request, timeout=within_s) as answer:
            found: bytes = answer.read()
            return found

    def _states(self, url: str) -> dict[str, str] | None:
        """States of an engine's models; None: it does not answer."""
        try:
            return {model: each.state for model, each in _decode(self._call(url, "/v2/outlook")).models.items()}
        except (OSError, msgspec.DecodeError):
            return None

    def _change(self, engine: str, url: str, model: str, what: str) -> None:
        try:
            self._call(url, f"/v2/repository/models/{model}/{what}", b"{}", LOAD_S)
            log.info(f"{what}ed by the plan", extra={"fields": {"engine": engine, "model": model}})
        except urllib.error.HTTPError as e:
            said = json.loads(e.read() or b"{}").get("error", e.reason)
            if what == "load" and e.code == 400:
                self.why[f"{engine}/{model}"] = said
            log.error("a model could not be moved", extra={"fields": {"engine": engine, "model": model, "why": said}})
        except OSError as e:
            log.error("an engine did not move a model", extra={"fields": {"engine": engine, "why": str(e)}})

    def replan(self, routers: Mapping[str, Mapping[str, Any]], wanted: Placed) -> dict[str, tuple[str, ...]] | None:
        """A new placement, if the recent load calls for one. A call starts planning in the background; a later one
        returns the result.
        """
        if self._planning is not None:
            if not self._planning.done():
                return None
            found, self._planning = self._planning.result(), None
            # Engines were added or removed meanwhile
            return found if found is not None and found.keys() == wanted.keys() else None
        rates = self._rates(routers)
        if rates is not None:
            self._planning = self._pool.submit(self._plan, rates, dict(wanted))
        return None

    def _rates(self, routers: Mapping[str, Mapping[str, Any]]) -> dict[str, float] | None:
        """Requests per second of each model since the last plan; None: it is too early, or there are too few
        requests.
        """
        s, now = self._file.settings, self._clock()
        if not s.replan_s or now - self._planned_at < s.replan_s:
            return None
        total: dict[str, int] = {}
        for each in routers.values():
            for model, count in each.get("by_model", {}).items():
                total[model] = total.get(model, 0) + count
        seconds, before = now - self._planned_at, self._counted
        self._planned_at, self._counted = now, total
        rates = {model: max(0.0, count - before.get(model, 0)) / seconds for model, count in total.items()}
        return rates if before and sum(rates.values()) * seconds >= FEWEST else None

    def _plan(self, rates: Mapping[str, float], wanted: Placed) -> dict[str, tuple[str, ...]] | None:
        s, names = self._file.settings, list(wanted)
        try:
            profiles = load_profiles(Path(self._file.folder) / str(s.profiles))
            full = {model: max(rates.get(model, 0.0), 0.01) for model in self._file.models}
            fleet = Fleet(profiles, full, len(names), s.memory_gb, s.gpu_gb or math.inf)
            current = tuple(tuple(sorted(wanted[name])) for name in names)
            found = plan(fleet, current, sure=math.inf)
        except PaellaError as e:
            log.error("planning failed", extra={"fields": {"why": str(e)}})
            return None
        if found.placement == current:
            return None
        steps = moves(current, found.placement)
        after = {name: set(wanted[name]) for name in names}
        for gpu, model in steps.load:
            after[names[gpu]].add(model)
        for gpu, model in steps.unload:
            after[names[gpu]].discard(model)
        log.info("replanned", extra={"fields": {"attainment": round(found.attainment, 3), "loads": len(steps.load)}})
        return {name: tuple(sorted(models)) for name, models in after.items()}
