"""Texts as the inputs of an encoder. It has a module of its own, so that processes that do this import no PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paellapy.scheduler.core.errors import InputError

MOST_CHARACTERS = 64  # for each token that the model takes; texts have about five


class TextReader:
    """Texts as the inputs of an encoder that takes up to `length` tokens."""

    def __init__(
        self, tokenizer: Any, names: Sequence[str], length: int, pad: int | None, truncate: bool, lower: bool,
        prompt: str,
    ) -> None:  # fmt: skip
        """`pad` fills all inputs up to the length; None: they have the length of their text."""
        self.tokenizer, self.names, self.length, self.pad = tokenizer, names, length, pad
        self._truncate, self._lower, self._prompt = truncate, lower, prompt
        if truncate:
            tokenizer.enable_truncation(length)

    def __call__(self, **texts: str) -> dict[str, NDArray[np.int64]]:
        """The inputs for a text, or for a query and a document."""
        given = [self._prompt + (each.lower() if self._lower else each) for each in texts.values()]
        most = self.length * MOST_CHARACTERS  # more would keep a worker busy for nothing
        if self._truncate:
            given = [each[:most] for each in given]
        elif (longest := max(map(len, given))) > most:
            raise self._too_long(texts, f"{longest} characters", longest, most)
        # A batch, since tokenizers leave the interpreter to other threads only for batches
        (found,) = self.tokenizer.encode_batch([given[0] if len(given) == 1 else tuple(given)])
        if len(found.ids) > self.length:
            raise self._too_long(texts, f"{len(found.ids)} tokens", len(found.ids), self.length)
        return encoder_inputs(self.names, found.ids, self.length, self.pad, found.type_ids)

    def _too_long(self, texts: Mapping[str, str], has: str, given: int, limit: int) -> InputError:
        names = " and ".join(texts)
        return InputError(
            f"the request's {names} has {has}; the model takes up to {self.length} tokens: send less text, or load the "
            "model with truncate=True", field=names, given=given, limit=limit,
        )  # fmt: skip


def encoder_inputs(
    names: Sequence[str], ids: Sequence[int], length: int, pad: int | None, types: Sequence[int] | None = None
) -> dict[str, NDArray[np.int64]]:
    """An encoder's inputs for these tokens; `pad` as for TextReader."""
    n = len(ids)
    made = {name: np.zeros(n if pad is None else length, np.int64) for name in names}
    made["input_ids"][n:] = pad or 0
    made["input_ids"][:n] = ids
    made["attention_mask"][:n] = 1
    if types is not None and "token_type_ids" in made:
        made["token_type_ids"][:n] = types
    return made
