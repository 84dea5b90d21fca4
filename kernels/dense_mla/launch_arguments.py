"""What `schedule` and `run` are given: checked before anything is launched, and viewed as the kernels take it."""

from __future__ import annotations

import math

import torch

from .problem import HEAD_DIM_QK, HEAD_DIM_V, DecodeProblem
from .workspace import ALIGNMENT, workspace_size, workspace_views

TMA_ALIGNMENT = 16  # bytes: of base addresses and of every stride but the last


class LaunchArguments:
    """The arguments of one decoder's launches. Shapes, dtypes, strides and addresses are looked at, and nothing that lies on the device.

    Every method raises a ValueError of one line: the argument, what it must be, what it is.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device, max_requests: int, sm_count: int, schedule_words: int):
        self.problem = problem
        self.device = device
        self.max_requests = max_requests
        self.schedule_words = schedule_words
        sizes = (workspace_size(problem, requests, sm_count) for requests in range(max_requests + 1))
        self._sizes = tuple((size.slots, size.total_bytes) for size in sizes)  # by requests: looked up in every layer of every step

    def query(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the rope part, as `_by_token`."""
        if isinstance(q, tuple):
            return self._by_token("q_nope", q[0], requests, HEAD_DIM_V), self._by_token("q_rope", q[1], requests, HEAD_DIM_QK - HEAD_DIM_V)
        whole = self._by_token("q", q, requests, HEAD_DIM_QK)
        rope = whole.as_strided((*whole.shape[:3], HEAD_DIM_QK - HEAD_DIM_V), whole.stride(), whole.storage_offset() + HEAD_DIM_V)
        return whole.as_strided((*whole.shape[:3], HEAD_DIM_V), whole.stride()), rope

    def output(self, out: torch.Tensor, requests: int) -> torch.Tensor:
        """`out` as `_by_token`; no two of its values may share an address."""
        out = self._by_token("out", out, requests, HEAD_DIM_V)
        if 0 in out.stride():
            raise ValueError(f"out must have an address of its own for every value, got strides {out.stride()} by request, token, head and column")
        return out

    def cache(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache, checked, with a page stride that a tensor map takes."""
        self._check_device("kv_cache", kv_cache, self.problem.kv_dtype)
        page_size = self.problem.page_size
        if kv_cache.dim() != 3 or kv_cache.shape[0] < 1 or kv_cache.shape[1:] != (page_size, HEAD_DIM_QK):
            raise ValueError(f"kv_cache must be [pages, {page_size}, {HEAD_DIM_QK}] with at least one page, got {tuple(kv_cache.shape)}")
        page, key, dense = kv_cache.stride()
        if key != HEAD_DIM_QK:
            raise ValueError(f"kv_cache must have dense rows (stride {HEAD_DIM_QK}) within a page, got stride {key}")
        if kv_cache.shape[0] == 1:
            page = page_size * HEAD_DIM_QK
            kv_cache = kv_cache.as_strided(kv_cache.shape, (page, key, dense))
        self._check_alignment("kv_cache", kv_cache, page, key, dense)
        return kv_cache

    def check_seq_lens(self, seq_lens: torch.Tensor) -> None:
        self._check_device("seq_lens", seq_lens, torch.int32)
        if seq_lens.dim() != 1 or not seq_lens.is_contiguous():
            raise ValueError(f"seq_lens must be contiguous [requests], got shape {tuple(seq_lens.shape)}, strides {seq_lens.stride()}")
        if seq_lens.shape[0] > self.max_requests:
            raise ValueError(f"seq_lens holds {seq_lens.shape[0]} requests, the decoder was prepared for at most {self.max_requests}")

    def check_schedule(self, schedule: torch.Tensor) -> None:
        self._check_device("schedule", schedule, torch.int32)
        words, past = self.schedule_words, schedule.data_ptr() % TMA_ALIGNMENT
        if schedule.shape != (words,) or not schedule.is_contiguous() or past:
            raise ValueError(
                f"schedule must be a buffer of empty_schedule() ({words} words), got shape {tuple(schedule.shape)}, strides {schedule.stride()} "
                f"at an address {past} past a multiple of {TMA_ALIGNMENT}"
            )

    def check_table(self, block_table: torch.Tensor, requests: int, max_seq_len: int | None) -> None:
        self._check_device("block_table", block_table, torch.int32)
        if block_table.dim() != 2 or block_table.shape[0] < requests or (block_table.shape[1] > 1 and block_table.stride(1) != 1):
            raise ValueError(
                f"block_table must be [{requests}, width] with dense rows, got shape {tuple(block_table.shape)}, strides {block_table.stride()}"
            )
        keys = block_table.shape[1] * self.problem.page_size
        if max_seq_len is not None and max_seq_len > keys:
            raise ValueError(
                f"block_table has {block_table.shape[1]} pages of {self.problem.page_size} keys ({keys}), too few for max_seq_len {max_seq_len}"
            )

    def lse(self, lse: torch.Tensor | None, requests: int) -> torch.Tensor | None:
        """[requests, tokens, heads] of an LSE [R, heads]; None exactly where the problem returns none."""
        problem = self.problem
        if (lse is not None) != problem.return_lse:
            given = "given" if lse is not None else "missing"
            raise ValueError(f"lse must be given exactly if the problem has return_lse, got return_lse={problem.return_lse} and lse {given}")
        if lse is None:
            return None
        self._check_device("lse", lse, torch.float32)
        shape = (requests * problem.query_len, problem.num_heads)
        if lse.shape != shape or not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous {shape}, got shape {tuple(lse.shape)}, strides {lse.stride()}")
        return lse.view(requests, problem.query_len, problem.num_heads)

    def check_total_lens(self, total_lens: torch.Tensor | None, requests: int) -> None:
        if (total_lens is not None) != self.problem.needs_total_lens:
            given = "given" if total_lens is not None else "missing"
            needed = "is" if self.problem.needs_total_lens else "is not"
            raise ValueError(f"total_lens {needed} needed by the problem (causal, several query tokens and ranks), but was {given}")
        if total_lens is not None:
            self._check_device("total_lens", total_lens, torch.int32)
            if total_lens.shape != (requests,) or not total_lens.is_contiguous():
                raise ValueError(f"total_lens must be contiguous ({requests},), got shape {tuple(total_lens.shape)}, strides {total_lens.stride()}")

    def check_k_scale(self, k_scale: torch.Tensor | None) -> None:
        if (k_scale is not None) != self.problem.needs_k_scale:
            given = "given" if k_scale is not None else "missing"
            raise ValueError(f"k_scale must be given exactly if kv_dtype is torch.float8_e4m3fn, got {self.problem.kv_dtype} and k_scale {given}")
        if k_scale is not None:
            self._check_device("k_scale", k_scale, torch.float32)
            if k_scale.shape != (1,):
                raise ValueError(f"k_scale must be (1,), got {tuple(k_scale.shape)}")

    def check_scale(self, scale: float) -> None:
        if not 0 < scale < math.inf:  # the kernels take the maximum before they scale
            raise ValueError(f"scale must be positive and finite, got {scale}")

    def partials(self, workspace: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_device("workspace", workspace, torch.uint8)
        slots, needed = self._sizes[requests]
        held, past = workspace.numel(), workspace.data_ptr() % ALIGNMENT
        if workspace.dim() != 1 or held < needed or not workspace.is_contiguous() or past:
            raise ValueError(
                f"workspace must be contiguous uint8 of at least {needed} bytes for {requests} requests, aligned to {ALIGNMENT}, "
                f"got shape {tuple(workspace.shape)} at an address {past} past a multiple"
            )
        return workspace_views(self.problem, workspace[:needed] if held % ALIGNMENT else workspace, slots)

    def _by_token(self, name: str, tensor: torch.Tensor, requests: int, columns: int) -> torch.Tensor:
        """[R, heads, columns], checked, as [requests, tokens, heads, columns] with strides that a tensor map takes."""
        self._check_device(name, tensor, self.problem.query_dtype)
        tokens, heads = self.problem.query_len, self.problem.num_heads
        if tensor.shape != (requests * tokens, heads, columns):
            raise ValueError(f"{name} must be {(requests * tokens, heads, columns)}, got {tuple(tensor.shape)}")
        row, head, dense = tensor.stride()
        # The stride of a dimension of size 1 is never walked; one that no tensor map takes is replaced.
        row = row if requests * tokens > 1 else heads * columns
        head = head if heads > 1 else columns
        self._check_alignment(name, tensor, row, head, dense)
        return tensor.as_strided((requests, tokens, heads, columns), (row * tokens, row, head, 1))

    def _check_alignment(self, name: str, tensor: torch.Tensor, outer: int, inner: int, dense: int) -> None:
        """`outer`, `inner` and `dense`: the strides, as far as they are walked."""
        unit = TMA_ALIGNMENT // tensor.element_size()
        if dense != 1:
            raise ValueError(f"{name} must be dense in its last dimension, got strides {tensor.stride()}")
        if outer % unit or inner % unit:
            raise ValueError(f"{name} must have strides that are multiples of {TMA_ALIGNMENT} bytes ({unit} elements), got {tensor.stride()}")
        if tensor.data_ptr() % TMA_ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {TMA_ALIGNMENT} bytes, got an address {tensor.data_ptr() % TMA_ALIGNMENT} past one"
            )

    def _check_device(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on {self.device}, got {tensor.device}")
