"""Time DENSE_MLA's decode and its peers in vLLM on one GPU, in one process, on the same inputs.

    python kernels/benchmarks/bench_decode.py --heads 8,11,12,16,24,32,64,128 --json docs/evidence/decode_h200.json
    python kernels/benchmarks/bench_decode.py --kv-dtype fp8 --heads 8,16,64,128
    python kernels/benchmarks/bench_decode.py --kernel sm80 --heads 8,16 --also ''

Every kernel at every shape: its output is compared with FP64 softmax attention in the very buffers that are timed, before and after, and its
calls over rotating KV caches (so that the L2 is cold) are captured in one CUDA graph. Then the graphs are replayed in rounds, each kernel's once
a round in a random order, and each replay is a sample. A kernel that fails is written down with its error and the others go on. Under a time
limit the most important shapes come first. The evidence is written after each shape, and names what has not run.

Where --shapes is not given, uneven batches are decoded with 16, 64 and 128 heads alone. Where --peers is not given, other heads are timed
beside TRITON_MLA, which compiles anew for each of them and is not the fastest, at two shapes only.

Exit status: 0 if DENSE_MLA ran and was right everywhere, 1 if not, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kernels and benchmarks of this checkout, installed or not

from benchmarks.batch_shape import BatchShape
from benchmarks.comparison_table import OURS, comparison_table
from benchmarks.contenders import (
    PARTIAL_DTYPES,
    Contender,
    forward_contender,
    invariant_contender,
    our_contenders,
    peer_contenders,
    planned_contender,
    portable_contenders,
)
from benchmarks.evidence import EVIDENCE_DIR, DecodeEvidence, collect_facts, write_json
from benchmarks.graph_timing import LEAST_SAMPLES
from benchmarks.outside_peers import b12x_is_installed
from benchmarks.peers import PEERS, PEERS_OF_FP8_CACHES, PEERS_OF_SEVERAL_TOKENS
from benchmarks.read_ceiling import measure_read_ceiling
from benchmarks.shape_timing import ShapeTiming
from dense_mla.problem import DecodeProblem

T = TypeVar("T")
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
UNIFORM_SHAPES = "1x4096,1x32768,1x131072,8x8192,32x4096,32x16384,128x4096,128x16384"
UNEVEN_SHAPES = "mixed:64:32768,spike:64:131072:512"
# Several query tokens: 64 rows of 16 heads, and the price of 8 tokens for 8 heads, beside 1 token of theirs.
TOKEN_WORK = "16:1x32768q4,16:32x4096q4,8:1x65536,8:1x65536q8"
MAIN_HEADS = 16
THOROUGH_HEADS = (MAIN_HEADS, 64, 128)  # with uneven batches and every peer at every shape
# By (cache dtype, kernel): the peers that are timed unless others are asked for, and the evidence file.
MODES: dict[tuple[str, str | None], tuple[tuple[str, ...], str]] = {
    ("bf16", None): (("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"), "decode_h200.json"),
    ("fp8", None): (("FLASHMLA", "TRITON_MLA"), "decode_fp8_h200.json"),
    ("bf16", "sm80"): (("TRITON_MLA", "B12X"), "decode_sm80_on_h200.json"),
    ("fp8", "sm80"): (("TRITON_MLA", "B12X"), "decode_sm80_fp8_on_h200.json"),
}
PLANNED_SHAPES = SPOT_SHAPES = ("1x4096", "32x4096")  # where a capture for a longer limit would show; where TRITON_MLA is timed at other heads


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
    work = ordered_work(args.heads, args.shapes, args.also, args.uneven_heads)
    evidence.not_run = [f"{heads} heads, {shape.label}" for heads, shape in work]
    write_json(args.json, evidence.to_json())
    alive = True
    for heads, shape in work:
        if not alive or time.monotonic() > deadline:
            break
        timing = ShapeTiming(evidence, shape, heads, args.page_size, device, KV_DTYPES[args.kv_dtype], args.k_scale)
        alive = timing.measure(contenders_of(args, heads, shape), args.replays)
        del evidence.not_run[0]
        write_json(args.json, evidence.to_json())
    report(evidence)
    ours_failed = any(failure.kernel.startswith(OURS) for failure in evidence.failures)
    return 1 if ours_failed or evidence.not_run else 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = f"{UNIFORM_SHAPES},{UNEVEN_SHAPES}"
    labels = "BATCHxKEYS, BATCHxKEYSqTOKENS, mixed:BATCH:KEYS, spike:BATCH:LONG:SHORT"
    parser.add_argument("--shapes", type=_list_of(BatchShape.parse), help=f"{labels}; by default {shapes}")
    parser.add_argument("--heads", type=_list_of(int), default=str(MAIN_HEADS))
    parser.add_argument("--also", type=_list_of(_parse_work), default=TOKEN_WORK, help="HEADS:SHAPE beside --heads x --shapes")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), default="bf16", help="of the KV cache; fp8 is E4M3 with one scale")
    parser.add_argument("--kernel", choices=("sm80",), help="force the portable kernel; by default the GPU's own")
    parser.add_argument("--k-scale", type=float, default=1.0, help="what an E4M3 cache's values were divided by")
    parser.add_argument("--peers", type=_list_of(_one_of(PEERS)), help="where not given, vLLM's that read the cache's dtype; b12x beside sm80")
    parser.add_argument("--partial-dtypes", type=_list_of(_one_of(PARTIAL_DTYPES)), default="bf16,fp32")
    parser.add_argument("--replays", type=int, default=30, help=f"samples of a kernel at a shape: at most this, at least {LEAST_SAMPLES}")
    parser.add_argument("--planned-for", type=int, default=2**20, help="also time a capture for requests of this many keys; 0: do not")
    parser.add_argument("--time-limit-s", type=float, default=540, help="no new shape is started after this many seconds")
    parser.add_argument("--json", type=Path, help="evidence file; where not given, the one of the mode under docs/evidence")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if args.replays < LEAST_SAMPLES:
        parser.error(f"--replays must be at least {LEAST_SAMPLES}, got {args.replays}")
    if args.planned_for < 0:
        parser.error(f"--planned-for must be 0 or more, got {args.planned_for}")
    args.uneven_heads = args.heads if args.shapes else THOROUGH_HEADS
    args.shapes = args.shapes or _list_of(BatchShape.parse)(shapes)
    args.every_peer = args.peers is not None
    _fill_in_mode(parser, args)
    try:
        for heads in [*args.heads, *(heads for heads, _ in args.also)]:
            DecodeProblem(heads, args.page_size)
        for shape in [*args.shapes, *(shape for _, shape in args.also)]:
            DecodeProblem(MAIN_HEADS, args.page_size, query_len=shape.query_len)
    except ValueError as error:
        parser.error(str(error))
    return args


def _fill_in_mode(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Peers and evidence file that follow from the cache's dtype and the kernel."""
    fp8 = args.kv_dtype == "fp8"
    peers, evidence = MODES[args.kv_dtype, args.kernel]
    if args.peers is None:  # b12x is no part of vLLM: where it is not installed, nothing is missing
        args.peers = [name for name in peers if name != "B12X" or b12x_is_installed()]
    args.json = args.json or EVIDENCE_DIR / evidence
    if not (math.isfinite(args.k_scale) and args.k_scale > 0):
        parser.error(f"--k-scale must be a positive number, got {args.k_scale}")
    if args.k_scale != 1 and not fp8:
        parser.error(f"--k-scale is of an E4M3 cache and needs --kv-dtype fp8, got {args.k_scale} with --kv-dtype {args.kv_dtype}")
    if fp8 and (unable := [name for name in args.peers if name not in PEERS_OF_FP8_CACHES]):
        parser.error(f"--peers with --kv-dtype fp8 must be of {', '.join(PEERS_OF_FP8_CACHES)}, got {', '.join(unable)}")


