"""A decoder's steps against the library whose models they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from language_families import FAMILIES, family

import paellapy as pp
from paellapy.scheduler.language.config import read_config
from paellapy.scheduler.language.decoder import Decoder, State, tile_tokens
from paellapy.scheduler.language.kernels import ROW
from paellapy.scheduler.language.pages import PAGE
from paellapy.scheduler.language.weights import decoder_weights, read_tensors

CONTEXT = 128
PAGES = [5, 9, 2, 7]  # of the sequence under test, which is number 1


class Steps:
    """A decoder and its state on a device, with one sequence."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.config, self._device = read_config(folder), device
        arrays = decoder_weights(read_tensors(folder), self.config, CONTEXT)
        weights = {key: device.array(np.ascontiguousarray(value)) for key, value in arrays.items()}
        self.state = State.on(device, self.config, 3, CONTEXT, 12)
        self._decoder = Decoder(self.config, weights, self.state, device.empty)

    def row(self, sequence: int, position: int, token: int = 0) -> Any:
        return (sequence, position, token, -1, 0, 0, 0.0, 1.0, 0.0, 0, 1.0, 0.0, 0.0, 0, 0)

    def _words(self, rows: list[Any]) -> Any:
        return self._device.array(np.array(rows, ROW).view(np.int32).reshape(len(rows), -1))

    def prefill(self, tokens: Any, first: int, end: int, padding: int = 0) -> Any:
        """Logits after the tokens from `first` to `end`, which enter as one chunk."""
        n, array = end - first, self._device.array
        place = np.arange(first, end, dtype=np.int32)
        unused = np.zeros(padding, np.int32)
        slots = np.array([PAGES[p // PAGE] * PAGE + p % PAGE for p in place], np.int32)
        size = tile_tokens(self.config)
        tiles = [(at, min(size, n - at), first + at, 1, -1) for at in range(0, n, size)] + [(0, 0, 0, 0, 0)]
        self.state.table[1][: len(PAGES)].set(np.array(PAGES, np.int32))
        out = array(np.zeros((1, 2), np.int32))
        chunk = {
            "tokens": array(np.concatenate([tokens[first:end], unused])),
            "positions": array(np.concatenate([place, unused])), "slots": array(np.concatenate([slots, unused])),
            "tiles": array(np.array(tiles, np.int32)),
        }  # fmt: skip
        logits = self._decoder.prefill(chunk, self._words([self.row(1, end - 1, n - 1)]), out)
        return logits.numpy()[0], int(out.numpy()[0, 0])

    def decode(self, token: int, position: int, rows: int) -> Any:
        """Logits after one token that enters alone, or beside rows that are not used."""
        self.state.tokens[1:2].set(np.array([token], np.int32))
        out = self._device.array(np.zeros((rows, 2), np.int32))
        words = self._words([self.row(0, 0)] * (rows - 1) + [self.row(1, position)])
        logits = self._decoder.decode(words, out)
        chosen = int(out.numpy()[-1, 0])
        assert self.state.tokens.numpy()[1] == chosen
        return logits.numpy()[-1], chosen


@pytest.mark.parametrize("where", ["virtual:h200", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_library(name: str, where: str, tmp_path: Path) -> None:
    import torch

    model = family(name, tmp_path)
    tokens = np.random.default_rng(1).integers(0, 300, 50).astype(np.int32)
    with torch.no_grad():
        wanted = model(torch.tensor(tokens[None].astype(np.int64))).logits[0].numpy()
    with pp.Device(where) as device:
        steps = Steps(tmp_path, device)
        found = [(20, steps.prefill(tokens, 0, 20)), (33, steps.prefill(tokens, 20, 33, padding=3))]
        found += [(at + 1, steps.decode(int(tokens[at]), at, rows)) for at, rows in ((33, 1), (34, 3), (35, 1))]
    for end, (logits, chosen) in found:
        np.testing.assert_allclose(logits, wanted[end - 1], atol=1e-4)
        assert chosen == wanted[end - 1].argmax()
