"""A cluster's engines and routers as deployments of Ray Serve.

Serve places replicas, starts them again, drains them and rolls changes through. Requests never pass through it: each
engine writes its address to Ray's store, and routers read there which engines there are.

This module imports little, so that replicas start quickly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
import urllib.error
from typing import Any

import ray
from ray import serve
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put

from paellapy.cluster.processes import EngineTask, RouterTask, answers, ask, free_port, kept
from paellapy.serving.logs import configure, log
from paellapy.serving.workers.keeper import Kept

read, keys, forget = _internal_kv_get, _internal_kv_list, _internal_kv_del  # of Ray's store

ENGINES, DRAINS = b"paellapy-engine:", b"paellapy-drain:"
FEED_S = 0.1
LOAD_S = 600.0
ALONE_S = 15.0  # an engine waits so long for another replica when its own has ended
ALONE_ANSWER_S = 0.5
MOST_STARTS = 3  # of a server that never answers


def engines() -> dict[str, str]:
    """Addresses of engines in Ray's store, by name. Those that were left behind are removed: their replica has ended,
    and they do not answer.
    """
    found = {key: read(key) for key in keys(ENGINES)}
    # Looked up after the entries: who has an entry was there before
    alive = {each["name"].rpartition("#")[2] for each in ray.util.list_named_actors(all_namespaces=True)}
    urls: dict[str, str] = {}
    for key, value in found.items():
        replica, _, url = (value or b"").decode().partition(" ")
        if replica in alive or (url and answers(url + "/v2/health/live", ALONE_ANSWER_S)):
            urls[key.removeprefix(ENGINES).decode()] = url
        else:
            forget(key)
    return urls


def write(key: bytes, value: bytes) -> None:
    _internal_kv_put(key, value, overwrite=True)


def _replica_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


class EngineReplica:
    """A server on the GPU that Ray has assigned, with a keeper that forks it again when it ends or falls silent.

    If a replica's process is lost, its server goes on, and the replica that Serve starts in its place adopts it.
    """

    def __init__(self, task: dict[str, Any], key: str | None, host: str | None, ready_s: float) -> None:
        configure("text", "info")
        host, self._replica = host or str(ray.util.get_node_ip_address()), _replica_id()
        self._task = EngineTask(
            **task, loaded=[], host=host, port=free_port(host), name=f"engine-{self._replica}",
            gpus=",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", [])), alone_s=ALONE_S,
        )  # fmt: skip
        self._key, self._ready_s = key, ready_s
        self._kept: Kept | None = None
        self._leaving: threading.Thread | None = None

    async def reconfigure(self, config: dict[str, list[str]]) -> None:
        """Called after the start, and when a plan changes the models: they are loaded before others are unloaded."""
        await asyncio.to_thread(self._start if self._kept is None else self._change, config["models"])

    @property
    def _url(self) -> str:
        return f"http://{self._task.host}:{self._task.port}"

    @property
    def _entry(self) -> bytes:
        return ENGINES + self._task.name.encode()

    def _start(self, models: list[str]) -> None:
        self._task.loaded = models
        self._kept = found = kept(self._task)
        self._task = found.task
        until = time.monotonic() + self._ready_s
        while not answers(self._url + "/v2/health/ready"):
            ends = found.ended or (not found.health.alive and found.health.starts > MOST_STARTS)
            if ends or time.monotonic() > until:
                found.end(0.0)
                late, ended = f"was not ready within ready_s = {self._ready_s:g}", "ended: see this replica's log"
                raise RuntimeError(f"the engine's server {ended if ends else late}")
            time.sleep(0.05)
        write(self._entry, f"{self._replica} {self._url}".encode())
        if found.adopted:
            self._change(models)

    def _change(self, models: list[str]) -> None:
        assert self._kept is not None
        self._kept.tell(loaded=models)
        ready = set(self._predicted_s())
        for name in [*(set(models) - ready), *(ready - set(models))]:
            what = "load" if name in models else "unload"
            try:
                ask(f"{self._url}/v2/repository/models/{name}/{what}", self._key, b"{}", LOAD_S)
            except urllib.error.HTTPError as e:
                fields = {"engine": self._task.name, "model": name, "why": e.read().decode()}
                log.error("a model could not be moved", extra={"fields": fields})
                return  # those it has stay

    def _predicted_s(self) -> dict[str, float]:
        """For each loaded model, the seconds that a new request would take."""
        models = json.loads(ask(self._url + "/v2/outlook", self._key))["models"]
        return {name: each["predicted_ms"] * 1e-3 for name, each in models.items() if each["state"] == "READY"}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return await asyncio.to_thread(self._predicted_s)

    def check_health(self) -> None:
        """Also looks whether it has to leave (`paellapy cluster drain`)."""
        if self._leaving is None and read(DRAINS + self._task.name.encode()):
            self._leaving = threading.Thread(target=self.leave)
            self._leaving.start()
        if self._kept is not None and self._kept.ended:
            raise RuntimeError("the engine's keeper has ended")

    def leave(self) -> None:
        """Routers forget the engine, then it finishes its requests."""
        forget(self._entry)
        time.sleep(2 * FEED_S)
        if self._kept is not None:
            self._kept.end()

    def __del__(self) -> None:  # Serve calls it when a replica has to go
        self.leave()


class RouterReplica:
    """A router with a keeper. Routers of one machine share the port, and the kernel spreads connections over them."""

    def __init__(self, options: dict[str, Any], models: list[str]) -> None:
        configure("text", "warning")
        self._drain_s = options["drain_s"]
        self._socket = _shared_socket(options["host"], options["port"])
        fd = self._socket.fileno()
        self._kept = kept(RouterTask(engines={}, options=options, models=models, descriptors=[fd], waits=True), [fd])
        threading.Thread(target=self._feed, daemon=True).start()

    def _feed(self) -> None:
        """Tells the router of every change of the engines. While Ray's store is away, it keeps those it knows."""
        known: dict[str, str] = {}
        while not self._kept.ended:
            with contextlib.suppress(Exception):
                if (found := engines()) != known:
                    known = found
                    self._kept.tell(engines=known)
            time.sleep(FEED_S)

    def check_health(self) -> None:
        if self._kept.ended:
            raise RuntimeError("the router's keeper has ended")

    def __del__(self) -> None:
        self._socket.close()
        self._kept.end(self._drain_s + 4.0)


def _shared_socket(host: str, port: int) -> socket.socket:
    """A socket that joins those on a port; a router listens with it once it has heard its engines."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, proto)
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        found.setsockopt(socket.SOL_SOCKET, option, 1)
    found.bind(address)
    return found


class PredictedFinish:
    """Serve's rule for the number of replicas: in proportion to the predicted time of a new request, where that is
    longest. One engine leaves at a time, since predictions of a few milliseconds say little.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        # Texts have no prediction: 0
        engines = (context.aggregated_metrics or {}).values()
        soonest = [min(filter(None, each.values()), default=0.0) for each in engines]
        now = context.current_num_replicas
        wanted = math.ceil(now * max(soonest, default=0.0) / self._target_s)
        return min(max(wanted, now - 1, 1), 2 * max(now, 1)), {}
