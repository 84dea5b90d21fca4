"""Tests marked `gpu` are skipped, with the reason, where there is no GPU that the kernels support."""

from __future__ import annotations

import pytest
import torch

from dense_mla import decoder, unsupported_reason
from vllm_dense_mla.registration import CACHE_DIR_VARIABLE
from vllm_dense_mla.settings import load_settings


@pytest.fixture(autouse=True)
def kernel_cache_of_the_user(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on a GPU use it where VLLM_K3_DENSE_MLA_CACHE_DIR turns it on, so that a second run compiles nothing. No other test touches it."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.delenv(CACHE_DIR_VARIABLE, raising=False)
    else:
        folder, prepared = load_settings().cache_folder, decoder.prepared_kernels
        monkeypatch.setattr(decoder, "prepared_kernels", lambda *args: prepared(*args[:3], args[3] or folder))


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
