"""Malformed requests, made by changing valid ones, on both paths of an inference, whose answers are compared.

    python benchmarks/trust/malformed.py [--requests 20000] [--seed 0] [--out DIR]

Two servers have the same models: one uses the fast path where it can, the other aiohttp for everything. Every request
goes to both. They must answer with the same status and the same text, never with 500, and keep serving.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from load import exchange
from served import requests
from store import save

from paellapy import demo
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.config import ServerConfig
from paellapy.serving.registry import Registry, entry_of
from paellapy.serving.server import Server

Change = Callable[[bytes, np.random.Generator], bytes]
PATIENCE_S = 20.0


def _json(request: bytes, edit: Callable[[dict[str, Any]], None]) -> bytes:
    """The request with its JSON edited and its lengths right again."""
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"Inference-Header-Content-Length: (\d+)", head)
    text, tail = (body, b"") if length is None else (body[: int(length[1])], body[int(length[1]) :])
    try:
        found = json.loads(text)
        edit(found)
        text = json.dumps(found).encode()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return request
    if length is not None:
        head = head.replace(length[0], b"Inference-Header-Content-Length: %d" % len(text))
    head = re.sub(rb"\r\nContent-Length: \d+", b"\r\nContent-Length: %d" % len(text + tail), head)
    return head + b"\r\n\r\n" + text + tail


ODD: list[Any] = [None, True, -1, 0, 1.5, 1e308, "", "x" * 3000, [], {}, [[]], "é\ud800", 1 << 70, float("inf"), "NaN"]


def _pick(rng: np.random.Generator) -> Any:
    return ODD[int(rng.integers(len(ODD)))]


def _tensor(key: str) -> Change:
    return lambda r, rng: _json(r, lambda d: d["inputs"][0].__setitem__(key, _pick(rng)))


def _top(key: str) -> Change:
    return lambda r, rng: _json(r, lambda d: d.__setitem__(key, _pick(rng)))


def _parameter(key: str) -> Change:
    return lambda r, rng: _json(r, lambda d: d.setdefault("parameters", {}).__setitem__(key, _pick(rng)))


def _own_parameter(key: str) -> Change:
    return lambda r, rng: _json(r, lambda d: d["inputs"][0].setdefault("parameters", {}).__setitem__(key, _pick(rng)))


def _value(r: bytes, rng: np.random.Generator) -> bytes:
    return _json(r, lambda d: d["inputs"][0]["data"].__setitem__(0, _pick(rng)))


def _fewer(r: bytes, rng: np.random.Generator) -> bytes:
    return _json(r, lambda d: d["inputs"][0]["data"].pop())


def _twice(r: bytes, rng: np.random.Generator) -> bytes:
    return _json(r, lambda d: d["inputs"].append(dict(d["inputs"][0])))


def _flip(r: bytes, rng: np.random.Generator) -> bytes:
    """A byte of the body."""
    start = r.find(b"\r\n\r\n") + 4
    at = int(rng.integers(start, len(r)))
    return r[:at] + bytes([int(rng.integers(256))]) + r[at + 1 :]


def _flip_head(r: bytes, rng: np.random.Generator) -> bytes:
    at = int(rng.integers(0, r.find(b"\r\n\r\n")))
    return r[:at] + bytes([int(rng.integers(256))]) + r[at + 1 :]


def _header(text: bytes) -> Change:
    return lambda r, rng: r.replace(b"\r\n", b"\r\n" + text + b"\r\n", 1)


def _length(change: Callable[[int], object]) -> Change:
    return lambda r, rng: re.sub(
        rb"\r\nContent-Length: (\d+)", lambda m: b"\r\nContent-Length: %s" % str(change(int(m[1]))).encode(), r
    )


def _json_length(change: Callable[[int], object]) -> Change:
    return lambda r, rng: re.sub(
        rb"Inference-Header-Content-Length: (\d+)",
        lambda m: b"Inference-Header-Content-Length: %s" % str(change(int(m[1]))).encode(), r,
    )  # fmt: skip


def _cut(r: bytes, rng: np.random.Generator) -> bytes:
    """The body ends early, and its length says so."""
    head, _, body = r.partition(b"\r\n\r\n")
    body = body[: int(rng.integers(0, len(body) + 1))]
    return re.sub(rb"\r\nContent-Length: \d+", b"\r\nContent-Length: %d" % len(body), head) + b"\r\n\r\n" + body


def _line(text: bytes) -> Change:
    return lambda r, rng: text + r[r.find(b"\r\n") :]


CHANGES: dict[str, Change] = {
    **{f"tensor {key}": _tensor(key) for key in ("name", "shape", "datatype", "data", "parameters")},
    **{f"top {key}": _top(key) for key in ("inputs", "id", "outputs", "parameters")},
    **{f"parameter {key}": _parameter(key) for key in ("priority", "timeout", "binary_data_output", "unknown")},
    **{f"tensor parameter {key}": _own_parameter(key) for key in ("binary_data_size", "shared_memory_region")},
    "a value": _value, "a value fewer": _fewer, "an input twice": _twice,
    "a byte of the body": _flip, "a byte of the header": _flip_head, "cut short": _cut,
    "two lengths": _header(b"Content-Length: 5"), "chunked too": _header(b"Transfer-Encoding: chunked"),
    "no header name": _header(b": x"), "a folded header": _header(b" folded"), "expect": _header(b"Expect: 200-maybe"),
    "unknown coding": _header(b"Content-Encoding: br"), "not gzip": _header(b"Content-Encoding: gzip"),
    "two hosts": _header(b"Host: other"), "a client of bytes": _header(b"X-Client-Id: \xff\xfe"),
    "no length": lambda r, rng: re.sub(rb"\r\nContent-Length: \d+", b"", r),
    "length no number": _length(lambda n: f"+{n}"), "length of two": _length(lambda n: f"{n}, {n}"),
    "json longer": _json_length(lambda n: n + 10**6), "json negative": _json_length(lambda n: -n),
    "json no number": _json_length(lambda n: f"{n}x"), "json shorter": _json_length(lambda n: n // 2),
    "no such model": _line(b"POST /v2/models/none/infer HTTP/1.1"), "no such version": _line(
        b"POST /v2/models/mlp/versions/9/infer HTTP/1.1"), "http 1.0": _line(b"POST /v2/models/mlp/infer HTTP/1.0"),
    "http 3": _line(b"POST /v2/models/mlp/infer HTTP/3.0"), "no path": _line(b"POST HTTP/1.1"),
    "an escaped name": _line(b"POST /v2/models/m%6cp/infer HTTP/1.1"), "dots": _line(
        b"POST /v2/models/../models/mlp/infer HTTP/1.1"), "get": _line(b"GET /v2/models/mlp/infer HTTP/1.1"),
    "unchanged": lambda r, rng: r,
}  # fmt: skip


async def send(port: int, request: bytes) -> tuple[str, str]:
    """Status and what is said, without what differs from one answer to the next."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_S):
            status, _, body = await exchange(reader, writer, request)
            while status == 100:
                status, _, body = await exchange(reader, writer, b"")
    except TimeoutError:
        return "waits", ""
    except (OSError, EOFError) as e:
        return type(e).__name__, ""
    finally:
        writer.close()
    said = re.sub(r"request [0-9a-f]+-[0-9a-f]+", "request …", body.decode(errors="replace")) if status != 200 else ""
    return str(status), re.sub(r"\d[\d.]* ms|\d+ requests", "#", said)


