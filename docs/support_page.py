"""Writes docs/support.md from what the backend and the kernels declare: `python docs/support_page.py`, from the project's root."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
GPUS = {  # compute capability: GPUs that have it, as their driver names them
    (8, 0): ("A100", "A30"),
    (8, 6): ("A40", "A10", "RTX 3090"),
    (8, 7): ("Orin",),
    (8, 9): ("L40S", "L4", "RTX 4090"),
    (9, 0): ("H100", "H200", "GH200"),
    (10, 0): ("B200", "GB200"),
    (10, 3): ("B300", "GB300"),
    (11, 0): ("Thor",),
    (12, 0): ("RTX PRO 6000", "RTX 5090"),
    (12, 1): ("GB10",),
}
# What vLLM's selector asks of a backend, and the same in a reader's words. Answered by the backend's own validation.
QUESTIONS = {
    "use_dcp": "decode context parallelism (`--decode-context-parallel-size`)",
    "use_pcp": "prefill context parallelism (`--prefill-context-parallel-size`)",
    "use_batch_invariant": "batch invariance (`VLLM_BATCH_INVARIANT=1`)",
    "use_non_causal": "non-causal draft blocks",
    "use_adaptive_verification": "adaptive verification of speculative decoding",
    "use_per_head_quant_scales": "KV-cache scales of single heads",
    "use_kv_connector": "KV connectors (`--kv-transfer-config`)",
    "use_sparse": "sparse MLA",
    "has_sliding_window": "sliding windows",
    "has_sink": "attention sinks",
}
DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")


def render() -> str:
    """The page."""
    return "\n".join(
        [
            "# What is supported",
            "",
            "Written by `python docs/support_page.py` from what the backend answers vLLM; a test says that it is current. A reason here is",
            "word for word what vLLM says when it starts, and [troubleshooting.md](troubleshooting.md) has what to do about it.",
            "",
            "## GPUs",
            "",
            *_table(("compute capability", "GPUs", "kernel", "run on hardware"), _gpu_rows()),
            "",
            "All of them are served; the last column is where the kernels' tests ran, those of FP16 caches before P was scaled, which has not run",
            "since. Where it says no, the kernel was compiled for these GPUs and its machine code looked at, and no GPU of that kind ever ran it:",
            "the server says so in its log, and `vllm-dense-mla check` on",
            "such a GPU compares the answers with FP64. What is compiled for 8.0, 8.6, 10.0 and 12.0 the tests also run on the CPU, from its PTX,",
            "against FP64 and for races. Hopper has several kernels, by the query rows that share a request's keys (heads x query tokens) and by",
            "the elements of the cache. Any other compute capability is refused at start.",
            "",
            "## Models and caches",
            "",
            *_table(("", "supported", "refused"), _model_rows()),
            "",
            "vLLM's own layer of Kimi-K3 and Kimi-Linear takes an FP8 cache on Blackwell's datacenter GPUs alone, for want of an FP8 prefill",
            "elsewhere.",
            "",
            "## Decode steps",
            "",
            *_table(("", ""), _decode_rows()),
            "",
            "## What vLLM may ask for",
            "",
            *_table(("", "", "reason"), _question_rows()),
            "",
        ]
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def refusals(capability: tuple[int, int] = (9, 0), **changes: Any) -> list[str]:
    """What the backend says to a dense BF16 MLA layer with changes, asked as vLLM's CUDA platform asks."""
    import torch
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from vllm_dense_mla.backend import DenseMLABackend

    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, "use_mla": True} | changes
    config = AttentionSelectorConfig(**asked)
    return DenseMLABackend.validate_configuration(device_capability=DeviceCapability(*capability), **config._asdict())


def _gpu_rows() -> list[tuple[str, ...]]:
    from dense_mla.arch import ARCHITECTURES, capability_name, compile_target, forward_class

    rows = []
    for capability in ARCHITECTURES:
        kernels = dict.fromkeys(f"`{forward_class(capability, problem).__name__}`" for problem in _problems())
        kernel = f"{', '.join(kernels)} for `{compile_target(capability)}`"
        rows.append((capability_name(capability), ", ".join(GPUS[capability]), kernel, _hardware(capability)))
    return rows


