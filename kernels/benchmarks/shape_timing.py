"""All contenders at one shape: checked against FP64 in the buffers that are timed, and timed in the same rounds."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.batch_shape import BatchShape
from benchmarks.comparison_table import OURS
from benchmarks.contenders import Contender
from benchmarks.decode_inputs import Call, DecodeInputs, enough_calls, worst_relative_l2
from benchmarks.evidence import DecodeEvidence, DecodeRow, Failure, error_text
from benchmarks.graph_timing import capture, sm_clock_mhz, time_in_rounds


class WrongAnswerError(Exception):
    """A kernel's output is not the attention that was asked for: its time would mean nothing."""


@dataclass(frozen=True)
class CapturedDecode:
    """A contender's calls at one shape as a graph, how many those are, and the output that it writes for each layer, `[R, heads, 512]`.

    `answers` is whether that output is the attention of all requests. `call` keeps what the graph reads and writes besides: a graph holds
    addresses and owns no memory, and workspace or schedule would go to the next contender.
    """

    contender: Contender
    graph: torch.cuda.CUDAGraph
    calls: int
    outs: tuple[torch.Tensor, ...]
    call: Call
    answers: bool

    @classmethod
    def of(cls, contender: Contender, inputs: DecodeInputs) -> CapturedDecode:
        """Compile, run once, capture, and replay into poisoned outputs."""
        call, outs = contender.prepare(inputs), list(inputs.empty_outputs())

        def decode(layer: int) -> None:
            result = call(inputs.caches[layer], outs[layer])
            if result is not None:  # memory of the graph's own, which no other capture gets as long as somebody holds it
                outs[layer] = result

        decode(0)  # compiles, and fills metadata that a first call makes
        calls = min(inputs.calls, enough_calls(len(outs), us_of(partial(decode, 0))))
        graph = capture([partial(decode, i % len(outs)) for i in range(calls)])
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        return cls(contender, graph, calls, tuple(outs), call, contender.answers(inputs))

    def relative_l2(self, references: dict[int, torch.Tensor]) -> float | None:
        """Of the worst request of the layers that there are references for; `None` where the output is no answer.

        Raises:
            WrongAnswerError: an output is not finite, or further from FP64 than the contender may be.
        """
        if not self.answers:
            return None
        found = [worst_relative_l2(self.outs[layer], reference) for layer, reference in references.items()]
        allowed = self.contender.max_relative_l2
        if not all(error <= allowed for error in found):
            raise WrongAnswerError(f"relative L2 against FP64 is {found} at layers {list(references)}, allowed is {allowed}")
        if not torch.stack([out.isfinite().all() for out in self.outs]).all():
            raise WrongAnswerError("an output holds NaN or infinity")
        return max(found)


@dataclass(frozen=True)
class ShapeTiming:
    """Times contenders at one shape into `evidence`: a row or a failure of each."""

    evidence: DecodeEvidence
    shape: BatchShape
    heads: int
    page_size: int
    device: torch.device
    kv_dtype: torch.dtype = torch.bfloat16
    k_scale: float = 1.0

    def measure(self, contenders: Sequence[Contender], replays: int) -> bool:
        """Capture and check each, then time them in rounds. False if a failure took the CUDA context with it."""
        marks = [time.perf_counter()]
        try:
            inputs = DecodeInputs.random(self.shape, self.heads, self.page_size, self.device, self.kv_dtype, self.k_scale)
            references = inputs.references()
            torch.cuda.synchronize()
        except (ValueError, RuntimeError) as error:
            self._fail(OURS, None, error)
            return _device_is_alive()
        marks.append(time.perf_counter())
        captured = [decode for contender in contenders if (decode := self._captured(contender, inputs, references)) is not None]
        marks.append(time.perf_counter())
        if captured and _device_is_alive():
            self._time(captured, inputs, references, replays)
        marks.append(time.perf_counter())
        del captured
        gc.collect()
        gc.freeze()  # what is left are modules and compiled kernels: looked at again after every shape, they cost more than the timing
        alive = _device_is_alive()
        if alive:
            torch.cuda.empty_cache()
        inputs_s, captures_s, timing_s = (after - before for before, after in itertools.pairwise(marks))
        print(f"{self.heads} heads, {self.shape.label}: inputs {inputs_s:.1f} s, captures {captures_s:.1f} s, timing {timing_s:.1f} s", flush=True)
        return alive

    def _captured(self, contender: Contender, inputs: DecodeInputs, references: dict[int, torch.Tensor]) -> CapturedDecode | None:
        try:
            decode = CapturedDecode.of(contender, inputs)
            decode.relative_l2(references)
        except Exception as error:  # whatever a peer raises is its result; ours fails the run at its end
            self._fail(contender.kernel, contender.partial_dtype, error)
            return None
        return decode

    def _time(self, captured: Sequence[CapturedDecode], inputs: DecodeInputs, references: dict[int, torch.Tensor], replays: int) -> None:
        clocks: list[int | None] = []
        try:
            timed = time_in_rounds([decode.graph.replay for decode in captured], replays, meanwhile=lambda: clocks.append(sm_clock_mhz()))
        except RuntimeError as error:
            for decode in captured:
                self._fail(decode.contender.kernel, decode.contender.partial_dtype, error)
            return
        for decode, samples in zip(captured, timed):
            try:
                # Checked again: a race may show only when replays follow each other closely.
                row = self._row(decode, inputs, samples, decode.relative_l2(references), clocks[0])
            except WrongAnswerError as error:
                self._fail(decode.contender.kernel, decode.contender.partial_dtype, error)
            else:
                self.evidence.rows.append(row)
                print(f"{row.heads} heads, {row.shape}, {row.kernel} {row.partial_dtype or ''}: {row.us:.1f} us", flush=True)

    def _row(self, decode: CapturedDecode, inputs: DecodeInputs, samples: Sequence[float], relative_l2: float | None, clock: int | None) -> DecodeRow:
        shape, contender = inputs.shape, decode.contender
        us_samples = [us / decode.calls for us in samples]
        us = statistics.median(us_samples)
        return DecodeRow(
            kernel=contender.kernel,
            shape=shape.label,
            heads=inputs.heads,
            query_len=inputs.query_len,
            batch=shape.batch,
            context=shape.context,
            keys=shape.keys,
            page_size=inputs.page_size,
            kv_dtype=inputs.kv_dtype_name,
            partial_dtype=contender.partial_dtype,
            planned_for=contender.planned_for or shape.context,
            us_samples=tuple(round(sample, 3) for sample in us_samples),
            us=round(us, 3),
            GBps=round(inputs.kv_bytes / us / 1e3, 1),
            relative_l2=relative_l2,
            floor_us=round(inputs.kv_bytes / self.evidence.read_ceiling_GBps / 1e3, 3),
            caches=len(inputs.caches),
            calls=decode.calls,
            sm_clock_mhz=clock,
        )

    def _fail(self, kernel: str, partial_dtype: str | None, error: Exception) -> None:
        self.evidence.failures.append(Failure(kernel, self.shape.label, self.heads, self.page_size, partial_dtype, error_text(error)))
        print(f"{self.heads} heads, {self.shape.label}, {kernel} {partial_dtype or ''}: {error_text(error)}", flush=True)


def us_of(call: Callable[[], None]) -> float:
    """Microseconds of one call, its launch included."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6


def _device_is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the CUDA context is lost, nothing more can run in this process: {error_text(error)}", flush=True)
        return False
    return True
