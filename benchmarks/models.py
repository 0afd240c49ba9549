"""Models of the benchmarks: torchvision's CNNs, a BERT-sized encoder, chains bound by one resource, tiny ones for CPUs.

A chain has the limit of its kernels in its name:

* `memory_bound`: multiples of a vector that no cache holds. Its kernel runs on SMs configured for much shared memory,
  as the next one does: an SM with another configuration runs only one of the two at a time;
* `compute_bound`: products of matrices that stay on the SM. Its one block on each SM leaves half of the places free;
* `full_bound`: products by cuBLAS, whose blocks take all registers of an SM on Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

import paellapy as pp
from paellapy.scheduler.backends.contention_probe import prefer_shared

VARIANTS = 4  # different inputs per model


class Encoder(torch.nn.Module):
    """A transformer encoder over word numbers: BERT's shape with `layers`, without its trained weights."""

    def __init__(self, layers: int, width: int = 768, heads: int = 12, words: int = 30522, length: int = 128) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.place = torch.nn.Parameter(torch.randn(length, width) * 0.02)
        layer = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(words) + self.place)[:, 0])


class Tiny(torch.nn.Module):
    """A CNN small enough for a CPU: shows that everything runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, width, 3, 2), torch.nn.ReLU(), torch.nn.Conv2d(width, width, 3, 2), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


@dataclass(frozen=True, slots=True)
class Kind:
    """A model by name, what its requests look like, and how often it is asked for."""

    name: str
    share: float = 0.0
    items: int = 1  # images of one request: a best-effort job is a batch by itself

    def build(self, device: str) -> torch.nn.Module:
        torch.manual_seed(sum(self.name.encode()))
        if self.name.startswith("tiny"):
            net: torch.nn.Module = Tiny(8 * int(self.name[4:]))
        elif self.name in ("bert", "distilbert"):
            net = Encoder(12 if self.name == "bert" else 6)
        else:
            import torchvision

            extra = {"init_weights": False, "aux_logits": True} if self.name in ("googlenet", "inception_v3") else {}
            net = getattr(torchvision.models, self.name)(weights=None, **extra)
        net = settle(net.to(device), self.image, device)
        if self.items == 1:
            return net
        return Resident(net, torch.randn(self.items, *self.image, device=device)).eval()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one request."""
        return self.image if self.items == 1 else (1,)

    @property
    def image(self) -> tuple[int, ...]:
        if self.words:
            return (128,)
        side = 32 if self.name.startswith("tiny") else 299 if self.name == "inception_v3" else 224
        return (3, side, side)

    @property
    def words(self) -> bool:
        return "bert" in self.name

    def inputs(self) -> NDArray[Any]:
        rng = np.random.default_rng(len(self.name))
        shape = (VARIANTS, *self.shape)
        return rng.integers(0, 30522, shape) if self.words else rng.standard_normal(shape).astype(np.float16)

    def model(self, batch: tuple[int, ...], instances: int, priority: int, device: str) -> pp.Model:
        # Built where it will run: it is tried once on its example, which takes minutes for large batches on a CPU.
        example = torch.zeros((1, *self.shape), dtype=torch.int64 if self.words else torch.float32)
        net, about = self.build(device), {"batch": batch, "instances": instances, "priority": priority}
        if self.words:
            return pp.Model.from_torch(net.to(torch.float16), example, name=self.label, **about)
        return pp.Model.from_torch(net, example, name=self.label, dtype=torch.float16, channels_last=True, **about)

    @property
    def label(self) -> str:
        return self.name if self.items == 1 else f"{self.name} x{self.items}"

    def expected(self, device: str) -> tuple[NDArray[Any], float]:
        """What the module computes when it is simply called, in eager mode; and how far fp32 is from that."""
        net = self.build(device)
        x = torch.from_numpy(self.inputs()).to(device)
        with torch.no_grad():
            full = np.stack([net(each[None] if self.words else each[None].float())[0].cpu().numpy() for each in x])
            net = net.to(torch.float16)
            if not self.words:
                net = net.to(memory_format=torch.channels_last)
            if x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            rows = [net(each[None])[0].float().cpu().numpy() for each in x]
        found = np.stack(rows)
        return found, float(np.abs(found - full).max())


def settle(net: torch.nn.Module, shape: tuple[int, ...], device: str) -> torch.nn.Module:
    """Batch norms that have seen data, as trained ones have: with their initial values resnet152 overflows in fp16."""
    norms = [each for each in net.modules() if isinstance(each, torch.nn.BatchNorm2d)]
    for each in norms:
        each.momentum = None  # the mean over all it has seen
    if norms:
        with torch.no_grad():
            net.train()(torch.randn(4, *shape, device=device))
    return net.eval()


