"""A server under test: its processes, its models with reference functions, and requests whose answers can be
checked.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paellapy import demo
from paellapy.demo.reference import forward

CLOSE = 2e-3  # of scores between 0 and 1, in single precision
TARGETS_MS = {"mlp": 50.0, "cnn": 100.0, "transformer": 200.0}
TABLE = 64  # rows of `lookup`, which does not check its index

CONFIG = """
device = "{device}"
[server]
host = "127.0.0.1"
port = 0
workers = {workers}
model_control = true
engine_timeout_s = 2.0
log_format = "json"
{server}
[[models]]
name = "lookup"
factory = "lookup_model:model"
"""
MODEL = """
[[models]]
factory = "paellapy.demo:load"
arguments = {{ name = "{name}" }}
target_ms = {target_ms}
"""
LOOKUP = """
import numpy as np
import paellapy as pp
import triton
import triton.language as tl

@pp.kernel
@triton.jit
def look_up(index, table, out, B: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, B)
    tl.store(out + row * B + i, tl.load(table + tl.load(index + row) * B + i))

def model():
    def fn(weights, inputs, outputs):
        look_up[(inputs["i"].shape[0],)](inputs["i"], weights["table"], outputs["y"], B=32)

    table = np.repeat(np.arange({rows}, dtype=np.float32)[:, None], 32, axis=1)
    return pp.Model("lookup", fn, inputs={{"i": pp.TensorSpec((1,), np.int64{bounds})}},
                    outputs={{"y": pp.TensorSpec((32,))}}, weights={{"table": table}}, batch=(1, 4))
