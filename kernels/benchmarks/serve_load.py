"""Load `vllm serve` with DENSE_MLA on loopback as hard as it takes, and hold it to the answers that it gives when it is quiet.

    python kernels/benchmarks/serve_load.py --json docs/evidence/serve_load_h200.json

2,000 requests of mixed lengths from more clients than the server runs at once; some hang up after their first token, many share a prefix, and the KV
cache is so small that requests are preempted. Passes if no request failed, every logprob is finite, preemption, aborts and prefix-cache hits did
happen, GPU memory stayed flat after the first quarter, the log holds no error and names no kernel that was compiled while serving, and the sample's
answers equal the quiet server's. vLLM's monitor of compilations warns, so that the log names them all; with `--jit-monitor-mode error` the first ends
the server. The evidence is written from the start on, and every few seconds of the load: where it is stopped, it holds what there is by then.
Exit status: 0 if it passes, 1 if not, 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import Agreement, Answer
from benchmarks.engine_log import OURS, compiled_while_serving, error_lines, unsaid
from benchmarks.engine_process import EngineProcess, free_port, metrics, sigterm_raises, wait_until_healthy
from benchmarks.evidence import EVIDENCE_DIR, collect_facts, error_text, write_json
from benchmarks.gpu_memory import MemoryWatch, growth_mib
from benchmarks.load_client import LoadResult, quiet_answers, under_load
from benchmarks.request_mix import LoadRequest, load_requests
from benchmarks.served_run import (
    COMPILATIONS,
    ENGINE_OPTIONS,
    PARTIAL_DTYPE_VARIABLE,
    UNCOMPILED,
    check_plugin,
    recorded_child,
    server_arguments,
)
from benchmarks.tiny_checkpoint import TinyCheckpoint

FLAT_MIB = 64  # what the CUDA driver and the allocator's rounding may add; a leak of a page a request is far more
COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "vllm:prompt_tokens", "vllm:generation_tokens")
MAX_ERRORS = 20


@dataclass
class LoadRun:
    """What a load has shown so far: `unfinished` says what is still to come, or what came in between.

    `served_lines`: first and last line of the log between the healthy server and its shutdown.
    """

    sent: int
    result: LoadResult = field(default_factory=LoadResult)
    memory: list[tuple[float, int]] = field(default_factory=list)
    quiet: list[Answer] = field(default_factory=list)
    again: list[Answer] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    served_lines: tuple[int, int | None] = (0, None)
    exit_status: int | None = None
    unfinished: str | None = "not finished: the server has not started yet"


def main() -> int:
    args = parse_arguments()
    try:
        check_plugin([OURS])
        facts = collect_facts(args.commit, args.dirty)
    except (ValueError, OSError) as error:
        print(f"serve_load: {error}", file=sys.stderr)
        return 2
    log = args.json.parent / f"{args.json.stem}.log"

    def save(content: dict[str, Any]) -> None:
        write_json(args.json, asdict(facts) | content)

    with tempfile.TemporaryDirectory(prefix="tiny_mla_") as folder, sigterm_raises():
        content = loaded(args, Path(folder), log, time.monotonic() + args.time_limit_s, save)
    report(content, log)
    return 0 if content["passed"] else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="at least 240: each prompt of the sample once")
    parser.add_argument("--clients", type=int, default=192, help="requests under way at once; the server runs 64")
    parser.add_argument("--partial-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--kv-blocks", type=int, default=500, help="of 64 tokens: few enough that requests are preempted")
    parser.add_argument("--jit-monitor-mode", choices=("error", "warn"), default="warn")
    parser.add_argument("--serve-arguments", type=str.split, default="", help="more arguments for vllm serve: --serve-arguments='--a b'")
    parser.add_argument("--time-limit-s", type=float, default=420, help="whatever still runs then is ended and recorded as failed")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "serve_load_h200.json", help="evidence file; the log goes beside it")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    for name, least in (("requests", 240), ("clients", 1), ("kv_blocks", 130)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    return args


def server_command(args: argparse.Namespace, checkpoint: Path, port: int) -> list[str]:
    """The server under test: prefix cache on, and a KV cache of `--kv-blocks` blocks."""
    options = ENGINE_OPTIONS | COMPILATIONS[UNCOMPILED]
    options |= {"max_num_seqs": 64, "enable_prefix_caching": True, "block_size": 64, "num_gpu_blocks_override": args.kv_blocks}
    options |= {"jit_monitor_mode": args.jit_monitor_mode}
    arguments = server_arguments(OURS, port, options)
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), *arguments, *args.serve_arguments]


def loaded(
    args: argparse.Namespace, scratch: Path, log: Path, deadline: float, save: Callable[[dict[str, Any]], None] = lambda content: None
) -> dict[str, Any]:
    """The evidence of one load: quiet answers, the load, quiet answers again. Errors are in it, not raised. `save` gets it as it grows."""
    checkpoint, port = scratch / "checkpoint", free_port()
    TinyCheckpoint().write(checkpoint)
    environment = {PARTIAL_DTYPE_VARIABLE: args.partial_dtype}
    command = server_command(args, checkpoint, port)
    server = {"server": recorded_child(command, environment, checkpoint, scratch), "partial_dtype": args.partial_dtype}
    process = EngineProcess(command, {"HF_HUB_OFFLINE": "1", **environment}, log)
    run, requests = LoadRun(args.requests), load_requests(args.requests)

    def evidence() -> dict[str, Any]:
        run.log = process.log_lines()
        content = server | evidence_of(run, args.partial_dtype, sum(request.max_tokens for request in requests))
        return content | {"passed": not content["unmet"], "log_lines": process.notable_lines()}

    try:
        save(evidence())
        measure(run, requests, process, port, args.clients, deadline, lambda: save(evidence()))
    except Exception as error:
        run.unfinished = f"{run.unfinished}: {error_text(error)}"
    finally:
        process.kill()
    content = evidence()
    save(content)
    return content


def measure(
    run: LoadRun,
    requests: Sequence[LoadRequest],
    process: EngineProcess,
    port: int,
    clients: int,
    deadline: float,
    progress: Callable[[], None],
) -> None:
    """Fill `run` in, step by step. Raises what a step raises; what the steps before it showed stays."""
    wait_until_healthy(process, port, deadline)
    first = len(process.log_lines()) - 1  # the line after the last is empty so far
    run.served_lines = (first, None)
    run.unfinished = "not finished: the quiet answers"
    run.quiet = quiet_answers(port, deadline)
    before = metrics(port, COUNTERS)
    run.unfinished = "not finished: the load"
    with MemoryWatch() as memory:
        run.memory = memory.samples
        under_load(port, requests, clients, deadline, run.result, progress)
    after = metrics(port, COUNTERS)
    run.counters = {name: after[name] - before[name] for name in COUNTERS}
    run.unfinished = "not finished: the quiet answers after the load"
    run.again = quiet_answers(port, deadline)
    run.served_lines = (first, len(process.log_lines()))
    run.unfinished = "not finished: the server's shutdown"
    run.exit_status = process.stop()
    run.unfinished = None


def evidence_of(run: LoadRun, partial_dtype: str, tokens_asked: int) -> dict[str, Any]:
    """Numbers, comparisons, and what of the promise was not kept. `tokens_asked`: of all requests, those that are hung up on included."""
    result, counted = run.result, run.counters
    pairs = [("under load", run.quiet[index], answer) for index, answer in result.sampled]
    pairs += [("quiet again", first, second) for first, second in zip(run.quiet, run.again)]
    comparisons = [{"when": when, **Agreement.of(first, second).to_json()} for when, first, second in pairs]
    growth, errors, compiled = growth_mib(run.memory), error_lines(run.log[slice(*run.served_lines)]), compiled_while_serving(run.log)
    latencies = sorted(result.latencies) or [0.0]
    unmet = [run.unfinished] if run.unfinished else []
    unmet += [f"{len(result.errors)} of {run.sent} requests failed"] if result.errors else []
    if result.completed + result.aborted + len(result.errors) != run.sent:
        unmet.append(f"{result.completed} answered + {result.aborted} aborted of {run.sent} requests")
    unmet += [f"no {what}: the load did not test it" for what, count in _exercised(run, tokens_asked).items() if not count]
    if growth is None or growth > FLAT_MIB:
        unmet.append(f"GPU memory grew by {growth} MiB after the first quarter, allowed is {FLAT_MIB}")
    unmet += [f"an answer {item['when']} differs from the quiet one: {item}" for item in comparisons if not item["within_bar"]]
    unmet += [f"the log holds {len(errors)} error lines"] if errors else []
    unmet += [f"compiled while serving: {name}" for name in compiled]
    if missing := unsaid(run.log, OURS, partial_dtype, full_graphs=True):
        unmet.append(missing)
    if run.exit_status not in (None, 0, -signal.SIGTERM, 128 + signal.SIGTERM):
        unmet.append(f"the server shut down with status {run.exit_status}")
    return {
        "requests": run.sent,
        "completed": result.completed,
        "aborted": result.aborted,
        "errors": result.errors[:MAX_ERRORS],
        "seconds": round(result.seconds, 2),
        "requests_per_s": round((result.completed + result.aborted) / result.seconds, 1) if result.seconds else None,
        "latency_s": {"median": round(statistics.median(latencies), 3), "p99": round(latencies[int(len(latencies) * 0.99)], 3)},
        "counters": counted,
        "tokens_asked": tokens_asked,
        "gpu_memory_mib": [[round(at, 1), used] for at, used in run.memory],
        "gpu_memory_growth_mib": growth,
        "comparisons": comparisons,
        "log_errors": errors[:MAX_ERRORS],
        "compiled_while_serving": compiled,
        "exit_status": run.exit_status,
        "unmet": unmet,
    }


def _exercised(run: LoadRun, tokens_asked: int) -> dict[str, float]:
    """How often each thing happened that the load is there for."""
    return {
        "aborted request": run.result.aborted,
        # The server goes on with a request that it does not know to be aborted.
        "token that an aborted request was spared": max(0.0, tokens_asked - run.counters.get("vllm:generation_tokens", tokens_asked)),
        "preemption": run.counters.get("vllm:num_preemptions", 0),
        "prefix-cache hit": run.counters.get("vllm:prefix_cache_hits", 0),
        "answer of the sample": len(run.result.sampled),
        "quiet answer after the load": len(run.again),
    }


def report(content: dict[str, Any], log: Path) -> None:
    """The verdict in a few lines; the end of the log if it failed."""
    for name in ("requests", "completed", "aborted", "seconds", "requests_per_s", "latency_s", "counters", "gpu_memory_growth_mib"):
        print(f"{name}: {content[name]}")
    worst = max((item["logprob_gap"] or 0.0 for item in content["comparisons"]), default=None)
    print(f"{len(content.get('comparisons', []))} comparisons, largest logprob gap {worst}")
    for line in [*content["unmet"][:MAX_ERRORS], *content["errors"][:3], *content["log_errors"]]:
        print(f"UNMET {line}")
    if not content["passed"]:
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    print("passed" if content["passed"] else "FAILED")


if __name__ == "__main__":
    sys.exit(main())
