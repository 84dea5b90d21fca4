"""Answer the prompts with vLLM's offline engine: a process of its own for each backend, started by serve_tiny.

python kernels/benchmarks/offline_engine.py CHECKPOINT ANSWERS.json OPTIONS-as-JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks of this checkout

from benchmarks.answers import MAX_TOKENS, Answer, prompts


def generate(checkpoint: Path, options: dict[str, Any]) -> list[Answer]:
    """Greedy answers to all prompts as one batch."""
    from vllm import LLM, SamplingParams

    engine = LLM(str(checkpoint), **options)
    sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=MAX_TOKENS, logprobs=2)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts()], sampling, use_tqdm=False)
    return [_answer(len(output.prompt_token_ids), output.outputs[0]) for output in outputs]


def _answer(prompt_tokens: int, completion: Any) -> Answer:
    steps = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    return Answer.from_steps(prompt_tokens, list(completion.token_ids), steps)


if __name__ == "__main__":
    found = generate(Path(sys.argv[1]), json.loads(sys.argv[3]))
    Path(sys.argv[2]).write_text(json.dumps([asdict(answer) for answer in found]))
