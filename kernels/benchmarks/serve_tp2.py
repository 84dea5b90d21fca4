"""Serve a tiny MLA model with DENSE_MLA on two GPUs, and compare its answers with those of one.

    python kernels/benchmarks/serve_tp2.py --json docs/evidence/serve_tp2_h200.json
    python kernels/benchmarks/serve_tp2.py --variants tp2_spec4,dcp2_spec4 --reuse A.json --json docs/evidence/serve_tp2_h200.json

`vllm serve` with `--tensor-parallel-size 2` (12 of 24 heads on each GPU) and with `--decode-context-parallel-size 2` besides (24 heads, half of the
keys), full CUDA graphs, both partial dtypes, plainly, with n-gram speculation and with VLLM_BATCH_INVARIANT=1. Each is compared with DENSE_MLA on
one GPU and the same options, that with TRITON_MLA. TRITON_MLA on two GPUs against itself on one is the measure: a sum over ranks is rounded
otherwise than one that is not divided. The GPUs talk through NCCL alone, without NVLink multicast (variants.py has the switches).

Parts can be run one by one; `--reuse` takes the other runs from an earlier file.

Exit status: 0 if every run of the whole list answered and every comparison is within the bar, else 1; 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

import torch

from benchmarks.answers import LOGPROB_BAR, LOGPROB_RMS_BAR, MAX_TOKENS
from benchmarks.engine_log import OURS
from benchmarks.evidence import EVIDENCE_DIR, RunFacts, collect_facts
from benchmarks.serve_tiny import REFERENCE, compared, earlier_records, run_and_report
from benchmarks.served_run import UNCOMPILED, RunRecord, ServedRun, check_plugin
from benchmarks.variants import PLAIN, PROMPT_TOKENS, RANK_VARIANTS, UNDIVIDED, variant_of

GPUS = 2
HEADS = 24
PARTIAL_DTYPES = ("bf16", "fp32")
EVIDENCE = "serve_tp2_h200.json"
NAMES = (*UNDIVIDED, *RANK_VARIANTS)
PEER_VARIANTS = (PLAIN, "tp2")  # of TRITON_MLA


def main() -> int:
    args = parse_arguments()
    try:
        check_gpus(torch.cuda.device_count())
        check_plugin([OURS])
        facts = collect_facts(args.commit, args.dirty)
        records = earlier_records(args.reuse, None, UNCOMPILED)
    except (ValueError, OSError) as error:
        print(f"serve_tp2: {error}", file=sys.stderr)
        return 2
    return run_and_report(args, records, lambda: evidence_of(facts, records))


def check_gpus(found: int) -> None:
    """ValueError where there are too few."""
    if found < GPUS:
        raise ValueError(f"at least {GPUS} GPUs are needed, got {found}")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(NAMES), help=f"of {', '.join(NAMES)}; by default all")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--serve-arguments", type=str.split, default="", help="more arguments for vllm serve: --serve-arguments='--a b'")
    parser.add_argument("--time-limit-s", type=float, default=1700, help="whatever still runs then is ended and recorded as failed")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / EVIDENCE, help="evidence file; the logs go beside it")
    parser.add_argument("--reuse", type=Path, help="an earlier evidence file with the runs that this call leaves out")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.variants if name not in NAMES]:
        parser.error(f"--variants must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    args.runs = [run for run in planned_runs() if run.variant_name in args.variants]
    args.model_shape, args.heads, args.parallel = "deepseek", HEADS, False  # for serve_tiny's half of the work
    return args


def planned_runs() -> list[ServedRun]:
    """The whole list: on one GPU offline, on two with `vllm serve`; TRITON_MLA offline. Batch invariance in one partial dtype."""
    runs = [ServedRun("offline", REFERENCE, None, name, compilation=UNCOMPILED) for name in PEER_VARIANTS]
    for name in NAMES:
        variant = variant_of(name)
        dtypes = PARTIAL_DTYPES[:1] if "invariant" in (name, variant.undivided) else PARTIAL_DTYPES
        path = "offline" if variant.gpus == 1 else "serve"
        # UNCOMPILED: vLLM's own compilation may fuse the all-reduce into kernels that use multicast.
        runs += [ServedRun(path, OURS, dtype, name, compilation=UNCOMPILED) for dtype in dtypes]
    return runs


def evidence_of(facts: RunFacts, records: dict[str, RunRecord]) -> dict[str, Any]:
    """The whole evidence object. It passes if every planned run answered, and every comparison of a DENSE_MLA run is within the bar."""
    comparisons = [comparison for record in records.values() for comparison in comparisons_of(record, records)]
    not_run = [run.name for run in planned_runs() if run.name not in records]
    agreed = all(comparison["within_bar"] for comparison in comparisons if comparison["required"])
    return asdict(facts) | {
        "gpus": GPUS,
        "heads": HEADS,
        "compilation": UNCOMPILED,
        "bars": {"logprob_gap": LOGPROB_BAR, "logprob_rms": LOGPROB_RMS_BAR, "lead_at_difference": 2 * LOGPROB_BAR},
        "prompt_tokens": list(PROMPT_TOKENS),
        "max_tokens": MAX_TOKENS,
        "passed": agreed and not not_run and not any(record.error for record in records.values()),
        "not_run": not_run,
        "control": None,
        "comparisons": comparisons,
        "runs": [record.to_json() for record in records.values()],
    }


def comparisons_of(record: RunRecord, records: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """A run on two GPUs against the same backend, partial dtype and options on one; DENSE_MLA plainly on one against TRITON_MLA. A missing side is a
    failed comparison."""
    undivided = variant_of(record.variant).undivided
    if undivided is not None:
        other = ServedRun("offline", record.backend, record.partial_dtype, undivided).name
    elif record.backend == OURS and record.variant == PLAIN:
        other = ServedRun("offline", REFERENCE).name
    else:
        return []
    return [compared(record, other, records.get(other)) | {"required": record.backend == OURS}]


if __name__ == "__main__":
    sys.exit(main())
