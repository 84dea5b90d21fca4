"""Folders and files that this user or root alone can have written: what lies there is run as code."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def refuse_folder(folder: Path, *, make: bool = False) -> str | None:
    """Why a folder may hold somebody else's code, or come to be one that does, or None.

    Args:
        folder: absolute and without symbolic links, as `os.path.realpath` gives it.
        make: make it where it is not there, and each missing folder above it, for this user alone.

    Raises:
        FileNotFoundError: it is not there and not to be made.
        OSError: it cannot be made or looked at, or a file is in the way.
    """
    # From the top: what was looked at stays as it was, since nobody else can rename or replace anything on the way to it.
    for place in reversed(folder.parents):
        refusal = refuse_parent(place, _status(place, make))
        if refusal is not None:
            return refusal
    return refuse_owner(_status(folder, make))


def refuse_parent(place: Path, status: os.stat_result) -> str | None:
    """Why somebody else could put another folder in the place of one below this one, or None."""
    # In a user namespace without root, / belongs to nobody known; whoever it is can replace every program anyway.
    if status.st_uid not in (os.geteuid(), 0) and place != place.parent:
        return f"{place} above it belongs to user {status.st_uid}"
    # With the sticky bit, as on /tmp, others may add names, and neither rename nor delete what this user or root owns.
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        return f"others may write to {place} above it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def refuse_owner(status: os.stat_result) -> str | None:
    """Why a file or folder may hold somebody else's code, or None."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & _OTHERS_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _status(place: Path, make: bool) -> os.stat_result:
    """Of a folder itself: a symbolic link that came here meanwhile is none."""
    try:
        status = place.lstat()
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):  # another process makes it too
            place.mkdir(mode=0o700)
        status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{place} is not a directory")
    return status
