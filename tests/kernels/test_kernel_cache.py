"""The folder of compiled kernels: entries are whole or not there, and nothing broken or foreign is ever loaded."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dense_mla import compiled, kernel_cache
from dense_mla.compiled import prepared_kernels
from dense_mla.kernel_cache import CACHE_DIR_VARIABLE, KernelCache, cache_contents, cache_folder
from dense_mla.problem import DecodeProblem

PROBLEM = DecodeProblem(12, 64)
DEVICE = torch.device("cuda", 0)
KEY = "ab" * 32


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A process that has prepared and said nothing yet, as on a Hopper GPU."""
    fresh_process(monkeypatch)
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_PREPARED", compiled._Prepared())
    kernel_cache._warn_once.cache_clear()


@pytest.fixture(scope="module")
def schedule() -> Any:
    """A compiled kernel: the one that compiles fastest."""
    return compiled.kernel_sources(PROBLEM, (9, 0))[0].compile(compiled.compile_options((9, 0)))


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    cache = KernelCache.open(tmp_path / "cache")
    assert cache is not None
    return cache


def entry(cache: KernelCache) -> Path:
    return cache.folder / f"Kernel-{KEY}.o"


def fetch(cache: KernelCache, kernel: Any) -> tuple[Any, int]:
    """A kernel from the cache, and how often it had to be compiled."""
    calls: list[None] = []

    def compile_kernel() -> Any:
        calls.append(None)
        return kernel

    fetched, loaded = cache.fetch("Kernel", KEY, compile_kernel)
    assert loaded is (not calls)
    return fetched, len(calls)


@pytest.mark.parametrize("value", ["off", "OFF", "", " "])
def test_off_compiles_and_keeps_nothing(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(CACHE_DIR_VARIABLE, value)
    assert prepared_kernels(PROBLEM, DEVICE).forward == "ForwardSm90"
    assert (compiled.preparation().compiled, compiled.preparation().loaded, list(tmp_path.iterdir())) == (3, 0, [])


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settled by the argument, then the variable; where it is on, by XDG_CACHE_HOME, then the home directory."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/no/folder/by/its/standard")
    monkeypatch.delenv(CACHE_DIR_VARIABLE)
    assert cache_folder() is None
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "On")
    assert cache_folder() == Path("/home/me/.cache/vllm-dense-mla")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/vllm-dense-mla")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "~/kernels")
    assert cache_folder() == Path("/home/me/kernels")
    assert cache_folder(tmp_path) == tmp_path and cache_folder("off") is None
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "kernels")
    with pytest.raises(ValueError, match=rf"^{CACHE_DIR_VARIABLE} must be an absolute path, on or off, got 'kernels'$"):
        cache_folder()
    with pytest.raises(ValueError, match=r"^cache_dir must be an absolute path, on or off, got '\./kernels'$"):
        cache_folder("./kernels")


def test_no_home_directory_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("XDG_CACHE_HOME", CACHE_DIR_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder("on") is None and "there is no home directory" in caplog.text


def test_the_folder_and_its_entries_are_their_owner_s_alone(tmp_path: Path, schedule: Any) -> None:
    drafts: list[int] = []

    def export(path: str, **options: Any) -> None:
        schedule.export_to_c(path, **options)
        drafts.append(stat.S_IMODE(os.stat(path).st_mode))

    before = os.umask(0)
    try:
        cache = KernelCache.open(tmp_path / "new" / "cache")
        assert cache is not None
        fetch(cache, SimpleNamespace(export_to_c=export))
    finally:
        os.umask(before)
    assert drafts == [0o600]
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache.folder, entry(cache))] == [0o700, 0o644]
    assert list(cache.folder.iterdir()) == [entry(cache)], "the lock and the draft are gone"


@pytest.mark.parametrize(("mode", "refusal"), [(0o777, "mode 777"), (0o770, "mode 770"), (0o720, "mode 720"), (0o755, None)])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, refusal: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(mode)
    for _ in range(2):
        assert (KernelCache.open(tmp_path) is None) is (refusal is not None)
    assert [record.getMessage() for record in caplog.records] == (
        [] if refusal is None else [f"kernel cache {tmp_path} is not used: others may write to it ({refusal})"]
    )
    assert cache_contents(tmp_path).refusal == (refusal and f"others may write to it ({refusal})")


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Root's may be used: an image brings it."""
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if owner == 0:
        assert KernelCache.open(tmp_path) is not None
        owner = 54321
        monkeypatch.setattr(Path, "stat", lambda self: SimpleNamespace(st_uid=owner, st_mode=0o40755))
    assert KernelCache.open(tmp_path) is None
    assert f"kernel cache {tmp_path} is not used: it belongs to user {owner}" in caplog.text


def test_a_file_in_the_way_is_said_and_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    (tmp_path / "file").touch()
    assert prepared_kernels(PROBLEM, DEVICE, cache_dir=tmp_path / "file" / "cache").merge == "Merge"
    (said,) = caplog.messages
    assert said.startswith(f"kernel cache {tmp_path}/file/cache is not used: Not a directory")


