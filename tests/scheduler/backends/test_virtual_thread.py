"""An engine's thread on the virtual GPU: whoever asks it for a pause gets one, even if it always has work to launch."""

from __future__ import annotations

import threading

import numpy as np
from engine_models import scale_model

from paellapy.scheduler.backends.virtual_thread import VirtualThread
from paellapy.scheduler.engine.engine import Engine

X = {"x": np.ones(64, np.float32)}


def test_a_call_in_the_loop_waits_for_two_launches_at_most(monkeypatch):
    """The one that is being made when it is asked for, and the one the core has decided on."""
    launch, waited = VirtualThread._launch, []

    def counted(self):
        if self._stop_word[0]:
            waited.append(True)
        return launch(self)

    monkeypatch.setattr(VirtualThread, "_launch", counted)
    done = threading.Event()

    def client():
        while not done.is_set():
            engine.infer_sync("scale", X)

    with Engine("virtual:h200", quantum_us=1) as engine:
        engine.load(scale_model(steps=40, batch=(1,)))
        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        most = 0
        for _ in range(30):
            waited.clear()
            called = threading.Event()
            engine.call_in_loop(called.set)
            called.wait()
            most = max(most, len(waited))
        done.set()
        for each in clients:
            each.join()
    assert most <= 2
