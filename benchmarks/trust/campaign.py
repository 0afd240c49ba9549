"""Checked requests over mixed models, sizes, encodings, priorities and deadlines, while faults are injected in turn.

    python benchmarks/trust/campaign.py [--requests 20000] [--clients 16] [--faults all|none|NAME,…] [--device D]
        [--resume FILE] [--out DIR]
    python benchmarks/trust/campaign.py --seconds 560 --device cuda --name trust_campaign_h200
    python benchmarks/trust/campaign.py --merge FILE FILE … [--out DIR]

Every answer is compared with NumPy's result. A fault is injected while the clients go on; `recovery_s` is the time from
its injection to the end of the last moment in which a prober, which asks every model in turn, got no right answer. The
result is written every few seconds; --resume continues a stopped run; --merge adds the counts of several servers, and
takes each fault from the file in which its recovery took longest.

With --seconds, the script takes this time in all, from its start to the end of the server. The load goes on until then,
and the faults are injected again and again: `recoveries_s` has every recovery of a fault, `recovery_s` the longest.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from faults import FAULTS
from load import Counts, exchange, judge, run_clients
from served import Checked, Served, requests, served
from store import facts, save

QUIET_S = 0.6  # of right answers before and after a fault
LONGEST_S = 30.0  # that a recovery is waited for
FAULT_S = 25.0  # left of --seconds, or no further fault begins
END_S = 12.0  # of --seconds, in which the clients and the server end


class Prober:
    """Asks every model in turn, on new connections, and notes when it was not answered right."""

    def __init__(self, server: Served, work: list[Checked]) -> None:
        self._port = server.port
        self._work = [next(w for w in work if w.model == m and b"timeout" not in w.request and w.kind == "json")
                      for m in sorted({w.model for w in work})]  # fmt: skip
        self.since = 0.0  # when the last failure was over
        self.good_since = self.last_good = time.monotonic()
        self.good = 0  # answers since then
        self.failures: list[str] = []

    async def run(self) -> None:
        k, counts = 0, Counts()
        while True:
            k += 1
            each = self._work[k % len(self._work)]
            said = ""
            try:
                async with asyncio.timeout(1.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                    try:
                        status, head, body = await exchange(reader, writer, each.request)
                    finally:
                        writer.close()
                outcome, _ = judge(each, status, head, body, counts)
                # A refusal for want of room is an answer: the load is there on purpose.
                no_room = outcome == "refused" and (b"in flight" in body or b"would take" in body)
                if outcome != "right" and not no_room:
                    said = f"{each.model} {status}: {body[:100].decode(errors='replace')}"
            except (OSError, EOFError, TimeoutError) as e:
                said = f"{each.model}: {type(e).__name__}"
            if said:
                self.since = time.monotonic()
                self.failures.append(said)
                self.begin_again()
            else:
                self.good += 1
                self.last_good = time.monotonic()
            await asyncio.sleep(0.02)

    def begin_again(self) -> None:
        self.good_since, self.good = time.monotonic(), 0

    async def quiet(self, for_s: float, at_most_s: float) -> bool:
        """Waits until all was right for so long, every model was asked meanwhile, and no answer is overdue."""
        end = time.monotonic() + at_most_s
        while True:
            now = time.monotonic()
            asked = self.good >= 2 * len(self._work) and now - self.last_good < for_s / 2
            if asked and now - self.good_since >= for_s:
                return True
            if now > end:
                return False
            await asyncio.sleep(0.02)


def add(found: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """A fault that is known keeps the entry of its longest recovery, and the recoveries of all."""
    entry["recoveries_s"] = [entry["recovery_s"]]
    for k, known in enumerate(found):
        if known["fault"] == entry["fault"]:
            every = known.get("recoveries_s", [known["recovery_s"]]) + entry["recoveries_s"]
            found[k] = {**max(known, entry, key=_longest_s), "recoveries_s": every}
            return
    found.append(entry)


async def inject(
    names: list[str], server: Served, prober: Prober, found: list[dict[str, Any]], until: float | None = None
) -> None:
    """Each fault once; with `until`, again and again, and none begins shortly before."""
    for name in names if until is None else itertools.cycle(names):
        if until is not None and time.monotonic() > until - FAULT_S:
            return
        end = time.monotonic() + LONGEST_S  # faults come one after the other: the server has done with the last one
        while not server.has_standby() and time.monotonic() < end:
            await asyncio.sleep(0.1)
        await prober.quiet(QUIET_S, LONGEST_S)
        prober.failures.clear()
        server.harmed_at = time.monotonic()
        entry: dict[str, Any] = {"fault": name, "what": FAULTS[name].__doc__, "standby": server.has_standby()}
        try:
            entry["seen"] = await asyncio.wait_for(FAULTS[name](server), LONGEST_S)
        except Exception as e:
            entry["seen"] = f"{type(e).__name__}: {e}"
        prober.begin_again()  # what it did may not show at once
        try:
            recovered = await prober.quiet(QUIET_S, LONGEST_S)
        except asyncio.CancelledError:  # the end of the run: a fault that still shows counts as one without recovery
            if prober.failures:
                failed = {"probes_failed": len(prober.failures), "first_failure": prober.failures[0]}
                add(found, {**entry, "recovery_s": None, **failed})
            raise
        entry["recovery_s"] = round(max(0.0, prober.since - server.harmed_at), 2) if recovered else None
        entry["probes_failed"] = len(prober.failures)
        entry["first_failure"] = prober.failures[0] if prober.failures else None
        add(found, entry)
        shown = f"recovery {entry['recovery_s']} s, {entry['probes_failed']} probes failed; {entry['seen']}"
        print(f"{name:28s} {shown}", flush=True)


async def run(server: Served, args: argparse.Namespace, result: dict[str, Any], write: Any) -> None:
    """`args.until`: when the clients end, or None."""
    work = requests(np.random.default_rng(args.seed), 2000, f"127.0.0.1:{server.port}")
    counts, end = Counts(), asyncio.Event()
    counts.outcomes.update(result["load"].get("outcomes", {}))
    counts.kinds.update(result["load"].get("kinds", {}))
    prober = Prober(server, work)
    left = max(0, args.requests - sum(counts.outcomes.values())) if args.until is None else 1 << 60
    probing = asyncio.create_task(prober.run())
    load = asyncio.create_task(run_clients(server.port, work, counts, args.clients, end, left))
    known = {each["fault"] for each in result["faults"]}
    wanted = [name for name in (FAULTS if args.faults == "all" else args.faults.split(",")) if name not in known]
    names = [] if args.faults == "none" else wanted
    faults = asyncio.create_task(inject(names, server, prober, result["faults"], args.until))
    began, seconds_before = time.monotonic(), result.get("seconds", 0.0)

    def note() -> None:
        result["load"] = counts.summary()
        result["seconds"] = round(seconds_before + time.monotonic() - began, 1)
        result["server"] = {"memory_bytes": server.memory_bytes(), "descriptors": server.descriptors()}
        write()

    while not (load.done() and faults.done()):
        rest_s = math.inf if args.until is None else args.until - time.monotonic()
        await asyncio.wait((load, faults), timeout=max(0.1, min(5.0, rest_s)), return_when=asyncio.ALL_COMPLETED)
        note()
        if args.until is not None and time.monotonic() >= args.until:
            end.set()
            faults.cancel()
        if load.done() and not faults.done() and not end.is_set():  # faults are to meet a load
            load = asyncio.create_task(run_clients(server.port, work, counts, args.clients, end, 1000))
    probing.cancel()
    note()


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One stored file of several: all requests together, and each fault with its longest recovery.

    `servers` has an entry for each server, with its commit and seconds; a fault's `server` is a place in that list.
    """
    servers: list[dict[str, Any]] = []
    faults: dict[str, dict[str, Any]] = {}
    for part in parts:
        found = part["results"]
        for each in found["faults"]:
            known = faults.get(each["fault"])
            if known is None or _longest_s(known) < _longest_s(each):
                faults[each["fault"]] = {**each, "server": len(servers) + each.get("server", 0)}
        servers += found.get("servers") or [_server(part)]
    every = [part["results"]["load"] for part in parts]
    load: dict[str, Any] = {"requests": sum(each["requests"] for each in every)}
    for key in ("outcomes", "kinds", "errors"):
        load[key] = dict(sum((Counter(each[key]) for each in every), Counter()))
    load["recent_latency_ms"] = every[0]["recent_latency_ms"]
    ordered = [faults[name] for name in FAULTS if name in faults]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in servers))
    on = {**parts[0]["on"], "commit": commits}
    every_s = [each["seconds"] for each in servers]
    seconds = None if None in every_s else sum(every_s)
    return {"on": on, "results": {"load": load, "faults": ordered, "seconds": seconds, "servers": servers}}


