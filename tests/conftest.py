"""Tests marked `gpu` are skipped, with the reason, where there is no GPU that the kernels support."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dense_mla import unsupported_reason
from dense_mla.kernel_cache import CACHE_DIR_VARIABLE


@pytest.fixture(scope="session")
def kernel_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of compiled kernels for all tests that run without a GPU."""
    return tmp_path_factory.mktemp("kernels") / "cache"


@pytest.fixture(autouse=True)
def no_kernel_cache_of_the_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kernel_cache_folder: Path) -> None:
    """Tests on a GPU use the user's cache, if VLLM_K3_DENSE_MLA_CACHE_DIR turns it on (`on` or a path), so that a second run compiles nothing.

    It is off by default: then every run compiles. No other test touches the user's.
    """
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv(CACHE_DIR_VARIABLE, str(kernel_cache_folder))


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
