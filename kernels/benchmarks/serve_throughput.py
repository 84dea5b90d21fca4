"""Decode tokens per second of the tiny model through vLLM's engine, DENSE_MLA beside its peers, by batch and context.

    python kernels/benchmarks/serve_throughput.py --together 5 --json docs/evidence/serve_throughput_h200.json

One engine for each backend and partial dtype, with full CUDA graphs; `--together` of them start side by side, but each is measured alone, in its
turn. Every run keeps the time of each of its steps. Parts can be run one by one with `--backends`; `--reuse` takes the others from an earlier
file. The evidence is written with every batch and context that is measured: where it is stopped, it holds those and names what is missing. Exit
status: 0 if every engine was measured, 1 if not, 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.engine_log import OURS, unsaid
from benchmarks.engine_process import EngineProcess, sigterm_raises
from benchmarks.evidence import EVIDENCE_DIR, RunFacts, collect_facts, source_text, write_json
from benchmarks.served_run import PARTIAL_DTYPE_VARIABLE, check_plugin, recorded_child
from benchmarks.tiny_checkpoint import TinyCheckpoint

BACKENDS = "DENSE_MLA,FLASHMLA,FLASH_ATTN_MLA,TRITON_MLA"
THROUGHPUT_ENGINE = Path(__file__).with_name("throughput_engine.py")
BYTES_PER_TOKEN_AND_LAYER = 576 * 2
SPARE_POSITIONS = 1024  # of a request: its answer, and a page that is not full
PREFILL_TOKENS = 16384  # of a step
UNFINISHED = "not finished"


@dataclass(frozen=True)
class ThroughputRun:
    """One engine to measure."""

    backend: str
    partial_dtype: str | None

    @property
    def name(self) -> str:
        """Name in the evidence and of the log file."""
        return "_".join(part.lower() for part in ("throughput", self.backend, self.partial_dtype) if part)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that this run sets."""
        return {PARTIAL_DTYPE_VARIABLE: self.partial_dtype} if self.partial_dtype else {}

    def command(self, checkpoint: Path, result: Path, options: dict[str, Any], plan: dict[str, Any]) -> list[str]:
        """Command line of the child."""
        return [sys.executable, str(THROUGHPUT_ENGINE), str(checkpoint), str(result), json.dumps(options), json.dumps(plan)]


def main() -> int:
    args = parse_arguments()
    try:
        check_plugin(args.backends)
        facts = collect_facts(args.commit, args.dirty)
        engines = earlier_engines(args.reuse)
    except (ValueError, OSError) as error:
        print(f"serve_throughput: {error}", file=sys.stderr)
        return 2
    content = evidence_of(facts, args, engines)
    write_json(args.json, content)
    for name, engine in measured(args.engine_runs, args, time.monotonic() + args.time_limit_s):
        engines[name] = engine
        content = evidence_of(facts, args, engines)
        write_json(args.json, content)
        print(f"{name}: {engine['error'] or 'measured'}, {len(engine['measurements'])} rows in {engine['seconds']} s", flush=True)
    report(content, args.json.parent)
    return 1 if content["not_run"] or any(engine["error"] for engine in engines.values()) else 0


