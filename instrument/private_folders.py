"""Folders of compiled code: one that another user can write to is not used, since its files are executed."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_told: set[tuple[Path, str]] = set()


def trusted(folder: Path, variable: str = "PAELLAPY_CACHE_DIR") -> bool:
    """Whether no other user can change files in the folder; if one can, a warning names the variable to set."""
    if (through := weak_place(folder)) is None:
        return True
    if (folder, variable) not in _told:
        _told.add((folder, variable))
        warnings.warn(f"{refusal(folder, through)}: {remedy(through, variable)}", stacklevel=2)
    return False


def refusal(folder: Path, through: Path) -> str:
    return f"{through} can be written by other users, so {'it' if through == folder else folder} is not used for code"


def remedy(through: Path, variable: str) -> str:
    owned = through.stat().st_uid == os.getuid()
    return f"{'run chmod go-w on it, or ' if owned else ''}set {variable} to a folder of your own"


def weak_place(folder: Path) -> Path | None:
    """The folder, or one above it, through which another user can change files in `folder`; None: there is none.

    Above it, a folder with the sticky bit is safe, as /tmp: others can add names there, but not replace ours. Folders
    that do not exist yet are left out.
    """
    for place in _places(folder):
        try:
            found, link_uid = place.stat(), place.lstat().st_uid
        except OSError:
            continue
        above = place not in (folder, folder.resolve())
        owners = {os.getuid(), 0, *([_unmapped()] if above else [])}
        if found.st_uid not in owners or link_uid not in owners:  # the owner of a link can let it lead elsewhere
            return place
        if _others_write(place, found) and not (above and found.st_mode & stat.S_ISVTX):
            return place
    return None


def _others_write(place: Path, found: os.stat_result) -> bool:
    """Where there is an access list, its entries for other users show as rights of the group."""
    group = found.st_mode & stat.S_IWGRP and (found.st_gid not in _own_groups() or _has_list(place))
    return bool(found.st_mode & stat.S_IWOTH or group)


def _own_groups() -> set[int]:
    """Groups without other users: root's, and this user's own, as each user has one on many systems. In a pod of
    Kubernetes, volumes belong to one of its further groups.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return {0, os.getgid(), *os.getgroups()}
    try:
        own = grp.getgrgid(os.getgid()).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container that knows neither
        own = True
    return {0, os.getgid()} if own else {0}


def _has_list(place: Path) -> bool:
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except OSError:
        return False


def _places(folder: Path) -> Iterator[Path]:
    """The folder and those above it, by the names given and by those behind symbolic links.

    In a pod of Kubernetes, only the folder: volumes are open to all users there, and the pod is the only user of most.
    """
    yield folder
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return
    found, paths = {folder}, [folder.absolute(), folder.resolve()]
    while paths:
        path = paths.pop()
        for place in [each for each in (path, *path.parents) if each not in found]:
            found.add(place)
            yield place
            with contextlib.suppress(OSError):  # it is no link, or cannot be read
                paths.append(Path(os.path.normpath(place.parent / place.readlink())))


@cache
def _unmapped() -> int:
    """The owner that files of the host have in a container that does not know their user."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 0
