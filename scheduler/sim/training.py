"""Training steps as profiles, recorded on an H200: simulate a training job beside serving anywhere.

    models = [*mix_profiles(names=["resnet50"]), *training_profiles("resnet18")]
    pp.simulate(models, pp.Poisson(250, "resnet50", duration=1, priority=1) + pp.Background("resnet18 training"))

`benchmarks/background.py` records them (`engine.job_profile`).
"""

from __future__ import annotations

from pathlib import Path

from paellapy.scheduler.core.profiles import ModelProfile, ProfileError, load_profiles

_FOLDER = Path(__file__).parent / "recorded"
TRAINED = ("resnet18", "transformer")


def training_profiles(*names: str) -> list[ModelProfile]:
    """Profiles of one captured step each, named "resnet18 training" and so on; all of them without names.

    >>> [each.name for each in training_profiles()]
    ['resnet18 training', 'transformer training']
    """
    unknown = [name for name in names if name not in TRAINED]
    if unknown:
        raise ProfileError(f"no training step of {unknown[0]!r} is recorded: choose among {', '.join(TRAINED)}")
    return [each for name in names or TRAINED for each in load_profiles(_FOLDER / f"{name}_training.json")]
