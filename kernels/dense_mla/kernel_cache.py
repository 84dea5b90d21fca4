"""Compiled kernels on disk: one object file each, in a folder that this user alone writes to.

An entry is the object file that the DSL exports, followed by its SHA-256; what reads object files does not look behind their sections. It is
written beside its place, synced and renamed, so that an entry is there whole or not at all. The key is in its name and in the name of its
function: an entry under another name is no entry.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import file_lock
from .kernel_key import SOURCES, sources_digest
from .trusted_folder import refuse_folder, refuse_owner

MAX_ENTRIES = 1024  # of 32 to 97 KB; a deployment has 3 to 33 on each context rank
LOCK_SECONDS = 120.0  # a kernel compiles in 1 to 5 seconds; a process that was stopped must not stop the others
LEFTOVER_SECONDS = 3600.0  # age of what a killed process left behind
_DIGEST_BYTES = 32
# The names of our files: whatever else lies in the folder is not ours to count or delete.
_ENTRY = re.compile(r"\w+-[0-9a-f]{64}\.o")
_LEFTOVER = re.compile(r"[0-9a-f]{64}\.lock|\w+-[0-9a-f]{64}\.[0-9a-f]+\.tmp")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheContents:
    """What a cache folder holds, and why it cannot be used, if so: then nothing in it counts."""

    entries: int
    bytes: int
    refusal: str | None


def cache_contents(folder: Path) -> CacheContents:
    """Looks into a folder and changes nothing; one that is not there is empty, if it can be made."""
    real = _real(folder)
    try:
        refusal = refuse_folder(real)
        sizes = [status.st_size for _, status in _files(real, _ENTRY)] if refusal is None else []
        return CacheContents(len(sizes), sum(sizes), refusal)
    except FileNotFoundError:
        above = next(place for place in real.parents if place.exists())
        return CacheContents(0, 0, None if os.access(above, os.W_OK) else f"{above} cannot be written to")
    except OSError as error:
        return CacheContents(0, 0, _reason(error))


class KernelCache:
    """Entries in one folder. Any number of processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path) -> KernelCache | None:
        """The cache in a folder, which is made if it is not there. None, after one line in the log, where entries cannot be trusted or read."""
        real = _real(folder)
        try:
            refusal = refuse_folder(real, make=True)
        except OSError as error:
            refusal = _reason(error)
        if refusal is None:
            return cls(real)
        _warn_once(f"kernel cache {folder} is not used: {refusal}")
        return None

    def key(self, make_key: Callable[[], str]) -> str | None:
        """What `make_key` returns; None, after one line in the log, where it fails: without a key nothing is loaded or kept."""
        try:
            return make_key()
        except Exception as error:  # of the DSL, which looks for the toolkit
            _warn_once(f"kernel cache {self.folder}: the key of a kernel cannot be made: {_reason(error)}; it is compiled and not kept")
            return None

    def fetch(self, name: str, key: str, compile_kernel: Callable[[], Any]) -> tuple[Callable[..., Any], bool]:
        """A kernel from its entry, or compiled and then kept. Of several processes that lack an entry, one compiles and the others wait.

        Args:
            name: of the kernel, for people.
            key: of `kernel_key`.
            compile_kernel: returns what cute.compile returns, compiled with TVM-FFI.

        Returns:
            The kernel, and whether it came from the cache.
        """
        # An entry never changes: reading one takes no lock.
        found = self._load(name, key, report_damage=False)
        if found is not None:
            return found, True
        with self._locked(name, key) as locked:
            found = self._load(name, key, report_damage=True)
            if found is not None:
                return found, True
            compiled = compile_kernel()
            if locked and self._publish(name, key, compiled):
                # What other processes will run; and its calls go through no Python of the DSL's.
                return self._load(name, key, report_damage=True) or compiled, False
            return compiled, False

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key}.o"

    def _load(self, name: str, key: str, *, report_damage: bool) -> Callable[..., Any] | None:
        """The kernel of an entry; None if there is none, or a damaged one, which the next to publish replaces."""
        path = self._path(name, key)
        try:
            damage = _damage(path)
            if damage is None:
                from cutlass.cute.runtime import load_module

                kernel = load_module(str(path), enable_tvm_ffi=True)[_symbol(key)]
                with suppress(OSError):  # a folder that this user only reads
                    os.utime(path)
                return kernel  # type: ignore[no-any-return]
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever LLVM does not like about it
            damage = _reason(error)
        if report_damage and path.exists():  # it may have been deleted between the look at it and the load
            logger.warning("kernel cache entry %s is not loaded: %s; the kernel is compiled anew", path, damage)
        return None

    @contextmanager
    def _locked(self, name: str, key: str) -> Iterator[bool]:
        """Holds the lock of a key; yields False, after one line in the log, where nothing can be published."""
        path = self.folder / f"{key}.lock"
        descriptor = None
        try:
            descriptor = file_lock.acquire(path, LOCK_SECONDS)
            if descriptor is None:
                logger.warning("kernel cache %s: waited %d s for the process that compiles %s; compiling it here too", path, LOCK_SECONDS, name)
        except OSError as error:
            self._say_read_only(error)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                file_lock.release(path, descriptor)

    def _publish(self, name: str, key: str, compiled: Any) -> bool:
        """Writes an entry; False, after one line in the log, where that failed."""
        if _sources_changed():
            _warn_once(f"kernel cache {self.folder}: the sources of dense_mla changed since this process started; its kernels are not kept")
            return False
        path = self._path(name, key)
        # No process id: ranks in containers of several machines have the same ones, and not every file system's locks reach so far.
        draft = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # nobody else's, whatever the umask is
            compiled.export_to_c(str(draft), function_name=_symbol(key), export_only_tvm_ffi_symbols=True)
            digest = hashlib.sha256(draft.read_bytes()).digest()
            with draft.open("ab") as file:
                os.fchmod(file.fileno(), 0o644)  # the folder decides who may read
                file.write(digest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except Exception as error:  # the kernel is there: it runs, kept or not
            self._say_read_only(error)
            return False
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
        self._tidy()
        return True

    def _say_read_only(self, error: Exception) -> None:
        _warn_once(f"kernel cache {self.folder} cannot be written: {_reason(error)}; kernels that it lacks are compiled and not kept")

    def _tidy(self) -> None:
        """What a new entry asks for; it is there, whatever fails here."""
        with suppress(OSError):  # some file systems cannot sync a folder: an entry that is lost with the machine's power is compiled again
            _sync_folder(self.folder)
        try:
            self._prune()
        except OSError as error:
            _warn_once(f"kernel cache {self.folder} is not pruned: {_reason(error)}; it may grow beyond {MAX_ENTRIES} entries")

    def _prune(self) -> None:
        """Delete the entries that were used longest ago, above the bound, and what killed processes left. A loader that comes too late compiles."""
        by_use = sorted(_files(self.folder, _ENTRY), key=lambda file: file[1].st_mtime, reverse=True)
        too_old = time.time() - LEFTOVER_SECONDS
        left = [path for path, status in _files(self.folder, _LEFTOVER) if status.st_mtime < too_old]
        for path in [*(path for path, _ in by_use[MAX_ENTRIES:]), *left]:
            path.unlink(missing_ok=True)


def _real(folder: Path) -> Path:
    """Where a folder is once the symbolic links on the way are followed: changing one afterwards leads nobody elsewhere."""
    return Path(os.path.realpath(folder))


def _sources_changed() -> bool:
    try:
        return sources_digest() != SOURCES
    except OSError:  # one is gone
        return True


def _damage(path: Path) -> str | None:
    """Why an entry must not be loaded, or None; FileNotFoundError if there is none."""
    with path.open("rb") as file:
        refusal = refuse_owner(os.fstat(file.fileno()))
        content = file.read()
    if refusal is not None:
        return refusal
    if hashlib.sha256(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        return f"its checksum does not fit its {len(content)} bytes"
    return None


def _symbol(key: str) -> str:
    return f"dense_mla_{key}"


def _files(folder: Path, names: re.Pattern[str]) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in folder.iterdir():
        if names.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another process deletes too
                found.append((path, path.stat()))
    return found


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    """An error in one line, without the colours that the DSL gives its own."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(_COLOUR.sub("", text).split())[:300]


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s", message)
