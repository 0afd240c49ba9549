"""One engine of a cluster as a process: `python -m paellapy.cluster.engine_process`, started by its actor.

A standby has imported its modules and read compiled code from the disk before it is needed. It has not opened the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from paellapy.cluster.cluster_file import EngineTask, taken
from paellapy.serving.api import serve_config
from paellapy.serving.build import build_policy
from paellapy.serving.config import Config, Source, load_config
from paellapy.serving.loading import import_device, warm_up


def _config(task: EngineTask) -> Config:
    models = [
        {**each, "name": name, "load": name in task.loaded}
        for each, name in zip(task.config["models"], task.names, strict=True)
    ]
    server = {**task.config.get("server", {}), "host": task.host, "port": task.port, "model_control": True}
    tree: dict[str, Any] = {**task.config, "models": models, "server": server}
    return load_config(defaults=tree)[0]


def main() -> None:
    task = taken(EngineTask)
    source = Source(str(Path(task.folder) / "cluster.toml"))
    config = _config(task)
    if task.waits:
        warm_up(build_policy(config, source))
        import_device(config.device)
        line = sys.stdin.buffer.readline()
        if not line:  # its actor no longer needs it
            return
        task.loaded = msgspec.json.decode(line, type=list[str])
        config = _config(task)
    serve_config(config, source)


if __name__ == "__main__":
    main()
