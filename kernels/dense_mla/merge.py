"""Merge of the pieces of split requests: out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m), with m the largest lse_i.

This is the log-sum-exp rule by which FlashDecoding and FlashAttention combine splits. `out_i` is normalised by its own sum and `lse_i`
is in base 2; the LSE handed out is in natural log. Pieces are added in a fixed order: the same bits for the same schedule.

A thread owns four columns of one row. Where few requests are split, several threads ("strands") share the pieces of a row, so that a single
long request still fills the GPU; their sums meet in shared memory. Requests that one CTA covered are not touched.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .problem import HEAD_DIM_V, DecodeProblem
from .schedule import HEADER_WORDS, RANGE_WORDS, SPLIT_WORDS
from .torch_types import cutlass_dtype

THREADS = 512
VECTOR = 4  # columns of a thread
ROW_VECTORS = HEAD_DIM_V // VECTOR
MAX_LOG_STRANDS = 5
BATCH = 4  # pieces whose loads are in flight together
LN2 = math.log(2.0)


class Merge:
    """The merge kernel of one problem: the partial dtype is a compile-time fact, the batch and the number of pieces are not."""

    def __init__(self, problem: DecodeProblem):
        self.rows = problem.rows
        self.partial_dtype = cutlass_dtype(problem.partial_dtype)
        self.return_lse = problem.return_lse

    @cute.jit
    def __call__(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mSchedule: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        num_ranges: Int32,
        num_ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel(mOutPartial, mLsePartial, mSchedule, mOut, mLse, num_ranges, num_ctas).launch(
            grid=(num_ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        mSchedule: cute.Tensor,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        num_ranges: Int32,
        num_ctas: Int32,
    ) -> None:
        thread, cta = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]

        @cute.struct
        class Storage:
            sums: cute.struct.Align[cute.struct.MemRange[Float32, THREADS * VECTOR], 16]
            maxima: cute.struct.MemRange[Float32, THREADS]
            weights: cute.struct.MemRange[Float32, THREADS]

        storage = cutlass.memory.SmemAllocator().allocate(Storage)
        sSums = storage.sums.get_tensor(cute.make_layout((VECTOR, THREADS)))
        sMaxima = storage.maxima.get_tensor(cute.make_layout((THREADS,)))
        sWeights = storage.weights.get_tensor(cute.make_layout((THREADS,)))

        # Step 1: share out the work. The schedule was complete before the forward started, so it may be read before the wait.
        vectors = mSchedule[0] * (self.rows * ROW_VECTORS)
        log_strands = Int32(0)
        for i in cutlass.range_constexpr(MAX_LOG_STRANDS):
            log_strands = Int32(i + 1) if (vectors << (i + 1)) <= num_ctas * THREADS else log_strands
        per_cta = Int32(THREADS) >> log_strands
        column, strand = thread % per_cta, thread // per_cta
        strands = Int32(1) << log_strands

        # Step 2: the forward's partials. Also where nothing is split: our end must not come before the forward's.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for base in cutlass.range(cta * per_cta, vectors, num_ctas * per_cta, unroll=1):
            vector = base + column
            split = vector // (self.rows * ROW_VECTORS)
            row = vector // ROW_VECTORS % self.rows
            words = mSchedule.iterator + HEADER_WORDS + num_ranges * RANGE_WORDS + split * SPLIT_WORDS
            words = cute.make_tensor(words, cute.make_layout((SPLIT_WORDS,)))
            total = cute.make_rmem_tensor((VECTOR,), Float32)
            total.fill(0.0)
            maximum, weight = -Float32.inf, Float32(0.0)
            if vector < vectors:
                maximum, weight = self.add_pieces(mOutPartial, mLsePartial, total, words, row, vector % ROW_VECTORS, strand, strands)
            if log_strands > 0:
                cute.autovec_copy(total, sSums[None, thread])
                sMaxima[thread] = maximum
                sWeights[thread] = weight
                cute.arch.sync_threads()
                if strand == 0:
                    maximum, weight = self.add_strands(sSums, sMaxima, sWeights, total, thread, per_cta, strands)
                cute.arch.sync_threads()
            if strand == 0:
                if vector < vectors:
                    self.store(total, maximum, weight, mOut, mLse, words[0], row, vector % ROW_VECTORS)

    @cute.jit
    def add_pieces(
        self,
        mOutPartial: cute.Tensor,
        mLsePartial: cute.Tensor,
        total: cute.Tensor,
        words: cute.Tensor,
        row: Int32,
        column: Int32,
        strand: Int32,
        strands: Int32,
    ) -> tuple[Float32, Float32]:
        """Weighted sum of this strand's pieces (strand, strand + strands, ...): their maximum and sum of weights."""
        first, pieces = words[1], words[2]
        maximum, weight = -Float32.inf, Float32(0.0)
        lse = cute.make_rmem_tensor((BATCH,), Float32)
        values = cute.make_rmem_tensor((VECTOR, BATCH), self.partial_dtype)
        for base in cutlass.range(strand, pieces, strands * BATCH, unroll=1):
            for i in cutlass.range_constexpr(BATCH):
                piece = base + i * strands
                lse[i] = -Float32.inf
                if piece < pieces:
                    lse[i] = mLsePartial[first + piece, row]
                    source = cute.local_tile(mOutPartial[first + piece, row, None], (VECTOR,), (column,))
                    cute.autovec_copy(source, values[None, i])
            new_maximum = maximum
            for i in cutlass.range_constexpr(BATCH):
                new_maximum = cute.arch.fmax(new_maximum, lse[i])
            # Where every piece so far is empty the maximum is -inf, and inf - inf would be NaN.
            reference = new_maximum if new_maximum > -Float32.inf else Float32(0.0)
            factor = cute.math.exp2(maximum - reference, fastmath=True)
            weight = weight * factor
            for j in cutlass.range_constexpr(VECTOR):
                total[j] = total[j] * factor
            for i in cutlass.range_constexpr(BATCH):
                w = cute.math.exp2(lse[i] - reference, fastmath=True)
                weight += w
                for j in cutlass.range_constexpr(VECTOR):
                    # An empty piece's values were never written: not even times 0.
                    value = values[j, i].to(Float32)
                    total[j] = total[j] + w * value if w > 0.0 else total[j]
            maximum = new_maximum
        return maximum, weight

    @cute.jit
    def add_strands(
        self,
        sSums: cute.Tensor,
        sMaxima: cute.Tensor,
        sWeights: cute.Tensor,
        total: cute.Tensor,
        thread: Int32,
        per_cta: Int32,
        strands: Int32,
    ) -> tuple[Float32, Float32]:
        """The strands of a row's columns, in order."""
        maximum = -Float32.inf
        for i in cutlass.range(strands, unroll=4):
            maximum = cute.arch.fmax(maximum, sMaxima[thread + i * per_cta])
        reference = maximum if maximum > -Float32.inf else Float32(0.0)
        weight = Float32(0.0)
        total.fill(0.0)
        part = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range(strands, unroll=4):
            other = thread + i * per_cta
            factor = cute.math.exp2(sMaxima[other] - reference, fastmath=True)
            weight += sWeights[other] * factor
            cute.autovec_copy(sSums[None, other], part)
            for j in cutlass.range_constexpr(VECTOR):
                total[j] = total[j] + part[j] * factor
        return maximum, weight

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        maximum: Float32,
        weight: Float32,
        mOut: cute.Tensor,
        mLse: cute.Tensor | None,
        request: Int32,
        row: Int32,
        column: Int32,
    ) -> None:
        inverse = 1.0 / weight if weight > 0.0 else Float32(0.0)
        result = cute.make_rmem_tensor((VECTOR,), BFloat16)
        for j in cutlass.range_constexpr(VECTOR):
            result[j] = (total[j] * inverse).to(BFloat16)
        cute.autovec_copy(result, cute.local_tile(mOut[request, row, None], (VECTOR,), (column,)))
        if cutlass.const_expr(self.return_lse):
            if column == 0:
                mLse[request, row] = (maximum + cute.math.log2(weight, fastmath=True)) * LN2


def fake_arguments(problem: DecodeProblem) -> tuple[Any, ...]:
    """Arguments for `cute.compile`: rows and dtypes are static, counts and the strides of `out` vary."""
    rows, slots = problem.rows, cute.sym_int()
    partial = cutlass_dtype(problem.partial_dtype)
    out_partial = make_fake_tensor(partial, (slots, rows, HEAD_DIM_V), (rows * HEAD_DIM_V, HEAD_DIM_V, 1), assumed_align=16)
    lse_partial = make_fake_tensor(Float32, (slots, rows), (rows, 1))
    schedule = make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    out = make_fake_tensor(BFloat16, (cute.sym_int(), rows, HEAD_DIM_V), strides, assumed_align=16)
    lse = make_fake_tensor(Float32, (cute.sym_int(), rows), (rows, 1)) if problem.return_lse else None
    return out_partial, lse_partial, schedule, out, lse, Int32(1), Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)
