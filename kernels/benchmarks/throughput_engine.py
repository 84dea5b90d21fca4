"""Decode speed of vLLM's offline engine with one attention backend: a process of its own for each backend, started by serve_throughput.

python kernels/benchmarks/throughput_engine.py CHECKPOINT RESULT.json OPTIONS-as-JSON PLAN-as-JSON

Starts the engine, creates RESULT.ready, and measures once RESULT.go exists: engines may start side by side, but only one is ever measured. RESULT
holds the rows so far, whenever this is ended.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.evidence import write_json
from benchmarks.tiny_checkpoint import VOCAB


def measure(engine: Any, plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for every batch and context of the plan, as it is measured.

    The longest context first fills the prefix cache: its prompts begin with those of the shorter ones, so that each prompt is computed once
    and a run's own prefill is one short step. Every request has a prompt of its own: shared pages would be read out of the L2.
    """
    fill(engine, plan)
    for context in plan["contexts"]:
        for batch in plan["batches"]:
            yield _row(engine, plan, batch, context)


def fill(engine: Any, plan: dict[str, Any]) -> None:
    """Prefill every prompt once."""
    prompts = [prompt(request, max(plan["contexts"])) for request in range(max(plan["batches"]))]
    step_times(engine, prompts, 1, "fill")


def _row(engine: Any, plan: dict[str, Any], batch: int, context: int) -> dict[str, Any]:
    prompts = [prompt(request, context) for request in range(batch)]
    step_times(engine, prompts, 8, f"warm-up-{batch}-{context}")
    runs = []
    for run in range(plan["runs"]):
        steps = step_times(engine, prompts, plan["tokens"], f"run-{run}-{batch}-{context}")
        runs.append({"step_ms_samples": [round(ms, 3) for ms in steps], "tokens_per_s": round(batch * len(steps) / sum(steps) * 1e3, 1)})
    return {"batch": batch, "context": context, "runs": runs}


def step_times(engine: Any, prompts: list[list[int]], tokens: int, name: str) -> list[float]:
    """Milliseconds of each step in which every request decodes one token: from all having their first to the first having its last.

    Raises:
        RuntimeError: there was no such step although there had to be one.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=tokens)
    for index, ids in enumerate(prompts):
        engine.add_request(f"{name}-{index}", {"prompt_token_ids": ids}, sampling)
    done: dict[str, int] = {}
    stamps = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        done |= {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        if outputs and len(done) == len(prompts) and not any(output.finished for output in outputs):
            stamps.append((now, sum(done.values())))
    steps = [(after - before) * 1e3 for (before, least), (after, most) in itertools.pairwise(stamps) if most - least == len(prompts)]
    if tokens > 8 and len(steps) < tokens // 2:
        raise RuntimeError(f"{name}: only {len(steps)} steps of {tokens} decoded all of {len(prompts)} requests: preempted, or not batched")
    return steps


def prompt(request: int, tokens: int) -> list[int]:
    """Token ids of a request's prompt: a longer one begins with the shorter."""
    draw = random.Random(request)
    return [draw.randrange(2, VOCAB) for _ in range(tokens)]


def main() -> None:
    checkpoint, result, options, plan = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    from vllm import LLM

    engine = LLM(checkpoint, **options).llm_engine
    result.with_suffix(".ready").touch()
    while not result.with_suffix(".go").exists():
        time.sleep(0.05)
    rows: list[dict[str, Any]] = []
    for row in measure(engine, plan):
        rows.append(row)
        write_json(result, {"measurements": rows})


if __name__ == "__main__":
    main()
