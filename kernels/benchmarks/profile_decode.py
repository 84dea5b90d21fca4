"""Where the warps of the decode's forward kernel are: samples of the program counter, taken by Nsight Compute in a child process.

    python kernels/benchmarks/profile_decode.py --work 128:128x4096,16:32x16384:fp8
    python kernels/benchmarks/profile_decode.py --work 16:8x8192 --csv source.csv --details details.txt --gpu ... --commit ... --dirty no

The child decodes three times, with the inputs and the decoder of bench_decode, and the second forward is profiled with the clocks as they are.
Profiled time is no measured time: the kernel runs once for every pass, behind flushed caches. What the shares mean says sass_samples.py.

The second form condenses pages that were exported before, and needs no GPU: --csv holds what `ncu -i REPORT --page source --csv` prints,
--details what `ncu -i REPORT --page details` prints, one file for each item of --work.

Exit status: 0, 1 if there is no profile, 2 for bad arguments on the command line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kernels and benchmarks of this checkout, installed or not

from benchmarks.batch_shape import BatchShape
from benchmarks.bench_decode import KV_DTYPES
from benchmarks.contenders import PARTIAL_DTYPES, ours
from benchmarks.decode_inputs import KV_DTYPE_NAMES, DecodeInputs
from benchmarks.evidence import EVIDENCE_DIR, RunFacts, collect_facts, recorded_command, source_state, write_json
from benchmarks.nsight_compute import PROFILER, NoProfileError, profiled_pages, read_metrics, require_profiler
from benchmarks.sass_samples import SampledCode
from dense_mla.problem import DecodeProblem

RUNS = 3  # of the decode in the child: the second is profiled
LEAST_SHARE = 0.005  # of all samples: an instruction with fewer is not listed
STALLS_LISTED = 3


@dataclass(frozen=True)
class Work:
    """One decode to profile, and its label on the command line."""

    label: str
    heads: int
    shape: BatchShape
    kv_dtype: torch.dtype

    @classmethod
    def parse(cls, label: str) -> Work:
        """Read `HEADS:SHAPE` or `HEADS:SHAPE:fp8`, with the shapes of bench_decode.

        Raises:
            ValueError: anything else.
        """
        heads, _, rest = label.partition(":")
        shape, _, kv_dtype = rest.rpartition(":")
        if kv_dtype not in KV_DTYPES:
            shape, kv_dtype = rest, "bf16"
        if not heads.isdecimal():
            raise ValueError(f"work must be HEADS:SHAPE or HEADS:SHAPE:{'|'.join(KV_DTYPES)}, got {label!r}")
        return cls(label, int(heads), BatchShape.parse(shape), KV_DTYPES[kv_dtype])


def main() -> int:
    args = parse_arguments()
    if args.decode_only:
        decode(args.work[0], args.page_size, args.partial_dtype)
        return 0
    try:
        if not args.csv:
            require_profiler(args.ncu)
        facts = given_facts(args) if args.csv else collect_facts(args.commit, args.dirty)
        rows = [profile_row(work, args, *pages) for work, pages in zip(args.work, exported_pages(args))]
    except (NoProfileError, OSError, ValueError) as error:
        print(f"profile_decode: {error}", file=sys.stderr)
        return 1
    write_json(args.json, asdict(facts) | {"profiler": None if args.csv else PROFILER, "rows": rows})
    for row in rows:
        print(profile_table(row))
    return 0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="128:128x4096,16:32x16384:fp8", help="HEADS:SHAPE or HEADS:SHAPE:fp8, several with commas")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--partial-dtype", choices=tuple(PARTIAL_DTYPES), default="bf16")
    parser.add_argument("--ncu", default="ncu", help="Nsight Compute's program")
    parser.add_argument("--csv", type=_paths, default=[], help="source pages that were exported before, in the order of --work")
    parser.add_argument("--details", type=_paths, default=[], help="their details pages")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "profile_h200.json")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source had uncommitted changes")
    for fact in ("gpu", "driver", "torch", "cutlass-dsl", "date"):
        parser.add_argument(f"--{fact}", help="of the profiled run, with --csv")
    parser.add_argument("--decode-only", action="store_true", help="what the profiled process does: decode, and nothing else")
    args = parser.parse_args(argv)
    try:
        args.work = [Work.parse(label) for label in args.work.split(",")]
        for work in args.work:
            DecodeProblem(work.heads, args.page_size, PARTIAL_DTYPES[args.partial_dtype], work.kv_dtype, query_len=work.shape.query_len)
    except ValueError as error:
        parser.error(str(error))
    if args.csv and not len(args.csv) == len(args.details) == len(args.work):
        parser.error(f"--csv and --details must name a file each for {len(args.work)} items of --work, got {len(args.csv)} and {len(args.details)}")
    facts = [args.gpu, args.torch, args.date, args.driver, args.cutlass_dsl]
    if args.csv and not (all(facts[:3]) and args.commit):
        parser.error("--csv must come with --gpu, --torch, --date and --commit of the profiled run")
    if not args.csv and (args.details or any(facts)):
        parser.error("--details, --gpu, --driver, --torch, --cutlass-dsl and --date describe an export and need --csv")
    return args


def decode(work: Work, page_size: int, partial_dtype: str) -> None:
    """The decode of one shape, `RUNS` times."""
    inputs = DecodeInputs.random(work.shape, work.heads, page_size, torch.device("cuda", torch.cuda.current_device()), work.kv_dtype)
    call = ours(inputs, partial_dtype=PARTIAL_DTYPES[partial_dtype])
    outputs = inputs.empty_outputs()
    for run in range(RUNS):
        layer = run % len(inputs.caches)
        call(inputs.caches[layer], outputs[layer])
    torch.cuda.synchronize()


def given_facts(args: argparse.Namespace) -> RunFacts:
    """The facts of a run that was profiled before, as the caller gives them."""
    commit, dirty = source_state(args.commit, args.dirty)
    command = recorded_command(sys.argv)
    return RunFacts(command, commit, dirty, args.gpu, args.driver, args.torch, None, args.cutlass_dsl, args.date)


def exported_pages(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Source page and details page of every item of work."""
    if args.csv:
        return [(source.read_text(), details.read_text()) for source, details in zip(args.csv, args.details)]
    return [profiled_pages(args.ncu, child_command(work, args)) for work in args.work]


