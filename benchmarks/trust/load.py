"""Clients that check every answer: right, refused with a reason, an error, wrong, or none at all."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from served import Checked

PATIENCE_S = 60.0  # for an answer
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")


@dataclass(slots=True)
class Counts:
    """`right`, `refused` (503 with Retry-After), `dropped` (the connection ended: the client sees it), `wrong`, `lost`
    (nothing within PATIENCE_S), `late` (503 after a deadline of its own), and other statuses by number."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=20_000))

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.latencies_s)
        places = {f"p{p}": int(p / 100 * (len(ordered) - 1)) for p in (50, 99)} if ordered else {}
        shown = {name: round(1e3 * ordered[at], 3) for name, at in places.items()}
        return {
            "requests": sum(self.outcomes.values()),
            "outcomes": dict(self.outcomes),
            "kinds": dict(self.kinds),
            "errors": dict(self.said.most_common(12)),
            "recent_latency_ms": shown,
        }


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[int, bytes, bytes]:
    """Status, header in small letters, and body."""
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = _LENGTH.search(head)
    body = await reader.readexactly(int(length[1])) if length else b""
    return int(head[9:12]), head, body


async def client(
    port: int, work: list[Checked], counts: Counts, end: asyncio.Event, most: list[int], rest_s: float = 0.0
) -> None:
    """Asks one after the other, on a connection that it keeps while the server does; pauses where it is refused."""
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    k = id(counts) + len(asyncio.all_tasks())
    while not end.is_set() and most[0] > 0:
        most[0] -= 1
        k += 1
        each = work[(k * 7919) % len(work)]
        began, pause_s = time.perf_counter(), 0.0
        try:
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(PATIENCE_S):
                status, head, body = await exchange(*connection, each.request)
        except TimeoutError:
            outcome = "lost"
        except (OSError, EOFError, asyncio.IncompleteReadError):
            outcome, pause_s = "dropped", 0.02
        else:
            outcome, pause_s = judge(each, status, head, body, counts)
            if outcome == "right":
                counts.latencies_s.append(time.perf_counter() - began)
        if connection is not None and (outcome in ("lost", "dropped") or b"\r\nconnection: close" in head):
            connection[1].close()
            connection = None
        counts.outcomes[outcome] += 1
        counts.kinds[f"{each.model} {each.kind}"] += 1
        if pause_s or rest_s:
            await asyncio.sleep(pause_s + rest_s)
    if connection is not None:
        connection[1].close()


def judge(each: Checked, status: int, head: bytes, body: bytes, counts: Counts) -> tuple[str, float]:
    """What an answer is worth, and how long to pause after it."""
    if status == 200:
        return ("right" if each.is_right(head, body) else "wrong"), 0.0
    counts.said[re.sub(rb"\d[\d.]*", b"#", body[:160]).decode(errors="replace")] += 1
    if status == 503 and b"\r\nretry-after: " in head:
        return "refused", 0.01  # sooner than asked: the load is to stay
    return str(status), 0.0


async def run_clients(
    port: int, work: list[Checked], counts: Counts, clients: int, end: asyncio.Event, most: int, rest_s: float = 0.0
) -> None:
    left = [most]
    await asyncio.gather(*(client(port, work, counts, end, left, rest_s) for _ in range(clients)))
