"""The peers: vLLM's own MLA decode kernels, called with the arguments that their backends pass in a step of full CUDA graphs, and two more
where they are installed.

What a backend computes once a step (scheduler metadata, split counts) is computed once here, before anything is timed, and so is
scratch that a backend takes from a preallocated workspace. What it launches for every layer, its merge included, is the call. All get
q as one `[requests, heads, 576]` tensor, as Kimi-K3's layer passes it, so that no peer pays for a concatenation, and write into `out`;
one whose kernel allocates its output returns that.

A server freezes `max_seq_len` at the model's limit when it captures a graph; here it is the batch's longest request, which is the best
case for the peers that choose their splits from it.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.decode_inputs import Call, DecodeInputs
from benchmarks.outside_peers import b12x, flashinfer
from benchmarks.vllm_peers import flash_attn_mla, flashmla, triton_mla

PEERS: dict[str, Callable[[DecodeInputs], Call]] = {
    "FLASHMLA": flashmla,
    "FLASH_ATTN_MLA": flash_attn_mla,
    "TRITON_MLA": triton_mla,
    "FLASHINFER": flashinfer,
    "B12X": b12x,
}
PEERS_OF_SEVERAL_TOKENS = ("FLASHMLA", "FLASH_ATTN_MLA")
PEERS_OF_FP8_CACHES = ("FLASHMLA", "TRITON_MLA", "B12X")
PEERS_QUANTISING_Q = ("FLASHMLA", "B12X")  # beside an E4M3 cache
