"""The environment variables of the plugin. Read where they are used, never while vLLM loads plugins."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from .registration import CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE

PartialDtype = Literal["bf16", "fp32"]
_SPELLINGS = {"bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}
_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OFF, ON = "off", "on"


def _canonical(value: Any) -> Any:
    return _SPELLINGS.get(value.lower(), value) if isinstance(value, str) else value


def _word_or_path(value: str) -> str:
    """`on` or `off` as they are spelled here, or an absolute path."""
    word = value.strip().lower() or OFF
    if word in (ON, OFF):
        return word
    if not os.path.isabs(os.path.expanduser(value)):
        raise ValueError(f"{CACHE_DIR_VARIABLE} must be an absolute path, on or off, got {value!r}")
    return value


def _default_folder() -> Path | None:
    """Among the user's caches; None for a user without a home directory, such as a container's user id that has no name."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "vllm-dense-mla"
    return folder if folder.is_absolute() else None


class DenseMLASettings(BaseSettings):
    """Settings of the DENSE_MLA backend, from the environment. `load_settings` reads them."""

    model_config = SettingsConfigDict(case_sensitive=True, frozen=True, use_attribute_docstrings=True, extra="ignore")

    partial_dtype: Annotated[PartialDtype, BeforeValidator(_canonical)] = Field("bf16", validation_alias=PARTIAL_DTYPE_VARIABLE)
    """Storage of the split partials between the forward and the merge: `bf16` or `fp32` (also `bfloat16`, `float32`, any case).

    FP32 saves one rounding of every partial and takes twice the bytes of out_partial. The splits and the KV cache are the same.
    """

    cache_dir: Annotated[str, AfterValidator(_word_or_path)] = Field(ON, validation_alias=CACHE_DIR_VARIABLE)
    """Folder where compiled kernels are kept between starts: an absolute path, `on` for `~/.cache/vllm-dense-mla` (or `vllm-dense-mla` in
    `XDG_CACHE_HOME`), or `off` (or empty) to compile at every start.

    What lies there is run as code: the folder is made for its owner alone, and one that belongs to or can be written by somebody else is not
    used. Without a folder that can be used a server starts all the same, and compiles.
    """

    @property
    def torch_dtype(self) -> torch.dtype:
        """`partial_dtype` as torch names it."""
        return _TORCH_DTYPES[self.partial_dtype]

    @property
    def partial_dtype_source(self) -> str:
        """Where `partial_dtype` comes from: the variable's name, or "default"."""
        return PARTIAL_DTYPE_VARIABLE if "partial_dtype" in self.model_fields_set else "default"

    @property
    def cache_dir_source(self) -> str:
        """Where `cache_dir` comes from: the variable's name, or "default"."""
        return CACHE_DIR_VARIABLE if "cache_dir" in self.model_fields_set else "default"

    @property
    def cache_folder(self) -> Path | None:
        """The folder that `cache_dir` names, or None where nothing is kept: `off`, or `on` for a user without a home directory."""
        if self.cache_dir == OFF:
            return None
        return _default_folder() if self.cache_dir == ON else Path(os.path.expanduser(self.cache_dir))

    @property
    def cache_place(self) -> str:
        """`cache_folder` for people: the folder, or that nothing is kept and why."""
        folder = self.cache_folder
        if folder is None and self.cache_dir == ON:
            return f"{OFF}: there is no home directory"
        return OFF if folder is None else str(folder)


@cache
def load_settings() -> DenseMLASettings:
    """The settings of this process, read once: every layer and every metadata builder sees the same.

    Raises:
        ValueError: a value that is not allowed; one line with the variable, the value and the values allowed.
    """
    try:
        return DenseMLASettings()
    except ValidationError as error:
        first = error.errors()[0]
        variable, value = first["loc"][0], first["input"]
        if variable == CACHE_DIR_VARIABLE:
            raise first["ctx"]["error"] from None
        raise ValueError(f"{PARTIAL_DTYPE_VARIABLE} must be bf16, fp32, bfloat16 or float32 (any case), got {value!r}") from None