@pytest.fixture
def read_only(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCache]:
    """The cache in a folder that cannot be written to; for root, which no mode holds back, as on a read-only file system."""
    cache.folder.chmod(0o500)
    if os.geteuid() == 0:
        real, read_only = os.open, OSError(30, "Read-only file system")

        def refuse(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
            if flags & os.O_CREAT and str(path).startswith(str(cache.folder)):
                raise read_only
            return real(path, flags, *rest, **keywords)

        monkeypatch.setattr(os, "open", refuse)
    yield cache
    cache.folder.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_said_once(read_only: KernelCache, schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        kernel, times = fetch(read_only, schedule)
        assert kernel is schedule and times == 1
    (said,) = caplog.messages
    assert said.startswith(f"kernel cache {read_only.folder} cannot be written: ") and said.endswith("are compiled and not kept")
    assert list(read_only.folder.iterdir()) == []


def test_what_a_read_only_folder_holds_is_loaded(
    cache: KernelCache, schedule: Any, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(cache, schedule)
    assert fetch(request.getfixturevalue("read_only"), schedule)[1] == 0 and caplog.messages == []


def test_a_full_disk_is_said_and_leaves_nothing(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert fetch(cache, schedule) == (schedule, 1)
    assert "cannot be written: No space left on device" in caplog.text and list(cache.folder.iterdir()) == []


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-100],
    "half": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
    "garbage": lambda content: os.urandom(4096),
    "checksum cut off": lambda content: content[:-32],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_and_compiled_anew(damage: str, cache: KernelCache, schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    fetch(cache, schedule)
    entry(cache).write_bytes(DAMAGES[damage](entry(cache).read_bytes()))
    assert fetch(cache, schedule)[1] == 1
    (said,) = caplog.messages
    assert said.startswith(f"kernel cache entry {entry(cache)} is not loaded: its checksum does not fit") and said.endswith("compiled anew")
    assert fetch(cache, schedule)[1] == 0, "the good entry is in its place"


def test_an_entry_of_another_key_or_that_others_may_write_to_is_not_loaded(
    cache: KernelCache, schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fetch(cache, schedule)
    entry(cache).chmod(0o620)
    assert fetch(cache, schedule)[1] == 1 and "others may write to it (mode 620)" in caplog.messages[-1]
    other = "cd" * 32
    entry(cache).rename(cache.folder / f"Kernel-{other}.o")
    assert not cache.fetch("Kernel", other, lambda: schedule)[1]
    assert len(caplog.messages) == 2 and f"dense_mla_{other}" in caplog.messages[-1] and "\n" not in caplog.messages[-1]


def test_an_error_of_the_compiler_is_the_caller_s(cache: KernelCache) -> None:
    def fail() -> Any:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        cache.fetch("Kernel", KEY, fail)
    assert list(cache.folder.iterdir()) == [], "no lock stays behind"


def test_sources_edited_under_a_running_process_are_not_filed_under_the_new_ones(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_cache, "sources_digest", lambda: "another")
    assert fetch(cache, schedule) == (schedule, 1)
    assert "the sources of dense_mla changed" in caplog.text and list(cache.folder.iterdir()) == []


def test_the_least_recently_used_are_deleted(cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_ENTRIES", 3)
    now = time.time()
    newest, middle, oldest = (f"Merge-{digit * 64}.o" for digit in "123")
    dead, live = ((f"{digit * 64}.lock", f"Merge-{digit * 64}.4711.tmp") for digit in "45")
    foreign = ("program.o", "note.tmp", "yarn.lock")
    ages = {newest: 100, middle: 200, oldest: 300, **dict.fromkeys(dead, 7200), **dict.fromkeys(live, 1), **dict.fromkeys(foreign, 1_000_000)}
    for name, age in ages.items():
        (cache.folder / name).write_bytes(b"kernel")
        os.utime(cache.folder / name, (now - age,) * 2)
    fetch(cache, schedule)
    assert {path.name for path in cache.folder.iterdir()} == {newest, middle, entry(cache).name, *live, *foreign}
    assert cache_contents(cache.folder).entries == 3 and cache_contents(cache.folder).bytes == 12 + entry(cache).stat().st_size
    os.utime(entry(cache), (now - 500,) * 2)
    fetch(cache, schedule)
    assert entry(cache).stat().st_mtime > now - 60, "a use counts"


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    contents = cache_contents(tmp_path / "nowhere")
    assert (contents.entries, contents.bytes, contents.refusal) == (0, 0, None) and not (tmp_path / "nowhere").exists()


# Processes: a server that has imported everything and is forked, so that eight cost no eight imports.


@pytest.fixture(scope="module")
def forks() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutlass.cute", "dense_mla.schedule_kernel", "dense_mla.merge", "dense_mla.forward_sm90", "test_kernel_cache"])
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


def test_messages_reach_a_process_that_configures_no_logging() -> None:
    """Python prints warnings to stderr where no handler is: vLLM configures its own logger alone."""
    assert kernel_cache.logger.getEffectiveLevel() <= logging.WARNING and not kernel_cache.logger.name.startswith("vllm")
