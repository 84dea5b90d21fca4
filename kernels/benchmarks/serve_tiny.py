"""Serve a tiny MLA model with DENSE_MLA through vLLM, and compare its answers with TRITON_MLA's.

    python kernels/benchmarks/serve_tiny.py --parallel --json docs/evidence/serve_tiny_h200.json
    python kernels/benchmarks/serve_tiny.py --model-shape k3 --parallel
    python kernels/benchmarks/serve_tiny.py --variants spec4,spec8,prefix,invariant,fp8,fp8_one_layer --jobs 6

Greedy answers with full CUDA graphs to prompts from 1 to 4,000 tokens, from vLLM's offline engine and from `vllm serve` over HTTP (an engine in
a spawned process), in both partial dtypes, with the compilation that vLLM does by itself (`--compilation`). FLASHMLA's answers stand beside: how
far two of vLLM's own backends are apart is the measure. `--variants` (variants.py) serve the model with speculative decoding, a prefix cache, an
FP8 cache, other head counts; each is compared with TRITON_MLA served the same way. The plugin must be installed: vLLM finds it by its entry point.
Parts can be run one by one; `--reuse` takes the other runs from an earlier file. The evidence is written before the first run and after each: where
this is stopped, it names what has not run.

Exit status: 0 if every run answered (a peer's need not) and every comparison is within the bar, else 1; 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import LOGPROB_BAR, LOGPROB_RMS_BAR, MAX_TOKENS, Agreement, agree, over_all
from benchmarks.engine_log import OURS
from benchmarks.engine_process import EngineProcess, sigterm_raises
from benchmarks.evidence import EVIDENCE_DIR, RunFacts, collect_facts, source_text, write_json
from benchmarks.served_run import COMPILATIONS, UNCOMPILED, VLLMS_OWN, RunRecord, ServedRun, check_plugin, execute
from benchmarks.tiny_checkpoint import TinyCheckpoint
from benchmarks.tiny_k3_checkpoint import TinyK3Checkpoint
from benchmarks.variants import K3_PROMPT_TOKENS, K3_VARIANTS, NO_ATTENTION, PLAIN, PROMPT_TOKENS, VARIANTS, variant_of

REFERENCE, PEER = "TRITON_MLA", "FLASHMLA"
CHECKPOINTS: dict[str, type[TinyCheckpoint]] = {"deepseek": TinyCheckpoint, "k3": TinyK3Checkpoint}
EVIDENCE_NAMES = {"deepseek": "serve_tiny_h200.json", "k3": "serve_k3_shape_h200.json"}
VARIANTS_EVIDENCE_NAME = "serve_variants_h200.json"  # of the deepseek shape served in other ways
PROMPTS = {"deepseek": PROMPT_TOKENS, "k3": K3_PROMPT_TOKENS}
LOG_TAIL_LINES = 60


def main() -> int:
    args = parse_arguments()
    try:
        check_plugin(args.backends)
        facts = collect_facts(args.commit, args.dirty)
        records = earlier_records(args.reuse, args.model_shape, args.compilation)
    except (ValueError, OSError) as error:
        print(f"serve_tiny: {error}", file=sys.stderr)
        return 2
    return run_and_report(args, records, lambda: evidence_of(facts, args.model_shape, records, args.compilation, args.runs))


def run_and_report(args: argparse.Namespace, records: dict[str, RunRecord], evidence: Callable[[], dict[str, Any]]) -> int:
    """Add the record of each run to `records` as it ends, write `evidence()` of what there is by then, and report the whole. The exit status."""
    write_json(args.json, evidence())
    with closing(executed(args.runs, args, time.monotonic() + args.time_limit_s)) as ended:
        for record in ended:
            records[record.name] = record
            print(f"{record.name}: {record.error or 'answered'} in {record.seconds} s", flush=True)
            write_json(args.json, evidence())
    content = evidence()
    write_json(args.json, content)
    report(content, args.json.parent)
    return 0 if content["passed"] else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=CHECKPOINTS, default="deepseek", help="k3: one KDA layer and one MLA layer, as Kimi-K3 has them")
    variants = f"of {', '.join(VARIANTS)}; by default {PLAIN}, of k3 {', '.join(K3_VARIANTS)}; only {PLAIN} is also served over HTTP"
    parser.add_argument("--variants", type=_words, help=variants)
    parser.add_argument("--parts", type=_words, default="offline,serve", help="offline, serve or both")
    backends = f"offline, each; served, {OURS} alone; by default {REFERENCE}, {OURS} and, of k3 and where plain, {PEER}"
    parser.add_argument("--backends", type=_words, help=backends)
    parser.add_argument("--partial-dtypes", type=_words, default="bf16,fp32")
    parser.add_argument(
        "--compilation", choices=COMPILATIONS, help=f"{VLLMS_OWN}: vLLM's own; {UNCOMPILED}: starts sooner, the default of k3 and of variants"
    )
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--parallel", action="store_true", help="all runs at once on the one GPU")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once without --parallel")
    parser.add_argument("--serve-arguments", type=str.split, default="", help="more arguments for vllm serve: --serve-arguments='--a b'")
    parser.add_argument("--time-limit-s", type=float, default=540, help="whatever still runs then is ended and recorded as failed")
    parser.add_argument("--json", type=Path, help="evidence file, by default of the model's shape or of the variants; the logs go beside it")
    parser.add_argument("--reuse", type=Path, help="an earlier evidence file with the runs that this call leaves out")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if unknown := [part for part in args.parts if part not in ("offline", "serve")]:
        parser.error(f"--parts must be offline, serve or both, got {', '.join(unknown)}")
    args.variants = args.variants or (list(K3_VARIANTS) if args.model_shape == "k3" else [PLAIN])
    if unknown := [name for name in args.variants if name not in VARIANTS]:
        parser.error(f"--variants must be of {', '.join(VARIANTS)}, got {', '.join(unknown)}")
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if args.model_shape == "k3" and args.layers != 2:
        parser.error(f"--layers must be 2 with --model-shape k3, got {args.layers}")
    deepseek, plain = args.model_shape == "deepseek", args.variants == [PLAIN]
    args.json = args.json or EVIDENCE_DIR / (VARIANTS_EVIDENCE_NAME if deepseek and not plain else EVIDENCE_NAMES[args.model_shape])
    args.compilation = args.compilation or (VLLMS_OWN if deepseek and plain else UNCOMPILED)
    args.backends = args.backends or ([REFERENCE, OURS] if deepseek and not plain else [REFERENCE, PEER, OURS])
    rounds = (PROMPTS[args.model_shape],)
    args.runs = planned_runs(args.parts, args.backends, args.partial_dtypes, args.variants, rounds, args.compilation)
    if not args.runs:
        parser.error(f"nothing to run: only {OURS} is served, and every backend runs offline")
    return args


def planned_runs(
    parts: Sequence[str],
    backends: Sequence[str],
    partial_dtypes: Sequence[str],
    variants: Sequence[str] = (PLAIN,),
    rounds: tuple[tuple[int, ...], ...] = (PROMPT_TOKENS,),
    compilation: str = VLLMS_OWN,
) -> list[ServedRun]:
    """The runs that the options ask for: DENSE_MLA once a partial dtype."""
    runs: list[ServedRun] = []
    for name in variants if "offline" in parts else ():
        variant = VARIANTS[name]
        if not variant.attention:
            runs.append(ServedRun("offline", REFERENCE, None, name, rounds, compilation))
        elif variant.only_ours:
            runs += [ServedRun("offline", OURS, dtype, name, rounds, compilation) for dtype in partial_dtypes[:1] if OURS in backends]
        else:
            pairs = [(backend, dtype) for backend in backends for dtype in (partial_dtypes if backend == OURS else (None,))]
            runs += [ServedRun("offline", backend, dtype, name, rounds, compilation) for backend, dtype in pairs]
    if "serve" in parts and OURS in backends and PLAIN in variants:
        runs += [ServedRun("serve", OURS, dtype, PLAIN, rounds, compilation) for dtype in partial_dtypes]
    return runs


def executed(runs: Sequence[ServedRun], args: argparse.Namespace, deadline: float) -> Generator[RunRecord]:
    """Records of the runs as they end. However this is left, no process stays behind."""
    processes: list[EngineProcess] = []
    at_once = len(runs) if args.parallel else args.jobs
    with tempfile.TemporaryDirectory(prefix="tiny_mla_") as folder, sigterm_raises(), ThreadPoolExecutor(at_once) as pool:
        scratch = Path(folder)
        checkpoints = written_checkpoints(runs, args, scratch)
        logs = {run: args.json.parent / f"{args.json.stem}_{run.name}.log" for run in runs}
        started = processes.append
        jobs = [pool.submit(execute, run, checkpoints[run], scratch, logs[run], deadline, args.serve_arguments, started) for run in runs]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            for job in jobs:
                job.cancel()
            for process in processes:
                process.kill()


def written_checkpoints(runs: Sequence[ServedRun], args: argparse.Namespace, scratch: Path) -> dict[ServedRun, Path]:
    """The folder of each run's checkpoint; runs of the same heads and layers share it."""
    folders = {}
    for run in runs:
        variant = run.variant
        checkpoint = CHECKPOINTS[args.model_shape](variant.heads or args.heads, variant.layers or args.layers, attention=variant.attention)
        folders[run] = scratch / f"checkpoint_{checkpoint.heads}x{checkpoint.layers}{'' if checkpoint.attention else '_' + NO_ATTENTION}"
        if not folders[run].exists():
            checkpoint.write(folders[run])
    return folders