def evidence_of(facts: RunFacts, args: argparse.Namespace, engines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The whole evidence object, with what is not there yet by its name."""
    return asdict(facts) | {
        "layers": args.layers,
        "heads": args.heads,
        "rows": rows_of(engines),
        "not_run": [run.name for run in args.engine_runs if run.name not in engines],
        "engines": list(engines.values()),
    }


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", type=_words, default=BACKENDS)
    parser.add_argument("--partial-dtypes", type=_words, default="bf16,fp32", help="of DENSE_MLA")
    parser.add_argument("--batches", type=_numbers, default="1,8,64")
    parser.add_argument("--contexts", type=_numbers, default="1024,8192,32768")
    parser.add_argument("--runs", type=int, default=3, help="of every batch and context")
    parser.add_argument("--tokens", type=int, default=128, help="that each request of a run decodes, at least 16")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--together", type=int, default=1, help="engines that start side by side; each takes the memory of all its KV tokens")
    parser.add_argument("--time-limit-s", type=float, default=560, help="whatever is not measured then is ended and recorded as failed")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "serve_throughput_h200.json", help="evidence file; the logs go beside it")
    parser.add_argument("--reuse", type=Path, help="an earlier evidence file with the engines that this call leaves out")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    for name, least in (("runs", 1), ("tokens", 16), ("layers", 1), ("together", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    if not args.backends:
        parser.error("--backends names none")
    dtypes = {OURS: args.partial_dtypes}
    args.engine_runs = [ThroughputRun(name, dtype) for name in args.backends for dtype in dtypes.get(name, [None])]
    return args


def engine_options(args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """Options of `vllm.LLM`: room for all prompts at once, a graph for every batch, and prompts that are computed once."""
    positions = max(args.contexts) + SPARE_POSITIONS
    kv_bytes = max(args.batches) * positions * args.layers * BYTES_PER_TOKEN_AND_LAYER
    return {
        "attention_backend": backend,
        "skip_tokenizer_init": True,
        "max_model_len": positions,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": PREFILL_TOKENS,
        "seed": 0,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": kv_bytes * 5 // 4,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(args.batches)},
    }


def measured(runs: Sequence[ThroughputRun], args: argparse.Namespace, deadline: float) -> Generator[tuple[str, dict[str, Any]]]:
    """Name and record of each engine as it ends. However this is left, no process stays behind."""
    plan = {"batches": args.batches, "contexts": args.contexts, "runs": args.runs, "tokens": args.tokens}
    with tempfile.TemporaryDirectory(prefix="tiny_mla_") as folder, sigterm_raises():
        scratch = Path(folder)
        checkpoint = scratch / "checkpoint"
        TinyCheckpoint(args.heads, args.layers, max(args.contexts) + SPARE_POSITIONS).write(checkpoint)
        for first in range(0, len(runs), args.together):
            engines = []
            try:
                for run in runs[first : first + args.together]:
                    log = args.json.parent / f"{args.json.stem}_{run.name}.log"
                    engines.append(StartedEngine(run, checkpoint, scratch, log, engine_options(args, run.backend), plan))
                for engine in engines:
                    engine.wait_until_ready(deadline)
                for engine in engines:
                    for record in engine.measure(deadline):
                        yield engine.run.name, record
            finally:
                for engine in engines:
                    engine.process.kill()


class StartedEngine:
    """A child that starts its engine at once and measures when it is told to."""

    def __init__(self, run: ThroughputRun, checkpoint: Path, scratch: Path, log: Path, options: dict[str, Any], plan: dict[str, Any]) -> None:
        self.run, self.plan = run, plan
        self.result = scratch / f"{run.name}.json"
        command = run.command(checkpoint, self.result, options, plan)
        self.command = recorded_child(command, run.environment, checkpoint, scratch)
        self.begin = time.monotonic()
        self.process = EngineProcess(command, {"HF_HUB_OFFLINE": "1", **run.environment}, log)

    def wait_until_ready(self, deadline: float) -> None:
        """Return when it is ready, has ended, or is out of time."""
        while not self.result.with_suffix(".ready").exists() and self.process.exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    def measure(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Tell it to measure; its record with each row that it has measured, and once it has ended. Errors are in the record, not raised."""
        self.result.with_suffix(".go").touch()
        shown = 0
        while self.process.exit_status() is None and time.monotonic() < deadline:
            if len(rows := self.rows()) > shown:
                shown = len(rows)
                yield self.record(rows, UNFINISHED)
            time.sleep(0.1)
        status = self.process.exit_status()
        self.process.kill()
        rows = self.rows()
        yield self.record(rows, self.error(status, rows))

    def rows(self) -> list[dict[str, Any]]:
        """What it has measured so far."""
        rows: list[dict[str, Any]] = json.loads(self.result.read_text())["measurements"] if self.result.exists() else []
        return rows

    def error(self, status: int | None, rows: Sequence[dict[str, Any]]) -> str | None:
        """What is wrong with an engine that has ended, or was ended (`status` None)."""
        if status is None:
            return "still running at the time limit"
        if status:
            return f"the engine ended with status {status}"
        found = [(row["context"], row["batch"], len(row["runs"])) for row in rows]
        wanted = [(context, batch, self.plan["runs"]) for context in self.plan["contexts"] for batch in self.plan["batches"]]
        return None if found == wanted else f"the (context, batch, runs) measured must be {wanted}, got {found}"

    def record(self, rows: Sequence[dict[str, Any]], error: str | None) -> dict[str, Any]:
        """As the evidence holds it. Rows of an engine whose log does not say that it served as it was asked to are nobody's."""
        missing = unsaid(self.process.log_lines(), self.run.backend, self.run.partial_dtype, full_graphs=True)
        return asdict(self.run) | {
            "name": self.run.name,
            "command": self.command,
            "error": error or missing,
            "measurements": [] if missing else list(rows),
            "seconds": round(time.monotonic() - self.begin, 1),
            "log_lines": self.process.notable_lines(),
        }


def earlier_engines(path: Path | None) -> dict[str, dict[str, Any]]:
    """Engines of an earlier evidence file, by name, each with the commit that it served."""
    if path is None:
        return {}
    content = json.loads(path.read_text())
    source = source_text(content["commit"], content["dirty"])
    return {engine["name"]: {"source": source} | engine for engine in content["engines"]}


def rows_of(engines: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A flat row of every engine, batch and context: the median of its runs, and each run beside it."""
    return [
        {
            "kernel": engine["backend"],
            "partial_dtype": engine["partial_dtype"],
            "batch": item["batch"],
            "context": item["context"],
            "tokens_per_s": statistics.median(run["tokens_per_s"] for run in item["runs"]),
            "runs": [run["tokens_per_s"] for run in item["runs"]],
        }
        for engine in engines.values()
        for item in engine["measurements"]
    ]


def report(content: dict[str, Any], folder: Path) -> None:
    """A line a batch and context with every engine's tokens per second, then what did not run, and the end of each failed engine's log."""
    rows = content["rows"]
    names = list(dict.fromkeys((row["kernel"], row["partial_dtype"]) for row in rows))
    print("batch  context  " + "  ".join(f"{' '.join(filter(None, name)):>18s}" for name in names))
    for shape in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        found = {(row["kernel"], row["partial_dtype"]): row["tokens_per_s"] for row in rows if (row["batch"], row["context"]) == shape}
        print(f"{shape[0]:5d}  {shape[1]:7d}  " + "  ".join(f"{found[name]:18.1f}" if name in found else f"{'-':>18s}" for name in names))
    for name in content["not_run"]:
        print(f"NOT RUN {name}")
    for engine in content["engines"]:
        for log in folder.glob(f"*_{engine['name']}.log") if engine["error"] else ():
            print(f"\n{engine['name']} FAILED: {engine['error']}\n--- end of {log.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-40:]))


def _words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def _numbers(text: str) -> list[int]:
    numbers = [int(word) for word in _words(text)]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers from 1, got {text!r}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
