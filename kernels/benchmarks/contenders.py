"""What a benchmark times at a shape: DENSE_MLA in each partial dtype, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.comparison_table import OURS, PORTABLE
from benchmarks.decode_inputs import Call, DecodeInputs
from benchmarks.peers import PEERS, PEERS_QUANTISING_Q
from dense_mla.problem import DecodeProblem

if TYPE_CHECKING:
    from dense_mla.decoder import DenseMLADecoder

PARTIAL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SCHEDULED = f"{OURS}+schedule"
PLANNED = f"{OURS}+planned"
INVARIANT = f"{OURS}+invariant"
FORWARD = f"{OURS}+forward"
MAX_RELATIVE_L2 = 1e-2  # five times what BF16 inputs cost: beyond it the kernel computes something else
MAX_RELATIVE_L2_OF_E4M3_Q = 1e-1  # q and P in E4M3 cost 3 to 6 %; what it cost is in the row, beside the time


@dataclass(frozen=True)
class Contender:
    """A kernel to time.

    Attributes:
        kernel: its name in the evidence.
        prepare: makes its call for a shape's inputs; the call must run once before it is captured.
        planned_for: keys of the longest request that the capture allows for; `None` for the shape's own.
        max_relative_l2: against FP64; beyond it the kernel's time is not recorded.
        answers: whether its output is the attention of all requests; one that leaves requests open has a time and no error.
    """

    kernel: str
    partial_dtype: str | None
    prepare: Callable[[DecodeInputs], Call]
    planned_for: int | None = None
    max_relative_l2: float = MAX_RELATIVE_L2
    answers: Callable[[DecodeInputs], bool] = lambda inputs: True


def peer_contenders(names: Sequence[str], kv_dtype: torch.dtype = torch.bfloat16) -> list[Contender]:
    """The peers by their vLLM names. One that quantises q beside an E4M3 cache is recorded with the error that this costs."""

    def bound(name: str) -> float:
        return MAX_RELATIVE_L2_OF_E4M3_Q if kv_dtype == torch.float8_e4m3fn and name in PEERS_QUANTISING_Q else MAX_RELATIVE_L2

    return [Contender(name, None, PEERS[name], max_relative_l2=bound(name)) for name in names]


def our_contenders(partial_dtypes: Sequence[str]) -> list[Contender]:
    """DENSE_MLA in every partial dtype, and in the first one with the step's schedule kernel before every call: the most that it can cost."""
    contenders = [Contender(OURS, name, partial(ours, partial_dtype=PARTIAL_DTYPES[name])) for name in partial_dtypes]
    for name in partial_dtypes[:1]:
        contenders.append(Contender(SCHEDULED, name, partial(ours, partial_dtype=PARTIAL_DTYPES[name], schedule_each_call=True)))
    return contenders


def planned_contender(partial_dtype: str, planned_for: int) -> Contender:
    """DENSE_MLA as a server with `max_model_len` of `planned_for` captures it: block table and length limit of that size."""
    return Contender(PLANNED, partial_dtype, partial(ours, partial_dtype=PARTIAL_DTYPES[partial_dtype], planned_for=planned_for), planned_for)


def invariant_contender(partial_dtype: str) -> Contender:
    """DENSE_MLA with requests cut at places that their own length decides: what VLLM_BATCH_INVARIANT costs."""
    return Contender(INVARIANT, partial_dtype, partial(ours, partial_dtype=PARTIAL_DTYPES[partial_dtype], batch_invariant=True))


def forward_contender(partial_dtype: str) -> Contender:
    """DENSE_MLA's forward alone: what the whole decode takes beyond it is the merge's. Requests that are split stay open."""
    dtype = PARTIAL_DTYPES[partial_dtype]
    return Contender(
        FORWARD, partial_dtype, partial(ours, partial_dtype=dtype, with_merge=False), answers=partial(keeps_requests_whole, partial_dtype=dtype)
    )


