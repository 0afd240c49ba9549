"""One engine of a cluster as a process: `python -m paellapy.cluster.engine_process '{…}'`, as its actor starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from paellapy.serving.api import serve_config
from paellapy.serving.config import Source, load_config


class EngineTask(msgspec.Struct, kw_only=True):
    """What the process is told. `loaded`: models to have from the start; the others wait for a plan."""

    config: dict[str, Any]
    names: list[str]  # of the models, in the configuration's order
    loaded: list[str]
    folder: str
    host: str
    port: int


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=EngineTask)
    models = [
        {**each, "name": name, "load": name in task.loaded}
        for each, name in zip(task.config["models"], task.names, strict=True)
    ]
    server = {**task.config.get("server", {}), "host": task.host, "port": task.port, "model_control": True}
    tree = {**task.config, "models": models, "server": server}
    config, _ = load_config(defaults=tree)
    serve_config(config, Source(str(Path(task.folder) / "cluster.toml")))


if __name__ == "__main__":
    main()
