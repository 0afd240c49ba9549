"""The cache on disk: it returns what was stored or nothing, never fails a caller, and trusts no folder of others."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import pytest
from failing import warning
from hypothesis import given
from hypothesis import strategies as st

from paellapy.instrument import cache
from paellapy.instrument.errors import FolderWarning
from paellapy.instrument.numba_ext.link import compiled


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "cache"))
    cache.trusted.cache_clear()
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


# --- folders that others can write to -------------------------------------------------------------------------------

OTHER = 4242  # a user and a group that nobody here has


def is_trusted(folder: Path) -> bool:
    cache.trusted.cache_clear()
    return cache.trusted(folder, "SOME_DIR")


def test_a_folder_of_ones_own_is_trusted_and_a_missing_one_is_made(folder: Path) -> None:
    assert is_trusted(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    assert is_trusted(folder)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_that_everybody_may_write_is_not_trusted(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    with warning(FolderWarning, field="SOME_DIR"):
        assert not is_trusted(folder)
    assert not cache.trusted(folder, "SOME_DIR")  # without a second warning


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "trust"),
    [
        (0o755, "own", "own", True), (0o775, "own", "own", True), (0o775, "own", OTHER, False),
        (0o755, "own", OTHER, True), (0o755, OTHER, "own", False), (0o755, 0, 0, True),
    ],
)  # fmt: skip
def test_owner_and_group_count(
    mode: int, uid: Any, gid: Any, trust: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another owner's, which only root could arrange; a user's own group has the user's number."""
    own = 1000
    seen = SimpleNamespace(st_mode=mode, st_uid=own if uid == "own" else uid, st_gid=own if gid == "own" else gid)
    monkeypatch.setattr(os, "getuid", lambda: own)
    monkeypatch.setattr(os, "getgid", lambda: own)
    for name in ("stat", "lstat"):
        monkeypatch.setattr(Path, name, lambda self, **_: seen)
    if trust:
        assert is_trusted(folder)
    else:
        with warning(FolderWarning, field="SOME_DIR"):
            assert not is_trusted(folder)


def test_a_link_of_another_user_is_not_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert is_trusted(link)
    monkeypatch.setattr(Path, "lstat", lambda self: SimpleNamespace(st_uid=OTHER))
    with warning(FolderWarning, field="SOME_DIR"):
        assert not is_trusted(link)


def test_a_folder_that_others_may_write_is_neither_read_nor_written(folder: Path) -> None:
    key, other = cache.digest("code"), cache.digest("other")
    cache.write(key, b"code")
    folder.chmod(0o777)
    cache.trusted.cache_clear()
    with warning(FolderWarning, field="PAELLAPY_CACHE_DIR"):
        assert cache.read(key) is None
    cache.write(other, b"other")
    assert not (folder / other[:2] / other).exists()


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_caches_of_libraries_are_moved_to_a_folder_of_ours(
    variable: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(variable, str(theirs))
    cache.protect_inductor()
    assert os.environ[variable] == str(theirs)
    theirs.chmod(0o777)
    cache.trusted.cache_clear()
    with warning(FolderWarning, field=variable):
        cache.protect_inductor()
    moved = Path(os.environ[variable])
    assert moved.parent == folder
    assert moved.stat().st_mode & 0o077 == 0


def test_without_a_safe_folder_of_ours_a_librarys_cache_lasts_as_long_as_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    with pytest.warns(FolderWarning) as said:
        cache.protect_triton()
    assert [each.message.field for each in said] == ["TRITON_CACHE_DIR", "PAELLAPY_CACHE_DIR"]
    moved = Path(os.environ["TRITON_CACHE_DIR"])
    assert folder not in moved.parents
    assert moved.stat().st_mode & 0o077 == 0


def test_the_folder_of_torch_compile_is_made_before_others_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.protect_inductor()
    made = Path(default_cache_dir())
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o077 == 0


def test_compiled_functions_in_an_open_folder_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def hits() -> int:
        cache.trusted.cache_clear()

        @compiled
        def twice(x: int) -> int:
            return 2 * x

        assert twice(21) == 42
        return sum(twice.stats.cache_hits.values())

    assert [hits(), hits()] == [0, 1]
    next(tmp_path.rglob("*.nbi")).parent.chmod(0o777)
    with warning(FolderWarning, field="NUMBA_CACHE_DIR"):
        assert hits() == 0
