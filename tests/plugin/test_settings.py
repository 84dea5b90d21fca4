"""The environment variables: spellings, source, and the one line for a bad value."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_dense_mla
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
        None: (Path("/home/me/.cache/vllm-dense-mla"), "default"),
        **dict.fromkeys(("on", "On "), (Path("/home/me/.cache/vllm-dense-mla"), CACHE_DIR_VARIABLE)),
        "/somewhere/else": (Path("/somewhere/else"), CACHE_DIR_VARIABLE),
        "~/kernels": (Path("/home/me/kernels"), CACHE_DIR_VARIABLE),
        **dict.fromkeys(("off", "Off", "", " "), (None, CACHE_DIR_VARIABLE)),
    }


def test_cache_dir_follows_xdg_where_nothing_is_set(monkeypatch):
    monkeypatch.delenv(CACHE_DIR_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert load_settings().cache_folder == Path("/xdg/vllm-dense-mla")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/no/folder/by/its/standard")
    monkeypatch.setenv("HOME", "/home/me")
    assert load_settings().cache_folder == Path("/home/me/.cache/vllm-dense-mla")


def test_without_home_the_user_s_entry_in_the_password_file_counts(monkeypatch):
    for name in (CACHE_DIR_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir="/home/me"))
    assert load_settings().cache_folder == Path("/home/me/.cache/vllm-dense-mla")


@pytest.mark.parametrize("text", [None, "on", "off"])
def test_a_user_without_a_home_directory_keeps_nothing_and_is_told_why(monkeypatch, text):
    """A container's user id that has no name: the server starts, and compiles."""

    def no_such_user(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in (CACHE_DIR_VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if text is not None:
        monkeypatch.setenv(CACHE_DIR_VARIABLE, text)
    monkeypatch.setattr(pwd, "getpwuid", no_such_user)
    settings = load_settings()
    assert (settings.cache_folder, settings.cache_place) == (None, "off" if text == "off" else "off: there is no home directory")


def test_the_tests_keep_kernels_in_a_folder_of_their_own(kernel_folder):
    """Not in that of whoever runs them, in other processes either."""
    code = "from vllm_dense_mla.settings import load_settings; print(load_settings().cache_folder)"
    path = os.pathsep.join(str(Path(vllm_dense_mla.__file__).parents[1] / name) for name in (".", "kernels"))
    found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert load_settings().cache_folder == kernel_folder and found.stdout.splitlines()[-1] == str(kernel_folder)


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
