"""The process: its hardware queues, pauses of the garbage collector, and a search for the objects of a class."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from places import ROOT

from paellapy.instrument import env
from paellapy.instrument.env import CONNECTIONS, live_instances, without_collection


def in_process(code: str, **given: str) -> str:
    """Output of code in a fresh process, since the number is set for a whole process."""
    whole = {k: v for k, v in os.environ.items() if k != CONNECTIONS} | given
    done = subprocess.run([sys.executable, "-c", code], env=whole, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


def test_an_import_asks_for_all_of_them_and_loads_no_driver() -> None:
    """The package itself does so, and Python imports it before any of its modules."""
    loaded = "env.gpu_in_use(), 'libcuda.so' in open('/proc/self/maps').read()"
    code = f"import os; from paellapy.instrument import env; print(os.environ['{CONNECTIONS}'], {loaded})"
    assert in_process(code) == "32 False False"


def test_a_number_that_was_chosen_stays() -> None:
    code = f"import os, paellapy; print(os.environ['{CONNECTIONS}'])"
    assert in_process(code, **{CONNECTIONS: "8"}) == "8"


@pytest.mark.parametrize(("chosen", "in_use", "warned"), [(None, True, True), (None, False, False), ("8", True, False)])
def test_few_queues_are_told_of_where_nobody_chose_them(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, chosen: str | None, in_use: bool, warned: bool
) -> None:
    monkeypatch.setattr(env, "_late", False)
    monkeypatch.setattr(env, "gpu_in_use", lambda: in_use)
    if chosen is None:
        monkeypatch.delenv(CONNECTIONS)
    else:
        monkeypatch.setenv(CONNECTIONS, chosen)
    env.ask_for_all_queues()
    env.warn_if_few_queues()
    assert os.environ[CONNECTIONS] == (chosen or "32")
    assert [w for w in recwarn if f"set {CONNECTIONS}=32" in str(w.message)] == list(recwarn)
    assert bool(recwarn.list) == warned


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "late"), [("", False), ("import torch; torch.zeros(1, device='cuda'); ", True)])
def test_an_engine_says_that_the_gpu_was_in_use_before(first: str, late: bool) -> None:
    code = f"{first}import paellapy as pp; pp.Engine('cuda').close(); print('done')"
    said = in_process(code)
    assert "done" in said
    assert ("Import paellapy first" in said) == late
    if late:
        assert "<string>:1: UserWarning" in said  # whoever made the engine


def test_a_thread_that_leaves_does_not_end_the_pause_of_another() -> None:
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with without_collection():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait(60)
    with without_collection():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection(), without_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


class Base:
    pass


class Below(Base):
    __slots__ = ("value",)


class Deeper(Below):
    @property
    def __class__(self) -> type:
        raise AssertionError("reading it may have side effects")


def test_objects_of_a_class_and_of_all_its_subclasses_are_found() -> None:
    made = [Base(), Below(), Deeper(), Base()]
    made[0].__dict__["other"] = made[1]
    assert {id(each) for each in live_instances(Base)} == {id(each) for each in made}
    assert [each is made[2] for each in live_instances(Deeper)] == [True]
    made.clear()
    assert live_instances(Base) == []


def test_tensors_and_parameters_are_found() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.ones(2))
    made = [torch.zeros(3), weight, torch.zeros(4)[1:], weight * 2]
    assert {id(each) for each in made} <= {id(each) for each in live_instances(torch.Tensor)}


class Watched(type):
    """Calls `seen` while a search looks at what it has found."""

    seen: Callable[[], object] = staticmethod(lambda: None)

    def __subclasscheck__(cls, other: type) -> bool:
        Watched.seen()
        return super().__subclasscheck__(other)


class Wanted(metaclass=Watched):
    pass


def test_a_tuple_that_another_thread_makes_meanwhile_can_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list of all objects, CPython raises a SystemError there."""
    begun, may_go_on, made = threading.Event(), threading.Event(), []

    def items() -> Iterator[int]:
        yield 0
        begun.set()
        may_go_on.wait(60)
        yield from range(50)

    def finish() -> None:
        may_go_on.set()
        thread.join()

    thread = threading.Thread(target=lambda: made.append(tuple(items())))
    thread.start()
    begun.wait(60)
    monkeypatch.setattr(Watched, "seen", finish)
    kept = Wanted()
    assert live_instances(Wanted) == [kept]
    assert [len(each) for each in made] == [51]


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ({"url": "file:///a%20b/paellapy", "dir_info": {}}, "/a b/paellapy[viz]"),
        ({"url": "file:///x/p-1-py3-none-any.whl", "archive_info": {}}, "/x/p-1-py3-none-any.whl[viz]"),
        ({"url": "https://host/p.git", "vcs_info": {"vcs": "git"}}, "paellapy[viz] @ git+https://host/p.git"),
        (None, "paellapy[viz]"),
    ],
)
def test_an_extra_is_installed_from_where_the_package_came(
    origin: dict[str, object] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {} if origin is None else {"direct_url.json": json.dumps(origin)}
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=files.get))
    monkeypatch.setattr(env, "__file__", str(tmp_path / "site-packages" / "paellapy" / "instrument" / "env.py"))
    assert shlex.split(env.install_line("viz"))[-1] == expected


def test_a_clone_installs_its_extras_from_itself() -> None:
    where, _, extra = shlex.split(env.install_line("viz"))[-1].partition("[")
    assert (Path(where).resolve(), extra) == (ROOT.resolve(), "viz]")


def test_two_hooks_for_one_module_are_both_told() -> None:
    code = (
        "import sys; from paellapy.instrument.env import ImportHook; told = []\n"
        "for k in (1, 2): ImportHook('colorsys', lambda module, k=k: told.append((k, module.__name__))).add()\n"
        "import colorsys; print(sorted(told))"
    )
    assert in_process(code) == "[(1, 'colorsys'), (2, 'colorsys')]"


def test_long_work_shows_a_line_and_short_work_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAELLAPY_QUIET", raising=False)
    with env.progress("working …", patience_s=0.0):
        end = time.monotonic() + 20
        while not (said := capsys.readouterr().err) and time.monotonic() < end:
            time.sleep(0.01)
    assert said == "working …\n"
    with env.progress("working …", patience_s=60.0):
        pass
    assert capsys.readouterr().err == ""


def test_a_reader_that_is_gone_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with contextlib.suppress(BrokenPipeError), open(writer, "w") as gone:  # it still has the text
        shown = env.console(file=gone)
        shown.print("nobody reads this")
        assert shown.quiet


def test_progress_can_be_turned_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_QUIET", "1")
    assert not env.show_progress("working …")
    assert capsys.readouterr().err == ""
