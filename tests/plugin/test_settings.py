"""The environment variable: spellings, source, and the one line for a bad value."""

from __future__ import annotations

import pytest
import torch

from vllm_dense_mla.registration import PARTIAL_DTYPE_VARIABLE
from vllm_dense_mla.settings import DenseMLASettings, load_settings


def test_default_is_bf16():
    settings = load_settings()
    assert (settings.partial_dtype, settings.torch_dtype, settings.partial_dtype_source) == ("bf16", torch.bfloat16, "default")


@pytest.mark.parametrize("text", ["bf16", "BF16", "bfloat16", "BFloat16", "BFLOAT16"])
def test_bf16_in_any_case(monkeypatch, text):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    settings = load_settings()
    assert (settings.partial_dtype, settings.torch_dtype, settings.partial_dtype_source) == ("bf16", torch.bfloat16, PARTIAL_DTYPE_VARIABLE)


@pytest.mark.parametrize("text", ["fp32", "FP32", "Fp32", "float32", "Float32"])
def test_fp32_in_any_case(monkeypatch, text):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    settings = load_settings()
    assert (settings.partial_dtype, settings.torch_dtype, settings.partial_dtype_source) == ("fp32", torch.float32, PARTIAL_DTYPE_VARIABLE)


@pytest.mark.parametrize("text", ["", "fp16", "float", "32", "bf16 ", "fp32,bf16", "FP8"])
def test_bad_value_is_one_line(monkeypatch, text):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    with pytest.raises(ValueError) as error:
        load_settings()
    message = str(error.value)
    assert message == f"{PARTIAL_DTYPE_VARIABLE} must be bf16, fp32, bfloat16 or float32 (any case), got {text!r}"
    assert "\n" not in message and error.value.__suppress_context__


def test_read_once(monkeypatch):
    """Layers and metadata builders size the workspace apart from each other: a change between them must not be seen."""
    assert load_settings().partial_dtype == "bf16"
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, "fp32")
    assert load_settings().partial_dtype == "bf16"


def test_every_field_is_described():
    assert all(field.description for field in DenseMLASettings.model_fields.values())
