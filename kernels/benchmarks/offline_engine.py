"""Answer prompts with vLLM's offline engine: a process of its own for each run, started by serve_tiny.

python kernels/benchmarks/offline_engine.py CHECKPOINT ANSWERS.json OPTIONS-as-JSON ROUNDS-as-JSON

A round is a list of prompt lengths, answered as one batch; a later round finds what an earlier one left in the prefix cache.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import LOGPROBS, MAX_TOKENS, Answer
from benchmarks.variants import prompts


def generate(engine: Any, rounds: list[list[int]]) -> list[Answer]:
    """Greedy answers to the prompts of all rounds, in order."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=MAX_TOKENS, logprobs=LOGPROBS)
    found = []
    for lengths in rounds:
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts(lengths)], sampling, use_tqdm=False)
        found += [_answer(len(output.prompt_token_ids), output.outputs[0]) for output in outputs]
    return found


def counters(engine: Any) -> dict[str, float]:
    """vLLM's counters, summed over their labels."""
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if isinstance(value := getattr(metric, "value", None), int | float):
            found[metric.name] = found.get(metric.name, 0) + value
    return found


def _answer(prompt_tokens: int, completion: Any) -> Answer:
    steps = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    return Answer.from_steps(prompt_tokens, list(completion.token_ids), steps)


def main() -> None:
    checkpoint, result, options, rounds = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
    from vllm import LLM

    engine = LLM(checkpoint, **options)
    answers = generate(engine, rounds)
    counted = {} if options.get("disable_log_stats", True) else counters(engine)
    result.write_text(json.dumps({"answers": [asdict(answer) for answer in answers], "counters": counted}))


if __name__ == "__main__":
    main()