def child_command(work: Work, args: argparse.Namespace) -> list[str]:
    """The command line of the process that is profiled."""
    command = [sys.executable, str(Path(__file__).resolve()), "--decode-only", "--work", work.label]
    return [*command, "--page-size", str(args.page_size), "--partial-dtype", args.partial_dtype]


def profile_row(work: Work, args: argparse.Namespace, source: str, details: str) -> dict[str, Any]:
    """One profile, condensed. Shares are of all samples, `share_of_role` and those of a role's classes of the role's samples."""
    sampled = SampledCode.of_export(source)
    if not sampled.samples:
        raise ValueError("export must hold samples of the program counter, got none")
    roles = sampled.samples_by_role()
    return {
        "heads": work.heads,
        "shape": work.shape.label,
        "query_len": work.shape.query_len,
        "page_size": args.page_size,
        "kv_dtype": KV_DTYPE_NAMES[work.kv_dtype],
        "partial_dtype": args.partial_dtype,
        "kernel": sampled.kernel,
        **read_metrics(details),
        "samples": sampled.samples,
        "roles": _shares(roles),
        "consumer_classes": _shares(sampled.samples_by_class("consumer")),
        "producer_classes": _shares(sampled.samples_by_class("producer")),
        "instructions": [
            {
                "index": index,
                "sass": sampled.readable(index),
                "role": sampled.roles[index],
                "class": sampled.main_class(index),
                "samples": instruction.samples,
                "share": round(instruction.samples / sampled.samples, 4),
                "share_of_role": round(instruction.samples / roles[sampled.roles[index]], 4),
                "executed": instruction.executed,
                "stalls": _most(instruction.stalls),
            }
            for index, instruction in enumerate(sampled.code)
            if instruction.samples >= LEAST_SHARE * sampled.samples
        ],
    }


def profile_table(row: dict[str, Any]) -> str:
    """A profile for readers: roles, what the consumers do, and the instructions with the most samples first."""
    lines = [
        f"{row['heads']} heads, {row['shape']}, {row['kv_dtype']} cache, {row['partial_dtype']} partials: {row['samples']} samples",
        f"{row['elapsed_cycles']:.0f} cycles at {row['sm_frequency_GHz']:.2f} GHz; SM {row['compute_throughput_percent']:.0f} %,"
        f" DRAM {row['dram_throughput_percent']:.0f} %, L2 {row['l2_throughput_percent']:.0f} % busy",
        "warps:     " + _listed(row["roles"]),
        "consumers: " + _listed(row["consumer_classes"]),
        f"{'index':>5}  {'share':>6}  {'executed':>8}  {'role':8}  {'class':14}  instruction (stall reasons)",
    ]
    for item in sorted(row["instructions"], key=lambda item: -item["samples"]):
        stalls = ", ".join(f"{reason} {samples}" for reason, samples in item["stalls"].items())
        lines.append(
            f"{item['index']:5}  {item['share']:6.1%}  {item['executed']:8}  {item['role']:8}  {item['class']:14}  {item['sass']} ({stalls})"
        )
    return "\n".join(lines) + "\n"


def _shares(samples: dict[str, int]) -> dict[str, dict[str, float]]:
    """Samples and their share of the sum, of what has any."""
    total = sum(samples.values())
    return {name: {"samples": count, "share": round(count / total, 4)} for name, count in samples.items() if count}


def _most(stalls: dict[str, int]) -> dict[str, int]:
    """The most frequent stall reasons, those that occur."""
    ordered = sorted(stalls.items(), key=lambda item: -item[1])
    return {reason: samples for reason, samples in ordered[:STALLS_LISTED] if samples}


def _listed(shares: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {item['share']:.1%}" for name, item in shares.items())


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
