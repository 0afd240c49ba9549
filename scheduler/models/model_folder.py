"""What all models of language have in their folders: JSON files, and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paellapy.instrument.env import install_line
from paellapy.scheduler.core.errors import ModelError

_LONGEST_CONFIG = 1 << 20


class LanguageModelError(ModelError):
    """A folder that holds no language model that can be served."""


def read_json(path: Path, kind: type = dict) -> Any:
    """A JSON object, or list, from a file of a model's folder."""
    try:
        if path.stat().st_size > _LONGEST_CONFIG:
            raise LanguageModelError(f"{path} is longer than 1 MiB: it is no configuration", path=path)
        found = json.loads(path.read_bytes())
    except OSError as e:
        raise LanguageModelError(
            f"{path} cannot be read ({e.strerror}): give the folder of a model, as downloaded from the hub", path=path
        ) from None
    except ValueError as e:
        raise LanguageModelError(f"{path} is not JSON ({e}): download the folder again", path=path) from None
    if not isinstance(found, kind):
        said = f"{path} holds no JSON {'object' if kind is dict else 'list'}: download the folder again"
        raise LanguageModelError(said, path=path)
    return found


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, which neither cuts nor pads."""
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        said = f"texts need the package tokenizers ({e}): {install_line('language')}"
        raise LanguageModelError(said, path=folder, field="tokenizers") from None
    path = folder / "tokenizer.json"
    if not path.exists():
        raise LanguageModelError(
            f"{path} is missing: download the model's tokenizer.json into the folder", path=path, field="tokenizer"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as e:  # the library raises plain Exceptions
        raise LanguageModelError(f"{path} cannot be read ({e}): download the file again", path=path) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
