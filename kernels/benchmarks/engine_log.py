"""What an engine's log says of how it served: an option that never arrived, or another backend, would answer as well."""

from __future__ import annotations

import re
from collections.abc import Sequence

OURS = "DENSE_MLA"
FP8_CACHES = ("fp8", "fp8_e4m3")


def unsaid(
    lines: Sequence[str],
    backend: str,
    partial_dtype: str | None = None,
    *,
    full_graphs: bool = False,
    kv_cache_dtype: str = "auto",
    batch_invariant: bool = False,
) -> str | None:
    """What the log would say of an engine that serves as it was asked to, and does not say; None where nothing is missing.

    Args:
        lines: of vLLM's log, in which DENSE_MLA has a line of its own.
        backend: vLLM's name of the attention backend that was asked for.
        partial_dtype: bf16 or fp32, of DENSE_MLA alone.
        full_graphs: whether full CUDA graphs have to be captured.
        kv_cache_dtype: as vLLM was asked for it.
        batch_invariant: whether VLLM_BATCH_INVARIANT was set; other backends say nothing of it.
    """
    fp8 = kv_cache_dtype in FP8_CACHES
    invariance = "?=, batch invariant" if batch_invariant else "?!, batch invariant"
    wanted = {f"{backend} was used": rf"Using \S*\b{backend}\b.* backend"}
    if backend == OURS:
        wanted |= {
            f"its partials are {partial_dtype}": rf"{OURS} backend: .*partial dtype {partial_dtype}\b",
            f"its KV cache is {'E4M3' if fp8 else 'of 16 bits'}": rf"{OURS} backend: .*KV cache {'float8_e4m3fn' if fp8 else '(bfloat16|float16)'}\b",
            "it was batch invariant" if batch_invariant else "it was not batch invariant": rf"{OURS} backend: .*\d bytes({invariance})",
        }
    elif fp8:
        wanted["its KV cache is E4M3"] = rf"Using {kv_cache_dtype} data type to store kv cache"
    if full_graphs:
        wanted["full CUDA graphs were captured"] = r"Capturing CUDA graphs \(.*FULL\)"
    missing = [text for text, pattern in wanted.items() if not any(re.search(pattern, line) for line in lines)]
    return f"the log does not say that {', nor that '.join(missing)}" if missing else None


def compiled_while_serving(lines: Sequence[str]) -> list[str]:
    """Kernels that were compiled after the warm-up, DENSE_MLA's or vLLM's own, in the words of vLLM's monitor."""
    found = (re.search(r"(\w+ (?:kernel )?JIT compilation) during inference: ([^.(\s]+)", line) for line in lines)
    return list(dict.fromkeys(f"{match[1]}: {match[2]}" for match in found if match))


def error_lines(lines: Sequence[str]) -> list[str]:
    """Lines that report an error."""
    return [line[:400] for line in lines if re.search(r"\bERROR\b|Traceback \(most recent|CUDA error", line)]
