"""Microseconds of the host for a decode step: a backend's metadata build and one layer's launch, through vLLM's real classes in one process.

    python kernels/benchmarks/host_cost.py --json docs/evidence/host_cost_h200.json

The batch is small, so that the device is always ahead of the host, and the host waits for it only between groups of steps. The backends take
turns, a group each. Each output is compared with FP64 attention before anything is timed. Exit status: 0 if DENSE_MLA ran, was right, and took
no longer than the fastest peer; 1 if not, and what failed is in the evidence; 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the kernels and benchmarks of this checkout, installed or not

from benchmarks.batch_shape import BatchShape
from benchmarks.contenders import MAX_RELATIVE_L2
from benchmarks.decode_inputs import DecodeInputs, worst_relative_l2
from benchmarks.engine_log import OURS
from benchmarks.evidence import EVIDENCE_DIR, collect_facts, error_text, write_json
from benchmarks.shape_timing import WrongAnswerError

GROUP_STEPS = 50
WARM_UP_STEPS = 20
QUERY_FORMS = ("tensor", "pair")  # as Kimi-K3's layer passes q, and as vLLM's own MLA layer does
PAGE_SIZE = 64

Query = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def main() -> int:
    args = parse_arguments()
    try:
        facts = collect_facts(args.commit, args.dirty)
    except ValueError as error:
        print(f"host_cost: {error}", file=sys.stderr)
        return 2
    import vllm_dense_mla

    vllm_dense_mla.register()
    from vllm.v1.worker.workspace import init_workspace_manager

    device = torch.device("cuda", torch.cuda.current_device())
    init_workspace_manager(device)  # as the model runner does: no layer allocates its workspace
    rows, failures = measured([OURS, *args.peers], args, device)
    content = asdict(facts) | {"rows": rows, "comparisons": comparisons(rows), "failures": failures}
    write_json(args.json, content)
    report(content)
    passed = len(content["comparisons"]) == len(QUERY_FORMS) and all(item["ours_over_fastest_peer"] <= 1 for item in content["comparisons"])
    return 0 if passed and not any(failure["backend"] == OURS for failure in failures) else 1


def measured(backends: Sequence[str], args: argparse.Namespace, device: torch.device) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The rows of every backend and form of q, and what failed. An error that is no single backend's ends it, and leaves the rows before it."""
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    try:
        inputs = DecodeInputs.random(BatchShape.parse(args.shape), args.heads, PAGE_SIZE, device)
        steps, failures = prepared_steps(backends, inputs)
        for form in QUERY_FORMS if steps else ():
            rows += measure(steps, inputs, form, args.steps)
    except Exception as error:
        failures.append({"backend": "every backend", "error": error_text(error)})
    return rows, failures


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help=f"steps of each backend, a multiple of {GROUP_STEPS}")
    parser.add_argument("--shape", default="8x512", help="BATCHxKEYS; small, so that the device never holds up the host")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--peers", type=lambda text: [name for name in text.split(",") if name], default="FLASHMLA,FLASH_ATTN_MLA")
    parser.add_argument("--json", type=Path, default=EVIDENCE_DIR / "host_cost_h200.json")
    parser.add_argument("--commit", help="commit of the source, where git is not there to ask")
    parser.add_argument("--dirty", choices=("yes", "no"), help="whether that source has uncommitted changes")
    args = parser.parse_args(argv)
    if args.steps < GROUP_STEPS or args.steps % GROUP_STEPS:
        parser.error(f"--steps must be a positive multiple of {GROUP_STEPS}, got {args.steps}")
    try:
        BatchShape.parse(args.shape)
    except ValueError as error:
        parser.error(str(error))
    return args


