"""Time DENSE_MLA's decode and its peers in vLLM on one GPU, in one process, on the same inputs.

    python kernels/benchmarks/bench_decode.py --json docs/evidence/decode_h200.json

Every kernel at every shape: its output is compared with FP64 softmax attention in the very buffers that are timed, then one CUDA graph with
its calls over rotating KV caches (so that the L2 is cold) is replayed, and each replay is a sample. A kernel that fails is written down
with its error and the others go on. Exit status: 0 if DENSE_MLA ran and was right everywhere, 1 if not, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kernels and benchmarks of this checkout, installed or not

from benchmarks.batch_shape import BatchShape
from benchmarks.comparison_table import OURS, comparison_table
from benchmarks.decode_inputs import DecodeInputs, worst_relative_l2
from benchmarks.evidence import EVIDENCE_DIR, DecodeEvidence, DecodeRow, Failure, collect_facts, error_text, write_json
from benchmarks.graph_timing import capture, time_launches
from benchmarks.peers import PEERS, Call
from benchmarks.read_ceiling import measure_read_ceiling
from dense_mla.problem import DecodeProblem

T = TypeVar("T")
SHAPES = "1x4096,1x32768,1x131072,8x8192,32x4096,32x16384,128x4096,128x16384"
PARTIAL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_RELATIVE_L2 = 1e-2  # five times what BF16 inputs cost: beyond it the kernel computes something else


@dataclass(frozen=True)
class Contender:
    """A kernel to time: its name in the evidence, and what makes its call for a shape's inputs."""

    kernel: str
    partial_dtype: str | None
    prepare: Callable[[DecodeInputs], Call]


class WrongAnswerError(Exception):
    """A kernel's output is not the attention that was asked for: its time would mean nothing."""


def main() -> int:
    args = parse_arguments()
    try:
        facts = collect_facts(args.commit, args.dirty)
    except ValueError as error:
        print(f"bench_decode: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.time_limit_s
    device = torch.device("cuda", torch.cuda.current_device())
    evidence = DecodeEvidence(facts, measure_read_ceiling(device))
    print(f"{facts.gpu}, read ceiling {evidence.read_ceiling_GBps:.0f} GB/s", flush=True)
    contenders = [*our_contenders(args.partial_dtypes), *(Contender(name, None, PEERS[name]) for name in args.peers)]
    todo = [(heads, shape) for heads in args.heads for shape in args.shapes]
    alive = True
    for heads, shape in todo:
        if not alive or time.monotonic() > deadline:
            evidence.not_run.append(f"{heads} heads, {shape.label}")
            continue
        alive = measure_shape(evidence, contenders, shape, heads, args.page_size, args.replays, device)
        write_json(args.json, evidence.to_json())
    write_json(args.json, evidence.to_json())
    report(evidence)
    ours_failed = any(failure.kernel.startswith(OURS) for failure in evidence.failures)
    return 1 if ours_failed or evidence.not_run else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=_list_of(BatchShape.parse), default=SHAPES, help="BATCHxKEYS, mixed:BATCH:KEYS, spike:BATCH:LONG:SHORT")
    parser.add_argument("--heads", type=_list_of(int), default="16")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--peers", type=_list_of(_one_of(PEERS)), default="FLASHMLA,FLASH_ATTN_MLA,TRITON_MLA")
    parser.add_argument("--partial-dtypes", type=_list_of(_one_of(PARTIAL_DTYPES)), default="bf16,fp32")
    parser.add_argument("--replays", type=int, default=30, help="samples of a kernel at a shape, at least 20")
    parser.add_argument("--time-limit-s", type=float, default=540, help="no new shape is started after this many seconds")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "decode_h200.json")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if args.replays < 20:
        parser.error(f"--replays must be at least 20, got {args.replays}")
    try:
        for heads in args.heads:
            DecodeProblem(heads, args.page_size)
    except ValueError as error:
        parser.error(str(error))
    return args


def our_contenders(partial_dtypes: Sequence[str]) -> list[Contender]:
    """DENSE_MLA in every partial dtype, and in the first one with the step's schedule kernel before every call: the most that it can cost."""
    contenders = [Contender(OURS, name, _prepare_ours(PARTIAL_DTYPES[name], schedule_each_call=False)) for name in partial_dtypes]
    for name in partial_dtypes[:1]:
        contenders.append(Contender(f"{OURS}+schedule", name, _prepare_ours(PARTIAL_DTYPES[name], schedule_each_call=True)))
    return contenders


