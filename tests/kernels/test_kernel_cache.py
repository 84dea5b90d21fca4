"""The folder of compiled kernels: entries are whole or not there, and nothing broken or foreign is ever loaded."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dense_mla import compiled, kernel_cache, kernel_key
from dense_mla.compiled import prepared_kernels
from dense_mla.kernel_cache import KernelCache, cache_contents
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


def test_without_a_folder_kernels_compile_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    for name in ("HOME", "XDG_CACHE_HOME", "VLLM_K3_DENSE_MLA_CACHE_DIR"):  # the kernels' package reads no setting
        monkeypatch.setenv(name, str(tmp_path))
    assert prepared_kernels(PROBLEM, DEVICE).forward == "ForwardSm90"
    assert (compiled.preparation().compiled, compiled.preparation().loaded, list(tmp_path.iterdir())) == (3, 0, [])


def test_a_relative_folder_is_refused() -> None:
    """Each process of a server may have a working directory of its own."""
    with pytest.raises(ValueError, match=r"^cache_dir must be an absolute path, got 'kernels'$"):
        prepared_kernels(PROBLEM, DEVICE, cache_dir=Path("kernels"))


@pytest.mark.parametrize("umask", [0, 0o002, 0o022])
def test_the_folder_what_is_made_above_it_and_its_entries_are_their_owner_s_alone(umask: int, tmp_path: Path, schedule: Any) -> None:
    drafts: list[int] = []

    def export(path: str, **options: Any) -> None:
        schedule.export_to_c(path, **options)
        drafts.append(stat.S_IMODE(os.stat(path).st_mode))

    before = os.umask(umask)
    try:
        cache = KernelCache.open(tmp_path / "new" / "newer" / "cache")
        assert cache is not None
        fetch(cache, SimpleNamespace(export_to_c=export))
    finally:
        os.umask(before)
    assert drafts == [0o600]
    made = tmp_path / "new", tmp_path / "new" / "newer", cache.folder
    assert [stat.S_IMODE(path.stat().st_mode) for path in (*made, entry(cache))] == [0o700, 0o700, 0o700, 0o644]
    assert list(cache.folder.iterdir()) == [entry(cache)], "the lock and the draft are gone"


def test_a_file_in_the_way_is_said_and_kernels_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    (tmp_path / "file").touch()
    assert prepared_kernels(PROBLEM, DEVICE, cache_dir=tmp_path / "file" / "cache").merge == "Merge"
    (said,) = caplog.messages
    assert said == f"kernel cache {tmp_path}/file/cache is not used: {tmp_path}/file is not a directory"


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
    assert len(caplog.messages) == 2 and f"dense_mla_{other}" in caplog.messages[-1]
    assert not {"\n", "\x1b"} & set(caplog.messages[-1]), "the DSL's own messages have several lines, in colours"


def test_an_entry_that_is_deleted_before_it_is_loaded_is_none(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By another process, which had one too many: that is no damage, and nothing to say."""
    fetch(cache, schedule)
    look = kernel_cache._damage

    def look_then_deleted(path: Path) -> str | None:
        found = look(path)
        path.unlink()
        return found

    monkeypatch.setattr(kernel_cache, "_damage", look_then_deleted)
    assert cache._load("Kernel", KEY, report_damage=True) is None and not entry(cache).exists()
    fetch(cache, schedule)
    assert caplog.messages == []


def test_an_error_of_the_compiler_is_the_caller_s(cache: KernelCache) -> None:
    def fail() -> Any:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        cache.fetch("Kernel", KEY, fail)
    assert list(cache.folder.iterdir()) == [], "no lock stays behind"


@pytest.mark.parametrize("change", ["edited", "deleted"])
def test_sources_changed_under_a_running_process_are_not_filed_under_the_new_ones(
    change: str, cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def digest() -> str:
        if change == "deleted":
            raise FileNotFoundError(2, "No such file or directory")
        return "another"

    monkeypatch.setattr(kernel_cache, "sources_digest", digest)
    assert fetch(cache, schedule) == (schedule, 1)
    assert "the sources of dense_mla changed" in caplog.text and list(cache.folder.iterdir()) == []


def test_the_least_recently_used_are_deleted(cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "MAX_ENTRIES", 3)
    now = time.time()
    newest, middle, oldest = (f"Merge-{digit * 64}.o" for digit in "123")
    dead, live = ((f"{digit * 64}.lock", f"Merge-{digit * 64}.4711beef.tmp") for digit in "45")
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


def test_an_entry_counts_as_kept_whatever_fails_after_it_is_published(
    cache: KernelCache, schedule: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(kernel_cache, "_sync_folder", refuse)
    monkeypatch.setattr(kernel_cache, "_files", refuse)
    kernel, times = fetch(cache, schedule)
    assert times == 1 and kernel is not schedule, "what other processes will run"
    entry(cache).unlink()
    fetch(cache, schedule)
    assert caplog.messages == [f"kernel cache {cache.folder} is not pruned: Input/output error; it may grow beyond 1024 entries"]
    assert fetch(cache, schedule)[1] == 0


def test_without_a_key_kernels_are_compiled_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the DSL does not find its libraries, say: that is said once, not for each kernel."""
    from cutlass.cute import runtime

    def fail(**options: Any) -> Any:
        raise RuntimeError("no runtime\nlibraries")

    for memory in (kernel_key.toolkit, kernel_key._versions):
        memory.cache_clear()
    monkeypatch.setattr(runtime, "find_runtime_libraries", fail)
    monkeypatch.setattr(compiled.KernelSource, "compile", lambda self, options: self.name)
    kernels = prepared_kernels(PROBLEM, DEVICE, cache_dir=tmp_path / "cache")
    assert (kernels.schedule, kernels.forward, kernels.merge) == ("ScheduleKernel", "ForwardSm90", "Merge")
    assert (compiled.preparation().compiled, compiled.preparation().loaded, list((tmp_path / "cache").iterdir())) == (3, 0, [])
    assert caplog.messages == [
        f"kernel cache {tmp_path}/cache: the key of a kernel cannot be made: no runtime libraries; it is compiled and not kept"
    ]


def test_a_folder_that_is_not_there_is_empty(tmp_path: Path) -> None:
    contents = cache_contents(tmp_path / "nowhere")
    assert (contents.entries, contents.bytes, contents.refusal) == (0, 0, None) and not (tmp_path / "nowhere").exists()


VLLM_LOGGING = "from vllm.config import LoggingConfig; from vllm.logger import configure_logging; configure_logging(LoggingConfig()); "


@pytest.mark.parametrize("before", ["", VLLM_LOGGING], ids=["alone", "beside vLLM"])
def test_messages_reach_stderr_in_a_process_that_configures_no_logging(before: str, tmp_path: Path) -> None:
    """Python prints warnings there where no handler is: vLLM configures its own logger alone."""
    tmp_path.chmod(0o777)
    code = f"{before}import sys, pathlib; from dense_mla.kernel_cache import KernelCache; KernelCache.open(pathlib.Path(sys.argv[1]))"
    path = str(Path(kernel_cache.__file__).parents[1])
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=True
    )
    said = f"kernel cache {tmp_path} is not used: others may write to it (mode 777)"
    assert found.stderr.splitlines().count(said) == 1 and said not in found.stdout
