"""Devices by name: one object each, clear errors where there is none, `with` chooses the current one."""

from __future__ import annotations

import pytest
from failing import failing
from stand_in_device import StandInDevice

from paellapy.instrument.device import Device, driver
from paellapy.instrument.errors import NoDeviceError

pytestmark = pytest.mark.quick


class Numbered(StandInDevice):
    first = "0"
    opened = 0

    def _setup(self, which: str) -> None:
        if which not in ("0", "1"):
            raise NoDeviceError(f"there is no {which}", given=which)
        Numbered.opened += 1
        self.name = f"numbered:{which}"


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "kinds", {"numbered": Numbered})
    monkeypatch.setattr(Device, "_open", {})
    monkeypatch.setattr(Numbered, "opened", 0)


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("names", [("numbered", "numbered:0"), ("numbered:0", "numbered"), ("auto", "numbered:0")])
def test_there_is_one_object_per_device(names: tuple[str, str]) -> None:
    assert Device(names[0]) is Device(names[1])
    assert Device("numbered:1") is not Device(names[0])
    assert Numbered.opened == 2


@pytest.mark.usefixtures("kinds")
def test_unknown_kinds_are_refused_with_examples() -> None:
    with failing(NoDeviceError, field="device", given="tpu:3"):
        Device("tpu:3")
    with failing(NoDeviceError, given="7"):
        Device("numbered:7")


def test_with_no_device_at_all_every_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(StandInDevice):
        def _setup(self, which: str) -> None:
            raise NoDeviceError("none plugged in")

    monkeypatch.setattr(Device, "kinds", {"missing": Missing})
    with failing(NoDeviceError, field="device"):
        Device.default()


def test_with_makes_a_device_current_and_puts_the_old_one_back() -> None:
    outer, inner = StandInDevice.make(), StandInDevice.make()
    with outer:
        with inner:
            assert Device.current() is inner
            with inner, outer:
                assert Device.current() is outer
            assert Device.current() is inner
        assert Device.current() is outer


def test_the_target_is_the_capability() -> None:
    device = StandInDevice.make()
    assert device.target == "sm_90"
    assert repr(device) == "<stand-in: Stand-in, 2 SMs, compute capability 90>"


def test_without_a_driver_the_error_says_what_to_do_and_names_the_virtual_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.driver")

    def missing() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(driver, "library", missing)
    with failing(NoDeviceError, field="libcuda"):
        driver.driver.__wrapped__()


@pytest.mark.parametrize(
    ("result", "unpacked"), [((0,), None), ((0, "one"), "one"), ((0, "one", "two"), ("one", "two"))]
)
def test_results_of_the_driver_are_unpacked(result: tuple[object, ...], unpacked: object) -> None:
    assert driver.check(result, "asking") == unpacked
