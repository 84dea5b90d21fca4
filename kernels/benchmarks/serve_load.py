"""Load `vllm serve` with DENSE_MLA on loopback as hard as it takes, and hold it to the answers that it gives when it is quiet.

    python kernels/benchmarks/serve_load.py --json docs/evidence/serve_load_h200.json

2,000 requests of mixed lengths from more clients than the server runs at once; some hang up after their first token, many share a prefix, and the KV
cache is so small that requests are preempted. Just-in-time compilation after warm-up is an error of the server's (`--jit-monitor-mode error`).
Passes if no request failed, every logprob is finite, preemption, aborts and prefix-cache hits did happen, GPU memory stayed flat after the first
quarter, the log holds no error, and the sample's answers equal the quiet server's. Exit status: 0 if so, 1 if not, 2 if nothing could start.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import Agreement, Answer
from benchmarks.engine_process import EngineProcess, free_port, hang_up, metrics, post, sigterm_raises, wait_until_healthy
from benchmarks.evidence import EVIDENCE_DIR, collect_facts, error_text, write_json
from benchmarks.gpu_memory import MemoryWatch, growth_mib
from benchmarks.request_mix import LoadRequest, load_requests, sample_requests
from benchmarks.served_run import (
    COMPILATIONS,
    ENGINE_OPTIONS,
    OURS,
    PARTIAL_DTYPE_VARIABLE,
    UNCOMPILED,
    answer_of,
    check_plugin,
    completion_body,
    names_backend,
    recorded_child,
    server_arguments,
)
from benchmarks.tiny_checkpoint import TinyCheckpoint

FLAT_MIB = 64  # what the CUDA driver and the allocator's rounding may add; a leak of a page a request is far more
COUNTERS = ("vllm:num_preemptions", "vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "vllm:prompt_tokens", "vllm:generation_tokens")
MAX_ERRORS = 20


@dataclass
class LoadResult:
    """What came back of a load; times in seconds from its start."""

    completed: int = 0
    aborted: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    sampled: list[tuple[int, Answer]] = field(default_factory=list)


def main() -> int:
    args = parse_arguments()
    try:
        check_plugin([OURS])
        facts = collect_facts(args.commit, args.dirty)
    except (ValueError, OSError) as error:
        print(f"serve_load: {error}", file=sys.stderr)
        return 2
    log = args.json.parent / f"{args.json.stem}.log"
    with tempfile.TemporaryDirectory(prefix="tiny_mla_") as folder, sigterm_raises():
        content = asdict(facts) | loaded(args, Path(folder), log, time.monotonic() + args.time_limit_s)
    write_json(args.json, content)
    report(content, log)
    return 0 if content["passed"] else 1


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000, help="at least 240: each prompt of the sample once")
    parser.add_argument("--clients", type=int, default=192, help="requests under way at once; the server runs 64")
    parser.add_argument("--partial-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--kv-blocks", type=int, default=500, help="of 64 tokens: few enough that requests are preempted")
    parser.add_argument("--jit-monitor-mode", choices=("error", "warn"), default="error")
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


def loaded(args: argparse.Namespace, scratch: Path, log: Path, deadline: float) -> dict[str, Any]:
    """The evidence of one load: quiet answers, the load, quiet answers again. Errors are in it, not raised."""
    checkpoint, port = scratch / "checkpoint", free_port()
    TinyCheckpoint().write(checkpoint)
    environment = {PARTIAL_DTYPE_VARIABLE: args.partial_dtype}
    command = server_command(args, checkpoint, port)
    content: dict[str, Any] = {"server": recorded_child(command, environment, checkpoint, scratch), "partial_dtype": args.partial_dtype}
    process = EngineProcess(command, {"HF_HUB_OFFLINE": "1", **environment}, log)
    try:
        wait_until_healthy(process, port, deadline)
        started = len(process.log_lines())
        quiet = quiet_answers(port, deadline)
        before = metrics(port, COUNTERS)
        with MemoryWatch() as memory:
            result = under_load(port, load_requests(args.requests), args.clients, deadline)
        after = metrics(port, COUNTERS)
        again = quiet_answers(port, deadline)
        status = process.stop()
        content |= evidence_of(args.requests, result, {name: after[name] - before[name] for name in COUNTERS}, memory.samples, quiet, again)
        content["log_errors"] = error_lines(process.log_lines()[started:])
        content["exit_status"] = status
        content["unmet"] += unmet_by_server(process, content["log_errors"], status)
    except Exception as error:
        content["unmet"] = [error_text(error)]
    finally:
        process.kill()
    return content | {"passed": not content["unmet"], "log_lines": process.notable_lines()}


def quiet_answers(port: int, deadline: float) -> list[Answer]:
    """The sample's answers, one request at a time."""
    return [answered(port, request, deadline) for request in sample_requests()]


def answered(port: int, request: LoadRequest, deadline: float) -> Answer:
    """The answer to one request.

    Raises:
        RuntimeError: an HTTP error, or a logprob that is not finite.
        ValueError: an answer without the tokens that were asked for.
    """
    choice = post(port, "/v1/completions", completion_body([list(request.prompt)], request.max_tokens), deadline)["choices"][0]
    answer = answer_of(len(request.prompt), choice)
    if len(answer.ids) != request.max_tokens:
        raise ValueError(f"asked for {request.max_tokens} tokens after {len(request.prompt)}, got {len(answer.ids)}")
    if not all(map(math.isfinite, answer.logprobs)):
        raise RuntimeError(f"a logprob after {len(request.prompt)} tokens is not finite")
    return answer


