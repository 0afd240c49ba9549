"""Serving from Python: `serve(models, …)`. This module is light to import: the first call imports aiohttp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paellapy.scheduler.models.model import Model
    from paellapy.serving.config import Config, Source


def serve(
    models: Iterable[Model] | str | Path,
    *,
    workers: int | None = None,
    announce: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serves models over HTTP until the process is told to stop.

        pp.serve([model], device="auto", policy="edf", server={"port": 9000}, keys={"alice": "…"})
        pp.serve("config.toml", server={"port": 9000})

    Instead of models you can give the path of a configuration file. The keyword options have the names of its settings
    and override them. `workers` is the number of HTTP processes in front of the engine, which then runs in a process of
    its own; 0 runs everything in this process. `announce` is called with the URL once every model is loaded.
    """
    from paellapy.serving.config import Source, load_config

    server = options.get("server", {})
    if not isinstance(server, Mapping):
        kind = type(server).__name__
        raise Source().error(("server",), f'the value is of type {kind}: give a dict, as in server={{"port": 9000}}')
    if workers is not None:
        options["server"] = {**server, "workers": workers}
    if isinstance(models, str | Path):
        config, source = load_config(models, options=options)
        serve_config(config, source, announce=announce)
    else:
        config, source = load_config(options=options)
        serve_config(config, source, models=list(models), announce=announce)


def serve_config(
    config: Config, source: Source, *, models: Iterable[Model] = (), announce: Callable[[str], None] | None = None
) -> None:
    """Serves the models of a configuration, and beside them models that already exist."""
    from paellapy.serving.listening import notify
    from paellapy.serving.logs import configure, log, own_process

    with own_process():
        configure(config.server.log_format, config.server.log_level, file=config.server.log_file)
        log.info("starting", extra={"fields": {"device": config.device, "policy": config.policy}})

        def ready(url: str) -> None:
            notify("READY=1")
            if announce is not None:
                announce(url)

        _serve(config, source, models, ready)


def _serve(
    config: Config, source: Source, models: Iterable[Model], announce: Callable[[str], None] | None
) -> None:
    from paellapy.serving.build import build_engine, build_entries, build_keys, build_pipelines, build_tls
    from paellapy.serving.preflight import check_machine
    from paellapy.serving.registry import Registry, entry_of
    from paellapy.serving.reload import Reloader, noted
    from paellapy.serving.server import Server, run_server, warn_of_neighbours

    if config.server.log_format == "json":
        os.environ.setdefault("PAELLAPY_QUIET", "1")  # progress lines on standard error are not JSON
    check_machine()
    if config.server.workers:
        from paellapy.serving.workers.worker import serve_workers

        serve_workers(config, source, list(models), announce)
        return
    entries = [entry_of(model) for model in models]
    if config.models or not entries:
        entries += build_entries(config, source)
    entries += build_pipelines(config, source, entries)
    keys, tls = build_keys(config, source), build_tls(config, source)
    engine = build_engine(config, source)
    registry = Registry(engine, entries)
    warn_of_neighbours(config.server, keys)

    def server() -> Server:
        made = Server(registry, config.server, keys, tls)
        made.reloader = Reloader(registry, config, source, made.take_secrets)
        return made

    with noted(source, config):
        run_server(engine, server, config.server, announce)


__all__ = ["serve", "serve_config"]
