"""Servers of others with one model, a look-up in a table, for `trust.py`. Runs without paellapy.

    pip install litserve nvidia-pytriton numpy; python benchmarks/other_servers.py lit | triton
    python benchmarks/other_servers.py which       says which of them are installed

nvidia-pytriton brings Triton's own server with the backend for Python; it needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

TABLE = np.repeat(np.arange(64, dtype=np.float32)[:, None], 32, axis=1)
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "i" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 32 ] } ]
instance_group [ { kind: KIND_CPU } ]
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as utils

class TritonPythonModel:
    def initialize(self, args):
        self.table = np.repeat(np.arange(64, dtype=np.float32)[:, None], 32, axis=1)

    def execute(self, requests):
        rows = [utils.get_input_tensor_by_name(each, "i").as_numpy()[:, 0] for each in requests]
        return [utils.InferenceResponse([utils.Tensor("y", self.table[each])]) for each in rows]
"""

if find_spec("litserve") is not None:
    import litserve

    class Lookup(litserve.LitAPI):
        def setup(self, device: str) -> None:
            self.table = TABLE

        def predict(self, request: Any) -> Any:
            return {"y": self.table[int(request["input"])].tolist()}


def lit(port: int) -> None:
    server = litserve.LitServer(Lookup(), accelerator="cpu", healthcheck_path="/health")
    server.run(host="127.0.0.1", port=port, generate_client_file=False)


def triton(port: int) -> None:
    """Becomes Triton's server."""
    (home,) = find_spec("pytriton").submodule_search_locations
    server, folder = Path(home) / "tritonserver", Path(tempfile.mkdtemp(prefix="triton-"))
    model = folder / "models" / "lookup"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.py").write_text(MODEL)
    backend = shutil.copytree(server / "backends" / "python", folder / "backends" / "python")
    stubs = server / "python_backend_stubs" / f"3.{sys.version_info.minor}"
    shutil.copy(stubs / "triton_python_backend_stub", backend)
    libraries = [str(Path(home).parent / "nvidia_pytriton.libs"), sysconfig.get_config_var("LIBDIR")]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    options = {"model-repository": model.parent, "backend-directory": folder / "backends", "http-address": "127.0.0.1",
               "http-port": port, "allow-grpc": "false", "allow-metrics": "false", "log-error": "false"}  # fmt: skip
    command = ["tritonserver", *(f"--{name}={value}" for name, value in options.items())]
    environment = os.environ | {"PATH": path, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    os.execve(server / "bin" / "tritonserver", command, environment)


def main(which: str) -> None:
    if which == "which":
        print(*(name for name, module in {"lit": "litserve", "triton": "pytriton"}.items() if find_spec(module)))
        return
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    {"lit": lit, "triton": triton}[which](port)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["lit", "triton", "which"])
    main(parser.parse_args().which)
