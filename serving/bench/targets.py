"""The load generator's view of a v2 endpoint: its models, and requests for them prepared in advance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from numpy.typing import NDArray

from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.engine.engine import Engine
from paellapy.serving.bench.arrivals import Load
from paellapy.serving.bench.client import BenchError, Endpoint, Pool
from paellapy.serving.errors import status_of
from paellapy.serving.protocol import engine_priority
from paellapy.serving.routes import model_metadata
from paellapy.serving.tensors import DTYPES, NOT_JSON

BODIES = 16  # different inputs per model, prepared in advance
SAID_BYTES = 240  # kept of an error's text
ANSWER_S = 30.0  # longest wait for a model's description
MOST_NUMBERS = 1 << 28  # in an input

Inputs = dict[str, NDArray[Any]]


class _Listed(msgspec.Struct):
    name: str
    state: str = "READY"


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Model(msgspec.Struct):
    inputs: list[_Input]


class _Text(msgspec.Struct):
    string_value: str


class _Config(msgspec.Struct):
    parameters: dict[str, _Text] = {}


class HttpTarget:
    """Any v2 endpoint. Of models that nobody has named, those that take texts are left out."""

    def __init__(self, url: str, load: Load) -> None:
        self.url, self.load = url, load
        self._endpoint = Endpoint.of(url, load.ca)
        self._pool = Pool(self._endpoint, load.connections if load.concurrency is None else load.concurrency)
        self.targets_ms: dict[str, float] = {}
        self._inputs: dict[str, list[tuple[list[dict[str, Any]], Inputs]]] = {}
        self._requests: dict[tuple[str, int, int | None, int | None], bytes] = {}

    async def prepare(self, rng: np.random.Generator) -> list[str]:
        """The names of the models to ask for."""
        names = list(self.load.models) or sorted({each.model for each in self.load.trace})
        named = bool(names)
        if not names:
            index = await self._get("POST", "/v2/repository/index", list[_Listed])
            names = [each.name for each in index if each.state == "READY"]
            if not names:
                raise BenchError(f"no model of {self.url} is ready: load one, or wait until it is loaded")
        for name in names:
            model = await self._get("GET", f"/v2/models/{quote(name, safe='')}", _Model)
            if not named and any(each.datatype == "BYTES" for each in model.inputs):
                continue
            inputs = [{"name": each.name, "datatype": each.datatype, "shape": each.shape} for each in model.inputs]
            await self._know_target(name)
            self._inputs[name] = [(inputs, made_up(name, inputs, self.load.items, rng)) for _ in range(BODIES)]
            for k in range(BODIES):
                self._request(name, k, self.load.timeout_us, self.load.priority)
        if not self._inputs:
            said = f"every model of {self.url} takes texts, which bench cannot make: {', '.join(names)}"
            raise BenchError(said, field="models", given=names)
        return list(self._inputs)

    async def _know_target(self, name: str) -> None:
        """Servers of others may not have this address, or no target there."""
        with contextlib.suppress(BenchError, KeyError, ValueError):
            config = await self._get("GET", f"/v2/models/{quote(name, safe='')}/config", _Config)
            self.targets_ms[name] = float(config.parameters["target_ms"].string_value)

    async def ask(self, name: str, k: int, timeout_us: int | None, level: int | None) -> tuple[int, str, float]:
        """Status, the text of an error, and the seconds to wait before the next request."""
        found = await self._pool.ask(self._request(name, k % BODIES, timeout_us, level), SAID_BYTES)
        if found.status == 200:
            return 200, "", 0.0
        said = found.body.decode(errors="replace")
        return found.status, said.removeprefix('{"error":"').removesuffix('"}'), found.retry_after_s

    def close(self) -> None:
        self._pool.close()

    async def _get(self, method: str, path: str, kind: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body, _ = await self._pool.ask(self._endpoint.request(method, path, headers=self.load.headers))
        except TimeoutError:
            said = f"{self.url}{path} does not answer within {ANSWER_S:.0f} s"
            raise BenchError(said, field="answer", limit=ANSWER_S) from None
        except OSError as e:
            raise BenchError(f"cannot reach {self.url}: {e}", field="url", given=self.url) from e
        if status != 200:
            said = body[:200].decode(errors="replace")
            raise BenchError(f"{self.url}{path} answered {status}: {said}", field="status", given=status)
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.ValidationError as e:
            said = f"{self.url}{path} does not answer as a v2 endpoint does: {e}"
            raise BenchError(said, field="answer", limit="v2") from None
        except NOT_JSON:
            said = f"{self.url}{path} does not answer with JSON: is it a v2 endpoint?"
            raise BenchError(said, field="answer", limit="JSON") from None

    def _request(self, name: str, k: int, timeout_us: int | None, level: int | None) -> bytes:
        key = (name, k, timeout_us, level)
        found = self._requests.get(key)
        if found is None:
            inputs, arrays = self._inputs[name][k]
            found = self._requests[key] = self._make(name, inputs, arrays, timeout_us, level)
        return found

    def _make(
        self, name: str, inputs: list[dict[str, Any]], arrays: Inputs, timeout_us: int | None, level: int | None
    ) -> bytes:
        tensors, tail = [], b""
        for each in inputs:
            array = arrays[each["name"]]
            tensor: dict[str, Any] = {"name": each["name"], "shape": list(array.shape), "datatype": each["datatype"]}
            if self.load.binary:
                tensor["parameters"] = {"binary_data_size": array.nbytes}
                tail += array.tobytes()
            else:
                numbers = array if array.dtype.kind in "biu" else array.astype(np.float32)
                tensor["data"] = numbers.reshape(-1).tolist()
            tensors.append(tensor)
        parameters: dict[str, Any] = {"binary_data_output": self.load.binary}
        if timeout_us is not None:
            parameters["timeout"] = timeout_us
        if level is not None:
            parameters["priority"] = level
        header = json.dumps({"inputs": tensors, "parameters": parameters}).encode()
        headers = {**self.load.headers, "Content-Type": "application/json"}
        if self.load.binary:
            headers |= {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
        path = f"/v2/models/{quote(name, safe='')}/infer"
        return self._endpoint.request("POST", path, header + tail, headers)


def made_up(model: str, inputs: list[dict[str, Any]], items: int, rng: np.random.Generator) -> Inputs:
    """Random numbers from 0 to 1 for inputs described by a model's metadata."""
    found = {}
    for each in inputs:
        if each["datatype"] not in DTYPES:
            said = f"model {model!r}, input {each['name']!r}: cannot make random {each['datatype']} values"
            raise BenchError(said, field="datatype", limit=list(DTYPES), given=each["datatype"])
        shape = [items if extent < 0 else extent for extent in each["shape"]]
        if math.prod(shape) > MOST_NUMBERS:
            said = f"model {model!r}, input {each['name']!r}: the shape {shape} is too large for random data"
            raise BenchError(said, field="shape", limit=MOST_NUMBERS, given=shape)
        dtype = DTYPES[each["datatype"]]
        values = rng.random(shape) if dtype.kind not in "biu" else rng.integers(0, 2, shape)
        found[each["name"]] = np.asarray(values).astype(dtype)
    return found


