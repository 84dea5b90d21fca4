"""A lock between processes: a file that is there while somebody holds it, and that a process which dies lets go of."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

POLL_SECONDS = 0.05


def acquire(path: Path, seconds: float) -> int | None:
    """A descriptor that holds the lock, or None if another process held it for so long; give it back with `release`.

    Raises:
        OSError: the file cannot be made, or the file system has no locks.
    """
    deadline = time.monotonic() + seconds
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = _wait(descriptor, deadline)
            # Whoever held it before has deleted it: only the file that has the name now counts.
            if held and _is_file_of(path, descriptor):
                taken, descriptor = descriptor, -1
                return taken
            if not held:
                return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def release(path: Path, descriptor: int) -> None:
    """Deletes the file and lets the lock go."""
    with suppress(OSError):
        path.unlink()
    # A child that was forked meanwhile has the descriptor too: closing it here would not let the lock go.
    with suppress(OSError):  # of a file server that lost the lock: it is gone
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with suppress(OSError):
        os.close(descriptor)


def _wait(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)


def _is_file_of(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
