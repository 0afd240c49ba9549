"""Hardware queues: all of them from the import on, unless a number was chosen; and a word where that was too late."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paellapy.instrument import queues


def in_process(code: str, **env: str) -> str:
    """Output of code in a fresh process, since the number is set for a whole process."""
    whole = {k: v for k, v in os.environ.items() if k != queues.VARIABLE} | env
    done = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


@pytest.mark.parametrize(
    "package", ["paellapy", "paellapy.scheduler.engine.engine", "paellapy.instrument.device.driver"]
)
def test_an_import_asks_for_all_of_them_before_anything_uses_the_gpu(package: str) -> None:
    assert in_process(f"import os, {package}; print(os.environ['{queues.VARIABLE}'])") == "32"


def test_a_number_that_was_chosen_stays() -> None:
    code = f"import os, paellapy; print(os.environ['{queues.VARIABLE}'])"
    assert in_process(code, **{queues.VARIABLE: "8"}) == "8"


@pytest.mark.parametrize(("chosen", "in_use", "warned"), [(None, True, True), (None, False, False), ("8", True, False)])
def test_few_queues_are_told_of_where_nobody_chose_them(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, chosen: str | None, in_use: bool, warned: bool
) -> None:
    monkeypatch.setattr(queues, "_late", False)
    monkeypatch.setattr(queues, "gpu_in_use", lambda: in_use)
    if chosen is None:
        monkeypatch.delenv(queues.VARIABLE)
    else:
        monkeypatch.setenv(queues.VARIABLE, chosen)
    queues.ask_for_all()
    queues.warn_if_few()
    assert os.environ[queues.VARIABLE] == (chosen or "32")
    assert [w for w in recwarn if f"set {queues.VARIABLE}=32" in str(w.message)] == list(recwarn)
    assert bool(recwarn.list) == warned


def test_to_ask_whether_the_gpu_is_in_use_does_not_load_its_driver() -> None:
    loaded = "'libcuda.so' in open('/proc/self/maps').read()"
    code = f"from paellapy.instrument import queues; print(queues.gpu_in_use(), {loaded})"
    assert in_process(code) == "False False"


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "late"), [("", False), ("import torch; torch.zeros(1, device='cuda'); ", True)])
def test_an_engine_says_that_the_gpu_was_in_use_before(first: str, late: bool) -> None:
    code = f"{first}import paellapy as pp; pp.Engine('cuda').close(); print('done')"
    said = in_process(code)
    assert "done" in said
    assert ("Import paellapy first" in said) == late
    if late:
        assert "<string>:1: UserWarning" in said  # whoever made the engine