async def one(number: int, work: list[Any], seed: int, ports: list[int]) -> tuple[str, list[tuple[str, str]], bytes]:
    rng = np.random.default_rng([seed, number])
    request = work[number % len(work)].request
    names = list(CHANGES)
    chosen = [names[int(k)] for k in rng.integers(0, len(names), 1 if rng.random() < 0.7 else 2)]
    for name in chosen:
        request = CHANGES[name](request, rng)
    return " + ".join(chosen), [await send(port, request) for port in ports], request


async def main_async(args: argparse.Namespace) -> dict[str, Any]:
    options = {"port": 0, "body_timeout_s": 0.5, "header_timeout_s": 0.5, "admission": "off", "drain_s": 1.0}
    with Engine("virtual:h200") as engine:
        registry = Registry(engine, [entry_of(demo.load("mlp"))])
        short = Server(registry, ServerConfig(**options))
        await short.start()
        await short.load()
        long = Server(registry, ServerConfig(**options, access_log=True))  # with a log, aiohttp has every request
        await long.start()
        ports = [int(each.url.rpartition(":")[2]) for each in (short, long)]
        made = [w for w in requests(np.random.default_rng(args.seed), 400, "127.0.0.1") if w.model == "mlp"]
        plain = [w for w in made if b"timeout" not in w.request]
        statuses: Counter[str] = Counter()
        differing: list[dict[str, Any]] = []
        failed = by_clock = 0
        for start in range(0, args.requests, args.at_once):
            batch = range(start, min(args.requests, start + args.at_once))
            for name, found, request in await asyncio.gather(*(one(k, plain, args.seed, ports) for k in batch)):
                statuses[found[0][0]] += 1
                failed += sum(status == "500" for status, _ in found)
                if found[0] == found[1]:
                    continue
                if any("deadline passed" in said for _, said in found):  # in time on one way only
                    by_clock += 1
                else:
                    shown = {"short": found[0], "aiohttp": found[1], "request": repr(request[:600])}
                    differing.append({"change": name, **shown})
        right = await asyncio.gather(*(send(port, w.request) for w in plain[:20] for port in ports))
        await short.stop()
        await long.stop()
    by_change = Counter(each["change"] for each in differing)
    return {
        "requests": args.requests, "statuses": dict(statuses), "of_500": failed, "differ": len(differing),
        "differ_in_status": sum(each["short"][0] != each["aiohttp"][0] for each in differing),
        "in_time_on_one_way": by_clock,
        "differ_by_change": dict(by_change.most_common(20)), "examples": differing[:20],
        "right_afterwards": sum(status == "200" for status, _ in right), "of": len(right),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = asyncio.run(main_async(args))
    print(json.dumps({k: v for k, v in result.items() if k != "examples"}, indent=1))
    for each in result["examples"][:5]:
        print(each["change"], each["short"], each["aiohttp"], each["request"][:160])
    print(save("trust_malformed", result, folder=args.out))


if __name__ == "__main__":
    main()
