"""Which KV caches the kernels read, by vLLM's names, and why others not."""

from __future__ import annotations

import torch

UNSCALED = ("auto", "float16", "bfloat16")
E4M3 = ("fp8", "fp8_e4m3")
SUPPORTED = (*UNSCALED, *E4M3)  # with a model of the right dtype
_MODEL_DTYPES = (torch.bfloat16, torch.float16)
_FP8_REASONS = {
    "fp8_e5m2": "the kernels read E4M3, whose numbers are twice as fine as those of E5M2",
    "fp8_ds_mla": "its records of 656 bytes are for sparse MLA",
    "fp8_per_token_head": "the kernels take one scale for the whole cache",
}


def cache_element_type(kv_cache_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Element type of a KV cache by vLLM's name for it.

    Raises:
        KeyError: a name of which `refuse_cache_dtype` says why it is refused.
    """
    named = {"auto": model_dtype, "float16": torch.float16, "bfloat16": torch.bfloat16}
    return (named | dict.fromkeys(E4M3, torch.float8_e4m3fn))[kv_cache_dtype]


def refuse_cache_dtype(kv_cache_dtype: str | None, model_dtype: torch.dtype) -> str | None:
    """Why a model of a dtype cannot have this cache, or None where it can. A model dtype that is refused itself is not spoken of."""
    name = kv_cache_dtype or "auto"
    if name not in SUPPORTED:
        reason = _FP8_REASONS.get(name)
        return f"kv_cache_dtype must be {', '.join(SUPPORTED[:-1])} or {SUPPORTED[-1]}, got {name}" + (f": {reason}" if reason else "")
    if model_dtype not in _MODEL_DTYPES:
        return None
    if name in E4M3 and model_dtype != torch.bfloat16:
        return f"kv_cache_dtype {name} takes a model of bfloat16, got {_name(model_dtype)}: the kernels multiply an FP8 cache as BF16"
    if name in UNSCALED and cache_element_type(name, model_dtype) != model_dtype:
        return f"kv_cache_dtype must be auto or the model's dtype, {_name(model_dtype)}, got {name}: queries and keys are multiplied as they are"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