def earlier_records(path: Path | None, model_shape: str | None, compilation: str) -> dict[str, RunRecord]:
    """Runs of an earlier evidence file, by name, each with the commit that it served.

    Raises:
        ValueError: the file is of another model or compilation.
    """
    if path is None:
        return {}
    content = json.loads(path.read_text())
    found, wanted = (content.get("model_shape"), content.get("compilation")), (model_shape, compilation)
    if found != wanted:
        raise ValueError(f"--reuse must name runs of model shape {wanted[0]}, compilation {wanted[1]}, got {found[0]}, {found[1]}")
    source = source_text(content["commit"], content["dirty"])
    return {run["name"]: RunRecord.from_json({**run, "source": run.get("source") or source}) for run in content["runs"]}


def evidence_of(
    facts: RunFacts, model_shape: str, records: dict[str, RunRecord], compilation: str = VLLMS_OWN, planned: Sequence[ServedRun] = ()
) -> dict[str, Any]:
    """The whole evidence object. It passes if every planned run of DENSE_MLA and TRITON_MLA answered, there is one of DENSE_MLA, every comparison
    of a DENSE_MLA run exists and is within the bar, and no prompt is answered alike without attention. What has not run yet is named."""
    comparisons = [comparison for record in records.values() for comparison in comparisons_of(record, records)]
    control = control_of(records)
    agreed = all(comparison["within_bar"] for comparison in comparisons if comparison["required"])
    not_run = [run.name for run in planned if run.name not in records]
    failed = any(record.error for record in records.values() if record.backend in (OURS, REFERENCE))
    answered = any(record.backend == OURS for record in records.values()) and not failed and not not_run
    return asdict(facts) | {
        "model_shape": model_shape,
        "compilation": compilation,
        "bars": {"logprob_gap": LOGPROB_BAR, "logprob_rms": LOGPROB_RMS_BAR, "lead_at_difference": 2 * LOGPROB_BAR},
        "prompt_tokens": list(PROMPTS[model_shape]),
        "max_tokens": MAX_TOKENS,
        "passed": answered and agreed and (control is None or control["attention_decides"]),
        "not_run": not_run,
        "control": control,
        "comparisons": comparisons,
        "runs": [record.to_json() for record in records.values()],
    }


