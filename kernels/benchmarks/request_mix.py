"""The requests of a load: prompts of all lengths, some with a beginning in common, some hung up on, and a sample that is sent again and again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.answers import MAX_TOKENS
from benchmarks.tiny_checkpoint import VOCAB

LONGEST_PROMPT = 4000
LONGEST_ANSWER = 128
SHARED_PREFIXES = 8
SHARED_TOKENS = 1024
SHARED_SHARE = 0.4  # of the requests begin with a shared prefix: prefix-cache hits
ABORTED_SHARE = 0.05
SAMPLE_PROMPTS = (1, 17, 64, 65, 130, 200, 511, 777, 1024, 1500, 2049, 3000)
SAMPLE_EVERY = 20  # requests, one is of the sample


@dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        sample: index into the sample's prompts, `None` for a request that is not compared.
        aborted: the client hangs up after the first token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sample: int | None = None
    aborted: bool = False


def sample_requests() -> list[LoadRequest]:
    """The prompts whose answers are compared with a quiet server's."""
    draw = random.Random("sample")
    return [LoadRequest(_tokens(draw, length), MAX_TOKENS, index) for index, length in enumerate(SAMPLE_PROMPTS)]


def load_requests(count: int) -> list[LoadRequest]:
    """The load, the same every time: lengths log-uniform, so that short and long requests are equally likely."""
    draw = random.Random("load")
    prefixes = [_tokens(draw, SHARED_TOKENS) for _ in range(SHARED_PREFIXES)]
    sample = sample_requests()
    requests = []
    for index in range(count):
        if index % SAMPLE_EVERY == SAMPLE_EVERY - 1:
            requests.append(sample[index // SAMPLE_EVERY % len(sample)])
            continue
        prefix = draw.choice(prefixes) if draw.random() < SHARED_SHARE else ()
        prompt = (*prefix, *_tokens(draw, _log_uniform(draw, LONGEST_PROMPT - len(prefix))))
        aborted = draw.random() < ABORTED_SHARE
        requests.append(LoadRequest(prompt, LONGEST_ANSWER if aborted else _log_uniform(draw, LONGEST_ANSWER), aborted=aborted))
    return requests


def _log_uniform(draw: random.Random, most: int) -> int:
    return min(int(most ** draw.random() + 0.5), most)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(2, VOCAB) for _ in range(count))
