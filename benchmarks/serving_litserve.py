"""LitServe with the model of serving_compare.py, which returns its input. Runs in its own environment.

    python serving_litserve.py PORT [--fast-queue]

LitServe takes JSON bodies (or forms), so tensors come as lists of numbers, or as base64 text if they are large.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import litserve as ls
import numpy as np


class Echo(ls.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request):  # without a type, which LitServe would take for that of the body
        tensor = request["inputs"][0]
        if isinstance(tensor["data"], str):
            return np.frombuffer(base64.b64decode(tensor["data"]), np.float32).reshape(tensor["shape"]), True
        return np.array(tensor["data"], np.float32).reshape(tensor["shape"]), False

    def predict(self, x: tuple[np.ndarray, bool]) -> tuple[np.ndarray, bool]:
        return x[0].copy(), x[1]

    def encode_response(self, output: tuple[np.ndarray, bool]) -> dict[str, Any]:
        y, text = output
        data = base64.b64encode(y.tobytes()).decode() if text else y.reshape(-1).tolist()
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": list(y.shape), "data": data}]}


if __name__ == "__main__":
    apis = [Echo(api_path=f"/v2/models/{name}/infer") for name in ("small", "large")]
    server = ls.LitServer(apis, accelerator="cpu", fast_queue="--fast-queue" in sys.argv, timeout=60)
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="error", access_log=False)
