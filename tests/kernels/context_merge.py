"""vLLM's own merge of the ranks of decode context parallelism, run on all ranks of a group in one process.

The ranks are threads that take turns: one runs until its next collective, and goes on once every rank has come to it. vLLM's code sees a
group with the collectives that it calls; the tensors of the others are handed over instead of sent.

    python tests/kernels/context_merge.py CASES.pt MERGED.pt

merges the cases of a file with Triton's interpreter, on the CPU. It has to be a process of its own, started with `INTERPRETED`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

MERGES = ("cp_lse_ag_out_rs", "dcp_a2a_lse_reduce")  # --dcp-comm-backend ag_rs and a2a
# vLLM leaves Triton out where no GPU is, unless all that there are were hidden from it.
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class RankAnswer:
    """What a rank's layer hands to vLLM: out [R, heads, 512], natural-log lse [R, heads], and its seq_lens [requests]."""

    out: torch.Tensor
    lse: torch.Tensor
    seq_lens: torch.Tensor


class OtherRankFailed(RuntimeError):
    """This rank waits for one that does not come."""


class Exchange:
    """The tensors of every collective. Threads hold `turn` while they run, and wait in `swap` only."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.turn = threading.Condition()
        self.given: list[dict[int, torch.Tensor]] = []
        self.failed = False

    def swap(self, rank: int, call: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """This rank's tensor of its collective number `call` for those of all ranks."""
        if call == len(self.given):
            self.given.append({})
        given = self.given[call]
        given[rank] = tensor.clone()  # the merge changes its inputs in place
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.failed or len(given) == self.world)
        if len(given) < self.world:
            raise OtherRankFailed(f"rank {rank} waits for ranks that have failed")
        return [given[other] for other in range(self.world)]


class RankGroup:
    """One rank's group: what vLLM's merge uses of its GroupCoordinator and of torch's process group."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank_in_group, self.world_size = rank, exchange.world
        self.device_group = self
        self._exchange, self._calls = exchange, 0

    def _swap(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._calls += 1
        return self._exchange.swap(self.rank_in_group, self._calls - 1, tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._swap(tensor), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Sums in the tensor's own dtype, rank by rank, as a ring does."""
        first, *others = (given.chunk(self.world_size, dim)[self.rank_in_group] for given in self._swap(tensor))
        return sum(others, start=first)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        parts = [given.chunk(self.world_size)[self.rank_in_group] for given in self._swap(sent)]
        received.copy_(torch.cat(parts))


def all_to_all_single(received: torch.Tensor, sent: torch.Tensor, *, group: RankGroup, async_op: bool) -> Any:
    """torch.distributed's, over a `RankGroup`."""
    group.all_to_all(received, sent)
    return SimpleNamespace(wait=lambda: None)


def on_every_rank(world: int, run: Callable[[RankGroup], torch.Tensor]) -> list[torch.Tensor]:
    """What `run` returns on each rank of a group. The error of a rank that failed is raised."""
    exchange = Exchange(world)

    def rank_thread(rank: int) -> torch.Tensor:
        with exchange.turn:
            try:
                return run(RankGroup(rank, exchange))
            except BaseException:
                exchange.failed = True
                exchange.turn.notify_all()
                raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(rank_thread, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, OtherRankFailed)):
        raise error
    return [future.result() for future in futures]


def merged_by_vllm(merge: str, ranks: Sequence[RankAnswer], query_len: int) -> torch.Tensor:
    """The ranks' answers merged as MLAAttention has it done: each rank gets its share of the heads; all of them [R, heads, 512].

    Args:
        merge: of `MERGES`.
        query_len: query tokens of each request.
    """
    from vllm.v1.attention.ops import dcp

    requests = ranks[0].seq_lens.shape[0]
    query_start_loc = torch.arange(requests + 1, dtype=torch.int32, device=ranks[0].out.device) * query_len

    def run(group: RankGroup) -> torch.Tensor:
        own = ranks[group.rank_in_group]
        inputs = own.out.clone(), own.lse.clone()
        return getattr(dcp, merge)(*inputs, cp_group=group, is_lse_base_on_e=True, seq_lens=own.seq_lens, query_start_loc=query_start_loc)

    distributed = dcp.dist
    dcp.dist = SimpleNamespace(all_to_all_single=all_to_all_single)
    try:
        return torch.cat(on_every_rank(len(ranks), run), 1)
    finally:
        dcp.dist = distributed


def interpret() -> None:
    """Makes vLLM's launcher take the interpreter's kernel, which does not say which of its arguments are compile-time ones."""
    from vllm.v1.attention.ops import dcp

    kernel = dcp.CorrectAttnCPOutKernel.kernel
    kernel.constexprs = [i for i, name in enumerate(kernel.arg_names) if kernel.fn.__annotations__.get(name) is not None]


def main() -> None:
    cases, merged = sys.argv[1:]
    interpret()
    torch.save([merged_by_vllm(merge, [RankAnswer(*rank) for rank in ranks], n) for merge, ranks, n in torch.load(cases)], merged)


if __name__ == "__main__":
    main()
