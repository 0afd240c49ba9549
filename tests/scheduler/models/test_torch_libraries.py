"""PyTorch's libraries, loaded while a model is made: which layers ask for them, where, and how often."""

from __future__ import annotations

import threading

import pytest

import paellapy as pp
from paellapy.scheduler.models import torch_capture

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


@pytest.fixture
def gpu(monkeypatch):
    """Opens engines on GPUs, and notes the steps that are run on each."""
    for name, empty in (("_open", {}), ("_wanted", {}), ("_begun", set())):
        monkeypatch.setattr(torch_capture, name, empty)
    ran: dict[int, list[int]] = {}

    def open_on(engine: int, index: int) -> None:
        def run(steps):
            assert threading.current_thread() is not threading.main_thread()
            for step in steps:
                step(torch.device("cpu"))
            ran.setdefault(index, []).append(len(steps))

        torch_capture.opened(engine, index, run)

    open_on.ran = ran
    return open_on


def network(*layers):
    return torch.nn.Sequential(*layers)


def test_a_model_of_convolutions_runs_layers_on_every_open_gpu_once(gpu):
    gpu(1, 0)
    gpu(2, 1)
    net = network(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 2))
    for name in ("a", "b"):
        pp.Model.from_torch(net, torch.zeros(1, 3, 8, 8), name=name)
    torch_capture.closed(1)
    torch_capture.closed(2)
    assert gpu.ran == {0: [6], 1: [6]}


def test_layers_run_on_a_gpu_that_is_opened_after_the_model_was_made(gpu):
    torch_capture.want(torch, network(torch.nn.Linear(4, 4)), None)
    gpu(1, 0)
    torch_capture.closed(1)
    gpu(2, 0)  # the libraries stay loaded
    torch_capture.closed(2)
    assert gpu.ran == {0: [1]}


@pytest.mark.parametrize("made_from", [network(torch.nn.ReLU()), torch.relu])
def test_other_models_load_nothing(gpu, made_from):
    gpu(1, 0)
    torch_capture.want(torch, made_from, None)
    torch_capture.closed(1)
    assert not gpu.ran


def test_a_failure_is_left_to_the_model_itself(gpu):
    def fails(steps):
        raise RuntimeError("no such library")

    torch_capture.opened(1, 0, fails)
    pp.Model.from_torch(network(torch.nn.Linear(4, 4)), torch.zeros(1, 4), name="a")
    torch_capture.closed(1)
