"""Compiled code is neither kept in nor taken from a folder that another user can write to."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paellapy.instrument import library_caches, private_folders
from paellapy.instrument.private_folders import trusted, weak_place

OTHER = 4242  # a user and a group that nobody here has


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = tmp_path / "above" / "cache"
    found.mkdir(parents=True)
    found.chmod(0o755)
    (tmp_path / "above").chmod(0o755)
    return found


def owned(monkeypatch: pytest.MonkeyPatch, place: Path, uid: int | None = None, gid: int | None = None) -> None:
    """Lets the folder look as if it were another's, which only root could arrange."""
    real = Path.stat

    def stat(self: Path, **given: Any) -> Any:
        found = real(self, **given)
        if self != place:
            return found
        return SimpleNamespace(
            st_mode=found.st_mode,
            st_uid=found.st_uid if uid is None else uid,
            st_gid=found.st_gid if gid is None else gid,
        )

    monkeypatch.setattr(Path, "stat", stat)


def test_a_folder_of_ones_own_is_trusted(folder: Path) -> None:
    assert weak_place(folder) is None
    assert weak_place(folder / "not" / "yet") is None


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o757])
def test_a_folder_that_everybody_may_write_is_not(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    assert weak_place(folder) == folder


def test_the_sticky_bit_protects_only_names_that_are_there(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert weak_place(folder) is None
    folder.parent.chmod(0o777)
    assert weak_place(folder) == folder.parent


def test_volumes_of_a_pod_may_be_open_and_the_folders_in_them_may_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    folder.parent.chmod(0o777)
    assert weak_place(folder) is None
    folder.chmod(0o777)
    assert weak_place(folder) == folder


def test_folders_of_another_user_are_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (folder, folder.parent):
        with monkeypatch.context() as patch:
            owned(patch, place, uid=OTHER)
            assert weak_place(folder) == place
            assert "chmod" not in private_folders.remedy(place, "SOME_DIR")


def test_a_group_of_others_may_not_write_and_ones_own_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o775)
    assert weak_place(folder) is None
    owned(monkeypatch, folder, gid=OTHER)
    assert weak_place(folder) == folder


def test_owners_that_a_container_does_not_know_may_own_folders_above(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = private_folders._unmapped()
    owned(monkeypatch, folder.parent, uid=nobody)
    assert weak_place(folder) is None
    owned(monkeypatch, folder, uid=nobody)
    assert weak_place(folder) == folder


def test_the_folder_behind_a_link_counts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert weak_place(tmp_path / "link") is None
    folder.parent.chmod(0o777)
    assert weak_place(tmp_path / "link") == folder.parent


def test_links_of_another_user_are_not_trusted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one in the middle: its owner can let it lead to a folder of theirs later."""
    (tmp_path / "middle").symlink_to(folder)
    (tmp_path / "link").symlink_to(tmp_path / "middle")
    assert weak_place(tmp_path / "link" / "code") is None
    real = Path.lstat

    def lstat(self: Path) -> Any:
        return SimpleNamespace(st_uid=OTHER) if self == tmp_path / "middle" else real(self)

    monkeypatch.setattr(Path, "lstat", lstat)
    assert weak_place(tmp_path / "link" / "code") == tmp_path / "middle"


def test_a_folder_that_cannot_be_looked_at_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError

    for name in ("stat", "lstat", "readlink"):
        monkeypatch.setattr(Path, name, refuse)
    assert weak_place(folder) is None


def test_a_group_with_other_users_may_not_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o775)
    monkeypatch.setattr(os, "getgid", lambda: OTHER)
    owned(monkeypatch, folder, gid=OTHER)
    for name, trust in (("me", True), ("users", False)):
        monkeypatch.setattr(private_folders.grp, "getgrgid", lambda gid, name=name: SimpleNamespace(gr_name=name))
        monkeypatch.setattr(private_folders.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
        assert (weak_place(folder) is None) == trust


def test_an_access_list_may_let_others_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getxattr", lambda place, name: b"list")
    assert weak_place(folder) is None
    folder.chmod(0o775)
    assert weak_place(folder) == folder


def test_the_warning_names_the_variable_and_comes_once(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match=r"can be written by other users.*chmod go-w.*SOME_DIR"):
        assert not trusted(folder, "SOME_DIR")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not trusted(folder, "SOME_DIR")


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_caches_of_libraries_are_moved_to_a_folder_of_ours(
    variable: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "ours"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv(variable, str(folder))
    library_caches.protect_inductor()
    assert os.environ[variable] == str(folder)
    folder.chmod(0o777)
    library_caches._check.cache_clear()
    with pytest.warns(UserWarning, match=f"is used instead: run chmod go-w on it, or set {variable}"):
        library_caches.protect_inductor()
    moved = Path(os.environ[variable])
    assert moved.parent == tmp_path / "ours"
    assert moved.stat().st_mode & 0o077 == 0


def test_without_a_safe_folder_of_ours_the_cache_lasts_as_long_as_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="is used instead"):
        library_caches.protect_triton()
    assert folder not in Path(os.environ["TRITON_CACHE_DIR"]).parents
    assert weak_place(Path(os.environ["TRITON_CACHE_DIR"])) is None


def test_where_every_folder_is_open_to_others_the_newest_one_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="is used instead"):
        library_caches.protect_triton()
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent == folder
    assert Path(os.environ["TRITON_CACHE_DIR"]).stat().st_mode & 0o077 == 0


def test_in_a_pod_the_group_of_a_volume_may_be_one_of_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o770)
    monkeypatch.setattr(os, "getgid", lambda: folder.stat().st_gid + 1)
    monkeypatch.setattr(os, "getgroups", lambda: [folder.stat().st_gid])
    if folder.stat().st_gid:
        assert weak_place(folder) == folder
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert weak_place(folder) is None


def test_the_folder_of_torch_compile_is_made_before_others_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    library_caches.protect_inductor()
    made = Path(default_cache_dir())
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o077 == 0


def test_compiled_functions_in_an_open_folder_are_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "some_entry.py").write_text(
        "from paellapy.instrument.numba_ext.link import compiled\n@compiled\ndef twice(x):\n    return 2 * x\n"
    )
    run = "from some_entry import twice; twice(21); print(sum(twice.stats.cache_hits.values()))"
    stored = tmp_path / "cache"

    def hits() -> tuple[str, str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(stored), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run([sys.executable, "-c", run], env=environment, check=True, capture_output=True, text=True)
        return done.stdout.strip(), done.stderr

    assert hits() == ("0", "")
    assert hits() == ("1", "")
    stored.chmod(0o777)
    found, said = hits()
    assert found == "0"
    assert "NUMBA_CACHE_DIR" in said
