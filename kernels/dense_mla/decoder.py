"""The door of the package: prepare once, schedule once a step, run once a layer."""

from __future__ import annotations

from pathlib import Path

import torch

from .compiled import LOG2_E, CompiledKernels, prepared_kernels
from .problem import HEAD_DIM_QK, HEAD_DIM_V, DecodeProblem
from .schedule import MAX_REQUESTS, schedule_words
from .workspace import ALIGNMENT, WorkspaceSize, workspace_size, workspace_views

TMA_ALIGNMENT = 16  # bytes: of base addresses and of every stride but the last


class DenseMLADecoder:
    """Split-KV decode of dense multi-head latent attention on one device.

    `schedule` and `run` allocate nothing, compile nothing and never wait for the device, so both can be captured in CUDA graphs; a
    captured `run` follows whatever the schedule buffer and the lengths hold when the graph is replayed.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device, max_requests: int, kernels: CompiledKernels):
        self.problem = problem
        self.device = device
        self.max_requests = max_requests
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        # Never more than the workspace is sized for: the portable kernel's CTAs may need fewer row tiles than the problem has.
        self.num_ranges = min(max(self.sm_count // kernels.row_tiles, 1), problem.num_ranges(self.sm_count))
        self._schedule_words = schedule_words(self.num_ranges, max_requests, problem.batch_invariant)
        sizes = (workspace_size(problem, requests, self.sm_count) for requests in range(max_requests + 1))
        self._sizes = tuple((size.slots, size.total_bytes) for size in sizes)  # by requests: looked up in every layer of every step
        self._kernels = kernels

    @classmethod
    def prepare(
        cls,
        problem: DecodeProblem,
        device: torch.device,
        *,
        max_requests: int,
        kernel: str | None = None,
        cache_dir: Path | None = None,
    ) -> DenseMLADecoder:
        """Compiles and loads everything that `schedule` and `run` launch.

        Args:
            problem: what is static. Compiled once per problem and device, about 5 seconds, or loaded from the cache; later calls share it.
            device: a CUDA device with a supported compute capability.
            max_requests: the largest batch that will be run, 1 to 4096.
            kernel: "sm80" forces the portable kernel on a Hopper GPU; by default a GPU runs the fastest that it has.
            cache_dir: folder where compiled kernels are kept between processes, an absolute path; None: nowhere.

        Raises:
            ValueError: an unsupported device or one that is not there, a problem that does not fit its shared memory, a batch out of range, or
                a folder that is no absolute path.
            RuntimeError: a CUDA graph is being captured and the kernels are not compiled yet.
        """
        if not 1 <= max_requests <= MAX_REQUESTS:
            raise ValueError(f"max_requests must be from 1 to {MAX_REQUESTS}, got {max_requests}")
        device = _present(device)
        decoder = cls(problem, device, max_requests, prepared_kernels(problem, device, kernel, cache_dir))
        if not torch.cuda.is_current_stream_capturing():
            decoder._load()
        return decoder

    def empty_schedule(self) -> torch.Tensor:
        """A schedule buffer, int32 on the device. Its contents belong to the kernels."""
        return torch.zeros(self._schedule_words, dtype=torch.int32, device=self.device)

    def workspace_size(self, num_requests: int) -> WorkspaceSize:
        """Bytes that `run` needs for a batch of at most `num_requests` requests of any length."""
        return workspace_size(self.problem, num_requests, self.sm_count)

    def schedule(self, seq_lens: torch.Tensor, block_table: torch.Tensor, schedule: torch.Tensor) -> None:
        """Plans a step on the device: one small launch on the current stream.

        Args:
            seq_lens: [requests] int32, keys of each request on this rank, >= 0.
            block_table: [requests, width] int32, the table that `run` will be given.
            schedule: a buffer of `empty_schedule`, overwritten.
        """
        self._check_seq_lens(seq_lens)
        self._check_table(block_table, seq_lens.shape[0], None)
        self._check_schedule(schedule)
        if seq_lens.shape[0]:
            self._kernels.schedule(seq_lens, block_table, schedule, self.num_ranges)

    def run(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        schedule: torch.Tensor,
        workspace: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        lse: torch.Tensor | None = None,
        total_lens: torch.Tensor | None = None,
        max_seq_len: int | None = None,
        k_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of one layer: forward and merge on the current stream.

        Args:
            q: [R, heads, 576] in query_dtype, or the pair [R, heads, 512], [R, heads, 64], with R = requests x query_len rows, the tokens of a
                request together. Any strides that are multiples of 16 bytes; the last dimension dense.
            kv_cache: [pages, page_size, 576] in kv_dtype, rows dense; any page stride that is a multiple of 16 bytes.
            block_table: [requests, width] int32. Columns past ceil(seq_len / page_size) are never read.
            seq_lens: [requests] int32, keys on this rank, query tokens included; the lengths that `schedule` was computed from.
            schedule: buffer that `schedule` filled on this stream, or an earlier one that this stream waited for.
            workspace: uint8, at least `workspace_size(requests).total_bytes`, aligned to 256 bytes. Contents need not be kept between calls.
            out: [R, heads, 512] in query_dtype, written whole: 0 for a row that sees no key. Any strides as for q.
            scale: softmax scale, positive.
            lse: [R, heads] fp32, contiguous: natural-log LSE, -inf for a row that sees no key. Given exactly if the problem returns it.
            total_lens: [requests] int32, keys on all ranks. Given exactly if the problem's causal rule needs it (`needs_total_lens`).
            max_seq_len: largest length that the host knows of; where given, the block table must be wide enough for it.
            k_scale: [1] fp32, what the cache's values have to be multiplied with; read when the kernels run. Given exactly if the cache is E4M3.

        Raises:
            ValueError: an argument that the kernels were not prepared for, before anything is launched.
        """
        self._check_seq_lens(seq_lens)
        self._check_schedule(schedule)
        requests = seq_lens.shape[0]
        q_nope, q_rope = self._query(q, requests)
        kv_cache = self._cache(kv_cache)
        out = self._by_token("out", out, requests, HEAD_DIM_V)
        if 0 in out.stride():
            raise ValueError(f"out must have an address of its own for every value, got strides {out.stride()} by request, token, head and column")
        self._check_table(block_table, requests, max_seq_len)
        self._check_lse(lse, requests)
        self._check_total_lens(total_lens, requests)
        self._check_k_scale(k_scale)
        if not scale > 0:  # the kernels take the maximum before they scale
            raise ValueError(f"scale must be positive, got {scale}")
        out_partial, lse_partial = self._partials(workspace, requests)
        if requests == 0:
            return
        lse = None if lse is None else lse.view(requests, self.problem.query_len, self.problem.num_heads)
        self._kernels.forward(
            kv_cache, q_nope, q_rope, block_table, seq_lens, total_lens, schedule, out, lse, out_partial, lse_partial,
            *(() if k_scale is None else (k_scale,)), scale * LOG2_E, self.num_ranges,
        )  # fmt: skip
        self._kernels.merge(out_partial, lse_partial, schedule, out, lse, self.num_ranges, self.sm_count)

    def _load(self) -> None:
        """Launches everything once on an empty request, so that no module is loaded during capture or serving."""
        problem = self.problem

        def zeros(*shape: int, dtype: torch.dtype = problem.query_dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        rows = (problem.query_len, problem.num_heads)
        seq_lens, schedule = zeros(1, dtype=torch.int32), self.empty_schedule()
        block_table = zeros(1, 1, dtype=torch.int32)
        self.schedule(seq_lens, block_table, schedule)
        self.run(
            zeros(*rows, HEAD_DIM_QK),
            zeros(1, problem.page_size, HEAD_DIM_QK, dtype=problem.kv_dtype),
            block_table,
            seq_lens,
            schedule=schedule,
            workspace=zeros(self.workspace_size(1).total_bytes, dtype=torch.uint8),
            out=zeros(*rows, HEAD_DIM_V),
            scale=1.0,
            lse=zeros(*rows, dtype=torch.float32) if problem.return_lse else None,
            total_lens=seq_lens if problem.needs_total_lens else None,
            k_scale=zeros(1, dtype=torch.float32) if problem.needs_k_scale else None,
        )

    def _query(self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent and the rope part, as `_by_token`."""
        if isinstance(q, tuple):
            return self._by_token("q_nope", q[0], requests, HEAD_DIM_V), self._by_token("q_rope", q[1], requests, HEAD_DIM_QK - HEAD_DIM_V)
        whole = self._by_token("q", q, requests, HEAD_DIM_QK)
        rope = whole.as_strided((*whole.shape[:3], HEAD_DIM_QK - HEAD_DIM_V), whole.stride(), whole.storage_offset() + HEAD_DIM_V)
        return whole.as_strided((*whole.shape[:3], HEAD_DIM_V), whole.stride()), rope

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

    def _cache(self, kv_cache: torch.Tensor) -> torch.Tensor:
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

    def _check_seq_lens(self, seq_lens: torch.Tensor) -> None:
        self._check_device("seq_lens", seq_lens, torch.int32)
        if seq_lens.dim() != 1 or not seq_lens.is_contiguous():
            raise ValueError(f"seq_lens must be contiguous [requests], got shape {tuple(seq_lens.shape)}, strides {seq_lens.stride()}")
        if seq_lens.shape[0] > self.max_requests:
            raise ValueError(f"seq_lens holds {seq_lens.shape[0]} requests, the decoder was prepared for at most {self.max_requests}")

    def _check_schedule(self, schedule: torch.Tensor) -> None:
        self._check_device("schedule", schedule, torch.int32)
        words = self._schedule_words
        if schedule.dim() != 1 or schedule.shape[0] != words or not schedule.is_contiguous() or schedule.data_ptr() % TMA_ALIGNMENT:
            raise ValueError(f"schedule must be a buffer of empty_schedule() ({words} words), got shape {tuple(schedule.shape)}")

    def _check_table(self, block_table: torch.Tensor, requests: int, max_seq_len: int | None) -> None:
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

    def _check_lse(self, lse: torch.Tensor | None, requests: int) -> None:
        if (lse is not None) != self.problem.return_lse:
            given = "given" if lse is not None else "missing"
            raise ValueError(f"lse must be given exactly if the problem has return_lse, got return_lse={self.problem.return_lse} and lse {given}")
        if lse is None:
            return
        self._check_device("lse", lse, torch.float32)
        shape = (requests * self.problem.query_len, self.problem.num_heads)
        if lse.shape != shape or not lse.is_contiguous():
            raise ValueError(f"lse must be contiguous {shape}, got shape {tuple(lse.shape)}, strides {lse.stride()}")

    def _check_total_lens(self, total_lens: torch.Tensor | None, requests: int) -> None:
        if (total_lens is not None) != self.problem.needs_total_lens:
            given = "given" if total_lens is not None else "missing"
            needed = "is" if self.problem.needs_total_lens else "is not"
            raise ValueError(f"total_lens {needed} needed by the problem (causal, several query tokens and ranks), but was {given}")
        if total_lens is not None:
            self._check_device("total_lens", total_lens, torch.int32)
            if total_lens.shape != (requests,) or not total_lens.is_contiguous():
                raise ValueError(f"total_lens must be contiguous ({requests},), got shape {tuple(total_lens.shape)}")

    def _check_k_scale(self, k_scale: torch.Tensor | None) -> None:
        if (k_scale is not None) != self.problem.needs_k_scale:
            given = "given" if k_scale is not None else "missing"
            raise ValueError(f"k_scale must be given exactly if kv_dtype is torch.float8_e4m3fn, got {self.problem.kv_dtype} and k_scale {given}")
        if k_scale is not None:
            self._check_device("k_scale", k_scale, torch.float32)
            if k_scale.shape != (1,):
                raise ValueError(f"k_scale must be (1,), got {tuple(k_scale.shape)}")

    def _partials(self, workspace: torch.Tensor, requests: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_device("workspace", workspace, torch.uint8)
        slots, needed = self._sizes[requests]
        held, past = workspace.numel(), workspace.data_ptr() % ALIGNMENT
        if workspace.dim() != 1 or held < needed or not workspace.is_contiguous() or past:
            raise ValueError(
                f"workspace must be contiguous uint8 of at least {needed} bytes for {requests} requests, aligned to {ALIGNMENT}, "
                f"got shape {tuple(workspace.shape)} at an address {past} past a multiple"
            )
        return workspace_views(self.problem, workspace[:needed] if held % ALIGNMENT else workspace, slots)


def _present(device: torch.device) -> torch.device:
    """A CUDA device of this process, with its index; the current one where none is given."""
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    devices = torch.cuda.device_count()
    if (device.index or 0) >= devices:
        raise ValueError(f"device must be one of the {devices} CUDA devices that this process sees, got {device}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
