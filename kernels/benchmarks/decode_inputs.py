"""One decode step's tensors for a benchmark: the layers share q, block table and lengths; each layer has its own KV cache.

The calls of a timed graph go through the layers in turn. With enough caches, each call finds its keys out of the L2, as in a real step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.batch_shape import BatchShape
from dense_mla.problem import HEAD_DIM_QK, HEAD_DIM_V

ROTATED_BYTES = 400_000_000  # an H200's L2 holds 60 MB: a cache comes round again after several times that
MEMORY_CAP_BYTES = 40_000_000_000
MIN_CALLS = 16  # of a graph: the launch of a graph costs a few microseconds, which the calls share
MIN_CALL_BYTES = 10_000_000_000  # or calls that read this much, 2 ms of an H200: enough to share the cost as well
MIN_REPLAY_US = 5000.0  # or calls that take this long: of one of 10 ms, each cache once will do
SCALE = 192**-0.5  # of the 128 + 64 dimensions before DeepSeek's latent projection
SEED = 20
KV_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8_e4m3"}
E4M3_MAX = 448.0

# Decode one layer: (kv_cache [pages, page_size, 576], out [R, heads, 512]). Writes `out`, or leaves it alone and returns an output of its own.
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Inputs of one shape. `caches` is `[layers, pages, page_size, 576]`, `q` `[R, heads, 576]`, both unit Gaussian BF16; R = requests x query
    tokens, those of a request together. An E4M3 cache holds the same values divided by `k_scale`, `[1]` FP32 on the device."""

    shape: BatchShape
    q: torch.Tensor
    caches: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scale: float = SCALE
    k_scale: torch.Tensor | None = None

    @classmethod
    def random(
        cls,
        shape: BatchShape,
        heads: int,
        page_size: int,
        device: torch.device,
        kv_dtype: torch.dtype = torch.bfloat16,
        k_scale: float = 1.0,
    ) -> DecodeInputs:
        """Random inputs on the device. A request's pages are scattered over the cache; the table's tail past them is page 0.

        `k_scale` is that of an E4M3 cache; a BF16 cache has none.
        """
        pages = shape.pages(page_size)
        torch.manual_seed(SEED)
        layers = num_caches(sum(pages) * page_size * HEAD_DIM_QK * kv_dtype.itemsize)
        caches = torch.empty(layers, sum(pages), page_size, HEAD_DIM_QK, dtype=kv_dtype, device=device)
        scale = torch.tensor([k_scale], dtype=torch.float32, device=device) if kv_dtype == torch.float8_e4m3fn else None
        for cache in caches:
            if scale is None:
                cache.normal_()
            else:
                cache.copy_(quantised(torch.randn(cache.shape, device=device), scale))
        block_table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for row, ids in zip(block_table, torch.split(torch.randperm(sum(pages)), list(pages))):
            row[: len(ids)] = ids
        q = torch.randn(shape.batch * shape.query_len, heads, HEAD_DIM_QK, device=device).bfloat16()
        seq_lens = torch.tensor(shape.seq_lens, dtype=torch.int32, device=device)
        return cls(shape, q, caches, block_table.to(device), seq_lens, k_scale=scale)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def query_len(self) -> int:
        """Query tokens of each request."""
        return self.shape.query_len

    @property
    def page_size(self) -> int:
        """Keys of a page."""
        return self.caches.shape[2]

    @property
    def calls(self) -> int:
        """Calls of one graph, at most."""
        return num_calls(len(self.caches), self.kv_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV cache that one decode call has to read."""
        return self.shape.keys * HEAD_DIM_QK * self.caches.element_size()

    @property
    def kv_dtype_name(self) -> str:
        """Element type of the cache, as the evidence names it."""
        return KV_DTYPE_NAMES[self.caches.dtype]

    def empty_outputs(self) -> torch.Tensor:
        """An output for every layer, `[layers, R, heads, 512]`, poisoned with NaN."""
        shape = (len(self.caches), len(self.q), self.heads, HEAD_DIM_V)
        return torch.full(shape, float("nan"), dtype=self.q.dtype, device=self.q.device)

    def reference(self, layer: int) -> torch.Tensor:
        """softmax(q K^T scale) V of one layer in FP64, `[R, heads, 512]`, an E4M3 cache times its scale. A request at a time: one of
        131,072 keys is 0.6 GB.

        Query token t of a request sees its first `length - query_len + 1 + t` keys.
        """
        out = torch.empty(len(self.q), self.heads, HEAD_DIM_V, dtype=torch.float64, device=self.q.device)
        for request, length in enumerate(self.shape.seq_lens):
            pages = self.block_table[request, : -(-length // self.page_size)].long()
            keys = self._exact(layer, pages).flatten(0, 1)[:length]
            for token in range(self.query_len):
                row, visible = request * self.query_len + token, keys[: length - self.query_len + 1 + token]
                weights = (self.q[row].double() @ visible.T * self.scale).softmax(dim=-1)
                out[row] = weights @ visible[:, :HEAD_DIM_V]
        return out

    def references(self) -> dict[int, torch.Tensor]:
        """What the outputs of the first and the last layer have to be, by layer."""
        return {layer: self.reference(layer) for layer in (0, len(self.caches) - 1)}

    def _exact(self, layer: int, pages: torch.Tensor) -> torch.Tensor:
        """The values that these pages stand for, FP64."""
        if self.k_scale is None:
            return self.caches[layer][pages].double()
        # Gathered as bytes: not every torch indexes E4M3 on every device.
        return self.caches[layer].view(torch.uint8)[pages].view(self.caches.dtype).double() * self.k_scale.double()


def quantised(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Values divided by their scale as E4M3, saturated: a plain cast makes NaN of what E4M3 does not reach."""
    return (values.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def require_one_query_token(name: str, inputs: DecodeInputs) -> None:
    """ValueError where a request has several: the peer of this name is not timed with them."""
    if inputs.query_len != 1:
        raise ValueError(f"{name} is timed with 1 query token of each request, got {inputs.query_len}")


def num_caches(cache_bytes: int, rotated_bytes: int = ROTATED_BYTES, cap_bytes: int = MEMORY_CAP_BYTES) -> int:
    """Caches to rotate over: `rotated_bytes` in all, and at least two.

    Raises:
        ValueError: two caches exceed `cap_bytes`.
    """
    count = max(2, -(-rotated_bytes // cache_bytes))
    if count * cache_bytes > cap_bytes:
        raise ValueError(f"{count} KV caches of {cache_bytes / 1e9:.1f} GB exceed the {cap_bytes / 1e9:.0f} GB that a benchmark may fill")
    return count


def num_calls(caches: int, call_bytes: int) -> int:
    """Calls of one graph, each reading `call_bytes`: every cache equally often, and `MIN_CALLS` or as many as read `MIN_CALL_BYTES`."""
    wanted = min(MIN_CALLS, -(-MIN_CALL_BYTES // call_bytes))
    return caches * -(-wanted // caches)


def enough_calls(caches: int, us: float) -> int:
    """Calls of one graph of a kernel that takes `us` a call: every cache equally often, and as many as take `MIN_REPLAY_US`."""
    return caches * max(1, math.ceil(MIN_REPLAY_US / (us * caches)))


def worst_relative_l2(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest ||out - reference|| / ||reference|| of a request's query token; NaN if any element is NaN.

    By request, because outputs of long requests are small: a broken one would not show beside the short ones of its batch.
    """
    difference = (out.double() - reference).flatten(1).norm(dim=1)
    return float((difference / reference.flatten(1).norm(dim=1)).max())
