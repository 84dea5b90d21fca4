"""Serve a tiny MLA model with DENSE_MLA through vLLM, and compare its answers with TRITON_MLA's.

    python kernels/benchmarks/serve_tiny.py --parallel --json docs/evidence/serve_tiny_h200.json

Greedy answers with full CUDA graphs to prompts from 1 to 4,000 tokens, from vLLM's offline engine and from `vllm serve` over HTTP (an engine in
a spawned process), in both partial dtypes. The plugin must be installed: vLLM finds it by its entry point. Parts can be run one by one;
`--reuse` takes the other runs from an earlier file. Exit status: 0 if every run answered and every comparison is within the bar, else 1;
2 if nothing could start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import LOGPROB_BAR, MAX_TOKENS, PROMPT_TOKENS, Agreement
from benchmarks.engine_process import EngineProcess, sigterm_raises
from benchmarks.evidence import EVIDENCE_DIR, RunFacts, collect_facts, write_json
from benchmarks.served_run import OURS, RunRecord, ServedRun, check_plugin, execute
from benchmarks.tiny_checkpoint import TinyCheckpoint

REFERENCE = "TRITON_MLA"
LOG_TAIL_LINES = 60


def main() -> int:
    args = parse_arguments()
    try:
        check_plugin(args.backends)
        facts = collect_facts(args.commit, args.dirty)
        records = earlier_records(args.reuse)
    except (ValueError, OSError) as error:
        print(f"serve_tiny: {error}", file=sys.stderr)
        return 2
    deadline = time.monotonic() + args.time_limit_s
    with closing(executed(args.runs, args, deadline)) as ended:
        for record in ended:
            records[record.name] = record
            print(f"{record.name}: {record.error or 'answered'} in {record.seconds} s", flush=True)
            write_json(args.json, evidence_of(facts, records))
    content = evidence_of(facts, records)
    write_json(args.json, content)
    report(content, args.json.parent)
    return 0 if content["passed"] else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_words, default="offline,serve", help="offline, serve or both")
    parser.add_argument("--backends", type=_words, default=f"{REFERENCE},{OURS}", help=f"offline, each; served, {OURS} alone")
    parser.add_argument("--partial-dtypes", type=_words, default="bf16,fp32")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--parallel", action="store_true", help="all runs at once on the one GPU")
    parser.add_argument("--serve-arguments", type=str.split, default="", help="more arguments for vllm serve: --serve-arguments='--a b'")
    parser.add_argument("--time-limit-s", type=float, default=540, help="whatever still runs then is ended and recorded as failed")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "serve_tiny_h200.json", help="evidence file; the logs go beside it")
    parser.add_argument("--reuse", type=Path, help="an earlier evidence file with the runs that this call leaves out")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - {"offline", "serve"}:
        parser.error(f"--parts must be offline, serve or both, got {', '.join(sorted(unknown))}")
    args.runs = planned_runs(args.parts, args.backends, args.partial_dtypes)
    if not args.runs:
        parser.error(f"nothing to run: only {OURS} is served, and every backend runs offline")
    return args


def planned_runs(parts: Sequence[str], backends: Sequence[str], partial_dtypes: Sequence[str]) -> list[ServedRun]:
    """The runs that the options ask for: DENSE_MLA once a partial dtype."""
    runs: list[ServedRun] = []
    if "offline" in parts:
        runs += [ServedRun("offline", name, dtype) for name in backends for dtype in (partial_dtypes if name == OURS else (None,))]
    if "serve" in parts and OURS in backends:
        runs += [ServedRun("serve", OURS, dtype) for dtype in partial_dtypes]
    return runs


def executed(runs: Sequence[ServedRun], args: argparse.Namespace, deadline: float) -> Generator[RunRecord]:
    """Records of the runs as they end. However this is left, no process stays behind."""
    processes: list[EngineProcess] = []
    with tempfile.TemporaryDirectory(prefix="tiny_mla_") as folder, sigterm_raises(), ThreadPoolExecutor(len(runs) if args.parallel else 1) as pool:
        scratch = Path(folder)
        checkpoint = scratch / "checkpoint"
        TinyCheckpoint(args.heads, args.layers).write(checkpoint)
        logs = {run: args.json.parent / f"{args.json.stem}_{run.name}.log" for run in runs}
        jobs = [pool.submit(execute, run, checkpoint, scratch, logs[run], deadline, args.serve_arguments, processes.append) for run in runs]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            for job in jobs:
                job.cancel()
            for process in processes:
                process.kill()


def earlier_records(path: Path | None) -> dict[str, RunRecord]:
    """Runs of an earlier evidence file, by name."""
    if path is None:
        return {}
    return {run["name"]: RunRecord.from_json(run) for run in json.loads(path.read_text())["runs"]}


def evidence_of(facts: RunFacts, records: dict[str, RunRecord]) -> dict[str, Any]:
    """The whole evidence object. It passes if every run answered and every comparison of a DENSE_MLA run exists and is within the bar."""
    comparisons = [comparison for record in records.values() for comparison in comparisons_of(record, records)]
    required = [comparison for comparison in comparisons if comparison["required"]]
    return asdict(facts) | {
        "bars": {"logprob_gap": LOGPROB_BAR, "lead_at_difference": 2 * LOGPROB_BAR},
        "prompt_tokens": list(PROMPT_TOKENS),
        "max_tokens": MAX_TOKENS,
        "passed": bool(required) and all(item["within_bar"] for item in required) and not any(record.error for record in records.values()),
        "comparisons": comparisons,
        "runs": [record.to_json() for record in records.values()],
    }


def comparisons_of(record: RunRecord, records: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """A run against TRITON_MLA, and a served one against the offline run of its backend and dtype. A missing side is a failed comparison."""
    others = [ServedRun("offline", REFERENCE).name]
    if record.path == "serve":
        others.append(ServedRun("offline", record.backend, record.partial_dtype).name)
    return [compared(record, other, records.get(other)) for other in others if other != record.name]


def compared(record: RunRecord, other_name: str, other: RunRecord | None) -> dict[str, Any]:
    """One comparison, prompt by prompt."""
    named = {"run": record.name, "with": other_name, "required": record.backend == OURS}
    if other is None or not record.answers or len(record.answers) != len(other.answers):
        return named | {"within_bar": False, "error": "one side has no answers", "prompts": []}
    agreements = [Agreement.of(left, right) for left, right in zip(record.answers, other.answers)]
    return named | {
        "within_bar": all(agreement.within() for agreement in agreements),
        "ids_equal": all(left.ids == right.ids for left, right in zip(record.answers, other.answers)),
        "prompts": [agreement.to_json() for agreement in agreements],
    }


def report(content: dict[str, Any], folder: Path) -> None:
    """Comparisons as text, then the log of every run that failed."""
    for comparison in content["comparisons"]:
        verdict = "within the bar" if comparison["within_bar"] else comparison.get("error", "NOT WITHIN THE BAR")
        print(f"\n{comparison['run']} against {comparison['with']}: {verdict}")
        for prompt in comparison["prompts"]:
            lead = "" if prompt["near_tie"] is None else f", lead at the difference {prompt['lead_at_difference']}"
            print(f"  prompt {prompt['prompt_tokens']:5d}: {prompt['agreeing']:3d} of {prompt['tokens']} tokens, gap {prompt['logprob_gap']}{lead}")
    for run in content["runs"]:
        for log in folder.glob(f"*_{run['name']}.log") if run["error"] else ():
            print(f"\n{run['name']} FAILED: {run['error']}\n--- end of {log.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]))
    print("\npassed" if content["passed"] else "\nFAILED")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