def keeps_requests_whole(inputs: DecodeInputs, *, partial_dtype: torch.dtype) -> bool:
    """Whether the schedule splits no request of this batch, so that the forward writes all of the output."""
    from dense_mla.schedule import plan

    decoder = _decoder(_problem(inputs, partial_dtype), inputs)
    return not plan(inputs.shape.seq_lens, inputs.page_size, decoder.num_ranges, fixed_cost=decoder.problem.fixed_cost).splits


def portable_contenders(partial_dtypes: Sequence[str]) -> list[Contender]:
    """DENSE_MLA's portable kernel, forced on whatever GPU this is, in every partial dtype."""
    return [Contender(PORTABLE, name, partial(ours, partial_dtype=PARTIAL_DTYPES[name], kernel="sm80")) for name in partial_dtypes]


def ours(
    inputs: DecodeInputs,
    *,
    partial_dtype: torch.dtype,
    schedule_each_call: bool = False,
    planned_for: int | None = None,
    batch_invariant: bool = False,
    with_merge: bool = True,
    kernel: str | None = None,
) -> Call:
    """DENSE_MLA's forward and merge, or the forward alone, with the schedule launched once, or before every call."""
    if planned_for is not None:
        inputs = with_wide_block_table(inputs, planned_for)
    decoder = _decoder(_problem(inputs, partial_dtype, batch_invariant), inputs, kernel)
    if not with_merge:
        decoder = _without_merge(decoder)
    schedule = decoder.empty_schedule()
    num_bytes = decoder.workspace_size(inputs.shape.batch).total_bytes
    workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=inputs.q.device)  # NaN in both partial dtypes
    decoder.schedule(inputs.seq_lens, inputs.block_table, schedule)

    def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        if schedule_each_call:
            decoder.schedule(inputs.seq_lens, inputs.block_table, schedule)
        decoder.run(
            inputs.q,
            kv_cache,
            inputs.block_table,
            inputs.seq_lens,
            schedule=schedule,
            workspace=workspace,
            out=out,
            scale=inputs.scale,
            max_seq_len=planned_for or inputs.shape.context,
            k_scale=inputs.k_scale,
        )

    return call


def _problem(inputs: DecodeInputs, partial_dtype: torch.dtype, batch_invariant: bool = False) -> DecodeProblem:
    return DecodeProblem(
        inputs.heads, inputs.page_size, partial_dtype, inputs.caches.dtype, query_len=inputs.query_len, batch_invariant=batch_invariant
    )


def _decoder(problem: DecodeProblem, inputs: DecodeInputs, kernel: str | None = None) -> DenseMLADecoder:
    from dense_mla.decoder import DenseMLADecoder
    from vllm_dense_mla.settings import load_settings

    # A kernel from the cache is the kernel: a second run need not compile it.
    folder = load_settings().cache_folder
    return DenseMLADecoder.prepare(problem, inputs.q.device, max_requests=inputs.shape.batch, kernel=kernel, cache_dir=folder)


def _without_merge(decoder: DenseMLADecoder) -> DenseMLADecoder:
    """The same decoder around the same compiled kernels, but nothing is launched after the forward."""
    from dense_mla.compiled import prepared_kernels

    kernels = replace(prepared_kernels(decoder.problem, decoder.device), merge=lambda *_: None)
    return type(decoder)(decoder.problem, decoder.device, decoder.max_requests, kernels)


def with_wide_block_table(inputs: DecodeInputs, keys: int) -> DecodeInputs:
    """The same inputs, their block table wide enough for requests of `keys` keys. The new columns hold no page: nothing may read them."""
    batch, width = inputs.block_table.shape
    table = torch.full((batch, max(width, -(-keys // inputs.page_size))), 2**31 - 1, dtype=torch.int32, device=inputs.block_table.device)
    table[:, :width] = inputs.block_table
    return replace(inputs, block_table=table)
