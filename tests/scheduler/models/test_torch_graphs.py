"""Captures by PyTorch begin without writing the generators' words."""

from __future__ import annotations

import pytest

from paellapy.scheduler.models.torch_capture import begin_capture

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def test_nothing_is_filled_when_a_capture_begins():
    word = torch.tensor([7])
    made, given = [], {}

    class Graph:
        def capture_begin(self, **options):
            given.update(options)
            word.fill_(0)
            made.append(torch.zeros(2) + 1)

    begin_capture(Graph(), pool=(0, 3))
    assert word.item() == 7  # left alone
    assert made[0].tolist() == [1, 1]  # other operations run
    assert given["pool"] == (0, 3)
    assert word.fill_(1).item() == 1  # afterwards as usual