def prepared_steps(backends: Sequence[str], inputs: DecodeInputs) -> tuple[list[Any], list[dict[str, str]]]:
    """An EngineStep of every backend whose answers are right, and the errors of the others."""
    from benchmarks.engine_step import EngineStep, engine_config

    reference = inputs.reference(0)
    steps, failures = [], []
    with tempfile.TemporaryDirectory(prefix="host_cost_") as folder:
        config = engine_config(Path(folder), inputs.heads, (1, 2, 4, inputs.shape.batch))
        for backend in backends:
            try:
                step = EngineStep.of(backend, config, inputs)
                for form in QUERY_FORMS:
                    error = worst_relative_l2(step.launch(step.build(), query_of(inputs, form)), reference)
                    if not error <= MAX_RELATIVE_L2:
                        raise WrongAnswerError(f"relative L2 against FP64 is {error}, allowed is {MAX_RELATIVE_L2}")
                steps.append(step)
            except Exception as error:  # whatever a peer raises is its result; ours fails the run at its end
                failures.append({"backend": backend, "error": error_text(error)})
    return steps, failures


def query_of(inputs: DecodeInputs, form: str) -> Query:
    """q as one tensor, or as the pair of its latent and rope parts, each in memory of its own."""
    if form == "tensor":
        return inputs.q
    return inputs.q[..., :512].contiguous(), inputs.q[..., 512:].contiguous()


def measure(steps: Sequence[Any], inputs: DecodeInputs, form: str, count: int) -> list[dict[str, Any]]:
    """A row of every backend: `count` steps of each, in groups that take turns."""
    query = query_of(inputs, form)
    samples: dict[str, tuple[list[float], list[float]]] = {step.backend: ([], []) for step in steps}
    gc.collect()
    gc.disable()  # a collection would be one backend's bad luck
    try:
        for step in steps:
            time_group(step, query, WARM_UP_STEPS)
        for _ in range(count // GROUP_STEPS):
            for step in steps:
                for kept, new in zip(samples[step.backend], time_group(step, query, GROUP_STEPS)):
                    kept.extend(new)
    finally:
        gc.enable()
    return [_row(step, inputs, form, *samples[step.backend]) for step in steps]


def time_group(step: Any, query: Query, count: int) -> tuple[list[float], list[float]]:
    """Microseconds of each build and of each launch of `count` steps that follow each other without waiting for the device."""
    builds, launches = [], []
    torch.cuda.synchronize()
    for _ in range(count):
        begin = time.perf_counter_ns()
        metadata = step.build()
        built = time.perf_counter_ns()
        step.launch(metadata, query)
        launched = time.perf_counter_ns()
        builds.append((built - begin) / 1e3)
        launches.append((launched - built) / 1e3)
    torch.cuda.synchronize()
    return builds, launches


def _row(step: Any, inputs: DecodeInputs, form: str, builds: list[float], launches: list[float]) -> dict[str, Any]:
    return {
        "kernel": step.backend,
        "q": form,
        "heads": inputs.heads,
        "batch": inputs.shape.batch,
        "context": inputs.shape.context,
        "page_size": inputs.page_size,
        "us": round(statistics.median(a + b for a, b in zip(builds, launches)), 2),
        "build_us": round(statistics.median(builds), 2),
        "launch_us": round(statistics.median(launches), 2),
        "build_us_samples": [round(value, 1) for value in builds],
        "launch_us_samples": [round(value, 1) for value in launches],
    }


def comparisons(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ours beside the fastest peer, for every form of q that both have."""
    found = []
    for form in QUERY_FORMS:
        ours = [row["us"] for row in rows if row["q"] == form and row["kernel"] == OURS]
        peers = {row["kernel"]: row["us"] for row in rows if row["q"] == form and row["kernel"] != OURS}
        if ours and peers:
            fastest = min(peers, key=lambda name: peers[name])
            found.append({"q": form, "fastest_peer": fastest, "ours_over_fastest_peer": round(ours[0] / peers[fastest], 3)})
    return found


def report(content: dict[str, Any]) -> None:
    """Medians, ratios and errors as text."""
    for row in content["rows"]:
        print(f"{row['kernel']:15s} q as a {row['q']:6s}: build {row['build_us']:6.1f} + launch {row['launch_us']:6.1f} = {row['us']:6.1f} us")
    for item in content["comparisons"]:
        print(f"q as a {item['q']}: DENSE_MLA takes {item['ours_over_fastest_peer']} of {item['fastest_peer']}'s time")
    for failure in content["failures"]:
        print(f"FAILED {failure['backend']}: {failure['error']}")


if __name__ == "__main__":
    sys.exit(main())