def _longest_s(fault: dict[str, Any]) -> float:
    return math.inf if fault["recovery_s"] is None else float(fault["recovery_s"])


def _server(part: dict[str, Any]) -> dict[str, Any]:
    """What is known of the one server of a file."""
    found, on = part["results"], part["on"]
    settings = {**found["settings"], "requests": found["load"]["requests"], "faults": len(found["faults"])}
    return {**settings, "seconds": found.get("seconds"), "cpu": on["cpu"], "commit": on["commit"], "date": on["date"]}


def merge(args: argparse.Namespace) -> None:
    document = merged([json.loads(each.read_text()) for each in args.merge])
    path = (args.out or Path(__file__).parents[1] / "results") / f"{args.name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")  # on what it was measured, not on this machine
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="virtual:h200")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=20_000, help="at least; without --seconds")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the whole run, in place of --requests")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--faults", default="all", help=", ".join(FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--name", default="trust_campaign")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--merge", type=Path, nargs="+")
    args = parser.parse_args()
    if args.merge:
        merge(args)
        return
    args.until = time.monotonic() + args.seconds - END_S if args.seconds else None
    result: dict[str, Any] = {"load": {}, "faults": []}
    if args.resume is not None:
        result = json.loads(args.resume.read_text())["results"]
    result["settings"] = {k: getattr(args, k) for k in ("device", "workers", "requests", "clients", "seed")}
    result["settings"]["cores"] = len(os.sched_getaffinity(0))

    def write() -> Path:
        result["servers"] = [_server({"on": facts(), "results": result})]
        return save(args.name, result, folder=args.out)

    with served(args.device, args.workers) as server:
        asyncio.run(run(server, args, result, write))
    path = write()
    counted = result["load"]["outcomes"]
    print(json.dumps(result["load"], indent=1))
    print(f"{counted.get('wrong', 0)} wrong, {counted.get('lost', 0)} lost, {counted.get('500', 0)} of 500; {path}")


if __name__ == "__main__":
    main()
