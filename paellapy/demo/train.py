"""Trains the demo models: `python -m paellapy.demo.train`, with the extra `train` (PyTorch and scikit-learn).

The data is scikit-learn's digits: 1,797 images of 8x8 pixels. One fifth, drawn once, is held out: it is used neither
for training nor for choices, only to measure the accuracy at the end. Seeds and the number of threads are fixed, so the
same versions give the same weights. They are stored as float16, with batch norms folded into their convolutions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from paellapy.demo import reference
from paellapy.demo.models import CLASSES, HEADS, NORM_EPS, PATCH, SIDE

WEIGHTS = Path(__file__).parent / "weights"
SEED = 7
THREADS = 1  # the order of additions, and so the weights, depend on it
HELD_OUT_SHARE = 0.2
BATCH = 64
LABEL_SMOOTHING = 0.05

Tensors = dict[str, Any]  # of torch.Tensor
Forward = Callable[[Any], Any]


@dataclass(slots=True)
class Recipe:
    """A network in training: images to logits, its trained parameters, and its stored weights."""

    forward: Forward
    parameters: list[Any]
    export: Callable[[], Tensors]
    epochs: int
    peak_rate: float
    decay: float = 0.01


# ---- the networks ----------------------------------------------------------------------------------------------------


def mlp() -> Recipe:
    sizes = {"0": (SIDE * SIDE, 256), "1": (256, 128), "classes": (128, CLASSES)}
    weights = {key: value for name, (k, n) in sizes.items() for key, value in _linear(name, k, n).items()}

    def forward(images: Any) -> Any:
        x = images.flatten(1)
        for layer in ("0", "1"):
            x = F.dropout(F.relu(_apply(x, weights, layer)), 0.1)
        return _apply(x, weights, "classes")

    return Recipe(forward, _trained(weights), lambda: weights, epochs=120, peak_rate=4e-3)


def cnn() -> Recipe:
    channels = (1, 16, 16, 32, 32, 64, 64)
    pairs = list(itertools.pairwise(channels))
    convolutions = [torch.nn.Conv2d(c, f, 3, padding=1, bias=False) for c, f in pairs]
    norms = [torch.nn.BatchNorm2d(f) for _, f in pairs]
    layers: list[Any] = []
    for i, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True)):
        layers += [torch.nn.MaxPool2d(2)] if i in (2, 4) else []
        layers += [convolution, norm, torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers)
    head = _linear("classes", channels[-1], CLASSES)

    def forward(images: Any) -> Any:
        return _apply(network(_double(images)).mean((2, 3)), head, "classes")

    def export() -> Tensors:
        folded = dict(head)
        for i, (convolution, norm) in enumerate(zip(convolutions, norms, strict=True)):
            gain = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            folded[f"{i}.weight"] = (convolution.weight * gain[:, None, None, None]).permute(2, 3, 1, 0)
            folded[f"{i}.bias"] = norm.bias - norm.running_mean * gain
        return folded

    return Recipe(forward, [*network.parameters(), *_trained(head)], export, epochs=50, peak_rate=4e-3)


def transformer(width: int = 64, hidden: int = 128, blocks: int = 10) -> Recipe:
    tokens = (2 * SIDE // PATCH) ** 2
    weights = {**_linear("patch", PATCH**2, width), "position": torch.randn(tokens, width) * 0.02}
    for i in range(blocks):
        weights |= _norm(f"{i}.norm1", width) | _linear(f"{i}.qkv", width, 3 * width)
        # The output of a block starts small, so that a deep stack trains as well as two blocks.
        weights |= _linear(f"{i}.mix", width, width, 1 / math.sqrt(2 * blocks))
        weights |= _norm(f"{i}.norm2", width) | _linear(f"{i}.up", width, hidden)
        weights |= _linear(f"{i}.down", hidden, width, 1 / math.sqrt(2 * blocks))
    weights |= _norm("norm", width) | _linear("classes", width, CLASSES)

    def normed(x: Any, name: str) -> Any:
        return F.layer_norm(x, (width,), weights[f"{name}.gain"], weights[f"{name}.bias"], NORM_EPS)

    def forward(images: Any) -> Any:
        patches = F.unfold(_double(images), PATCH, stride=PATCH).transpose(1, 2)
        x = _apply(patches, weights, "patch") + weights["position"]
        for i in range(blocks):
            qkv = _apply(normed(x, f"{i}.norm1"), weights, f"{i}.qkv")
            q, k, v = qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + _apply(mixed, weights, f"{i}.mix")
            up = F.gelu(_apply(normed(x, f"{i}.norm2"), weights, f"{i}.up"), approximate="tanh")
            x = x + _apply(up, weights, f"{i}.down")
        return _apply(normed(x, "norm").mean(1), weights, "classes")

    def export() -> Tensors:
        return weights | {"patch.weight": weights["patch.weight"].reshape(PATCH, PATCH, width)}

    return Recipe(forward, _trained(weights), export, epochs=60, peak_rate=2e-3, decay=0.05)


RECIPES: dict[str, Callable[[], Recipe]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def _linear(name: str, k: int, n: int, gain: float = 1.0) -> Tensors:
    bound = math.sqrt(6 / (k + n))
    weight = (torch.rand(k, n) * 2 - 1) * bound * gain
    return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(n)}


def _norm(name: str, n: int) -> Tensors:
    return {f"{name}.gain": torch.ones(n), f"{name}.bias": torch.zeros(n)}


def _trained(weights: Tensors) -> list[Any]:
    return [tensor.requires_grad_() for tensor in weights.values()]


def _apply(x: Any, weights: Tensors, name: str) -> Any:
    return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _double(images: Any) -> Any:
    return F.interpolate(images[:, None], scale_factor=2, mode="bilinear", align_corners=False)


# ---- training --------------------------------------------------------------------------------------------------------


def split() -> tuple[NDArray[np.uint8], ...]:
    """Training images, held-out images (values 0 to 16), and the labels of both."""
    digits = load_digits()
    parts = train_test_split(
        digits.images, digits.target, test_size=HELD_OUT_SHARE, stratify=digits.target, random_state=0
    )
    return tuple(part.astype(np.uint8) for part in parts)


def vary(images: Any) -> Any:
    """Each image rotated, scaled and shifted a little, as handwriting varies."""
    n = len(images)
    angle, size, shift = (torch.rand(n) * 2 - 1) * 0.2, 1 + (torch.rand(n) * 2 - 1) * 0.12, torch.rand(n, 2) * 2 - 1
    cos, sin = torch.cos(angle) * size, torch.sin(angle) * size
    shift = shift * (2 / SIDE)  # up to one pixel: the picture spans -1 to 1
    matrix = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], 1).reshape(n, 2, 3)
    grid = F.affine_grid(matrix, [n, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(images[:, None], grid, align_corners=False)[:, 0]


def fit(recipe: Recipe, images: Any, labels: Any, after_epoch: Callable[[float], None]) -> None:
    steps = recipe.epochs * math.ceil(len(images) / BATCH)
    optimiser = torch.optim.AdamW(recipe.parameters, recipe.peak_rate, weight_decay=recipe.decay)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.peak_rate, steps, pct_start=0.2)
    for _ in range(recipe.epochs):
        total = 0.0
        for chosen in torch.randperm(len(images)).split(BATCH):
            logits = recipe.forward(vary(images[chosen]))
            loss = F.cross_entropy(logits, labels[chosen], label_smoothing=LABEL_SMOOTHING)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(recipe.parameters, 1.0)
            optimiser.step()
            rates.step()
            total += loss.item() * len(chosen)
        after_epoch(total / len(images))


def train(name: str, images: NDArray[Any], labels: NDArray[Any], progress: Progress) -> dict[str, NDArray[np.float16]]:
    torch.manual_seed(SEED)
    recipe = RECIPES[name]()
    task = progress.add_task(name, total=recipe.epochs, loss=math.nan)
    fit(
        recipe,
        torch.from_numpy(images.astype(np.float32) / 16),
        torch.from_numpy(labels.astype(np.int64)),
        lambda loss: progress.update(task, advance=1, loss=loss),
    )
    with torch.no_grad():
        return {key: np.ascontiguousarray(value.numpy(), np.float16) for key, value in recipe.export().items()}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Train only this model; may be repeated.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the weights.")] = WEIGHTS,
) -> None:
    """Train the demo models and store their weights."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    images, test_images, labels, test_labels = split()
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "digits_test.npz", images=test_images, labels=test_labels)
    table = Table("model", "parameters", "size", "held-out accuracy")
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("loss {task.fields[loss]:.4f}"))  # fmt: skip
    with Progress(*columns) as progress:
        for name in only or RECIPES:
            weights = train(name, images, labels, progress)
            path = out / f"{name}.npz"
            np.savez_compressed(path, **weights)  # type: ignore[arg-type]
            scores = reference.forward(name, weights, test_images / 16)
            right = np.mean(scores.argmax(axis=1) == test_labels)
            count = sum(w.size for w in weights.values())
            table.add_row(name, f"{count:,}", f"{path.stat().st_size / 1000:.0f} kB", f"{right:.2%}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