# The load generator on an engine in this process: the same workload without HTTP, on a real or a virtual GPU.


class EngineTarget:
    """An engine with loaded models. Each request is one item."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self.url, self.load = f"engine on {engine.device.name}, {engine.policy}", load
        self._engine = engine
        self.targets_ms = {name: m.target_ms for name, m in engine.models.items() if m.target_ms is not None}
        self._inputs: dict[str, list[Inputs]] = {}

    async def prepare(self, rng: np.random.Generator) -> list[str]:
        models = self._engine.models
        names = list(self.load.models) or sorted({each.model for each in self.load.trace}) or list(models)
        if unknown := [name for name in names if name not in models]:
            said = f"the engine has no model {', '.join(unknown)}; it has {', '.join(models) or 'none'}"
            raise BenchError(said, field="models", limit=list(models), given=unknown)
        if self.load.items != 1:
            said = "an engine takes one item per request: leave items at 1"
            raise BenchError(said, field="items", limit=1, given=self.load.items)
        for name in names:
            inputs = model_metadata(models[name])["inputs"]
            made = [made_up(name, inputs, 1, rng) for _ in range(BODIES)]
            self._inputs[name] = [{key: array[0] for key, array in each.items()} for each in made]
            await self._engine.infer(name, self._inputs[name][0])  # compiles before the measurement
        return names

    async def ask(self, name: str, k: int, timeout_us: int | None, level: int | None) -> tuple[int, str, float]:
        deadline_ms = None if timeout_us is None else timeout_us * 1e-3
        priority = engine_priority(self._engine.models[name].priority, level)
        try:
            await self._engine.infer(name, self._inputs[name][k % BODIES], deadline_ms, priority)
        except PaellaError as e:
            return status_of(e)[0], str(e)[:240], 0.0
        return 200, "", 0.0

    def close(self) -> None:
        """Does nothing: the caller owns the engine."""
