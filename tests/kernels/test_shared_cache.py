"""The folder of compiled kernels between processes that die or hang, in a home that cannot be written to, or that machines share: each start
works, with one line at most."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import test_kernel_cache
from dense_mla import compiled, file_lock, kernel_cache
from dense_mla.compiled import prepared_kernels
from dense_mla.kernel_cache import CacheContents, KernelCache, cache_contents
from test_kernel_cache import DEVICE, KEY, PROBLEM, entry, fetch

cache, hopper, schedule = test_kernel_cache.cache, test_kernel_cache.hopper, test_kernel_cache.schedule  # fixtures


@pytest.mark.parametrize("error", [OSError(13, "Permission denied"), OSError(30, "Read-only file system"), OSError(122, "Disk quota exceeded")])
def test_a_home_that_cannot_be_written_to_is_one_line(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a user whose home is / and who is not root. Each kernel compiles, of every problem."""

    def refuse(self: Path, *arguments: Any, **keywords: Any) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))  # root may write wherever a file system lets it
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    folder = tmp_path / ".cache" / "vllm-dense-mla"
    for query_len in (1, 2):
        problem = compiled.replace(PROBLEM, query_len=query_len)
        assert prepared_kernels(problem, DEVICE, cache_dir=folder).forward == "ForwardSm90"
    assert caplog.messages == [f"kernel cache {folder} is not used: {error.strerror}"]
    assert compiled.preparation().loaded == 0 and list(tmp_path.iterdir()) == []
    assert cache_contents(folder) == CacheContents(0, 0, f"{tmp_path} cannot be written to")


def test_machines_without_common_locks_keep_apart_what_they_write(cache: KernelCache, schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In containers their processes have the same ids, and both may compile one kernel at the same time."""

    def export(path: str, **options: Any) -> None:
        schedule.export_to_c(path, **options)
        assert not other or other.pop()._publish("Kernel", KEY, schedule)

    other = [KernelCache(cache.folder)]
    kernel, times = fetch(cache, SimpleNamespace(export_to_c=export))
    assert times == 1 and not other and callable(kernel)
    assert fetch(cache, schedule)[1] == 0 and caplog.messages == []
    assert list(cache.folder.iterdir()) == [entry(cache)]


def test_a_lock_that_a_file_server_lost_stops_nobody(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise OSError(5, "Input/output error")
        real(descriptor, operation)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    before = len(os.listdir("/proc/self/fd"))
    assert fetch(cache, schedule)[1] == 1 and fetch(cache, schedule)[1] == 0
    assert len(os.listdir("/proc/self/fd")) == before and caplog.messages == []


def test_a_file_system_without_locks_is_one_line(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    for _ in range(2):
        assert fetch(cache, schedule) == (schedule, 1)
    said = f"kernel cache {cache.folder} cannot be written: Function not implemented; kernels that it lacks are compiled and not kept"
    assert caplog.messages == [said] and not entry(cache).exists()


def test_the_line_of_a_start_after_an_update_is_none(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another version has other keys: its kernels come beside the old ones, and push out the oldest where there are too many."""
    monkeypatch.setattr(kernel_cache, "MAX_ENTRIES", 2)
    for version, kept in (("01", 1), ("02", 2), ("03", 2)):
        assert not cache.fetch("Kernel", version * 32, lambda: schedule)[1]
        os.utime(cache.folder / f"Kernel-{version * 32}.o", (int(version), int(version)))
        assert len(list(cache.folder.iterdir())) == kept
    assert sorted(path.name[7:9] for path in cache.folder.iterdir()) == ["02", "03"] and caplog.messages == []


@pytest.fixture(scope="module")
def forks() -> Any:
    """Starts processes: a server that has imported everything and is forked, so that eight cost no eight imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutlass.cute", "dense_mla.schedule_kernel", "dense_mla.merge", "dense_mla.forward_sm90", "test_shared_cache"])
    return context


class KilledWhileWriting:
    """A compiled kernel whose process dies when half of its object is written."""

    def export_to_c(self, path: str, **options: Any) -> None:
        Path(path).write_bytes(b"\x7fELF half")
        os.kill(os.getpid(), signal.SIGKILL)


def be_killed(folder: Path) -> None:
    KernelCache(folder).fetch("Kernel", KEY, KilledWhileWriting)


def test_a_killed_process_leaves_no_entry_and_no_lock(forks: Any, cache: KernelCache, schedule: Any) -> None:
    process = forks.Process(target=be_killed, args=(cache.folder,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    assert {path.suffix for path in cache.folder.iterdir()} == {".tmp", ".lock"}
    start = time.monotonic()
    assert fetch(cache, schedule)[1] == 1 and time.monotonic() - start < kernel_cache.LOCK_SECONDS / 4
    assert fetch(cache, schedule)[1] == 0


def test_a_process_that_hangs_does_not_stop_the_others(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "LOCK_SECONDS", 0.2)
    with cache._locked("Kernel", KEY) as held:
        assert held and fetch(cache, schedule) == (schedule, 1)
    (said,) = caplog.messages
    assert "waited 0 s for the process that compiles Kernel" in said and not entry(cache).exists()
    assert fetch(cache, schedule)[1] == 1 and entry(cache).exists()


def test_whoever_waits_on_a_deleted_lock_takes_the_new_one(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening a lock and getting it, its holder may have deleted it, and a third process made another."""
    real, opened = os.open, []

    def open_then_deleted(path: Any, *rest: Any) -> int:
        descriptor = real(path, *rest)
        opened.append(descriptor)
        if len(opened) == 1:
            Path(path).unlink()
        return descriptor

    monkeypatch.setattr(os, "open", open_then_deleted)
    with cache._locked("Kernel", KEY) as held:
        assert held and len(opened) == 2 and (cache.folder / f"{KEY}.lock").exists()
    assert list(cache.folder.iterdir()) == []
