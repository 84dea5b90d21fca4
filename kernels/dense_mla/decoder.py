"""The door of the package: prepare once, schedule once a step, run once a layer."""

from __future__ import annotations

from pathlib import Path

import torch

from .compiled import LOG2_E, CompiledKernels, prepared_kernels
from .launch_arguments import LaunchArguments
from .merge_plan import MergeTile
from .problem import HEAD_DIM_QK, HEAD_DIM_V, DecodeProblem
from .schedule import MAX_REQUESTS, schedule_words
from .workspace import WorkspaceSize, workspace_size


class DenseMLADecoder:
    """Split-KV decode of dense multi-head latent attention on one device.

    `schedule` and `run` allocate nothing, compile nothing and never wait for the device, so both can be captured in CUDA graphs; a
    captured `run` follows whatever the schedule buffer, the lengths and the block table hold when the graph is replayed. The tensors that
    it was captured with have to live as long as the graph; the compiled kernels live as long as the process.

    A schedule holds for the lengths and the block table that it was computed from: from `schedule` to the last `run` of the step neither may
    change. Where each CTA's range starts and ends stands in it, with the first page: for other lengths the answers are undefined.
    Everything else, `total_lens` and the cache's values included, is read when `run` runs.

    Launches that can run at the same time, on two streams say, need a schedule and a workspace each. Those that follow each other on one
    stream may share a workspace, of several decoders too.
    """

    def __init__(self, problem: DecodeProblem, device: torch.device, max_requests: int, kernels: CompiledKernels):
        self.problem = problem
        self.device = device
        self.max_requests = max_requests
        self.sm_count = _sm_count(device)
        # Never more than the workspace is sized for: the portable kernel's CTAs may need fewer row tiles than the problem has.
        self.num_ranges = min(max(self.sm_count // kernels.row_tiles, 1), problem.num_ranges(self.sm_count))
        self._schedule_words = schedule_words(self.num_ranges, max_requests, self.sm_count, problem.batch_invariant)
        self._arguments = LaunchArguments(problem, device, max_requests, self.sm_count, self._schedule_words)
        tile = MergeTile.of(problem.rows)
        self._merge_work = (problem.rows * tile.row_vectors, tile.batch, self.sm_count)  # what the schedule shares out
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
            ValueError: an unsupported device or one that is not there, one with more SMs than the kernels share work among, a problem that does
                not fit its shared memory, a batch out of range, or a folder that is no absolute path.
            RuntimeError: a CUDA graph is being captured and the kernels are not compiled yet.
        """
        if not 1 <= max_requests <= MAX_REQUESTS:
            raise ValueError(f"max_requests must be from 1 to {MAX_REQUESTS}, got {max_requests}")
        device = _present(device)
        workspace_size(problem, max_requests, _sm_count(device))  # too many SMs or partials are refused before anything compiles
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
            seq_lens: [requests] int32, keys of each request on this rank, >= 0. To stay as they are until the step's last `run`.
            block_table: [requests, width] int32, the table that `run` will be given: likewise, up to column ceil(seq_len / page_size).
            schedule: a buffer of this decoder's `empty_schedule`, overwritten.

        Raises:
            ValueError: an argument that the kernels were not prepared for, before anything is launched.
        """
        self._arguments.check_seq_lens(seq_lens)
        self._arguments.check_table(block_table, seq_lens.shape[0], None)
        self._arguments.check_schedule(schedule)
        if seq_lens.shape[0]:
            self._kernels.schedule(seq_lens, block_table, schedule, self.num_ranges, *self._merge_work)

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
            block_table: [requests, width] int32, with the pages that it had when `schedule` ran. Columns past ceil(seq_len / page_size) are never
                read.
            seq_lens: [requests] int32, keys on this rank, query tokens included: the lengths that `schedule` ran with, every one as it was then.
            schedule: buffer that this decoder's `schedule` filled on this stream, or on one that this stream waited for.
            workspace: uint8, at least `workspace_size(requests).total_bytes`, aligned to 256 bytes. Contents need not be kept between calls.
            out: [R, heads, 512] in query_dtype, written whole: 0 for a row that sees no key. Any strides as for q.
            scale: softmax scale, positive and finite.
            lse: [R, heads] fp32, contiguous: natural-log LSE, -inf for a row that sees no key. Given exactly if the problem returns it.
            total_lens: [requests] int32, keys on all ranks. Given exactly if the problem's causal rule needs it (`needs_total_lens`).
            max_seq_len: largest length that the host knows of; where given, the block table must be wide enough for it.
            k_scale: [1] fp32, what the cache's values have to be multiplied with; read when the kernels run. Given exactly if the cache is E4M3.

        Raises:
            ValueError: an argument that the kernels were not prepared for, before anything is launched.
        """
        arguments = self._arguments
        arguments.check_seq_lens(seq_lens)
        arguments.check_schedule(schedule)
        requests = seq_lens.shape[0]
        q_nope, q_rope = arguments.query(q, requests)
        kv_cache = arguments.cache(kv_cache)
        out = arguments.output(out, requests)
        arguments.check_table(block_table, requests, max_seq_len)
        lse = arguments.lse(lse, requests)
        arguments.check_total_lens(total_lens, requests)
        arguments.check_k_scale(k_scale)
        arguments.check_scale(scale)
        out_partial, lse_partial = arguments.partials(workspace, requests)
        if requests == 0:
            return
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


def _present(device: torch.device) -> torch.device:
    """A CUDA device of this process, with its index; the current one where none is given."""
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    devices = torch.cuda.device_count()
    if (device.index or 0) >= devices:
        raise ValueError(f"device must be one of the {devices} CUDA devices that this process sees, got {device}")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