def ordered_work(
    heads: Sequence[int], shapes: Sequence[BatchShape], also: Sequence[tuple[int, BatchShape]], uneven_heads: Collection[int]
) -> list[tuple[int, BatchShape]]:
    """Most important first, because a time limit cuts off the end: 16 heads in uniform batches, what is `also` asked for, 64 and 128 heads in
    uniform batches, 16 heads in uneven ones, the other heads. Uneven batches only with `uneven_heads`."""

    def rank(item: tuple[int, BatchShape]) -> int:
        count, shape = item
        if count == MAIN_HEADS:
            return 0 if shape.is_uniform else 2
        return (1 if count in THOROUGH_HEADS else 3) if shape.is_uniform else 4

    wanted = [(count, shape) for count, shape in itertools.product(heads, shapes) if shape.is_uniform or count in uneven_heads]
    work = sorted(wanted, key=rank)
    first = sum(rank(item) == 0 for item in work)
    return [*work[:first], *also, *work[first:]]


def contenders_of(args: argparse.Namespace, heads: int, shape: BatchShape) -> list[Contender]:
    """What is timed at one shape, ours first; at 16 heads with the forward alone, and with what batch invariance and a capture for longer
    requests cost."""
    contenders = portable_contenders(args.partial_dtypes) if args.kernel else our_contenders(args.partial_dtypes)
    if heads == MAIN_HEADS and shape.query_len == 1 and not args.kernel:
        contenders.append(invariant_contender(args.partial_dtypes[0]))
        if shape.is_uniform:
            contenders.append(forward_contender(args.partial_dtypes[0]))
        if args.planned_for > shape.context and shape.label in PLANNED_SHAPES:
            contenders.append(planned_contender(args.partial_dtypes[0], args.planned_for))
    return contenders + peer_contenders(peers_of(args, heads, shape), KV_DTYPES[args.kv_dtype])


def peers_of(args: argparse.Namespace, heads: int, shape: BatchShape) -> list[str]:
    """The peers that are timed at one shape."""
    able = [name for name in args.peers if shape.query_len == 1 or name in PEERS_OF_SEVERAL_TOKENS]
    if args.every_peer or args.kernel or heads in THOROUGH_HEADS or shape.label in SPOT_SHAPES:
        return able
    return [name for name in able if name != "TRITON_MLA"]


def report(evidence: DecodeEvidence) -> None:
    """The table, and everything that is not in it."""
    if evidence.rows:
        print(f"\nmicroseconds a call, median; read ceiling {evidence.read_ceiling_GBps:.0f} GB/s\n{comparison_table(evidence.rows)}")
    for failure in evidence.failures:
        print(f"FAILED {failure.kernel} {failure.partial_dtype or ''} {failure.shape}, {failure.heads} heads: {failure.error}")
    for label in evidence.not_run:
        print(f"NOT RUN {label}")


def _parse_work(text: str) -> tuple[int, BatchShape]:
    heads, _, label = text.partition(":")
    if not heads.isdecimal():
        raise ValueError(f"work must be HEADS:SHAPE, got {text!r}")
    return int(heads), BatchShape.parse(label)


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