"""


class Served:
    """`paellapy serve` with workers, in a folder of its own."""

    def __init__(self, process: subprocess.Popen[str], url: str, folder: Path, log: Path) -> None:
        self.process, self.url, self.folder, self.log = process, url, folder, log
        self.port = int(url.rpartition(":")[2])
        self.harmed_at = 0.0  # when a fault began: recoveries are measured from here

    @property
    def config(self) -> Path:
        return self.folder / "trust.toml"

    def children(self, ended: bool = False) -> dict[str, list[int]]:
        """The numbers of the server's processes, by their names: engine, work1, …

        The system needs seconds to clean up after a process with a real GPU. Such a process has ended: it keeps its
        name but has no command line any more. It counts only with `ended`.
        """
        found: dict[str, list[int]] = {}
        for each in Path("/proc").iterdir():
            with contextlib.suppress(OSError, IndexError, ValueError):
                ours = each.name.isdigit() and _parent(int(each.name)) == self.process.pid
                if ours and (ended or (each / "cmdline").read_bytes()):
                    name = (each / "comm").read_text().strip().removeprefix("paellapy-")
                    found.setdefault(name, []).append(int(each.name))
        return found

    def has_standby(self) -> bool:
        """Whether the latest process that stands by has loaded what it is to have."""
        said = [json.loads(each) for each in self.log.read_text().splitlines() if each.endswith("}")]
        ready = [each["pid"] for each in said if each["message"] == "a standby is ready"]
        return bool(ready) and ready[-1:] == self.children().get("spare")

    def pids(self) -> list[int]:
        return [self.process.pid, *(pid for pids in self.children().values() for pid in pids)]

    def memory_bytes(self) -> int:
        """Private memory of all its processes: what they share is counted by none."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += sum(int(kb) << 10 for kb in re.findall(r"^Private_\w+:\s+(\d+)", text, re.M))
        return total

    def descriptors(self) -> int:
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += len(os.listdir(f"/proc/{pid}/fd"))
        return total


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def served(device: str, workers: int = 2, ranges: bool = False, more: str = "") -> Iterator[Served]:
    """Up and loaded. `ranges`: the lookup's index has a range that is checked; `more`: settings under [server]."""
    with tempfile.TemporaryDirectory(prefix="trust-") as name:
        folder = Path(name)
        models = "".join(MODEL.format(name=each, target_ms=TARGETS_MS[each]) for each in demo.names())
        (folder / "trust.toml").write_text(CONFIG.format(device=device, workers=workers, server=more) + models)
        bounds = f", low=0, high={TABLE - 1}" if ranges else ""
        (folder / "lookup_model.py").write_text(LOOKUP.format(rows=TABLE, bounds=bounds))
        log = folder / "log"
        command = [sys.executable, "-m", "paellapy", "serve", str(folder / "trust.toml")]
        environment = {**os.environ, "XDG_RUNTIME_DIR": name}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, env=environment)
        try:
            yield Served(process, _wait(process, log, workers), folder, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(process: subprocess.Popen[Any], log: Path, workers: int) -> str:
    while True:
        assert process.poll() is None, log.read_text()
        lines = [json.loads(each) for each in log.read_text().splitlines() if each.endswith("}")]
        url = next((each["url"] for each in lines if each["message"] == "listening"), None)
        if url is not None and sum(each["message"] == "loaded" for each in lines) == len(demo.names()) + 1:
            return str(url)
        time.sleep(0.1)


# -- requests


@dataclass(frozen=True, slots=True)
class Checked:
    """A request as bytes, and the answer it must get."""

    model: str
    kind: str
    request: bytes
    output: str
    expected: Any  # [items, …]

    def is_right(self, header: bytes, body: bytes) -> bool:
        """Of an answer with status 200."""
        length = re.search(rb"\r\ninference-header-content-length: (\d+)", header)
        if b"\r\ncontent-encoding: gzip" in header:
            body = gzip.decompress(body)
        told = msgspec.json.decode(body if length is None else body[: int(length[1])])
        output = told["outputs"][0]
        if length is None:
            found = np.array(output["data"], np.float32)
        else:
            found = np.frombuffer(body[int(length[1]) :], np.float32)
        if output["name"] != self.output or found.size != self.expected.size:
            return False
        return bool(np.abs(found.reshape(self.expected.shape) - self.expected).max() < CLOSE)


def requests(rng: np.random.Generator, count: int, host: str) -> list[Checked]:
    """Of all models, sizes, encodings, priorities and deadlines."""
    images, _ = demo.held_out()
    scores = {name: forward(name, demo.load_weights(name), images) for name in demo.names()}
    made = []
    for _ in range(count):
        model = str(rng.choice(["lookup", *demo.names()], p=[0.25, 0.45, 0.2, 0.1]))
        items = int(rng.choice([1, 2, 4], p=[0.7, 0.2, 0.1]))
        kind = str(rng.choice(["json", "binary", "gzip", "closing", "answer-gzip"], p=[0.35, 0.45, 0.08, 0.04, 0.08]))
        parameters: dict[str, Any] = {}
        if rng.random() < 0.2:
            parameters["priority"] = int(rng.integers(0, 20))
        if rng.random() < 0.2:
            parameters["timeout"] = int(rng.choice([500, 50_000, 5_000_000]))
        if model == "lookup":
            values = rng.integers(0, TABLE, (items, 1))
            tensor = {"name": "i", "shape": [items, 1], "datatype": "INT64"}
            output, expected = "y", np.repeat(values.astype(np.float32), 32, axis=1)
        else:
            which = rng.integers(0, len(images), items)
            values = images[which]
            tensor = {"name": "image", "shape": list(values.shape), "datatype": "FP32"}
            output, expected = "scores", scores[model][which]
        made.append(Checked(model, kind, _bytes(model, kind, tensor, values, parameters, host), output, expected))
    return made


def _bytes(model: str, kind: str, tensor: dict[str, Any], values: Any, parameters: dict[str, Any], host: str) -> bytes:
    headers = [f"POST /v2/models/{model}/infer HTTP/1.1", f"Host: {host}"]
    if kind == "binary":
        tensor = {**tensor, "parameters": {"binary_data_size": values.nbytes}}
        head = json.dumps({"inputs": [tensor], "parameters": {**parameters, "binary_data_output": True}}).encode()
        headers.append(f"Inference-Header-Content-Length: {len(head)}")
        body = head + values.tobytes()
    else:
        tensor = {**tensor, "data": values.reshape(-1).tolist()}
        body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    if kind == "gzip":
        body = gzip.compress(body, 1)
        headers.append("Content-Encoding: gzip")
    if kind == "closing":
        headers.append("Connection: close")
    if kind == "answer-gzip":
        headers.append("Accept-Encoding: gzip")
    headers += [f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(headers).encode() + body