def under_load(port: int, requests: Sequence[LoadRequest], clients: int, deadline: float) -> LoadResult:
    """Send all requests from `clients` threads, each as soon as one is free."""
    result, lock, begin = LoadResult(), threading.Lock(), time.monotonic()

    def send(request: LoadRequest) -> None:
        sent = time.monotonic()
        try:
            if request.aborted:
                hang_up(port, "/v1/completions", completion_body([list(request.prompt)], request.max_tokens) | {"stream": True}, deadline)
                with lock:
                    result.aborted += 1
                return
            answer = answered(port, request, deadline)
        except Exception as error:
            with lock:
                result.errors.append(error_text(error, 300))
            return
        with lock:
            result.completed += 1
            result.latencies.append(time.monotonic() - sent)
            if request.sample is not None:
                result.sampled.append((request.sample, answer))

    with ThreadPoolExecutor(clients) as pool:
        for _ in pool.map(send, requests):
            pass
    result.seconds = time.monotonic() - begin
    return result


def evidence_of(
    sent: int,
    result: LoadResult,
    counted: dict[str, float],
    memory: Sequence[tuple[float, int]],
    quiet: Sequence[Answer],
    again: Sequence[Answer],
) -> dict[str, Any]:
    """Numbers, comparisons, and what of the promise was not kept."""
    pairs = [("under load", quiet[index], answer) for index, answer in result.sampled]
    pairs += [("quiet again", first, second) for first, second in zip(quiet, again)]
    comparisons = [{"when": when, **Agreement.of(first, second).to_json()} for when, first, second in pairs]
    growth = growth_mib(memory)
    unmet = [f"{len(result.errors)} of {sent} requests failed"] if result.errors else []
    if result.completed + result.aborted + len(result.errors) != sent:
        unmet.append(f"{result.completed} answered + {result.aborted} aborted of {sent} requests")
    unmet += [f"no {what}: the load did not test it" for what, count in _exercised(result, counted).items() if not count]
    if growth is None or growth > FLAT_MIB:
        unmet.append(f"GPU memory grew by {growth} MiB after the first quarter, allowed is {FLAT_MIB}")
    unmet += [f"an answer {item['when']} differs from the quiet one: {item}" for item in comparisons if not item["within_bar"]]
    latencies = sorted(result.latencies) or [0.0]
    return {
        "requests": sent,
        "completed": result.completed,
        "aborted": result.aborted,
        "errors": result.errors[:MAX_ERRORS],
        "seconds": round(result.seconds, 2),
        "requests_per_s": round(sent / result.seconds, 1),
        "latency_s": {"median": round(statistics.median(latencies), 3), "p99": round(latencies[int(len(latencies) * 0.99)], 3)},
        "counters": counted,
        "gpu_memory_mib": [[round(at, 1), used] for at, used in memory],
        "gpu_memory_growth_mib": growth,
        "comparisons": comparisons,
        "unmet": unmet,
    }


def _exercised(result: LoadResult, counted: dict[str, float]) -> dict[str, float]:
    """How often each thing happened that the load is there for."""
    return {
        "aborted request": result.aborted,
        "preemption": counted["vllm:num_preemptions"],
        "prefix-cache hit": counted["vllm:prefix_cache_hits"],
        "answer of the sample": len(result.sampled),
    }


def error_lines(lines: Sequence[str]) -> list[str]:
    """Lines of the server's log that report an error."""
    return [line[:400] for line in lines if any(word in line for word in (" ERROR ", "Traceback", "CUDA error"))][:MAX_ERRORS]


def unmet_by_server(process: EngineProcess, errors: Sequence[str], status: int) -> list[str]:
    """What the server's log and its exit say against it."""
    unmet = [f"the log holds {len(errors)} error lines"] if errors else []
    if not names_backend(process.log_lines(), OURS):
        unmet.append(f"the log does not say that {OURS} was used")
    if status not in (0, -15, 143):
        unmet.append(f"the server shut down with status {status}")
    return unmet


def report(content: dict[str, Any], log: Path) -> None:
    """The verdict in a few lines; the end of the log if it failed."""
    for name in ("requests", "completed", "aborted", "seconds", "requests_per_s", "latency_s", "counters", "gpu_memory_growth_mib"):
        print(f"{name}: {content.get(name)}")
    worst = max((item["logprob_gap"] or 0.0 for item in content.get("comparisons", [])), default=None)
    print(f"{len(content.get('comparisons', []))} comparisons, largest logprob gap {worst}")
    for line in [*content["unmet"][:MAX_ERRORS], *content.get("errors", [])[:3], *content.get("log_errors", [])]:
        print(f"UNMET {line}")
    if not content["passed"]:
        print("\n".join(log.read_text(errors="replace").splitlines()[-60:]))
    print("passed" if content["passed"] else "FAILED")


if __name__ == "__main__":
    sys.exit(main())
