"""Models bound by one resource: the tensor units, the memory's bandwidth, or places on the SMs.

* `memory_bound`: multiples of a vector that no cache holds. Its kernel, one of ours, runs on SMs configured for much
  shared memory, as the next one does: an SM with another configuration runs only one of the two at a time;
* `compute_bound`: products of matrices that stay on the SM, by a kernel of ours. Its one block on each SM leaves half
  of the places free;
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
from paper_models import Kind

import paellapy as pp
from paellapy.scheduler.backends.contention_probe import prefer_shared

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
