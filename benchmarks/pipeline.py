"""A pipeline of three models against three HTTP calls, each of which sends on what the one before answered.

    python benchmarks/pipeline.py [--device virtual:h200] [--seconds 5]

One client on one connection, tensors in binary; both ways take turns. The models are the parts of a CNN: a filter that
returns an image, a trunk, a head. In the pipeline, their values stay on the GPU.
"""

from __future__ import annotations

import http.client
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from harness import ServerProcess, announce, arguments, finish
from models import settle
from numpy.typing import NDArray

import paellapy as pp

NAMES = ("clean", "trunk", "head")
GIVES = ("image", "features", "scores")
AIM = 0.6


def models(small: bool) -> list[pp.Model]:
    """Three models, each of which takes what the one before gives."""
    width, pixels = (8, 32) if small else (64, 224)
    if small:
        pooled = [torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
        trunk: torch.nn.Module = torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, 2), *pooled)
    else:
        from torchvision.models import resnet18

        net = resnet18()
        net.fc, width = torch.nn.Identity(), 512
        trunk = settle(net, (3, pixels, pixels), "cpu")
    head = torch.nn.Sequential(torch.nn.Linear(width, 1000), torch.nn.Softmax(1))
    nets = [torch.nn.Conv2d(3, 3, 5, padding=2), trunk, head]
    takes, given, made = "pixels", torch.zeros(1, 3, pixels, pixels), []
    for name, net, gives in zip(NAMES, nets, GIVES, strict=True):
        made.append(pp.Model.from_torch(Named(net, gives), given, name=name, input_names=[takes], batch=(1, 4)))
        with torch.no_grad():
            given, takes = net(given), gives
    return made


class Named(torch.nn.Module):
    """A module whose result has a name."""

    def __init__(self, net: torch.nn.Module, gives: str) -> None:
        super().__init__()
        self.net, self.gives = net, gives

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {self.gives: self.net(x)}


class Client:
    def __init__(self, url: str) -> None:
        self._line = http.client.HTTPConnection(url.removeprefix("http://"))

    def ask(self, model: str, name: str, x: NDArray[Any]) -> NDArray[Any]:
        """The first output."""
        binary = {"binary_data_size": x.nbytes}
        tensor = {"name": name, "datatype": "FP32", "shape": [1, *x.shape], "parameters": binary}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        self._line.request("POST", f"/v2/models/{model}/infer", head + x.tobytes(), headers)
        answer = self._line.getresponse()
        said = answer.read()
        assert answer.status == 200, said
        at = int(answer.headers["Inference-Header-Content-Length"])
        (out,) = json.loads(said[:at])["outputs"]
        return np.frombuffer(said, np.float32, offset=at).reshape(out["shape"][1:])

    def three(self, x: NDArray[Any]) -> NDArray[Any]:
        for name, takes in zip(NAMES, ("pixels", *GIVES), strict=False):
            x = self.ask(name, takes, x)
        return x

    def pipeline(self, x: NDArray[Any]) -> NDArray[Any]:
        return self.ask("all", "pixels", x)


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=5.0)
    parser.add_argument("--serve", action="store_true", help="serve the models")
    o = parser.parse_args()
    small = o.device.startswith("virtual")
    if o.serve:
        made = models(small)
        pp.serve([*made, pp.Pipeline("all", made)], device=o.device, server={"port": 0, "log_level": "warning"},
                 announce=announce)  # fmt: skip
        return
    x = np.random.default_rng(0).standard_normal((3, 32, 32) if small else (3, 224, 224)).astype(np.float32)
    took: dict[str, list[float]] = {"three calls": [], "pipeline": []}
    with ServerProcess(__file__, "--device", o.device, "--serve") as server:
        client = Client(server.url)
        ways = dict(zip(took, (client.three, client.pipeline), strict=True))
        wanted = client.three(x)
        end = time.perf_counter() + o.seconds
        while time.perf_counter() < end:
            for name, way in ways.items():
                since = time.perf_counter()
                found = way(x)
                took[name].append((time.perf_counter() - since) * 1e3)
                np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)
    p50 = {name: statistics.median(ms[len(ms) // 10 :]) for name, ms in took.items()}
    p99 = {name: float(np.quantile(ms[len(ms) // 10 :], 0.99)) for name, ms in took.items()}
    rows: list[Any] = [("way", "p50, ms", "p99, ms", f"÷ three calls (aim {AIM})")]
    rows += [(name, f"{p50[name]:.2f}", f"{p99[name]:.2f}", f"{p50[name] / p50['three calls']:.2f}") for name in took]
    from paellapy.instrument.device import Device

    finish(o, "pipeline", {"p50_ms": p50, "p99_ms": p99, "requests": len(took["pipeline"])}, "Three models", rows,
           Device.open(o.device))  # fmt: skip


if __name__ == "__main__":
    main()
