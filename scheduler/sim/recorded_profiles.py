"""Profiles measured on an H200, to simulate anywhere: Paella's eight models, and training steps.

The models run in fp16 on 224² images (inception_v3: 299²), in PyTorch. Time alone and saturated throughput per batch
size were measured for three of the models; the others have a measured time alone at batch 1, and take the rest from the
mean of the three. The GPU share of a batch size follows from both: n batches at once saturate the GPU when n · share =
1. At batch 1 these models are bound by kernel issue, which gives their number of kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.core.errors import ProfileError
from paellapy.scheduler.core.profiles import ModelProfile, SegmentProfile, load_profiles
from paellapy.scheduler.core.values import Rule, check_values, number, or_none, shortened

# By model: its proportion in Paella's figure 11, and its time alone at batch 1 in µs.
_MODELS = {
    "resnet18": (0.272, 350.0),
    "mobilenet_v2": (0.257, 584.0),
    "resnet34": (0.168, 680.0),
    "squeezenet1_1": (0.0895, 317.0),
    "resnet50": (0.0745, 875.0),
    "densenet121": (0.0706, 1800.0),
    "googlenet": (0.0546, 1005.0),
    "inception_v3": (0.0138, 1615.0),
}
MIX = MappingProxyType({name: part for name, (part, _) in _MODELS.items()})
ALONE_US = MappingProxyType({name: us for name, (_, us) in _MODELS.items()})
# batch: (time alone in µs, saturated requests per second)
MEASURED = MappingProxyType(
    {
        "resnet18": {1: (340, 12.6e3), 2: (375, 20.9e3), 4: (424, 25.9e3), 8: (475, 35.4e3), 16: (605, 39.3e3),
                     32: (947, 45.4e3)},
        "resnet50": {1: (855, 4.7e3), 2: (885, 7.1e3), 4: (956, 9.6e3), 8: (1104, 12.0e3), 16: (1469, 14.0e3),
                     32: (2319, 16.4e3)},
        "densenet121": {1: (1726, 2.2e3), 2: (1859, 3.6e3), 4: (2173, 5.2e3), 8: (2527, 6.6e3), 16: (3317, 7.3e3),
                        32: (4884, 8.2e3)},
    }
)  # fmt: skip
SIZES = tuple(MEASURED["resnet18"])
ISSUE_PER_S = 1.35e6  # kernels per second over all streams
KERNELS_PER_SEGMENT = 24
BLOCK_WARPS = 8
BLOCK_REGISTERS = BLOCK_WARPS * 32 * 32
TRAINED = ("resnet18", "transformer")
_FOLDER = Path(__file__).parent / "recorded"
FOOTPRINT = 0.1  # fraction of the block slots at batch 1; measured 5–18 %


def _curve(name: str, batch: int) -> tuple[float, float]:
    """Time alone in µs, and the share of the GPU that one batch takes while it runs."""
    if name in MEASURED:
        us, rate = MEASURED[name][batch]
        return us, batch / (rate * us * 1e-6)
    ratios, shares = [], []
    for sizes in MEASURED.values():
        us, rate = sizes[batch]
        ratios.append(us / sizes[1][0])
        shares.append(batch / (rate * us * 1e-6))
    return ALONE_US[name] * sum(ratios) / len(ratios), sum(shares) / len(shares)


def _some_of(kind: type, known: Sequence[Any]) -> Rule:
    def fits(given: Any) -> bool:
        some = isinstance(given, Sequence) and not isinstance(given, str | bytes) and len(given) > 0
        return some and all(isinstance(each, kind) and not isinstance(each, bool) and each in known for each in given)

    return Rule(fits, f"a list of some of {', '.join(map(str, known))}")


_OF_MIX = {
    "batch": _some_of(int, SIZES),
    "target": or_none(number(0, 1e6, above=True)),
    "names": _some_of(str, tuple(_MODELS)),
}


def mix_profiles(
    batch: Sequence[int] = (1,), *, instances: int = 16, target: float | None = 4.0, names: Sequence[str] = tuple(MIX)
) -> list[ModelProfile]:
    """The models at these batch sizes (of 1, 2, 4, 8, 16, 32), with a target of `target` times their time alone.

    >>> [round(m.alone_ns() / 1e3) for m in mix_profiles(names=["resnet18", "googlenet"])]
    [340, 1005]
    """
    check_values({"batch": batch, "target": target, "names": names}, _OF_MIX, ProfileError)
    gpu = part("h200")
    slots = gpu.sms * gpu.sm.warps / BLOCK_WARPS
    profiles = []
    for name in names:
        us1, share1 = _curve(name, 1)
        kernels = max(1, round(share1 * us1 * 1e-6 * ISSUE_PER_S))
        cuts = max(1, round(kernels / KERNELS_PER_SEGMENT))
        sizes = {}
        for b in batch:
            us, share = _curve(name, b)
            footprint = FOOTPRINT if b == 1 else share
            blocks = max(1, round(footprint * slots))
            each = [kernels * (k + 1) // cuts - kernels * k // cuts for k in range(cuts)]
            sizes[b] = [
                SegmentProfile(us * 1e3 * n / kernels, blocks, blocks * BLOCK_WARPS, blocks * BLOCK_REGISTERS, 0, n)
                for n in each
            ]
        aim = None if target is None else target * us1 / 1e3
        profiles.append(
            ModelProfile(name, sizes, target_ms=aim, instances=instances, about="fp16, measured on an H200")
        )
    return profiles


def training_profiles(*names: str) -> list[ModelProfile]:
    """Training steps recorded on an H200, named "resnet18 training" and so on; all of them without names.

        models = [*mix_profiles(names=["resnet50"]), *training_profiles("resnet18")]
        pp.simulate(models, pp.Poisson(250, "resnet50", duration=1, priority=1) + pp.Background("resnet18 training"))

    `benchmarks/background.py` records them (`engine.job_profile`).

    >>> [each.name for each in training_profiles()]
    ['resnet18 training', 'transformer training']
    """
    unknown = [name for name in names if not isinstance(name, str) or name not in TRAINED]
    if unknown:
        text = f"no training step of {shortened(unknown[0])} is recorded: choose among {', '.join(TRAINED)}"
        raise ProfileError(text, field="names", given=unknown[0])
    return [each for name in names or TRAINED for each in load_profiles(_FOLDER / f"{name}_training.json")]
