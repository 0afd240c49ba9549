"""The cache on disk: it returns what was stored or nothing, and never fails a caller."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument import cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def stored_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_was_written_is_read_back() -> None:
    key = cache.digest("a")
    assert cache.read(key) is None
    cache.write(key, b"first")
    assert cache.read(key) == b"first"
    cache.write(key, b"second")
    assert cache.read(key) == b"second"
    assert cache.read(cache.digest("b")) is None


def test_the_empty_result_is_a_result() -> None:
    cache.write(cache.digest("a"), b"")
    assert cache.read(cache.digest("a")) == b""


def cut(data: bytes) -> bytes:
    return data[:-1]


def emptied(data: bytes) -> bytes:
    return b""


def grown(data: bytes) -> bytes:
    return data + b"x"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("damage", [cut, emptied, grown, flipped])
def test_a_damaged_file_is_no_result_and_can_be_replaced(damage: Callable[[bytes], bytes], folder: Path) -> None:
    key = cache.digest("a")
    cache.write(key, b"machine code")
    (path,) = stored_files(folder)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read(key) is None
    cache.write(key, b"machine code")
    assert cache.read(key) == b"machine code"


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "file"))
    cache.write(cache.digest("a"), b"data")
    assert cache.read(cache.digest("a")) is None


def test_a_failed_write_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache.write(cache.digest("a"), b"data")
    assert cache.read(cache.digest("a")) is None
    assert stored_files(folder) == []


def test_the_folder_is_the_users_unless_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAELLAPY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_dir() == tmp_path / "paellapy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.cache_dir() == Path("/home/somebody/.cache/paellapy")


def test_a_user_without_a_home_still_has_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("PAELLAPY_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache.cache_dir().is_absolute()


parts = st.lists(st.one_of(st.text(max_size=5), st.binary(max_size=5)), max_size=4)


def as_bytes(given_parts: list[str | bytes]) -> list[bytes]:
    return [p.encode() if isinstance(p, str) else p for p in given_parts]


@given(parts, parts)
def test_keys_are_equal_exactly_when_all_parts_are(a: list[str | bytes], b: list[str | bytes]) -> None:
    assert (cache.digest(*a) == cache.digest(*b)) == (as_bytes(a) == as_bytes(b))


def test_a_folder_that_others_may_write_is_neither_read_nor_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "open"))
    key = cache.digest("code")
    cache.write(key, b"code")
    assert cache.read(key) == b"code"
    assert (tmp_path / "open").stat().st_mode & 0o077 == 0
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by other"):
        assert cache.read(key) is None
    other = cache.digest("other")
    cache.write(other, b"other")
    assert not (tmp_path / "open" / other[:2] / other).exists()
