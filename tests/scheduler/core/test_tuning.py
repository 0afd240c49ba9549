"""Tuned numbers: data of a part, each with its source, and settable for experiments."""

from __future__ import annotations

import pytest

from paellapy.instrument.device import Device
from paellapy.scheduler.core.tuning import TUNING, Tuning, TuningError


def test_every_number_has_a_meaning_and_a_source() -> None:
    numbers = Tuning.for_part("h200").numbers()
    assert len(numbers) > 30
    assert [each.name for each in numbers] == list(TUNING.names or ())
    assert all(each.meaning and each.source for each in numbers)


def test_a_part_without_numbers_of_its_own_uses_the_h200s_and_says_so() -> None:
    own, borrowed = Tuning.for_part("h200"), Tuning.for_part("a100")
    assert borrowed.measured_on == "h200"
    assert borrowed.part == "a100"
    assert "a100" in borrowed.note
    assert borrowed.numbers() == own.numbers()


def test_a_device_has_the_numbers_of_its_part() -> None:
    assert Tuning.for_device(Device.open("virtual:h200")) == Tuning.for_part("h200")


def test_numbers_set_for_an_experiment_are_named() -> None:
    found = Tuning.for_part("h200", {"demand_limit": 3.5})
    assert found.row()[0]["demand_limit"] == 3.5
    assert "demand_limit" in found.note
    assert [each.name for each in found.numbers() if "this run" in each.source] == ["demand_limit"]
    assert Tuning.for_part("h200", found) is found


@pytest.mark.parametrize(
    "changes",
    [{"demand": 1.0}, {"demand_limit": -1.0}, {"demand_limit": float("nan")}, {"roomy_jobs": 1.5}, {"quantum_us": ""}],
)
def test_a_number_that_makes_no_sense_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(TuningError) as caught:
        Tuning.for_part("h200", changes)
    assert caught.value.field in changes