def _hardware(capability: tuple[int, int]) -> str:
    """Where the kernels of a capability ran: the one that is chosen, and another that was forced."""
    from dense_mla.arch import KERNELS, chosen_kernel, forward_class, ran_on

    others = [kernel for kernel in KERNELS if kernel != chosen_kernel(capability) and ran_on(capability, kernel)]
    forced = []
    for kernel in others:
        names = dict.fromkeys(f"`{forward_class(capability, problem, kernel).__name__}`" for problem in _problems())
        forced.append(f"{', '.join(names)}, forced: {ran_on(capability, kernel)}")
    return "; ".join([ran_on(capability) or "no, compiled only", *forced])


def _problems() -> list[Any]:
    """One for each kernel that a GPU may have: for a few rows, for many, and for an FP8 cache."""
    import torch

    from dense_mla import DecodeProblem
    from dense_mla.problem import MAX_TILE_ROWS

    return [*(DecodeProblem(heads, 64) for heads in (1, MAX_TILE_ROWS)), DecodeProblem(1, 64, kv_dtype=torch.float8_e4m3fn)]


def _model_rows() -> list[tuple[str, ...]]:
    import torch

    from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V, MAX_HEADS
    from vllm_dense_mla.backend import DenseMLABackend

    dtypes = [(name, bool(refusals(dtype=getattr(torch, name)))) for name in DTYPES]
    caches = {dtype: [(name, bool(refusals(dtype=getattr(torch, dtype), kv_cache_dtype=name))) for name in KV_DTYPES] for dtype in DTYPES[:2]}
    sizes = ", ".join(str(getattr(size, "base", size)) for size in DenseMLABackend.get_supported_kernel_block_sizes())
    keys = ", ".join(map(str, DenseMLABackend.get_supported_head_sizes()))
    return [
        ("model dtype", *_split(dtypes)),
        *((f"`--kv-cache-dtype` of a {dtype} model", *_split(asked)) for dtype, asked in caches.items()),
        ("latent key", f"{keys} values: kv_lora_rank {HEAD_DIM_V}, qk_rope_head_dim {HEAD_DIM_QK - HEAD_DIM_V}", "other sizes"),
        ("query heads in a rank's kernels", f"1 to {MAX_HEADS}", "more"),
        ("`--block-size`", f"multiples of {sizes}; {DenseMLABackend.get_preferred_block_size(16)} where none is given", "others"),
    ]


def _split(asked: list[tuple[str, bool]]) -> tuple[str, str]:
    taken, refused = ([f"`{name}`" for name, is_refused in asked if is_refused is wanted] for wanted in (False, True))
    return ", ".join(taken), ", ".join(refused)


def _decode_rows() -> list[tuple[str, ...]]:
    from dense_mla import problem, schedule
    from dense_mla.problem import PARTIAL_DTYPES
    from vllm_dense_mla.backend import DenseMLABackend

    builder = DenseMLABackend.get_builder_cls()
    longest = problem.MAX_QUERY_LEN
    tokens = {
        "SINGLE_ONLY": "1; several are verified as prefill, which is vLLM's own",
        "UNIFORM": f"1 to {longest}, the same number for every request of a step; vLLM leaves requests with another number to prefill, "
        "and with asynchronous scheduling waits for the lengths of verifications among them",
        "VARLEN": f"1 to {longest}",
    }
    graphs = {
        "NEVER": "none",
        "UNIFORM_SINGLE_TOKEN_DECODE": "full graphs of one query token a request",
        "UNIFORM_BATCH": "full graphs of one or several query tokens, the same number for every request",
        "ALWAYS": "full graphs of any batch",
    }
    return [
        ("query tokens of a request", tokens[builder.query_len_support.name]),
        ("CUDA graphs", graphs[builder._cudagraph_support.name]),
        ("speculative tokens (`num_speculative_tokens`)", f"up to {longest - 1}"),
        ("requests of a step", f"1 to {schedule.MAX_REQUESTS:,}"),
        ("split partials", " or ".join(str(dtype).removeprefix("torch.") for dtype in PARTIAL_DTYPES)),
        ("prefill", "vLLM's own backend"),
    ]


def _question_rows() -> list[tuple[str, ...]]:
    rows = []
    for field, words in QUESTIONS.items():
        reasons = refusals(**{field: True})
        rows.append((words, "no" if reasons else "yes", "; ".join(reasons)))
    return rows


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    (DOCS / "support.md").write_text(render())
