"""The environment variables: spellings, source, and the one line for a bad value."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from vllm_dense_mla.registration import CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE
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


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = {}
    for text in (None, "on", "On ", "/somewhere/else", "~/kernels", "off", "Off", "", " "):
        monkeypatch.delenv(CACHE_DIR_VARIABLE, raising=False) if text is None else monkeypatch.setenv(CACHE_DIR_VARIABLE, text)
        load_settings.cache_clear()
        settings = load_settings()
        found[text] = settings.cache_folder, settings.cache_dir_source
    assert found == {
        None: (None, "default"),
        **dict.fromkeys(("on", "On "), (Path("/home/me/.cache/vllm-dense-mla"), CACHE_DIR_VARIABLE)),
        "/somewhere/else": (Path("/somewhere/else"), CACHE_DIR_VARIABLE),
        "~/kernels": (Path("/home/me/kernels"), CACHE_DIR_VARIABLE),
        **dict.fromkeys(("off", "Off", "", " "), (None, CACHE_DIR_VARIABLE)),
    }


def test_cache_dir_follows_xdg_where_it_is_on(monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "on")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert load_settings().cache_folder == Path("/xdg/vllm-dense-mla")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/no/folder/by/its/standard")
    monkeypatch.setenv("HOME", "/home/me")
    assert load_settings().cache_folder == Path("/home/me/.cache/vllm-dense-mla")


def test_a_default_folder_needs_a_home_directory(monkeypatch):
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "on")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(ValueError, match=f"^{CACHE_DIR_VARIABLE} must be an absolute path or off where there is no home directory, got 'on'$"):
        _ = load_settings().cache_folder


@pytest.mark.parametrize("text", ["kernels", "./kernels", "none"])
def test_a_relative_cache_dir_is_one_line(monkeypatch, text):
    """Each of vLLM's processes may have a working directory of its own."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, text)
    with pytest.raises(ValueError) as error:
        load_settings()
    assert str(error.value) == f"{CACHE_DIR_VARIABLE} must be an absolute path, on or off, got {text!r}"


def test_read_once(monkeypatch):
    """Layers and metadata builders size the workspace apart from each other: a change between them must not be seen."""
    assert load_settings().partial_dtype == "bf16"
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, "fp32")
    assert load_settings().partial_dtype == "bf16"


def test_every_field_is_described():
    assert all(field.description for field in DenseMLASettings.model_fields.values())