def _prepare_ours(partial_dtype: torch.dtype, *, schedule_each_call: bool) -> Callable[[DecodeInputs], Call]:
    def prepare(inputs: DecodeInputs) -> Call:
        from dense_mla.decoder import DenseMLADecoder

        problem = DecodeProblem(inputs.heads, inputs.page_size, partial_dtype)
        decoder = DenseMLADecoder.prepare(problem, inputs.q.device, max_requests=inputs.shape.batch)
        schedule = decoder.empty_schedule()
        num_bytes = decoder.workspace_size(inputs.shape.batch).total_bytes
        workspace = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=inputs.q.device)  # NaN in both partial dtypes
        decoder.schedule(inputs.seq_lens, schedule)

        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
            if schedule_each_call:
                decoder.schedule(inputs.seq_lens, schedule)
            decoder.run(
                inputs.q,
                kv_cache,
                inputs.block_table,
                inputs.seq_lens,
                schedule=schedule,
                workspace=workspace,
                out=out,
                scale=inputs.scale,
                max_seq_len=inputs.shape.context,
            )

        return call

    return prepare


def measure_shape(
    evidence: DecodeEvidence, contenders: Sequence[Contender], shape: BatchShape, heads: int, page_size: int, replays: int, device: torch.device
) -> bool:
    """Time every contender at one shape, on the same inputs, into `evidence`. False if a failure took the CUDA context with it."""
    try:
        inputs = DecodeInputs.random(shape, heads, page_size, device)
        references = {layer: inputs.reference(layer) for layer in (0, len(inputs.caches) - 1)}
    except (ValueError, RuntimeError) as error:
        evidence.failures.append(Failure(OURS, shape.label, heads, page_size, None, f"no inputs: {error_text(error)}"))
        return _device_is_alive()
    for contender in contenders:
        try:
            samples, relative_l2 = time_contender(contender, inputs, references, replays)
        except Exception as error:  # whatever a peer raises is its result; ours fails the run at its end
            evidence.failures.append(Failure(contender.kernel, shape.label, heads, page_size, contender.partial_dtype, error_text(error)))
            print(f"{shape.label} {contender.kernel}: {error_text(error)}", flush=True)
            if not _device_is_alive():
                return False
        else:
            evidence.rows.append(_row(contender, inputs, samples, relative_l2, evidence.read_ceiling_GBps))
            print(f"{shape.label} {contender.kernel} {contender.partial_dtype or ''}: {statistics.median(samples):.1f} us", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return True


def time_contender(contender: Contender, inputs: DecodeInputs, references: dict[int, torch.Tensor], replays: int) -> tuple[list[float], float]:
    """Microseconds a call of each replay, and the relative L2 of the worst request in the buffers that the timed graph writes.

    Raises:
        WrongAnswerError: an output is not finite, or further than `MAX_RELATIVE_L2` from FP64.
    """
    call = contender.prepare(inputs)
    outs = inputs.empty_outputs()
    call(inputs.caches[0], outs[0])  # compiles, and fills metadata that a first call makes
    torch.cuda.synchronize()
    layers = len(inputs.caches)
    graph = capture([partial(call, inputs.caches[i % layers], outs[i % layers]) for i in range(inputs.calls)])
    outs.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    relative_l2 = [worst_relative_l2(outs[layer], reference) for layer, reference in references.items()]
    if not all(error <= MAX_RELATIVE_L2 for error in relative_l2):
        raise WrongAnswerError(f"relative L2 against FP64 is {relative_l2} at layers {list(references)}, allowed is {MAX_RELATIVE_L2}")
    if not outs.isfinite().all():
        raise WrongAnswerError("an output holds NaN or infinity")
    return [us / inputs.calls for us in time_launches(graph.replay, replays)], max(relative_l2)


def _row(contender: Contender, inputs: DecodeInputs, samples: Sequence[float], relative_l2: float, ceiling: float) -> DecodeRow:
    shape, us = inputs.shape, statistics.median(samples)
    return DecodeRow(
        kernel=contender.kernel,
        shape=shape.label,
        heads=inputs.heads,
        query_len=1,
        batch=shape.batch,
        context=shape.context,
        keys=shape.keys,
        page_size=inputs.page_size,
        kv_dtype="bf16",
        partial_dtype=contender.partial_dtype,
        us_samples=tuple(round(sample, 3) for sample in samples),
        us=round(us, 3),
        GBps=round(shape.kv_bytes / us / 1e3, 1),
        relative_l2=relative_l2,
        floor_us=round(shape.kv_bytes / ceiling / 1e3, 3),
        caches=len(inputs.caches),
        calls=inputs.calls,
    )


def report(evidence: DecodeEvidence) -> None:
    """The table, and everything that is not in it."""
    if evidence.rows:
        print(f"\nmicroseconds a call, median; read ceiling {evidence.read_ceiling_GBps:.0f} GB/s\n{comparison_table(evidence.rows)}")
    for failure in evidence.failures:
        print(f"FAILED {failure.kernel} {failure.partial_dtype or ''} {failure.shape}, {failure.heads} heads: {failure.error}")
    for label in evidence.not_run:
        print(f"NOT RUN {label}")


def _device_is_alive() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the CUDA context is lost, nothing more can run in this process: {error_text(error)}", flush=True)
        return False
    return True


def _one_of(choices: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _list_of(parse_one: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        try:
            return [parse_one(part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


if __name__ == "__main__":
    sys.exit(main())
