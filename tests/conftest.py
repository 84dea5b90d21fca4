"""Tests marked `gpu` are skipped, with the reason, where there is no GPU that the kernels support. No test touches the user's kernels on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dense_mla import decoder, unsupported_reason
from vllm_dense_mla.registration import CACHE_DIR_VARIABLE


@pytest.fixture(scope="session", autouse=True)
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the session keeps compiled kernels, its child processes and the workers that share its tests included: a folder that the environment
    names, so that a second session need not compile again, or one of its own."""
    base = tmp_path_factory.getbasetemp()
    named = Path(os.environ.get(CACHE_DIR_VARIABLE, ""))
    folder = named if named.is_absolute() else (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(CACHE_DIR_VARIABLE, str(folder))
        yield folder


@pytest.fixture(autouse=True)
def kernels_of_the_session(request: pytest.FixtureRequest, kernel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test on a GPU that prepares a decoder and names no folder takes that one: a kernel is compiled once for all of them."""
    if request.node.get_closest_marker("gpu") is not None:
        prepared = decoder.prepared_kernels
        monkeypatch.setattr(decoder, "prepared_kernels", lambda *args: prepared(*args[:3], args[3] or kernel_folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _no_gpu_reason()
    if reason is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _no_gpu_reason() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    return unsupported_reason(torch.cuda.get_device_capability())