def comparisons_of(record: RunRecord, records: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """A run against TRITON_MLA served the same way, and a served one against the offline run of its backend and dtype: a missing side is a failed
    comparison. DENSE_MLA also against each other peer that ran; required where that peer agrees with TRITON_MLA itself."""
    variant = VARIANTS[record.variant]
    if variant.only_ours or not variant.attention:
        return []
    reference = ServedRun("offline", REFERENCE, None, record.variant).name
    others = {reference: record.backend == OURS}
    if record.path == "serve":
        others[ServedRun("offline", record.backend, record.partial_dtype).name] = record.backend == OURS
    for peer in records.values():
        if record.backend == OURS and peer.backend not in (OURS, REFERENCE) and peer.variant == record.variant:
            others[peer.name] = compared(peer, reference, records.get(reference))["within_bar"]
    return [compared(record, other, records.get(other)) | {"required": required} for other, required in others.items() if other != record.name]


def control_of(records: dict[str, RunRecord]) -> dict[str, Any] | None:
    """Answers of the same weights whose attention reaches nothing, against the real ones: None if that was not run.

    If they differ for every prompt, a wrong attention output does change what the comparisons compare.
    """
    without = records.get(ServedRun("offline", REFERENCE, None, NO_ATTENTION).name)
    plain = records.get(ServedRun("offline", REFERENCE).name)
    if without is None:
        return None
    try:
        agreements = agreements_of(without, plain)
    except ValueError:
        return {"attention_decides": False, "prompts": []}
    decides = all(agreement.agreeing < agreement.tokens for agreement in agreements)
    return {"attention_decides": decides, "prompts": [{"prompt_tokens": item.prompt_tokens, "agreeing": item.agreeing} for item in agreements]}


def compared(record: RunRecord, other_name: str, other: RunRecord | None) -> dict[str, Any]:
    """One comparison, prompt by prompt."""
    rms_bar = variant_of(record.variant).rms_bar
    named = {"run": record.name, "with": other_name, "logprob_rms_bar": rms_bar}
    try:
        agreements = agreements_of(record, other)
    except ValueError as error:
        return named | {"within_bar": False, "error": str(error), "prompts": []}
    return named | {
        "within_bar": agree(agreements, rms_bar),
        "ids_equal": all(agreement.agreeing == agreement.tokens for agreement in agreements),
        **over_all(agreements),
        "prompts": [agreement.to_json() for agreement in agreements],
    }


def agreements_of(record: RunRecord, other: RunRecord | None) -> list[Agreement]:
    """Of two runs' answers, prompt by prompt. ValueError where a side has none, or they are to other prompts."""
    if other is None or not record.answers or len(record.answers) != len(other.answers):
        raise ValueError("one side has no answers")
    return [Agreement.of(left, right) for left, right in zip(record.answers, other.answers)]


def report(content: dict[str, Any], folder: Path) -> None:
    """Comparisons as text, then what did not run, and the log of every run that failed."""
    for comparison in content["comparisons"]:
        verdict = "within the bar" if comparison["within_bar"] else comparison.get("error", "NOT WITHIN THE BAR")
        apart = f", logprobs {comparison['logprob_rms']} apart (rms), {comparison['logprob_gap']} at most" if comparison["prompts"] else ""
        print(f"\n{comparison['run']} against {comparison['with']}: {verdict}{apart}")
        for prompt in comparison["prompts"]:
            lead = "" if prompt["near_tie"] is None else f", lead at the difference {prompt['lead_at_difference']}"
            apart = f"gap {prompt['logprob_gap']}, rms {prompt['logprob_rms']}{lead}"
            print(f"  prompt {prompt['prompt_tokens']:5d}: {prompt['agreeing']:3d} of {prompt['tokens']} tokens, {apart}")
    if content["control"]:
        agreeing = [prompt["agreeing"] for prompt in content["control"]["prompts"]]
        print(f"\nwithout attention, tokens of each answer that stay: {agreeing} of {MAX_TOKENS}")
    for name in content["not_run"]:
        print(f"NOT RUN {name}")
    for run in content["runs"]:
        for log in folder.glob(f"*_{run['name']}.log") if run["error"] else ():
            print(f"\n{run['name']} FAILED: {run['error']}\n--- end of {log.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]))
    print("\npassed" if content["passed"] else "\nFAILED")


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
