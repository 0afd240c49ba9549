"""Models for benchmarks of memory: each has weights of its own, on which its answers depend."""

from __future__ import annotations

from typing import Any

import numpy as np

import paellapy as pp

KINDS = ("vit_l_16", "vgg16", "convnext_large", "vgg11", "vit_b_16", "convnext_base")
TOLERANCE = 0.02


def drawn(torch: Any, module: Any) -> Any:
    """Draws parameters that are zero or nearly zero at first. torchvision gives vision transformers a head of zeros, so
    that all of them answer 0, and scales the blocks of ConvNeXt by 1e-6, so that their weights hardly matter.
    """
    with torch.no_grad():
        for each in module.parameters():
            if float(each.abs().max()) < 1e-4:
                each.normal_(0.0, 0.05)
    return module


class Zoo:
    """Models with weights of their own, and what each answers."""

    def __init__(self, count: int, device: str, half: bool = False, first: int = 0) -> None:
        import torch

        self.torch, self.cuda, self.half = torch, not device.startswith("virtual"), half
        self.modules: dict[str, Any] = {}
        for k in range(first, first + count):
            torch.manual_seed(k)
            self.modules[f"m{k}"] = self._module(k)
        torch.manual_seed(0)
        self.example = torch.randn(1, 3, 224, 224) if self.cuda else torch.randn(1, 64)
        if half:
            self.example = self.example.half()
        self.expected: dict[str, Any] = {}

    def _module(self, k: int) -> Any:
        torch = self.torch
        if not self.cuda:
            return drawn(torch, torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))).eval()
        import torchvision

        # There, beside the engine: weights are drawn, examples run and answers computed in a hundredth of the time.
        with torch.device("cuda"):
            made = drawn(torch, getattr(torchvision.models, KINDS[k % len(KINDS)])(weights=None))
        return (made.half() if self.half else made).eval()

    def nbytes(self, name: str) -> int:
        return sum(t.numel() * t.element_size() for t in self.modules[name].state_dict().values())

    @property
    def total_bytes(self) -> int:
        return sum(self.nbytes(name) for name in self.modules)

    def model(self, name: str, **about: Any) -> pp.Model:
        return pp.Model.from_torch(self.modules[name], self.example, name=name, batch=(1,), **about)

    def answer(self, name: str) -> Any:
        """What PyTorch gives, on the same device."""
        torch = self.torch
        if name not in self.expected:
            where = "cuda" if self.cuda else "cpu"
            with torch.no_grad():
                self.expected[name] = self.modules[name](self.example.to(where))[0].float().cpu().numpy()
        return self.expected[name]

    def right(self, name: str, found: Any) -> bool:
        """Whether an output is PyTorch's, to within 2 % of the largest value. Another model's output is not."""
        want = self.answer(name)
        return bool(np.abs(found.astype(np.float32) - want).max() <= TOLERANCE * float(np.abs(want).max()))
