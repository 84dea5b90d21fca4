"""Tests marked `gpu` are skipped, with the reason, where there is no GPU that the kernels support."""

from __future__ import annotations

import pytest
import torch

from dense_mla import unsupported_reason


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