class Resident(torch.nn.Module):
    """A batch whose images lie on the GPU, as those of offline work do; a request brings a number to add to them.

    Sent along, 64 images would take the host longer to copy than the GPU to compute.
    """

    def __init__(self, net: torch.nn.Module, images: torch.Tensor) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("images", images)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = (self.images + 0.1 * x[:, :, None, None, None]).flatten(0, 1)
        return self.net(shifted.contiguous(memory_format=torch.channels_last)).unflatten(0, (len(x), -1))


FIG11 = (
    Kind("resnet18", 0.272), Kind("mobilenet_v2", 0.257), Kind("resnet34", 0.168), Kind("squeezenet1_1", 0.0895),
    Kind("resnet50", 0.0745), Kind("densenet121", 0.0706), Kind("googlenet", 0.0546), Kind("inception_v3", 0.0138),
)  # fmt: skip
DISB = tuple(Kind(name) for name in ("resnet152", "densenet201", "vgg19", "inception_v3", "distilbert"))
TINY = (Kind("tiny1", 0.7), Kind("tiny4", 0.3))

# -- chains bound by one resource

TILE = 128
BLOCKS = 132  # one for each SM of an H200
TIMES = 40  # products of a tile in one step
COLUMNS = {"memory_bound": 1 << 26, "compute_bound": TILE, "full_bound": 3072}
STEPS = 12


@triton.jit
def multiply_often(x, matrix, out, TIMES: tl.constexpr, TILE: tl.constexpr):
    """A tile times a matrix, again and again: nearly nothing is moved meanwhile."""
    i = tl.arange(0, TILE)
    at = i[:, None] * TILE + i[None, :]
    first = tl.program_id(0) * TILE * TILE
    y, right = tl.load(x + first + at), tl.load(matrix + at)
    for _ in range(TIMES):
        y = tl.dot(y, right).to(tl.float16)
    tl.store(out + first + at, y)


@triton.jit
def scale_all(x, out, n, BLOCK: tl.constexpr):
    """Few blocks, each of which goes on through the vector: they leave places on their SMs to others."""
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(out + i, tl.load(x + i) * 0.9375)


def scaled(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return x * 0.9375
    out = torch.empty_like(x)
    compiled = scale_all[(4 * BLOCKS,)](x, out, x.numel(), BLOCK=4096, num_warps=8)
    prefer_shared(compiled.function)
    return out


def multiplied_often(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    if x.is_cuda:
        multiply_often[(x.shape[0] // TILE,)](x, matrix, out, TIMES=TIMES, TILE=TILE, num_warps=4)
        return out
    for _ in range(TIMES):
        x = x @ matrix
    return x


class Chain(torch.nn.Module):
    """Steps of one kind, each of which needs the one before it."""

    def __init__(self, bound: str, tiny: bool) -> None:
        super().__init__()
        self.bound, self.steps = bound, 4 if tiny else STEPS
        columns = 64 if tiny else COLUMNS[bound]
        given = torch.Generator().manual_seed(columns)
        if bound == "memory_bound":
            self.register_buffer("first", torch.randn(columns, generator=given))
            return
        rows = TILE * BLOCKS if bound == "compute_bound" and not tiny else columns
        self.register_buffer("first", torch.randn(rows, columns, generator=given))
        # However often something is multiplied with it, that stays as long as it is.
        matrix, _ = torch.linalg.qr(torch.randn(columns, columns, generator=given))
        self.register_buffer("matrix", matrix)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first + x.reshape(-1)[:1]
        for _ in range(self.steps):
            if self.bound == "memory_bound":
                y = scaled(y)
            else:
                y = multiplied_often(y, self.matrix) if self.bound == "compute_bound" else y @ self.matrix
        return y.reshape(1, -1)[:, :16].expand(x.shape[0], 16).contiguous()


@dataclass(frozen=True, slots=True)
class Bound(Kind):
    """A chain of kernels as a model. Its name is the limit of its kernels and a number; its batch size is 1."""

    tiny: bool = False

    def build(self, device: str) -> torch.nn.Module:
        return Chain(self.name.rstrip("_0123456789"), self.tiny).to(device).eval()

    @property
    def image(self) -> tuple[int, ...]:
        return (1,)

    def model(self, batch: tuple[int, ...], instances: int, priority: int, device: str) -> pp.Model:
        half = torch.float16
        return pp.Model.from_torch(
            self.build(device), torch.zeros(1, 1), name=self.name, dtype=half, batch=batch, instances=instances,
            priority=priority,
        )  # fmt: skip

    def expected(self, device: str) -> tuple[NDArray[Any], float]:
        net = self.build(device).to(torch.float16)
        rows = [net(torch.from_numpy(x[None]).to(device))[0].float().cpu().numpy() for x in self.inputs()]
        return np.stack(rows), 0.0
