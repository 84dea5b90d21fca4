"""Whose folder the kernels' may be: neither it nor what it lies in is somebody else's to write to or to exchange."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dense_mla import kernel_cache
from dense_mla.kernel_cache import KernelCache, cache_contents


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    kernel_cache._warn_once.cache_clear()


@pytest.mark.parametrize(("mode", "refusal"), [(0o777, "mode 777"), (0o770, "mode 770"), (0o720, "mode 720"), (0o755, None)])
def test_a_folder_that_others_may_write_to_is_refused(mode: int, refusal: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(mode)
    for _ in range(2):
        assert (KernelCache.open(tmp_path) is None) is (refusal is not None)
    assert [record.getMessage() for record in caplog.records] == (
        [] if refusal is None else [f"kernel cache {tmp_path} is not used: others may write to it ({refusal})"]
    )
    assert cache_contents(tmp_path).refusal == (refusal and f"others may write to it ({refusal})")


@pytest.mark.parametrize(
    ("mode", "refused"),
    [(0o777, True), (0o775, True), (0o757, True), (0o2775, True), (0o1777, False), (0o1775, False), (0o755, False), (0o711, False)],
)
@pytest.mark.parametrize("below", ["cache", "some/where/cache"])
def test_a_folder_that_others_may_exchange_is_refused(mode: int, refused: bool, below: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever may write to a folder above it can rename it and put another there, unless the sticky bit is set as on /tmp."""
    above = tmp_path / "above"
    folder = above / below
    for there in (False, True):
        above.mkdir(exist_ok=True)
        above.chmod(mode)
        if there:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        kernel_cache._warn_once.cache_clear()
        caplog.clear()
        said = f"others may write to {above} above it (mode {mode:o})"
        assert cache_contents(folder).refusal == (said if refused else None)
        assert (KernelCache.open(folder) is None) is refused and folder.exists() is (there or not refused)
        assert caplog.messages == ([f"kernel cache {folder} is not used: {said}"] if refused else [])


def belongs_to(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """Folders with another owner: only root could give one away."""
    real = Path.lstat

    def lstat(self: Path) -> Any:
        found = real(self)
        return SimpleNamespace(st_mode=found.st_mode, st_uid=owners.get(self, found.st_uid))

    monkeypatch.setattr(Path, "lstat", lstat)


@pytest.mark.parametrize(
    ("owners", "refusal"),
    [
        ({"root": 0, "root/mine": 12345, "root/mine/cache": 12345}, None),
        ({"root": 0, "root/mine": 0, "root/mine/cache": 0}, None),  # as an image brings it
        ({"root": 12345, "root/mine": 12345, "root/mine/cache": 54321}, "it belongs to user 54321"),
        ({"root": 12345, "root/mine": 54321, "root/mine/cache": 12345}, "{}/root/mine above it belongs to user 54321"),
        ({"root": 54321, "root/mine": 12345, "root/mine/cache": 12345}, "{}/root above it belongs to user 54321"),
    ],
)
@pytest.mark.parametrize("mode", [0o755, 0o1755])
def test_a_folder_of_somebody_else_or_below_one_is_refused(
    mode: int, owners: dict[str, int], refusal: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner's alone is what a sticky folder protects, and from its own owner it protects nothing. What is above / nobody asks."""
    folder = tmp_path / "root/mine/cache"
    folder.mkdir(parents=True)
    folder.parent.chmod(mode)
    above = dict.fromkeys(tmp_path.parents, 0) | {tmp_path: 0, Path("/"): 65534}
    belongs_to(monkeypatch, above | {tmp_path / name: owner for name, owner in owners.items()})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    said = None if refusal is None else refusal.format(tmp_path)
    assert cache_contents(folder).refusal == said and (KernelCache.open(folder) is None) is (said is not None)
    assert caplog.messages == ([] if said is None else [f"kernel cache {folder} is not used: {said}"])


def test_symbolic_links_are_followed_once_and_what_they_lead_to_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad, link = tmp_path / "good", tmp_path / "bad", tmp_path / "link"
    bad.mkdir()
    bad.chmod(0o777)
    (bad / "cache").mkdir(mode=0o700)
    link.symlink_to(good)
    cache = KernelCache.open(link / "cache")
    assert cache is not None and cache.folder == good / "cache" and stat.S_IMODE(good.stat().st_mode) == 0o700
    link.unlink()
    link.symlink_to(bad)
    assert KernelCache.open(link / "cache") is None and f"others may write to {bad} above it" in caplog.text
    link.unlink()
    link.symlink_to(link)
    assert KernelCache.open(link / "cache") is None and f"{link} is not a directory" in caplog.text


def test_a_folder_that_another_process_makes_meanwhile_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding that it is missing and making it, in a folder where everybody may add names."""
    tmp_path.chmod(0o1777)
    make = Path.mkdir
    for mode, accepted in ((0o700, True), (0o777, False)):

        def first(self: Path, mode: int = 0o777, theirs: int = mode) -> None:
            make(self)
            self.chmod(theirs)
            make(self, mode)

        monkeypatch.setattr(Path, "mkdir", first)
        assert (KernelCache.open(tmp_path / f"{mode:o}" / "cache") is not None) is accepted
        monkeypatch.undo()
