"""Which tests one worker runs: files say so."""

from __future__ import annotations

from pathlib import Path

import pytest
from groups import scope_of
from places import ROOT


@pytest.mark.parametrize(
    ("marks", "group"),
    [
        ('pytestmark = pytest.mark.xdist_group("one")', "one"),
        ('pytestmark = [\n    pytest.mark.filterwarnings("ignore"),\n    pytest.mark.xdist_group("two"),\n]', "two"),
        ('pytestmark = pytest.mark.skip("here is no xdist_group")', None),
        ("", None),
    ],
)
def test_a_file_names_the_group_of_its_tests(marks: str, group: str | None, tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(f"import pytest\n\n{marks}\n\n\ndef test_a(): ...\n")
    test = "test_x.py::test_a[a::b-c]"
    assert scope_of(test, tmp_path) == (group or test)


def test_all_tests_with_ray_are_run_by_one_worker() -> None:
    files = ("tests/cluster/test_ray.py", "tests/cluster/test_ray_serve.py")
    assert {scope_of(f"{file}::test_a", ROOT) for file in files} == {"ray"}
