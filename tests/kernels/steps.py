"""One decode step on a GPU, with everything that could go wrong made visible: shared by the GPU tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from cases import Case
from dense_mla.decoder import DenseMLADecoder

DEVICE = torch.device("cuda", 0)
DTYPES = [torch.bfloat16, torch.float32]
CANARY = 0xA5
CANARY_BYTES = 4096


@dataclass
class Step:
    """One decode step with everything it writes pre-filled: NaN where the kernels must write, a canary behind."""

    decoder: DenseMLADecoder
    case: Case
    schedule: torch.Tensor
    workspace: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    k_scale: torch.Tensor | None = None

    @classmethod
    def of(
        cls, case: Case, partial_dtype: torch.dtype, *, return_lse: bool = True, max_requests: int = 256, batch_invariant: bool = False
    ) -> Step:
        problem = case.problem(partial_dtype, return_lse=return_lse, batch_invariant=batch_invariant)
        decoder = DenseMLADecoder.prepare(problem, DEVICE, max_requests=max_requests)
        requests, rows, heads = len(case.seq_lens), len(case.seq_lens) * case.query_len, case.num_heads
        size = decoder.workspace_size(requests).total_bytes
        workspace = torch.full((size + CANARY_BYTES,), 0xFF, dtype=torch.uint8, device=DEVICE)
        workspace[size:] = CANARY
        # `out` is a window of a wider tensor: neighbours in every dimension must stay as they are.
        out = torch.full((rows + 1, heads + 1, 520), math.nan, dtype=case.query_dtype, device=DEVICE)
        lse = torch.full((rows, heads), math.nan, device=DEVICE) if return_lse else None
        k_scale = torch.full((1,), case.k_scale, device=DEVICE) if problem.needs_k_scale else None
        return cls(decoder, case, decoder.empty_schedule(), workspace, out, lse, k_scale)

    @property
    def result(self) -> torch.Tensor:
        return self.out[:-1, :-1, :512]

    def plan(self) -> None:
        self.decoder.schedule(self.case.seq_lens, self.case.block_table, self.schedule)

    def run(self, **overrides: Any) -> None:
        arguments = {"q": self.case.q, "kv_cache": self.case.kv_cache, "block_table": self.case.block_table, "seq_lens": self.case.seq_lens}
        arguments |= {"schedule": self.schedule, "workspace": self.workspace[:-CANARY_BYTES], "out": self.result, "lse": self.lse}
        if self.decoder.problem.needs_total_lens:
            arguments["total_lens"] = self.case.total_lens
        if self.k_scale is not None:
            arguments["k_scale"] = self.k_scale
        self.decoder.run(**arguments | {"scale": self.case.scale} | overrides)

    def check(self) -> None:
        torch.cuda.synchronize()
        assert (self.workspace[-CANARY_BYTES:] == CANARY).all(), "written past the workspace"
        assert self.out[-1].isnan().all() and self.out[:, -1].isnan().all() and self.out[..., 512:].isnan().all(), "written past out"
        self.case.check(self.result, self.lse, self.decoder.problem.partial_dtype)


def decode(case: Case, partial_dtype: torch.dtype, **options: Any) -> Step:
    """Plan, run and check one step; `options` as of `Step.of`."""
    step = Step.of(case, partial_dtype, **options)
    step.plan()
    step.run()
    step.check()
    return step


def captured(step: Step, *, plan_inside: bool = True) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan_inside:
            step.plan()
        step.run()
    return graph
