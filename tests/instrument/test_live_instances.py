"""Live objects of a class: which are found, and that a search disturbs no other thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from paellapy.instrument.live_instances import live_instances


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
