"""Greedy answers of a model served with one attention backend, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TOKENS = 48
LOGPROBS = 5  # that are asked for at every position: near-ties of three tokens happen
LOGPROB_BAR = 0.1  # for every token; BF16 noise of the logits alone is half of it (tiny_checkpoint.py)
LOGPROB_RMS_BAR = 0.02  # over all tokens of a comparison: much smaller errors than a single token's bar shows


@dataclass(frozen=True)
class Answer:
    """Token ids, their logprobs, and the likeliest other tokens of every position with their logprobs."""

    prompt_tokens: int
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    other_ids: tuple[tuple[int, ...], ...]
    other_logprobs: tuple[tuple[float, ...], ...]

    @classmethod
    def from_steps(cls, prompt_tokens: int, ids: Sequence[int], steps: Sequence[Mapping[int, float]]) -> Answer:
        """From each position's logprobs by token id; they must hold the answer's token and another.

        Raises:
            ValueError: they do not, there is not one for every token, or one is no finite number.
        """
        if len(ids) != len(steps) or any(token not in step or len(step) < 2 for token, step in zip(ids, steps)):
            raise ValueError(f"the answer to the prompt of {prompt_tokens} tokens lacks logprobs of its tokens or of others")
        if not all(value is not None and math.isfinite(value) for step in steps for value in step.values()):  # JSON has null for NaN
            raise ValueError(f"a logprob of the answer to the prompt of {prompt_tokens} tokens is not finite")
        others = [sorted((item for item in step.items() if item[0] != token), key=lambda item: -item[1]) for token, step in zip(ids, steps)]
        logprobs = tuple(round(step[token], 5) for token, step in zip(ids, steps))
        other_ids = tuple(tuple(token for token, _ in position) for position in others)
        return cls(prompt_tokens, tuple(ids), logprobs, other_ids, tuple(tuple(round(value, 5) for _, value in position) for position in others))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Answer:
        """From the object that `dataclasses.asdict` made, read back from a file."""
        nested = (tuple(map(tuple, content[name])) for name in ("other_ids", "other_logprobs"))
        return cls(content["prompt_tokens"], tuple(content["ids"]), tuple(content["logprobs"]), *nested)

    def lead_over(self, token: int, position: int) -> float:
        """Logprob of the answer's token at a position minus that of `token`; infinite unless `token` is among the likeliest others."""
        others = dict(zip(self.other_ids[position], self.other_logprobs[position]))
        return self.logprobs[position] - others[token] if token in others else math.inf


@dataclass(frozen=True)
class Agreement:
    """Two answers to one prompt.

    Attributes:
        agreeing: tokens before the first difference, of `tokens`.
        logprob_gap: largest difference of the logprobs of those.
        logprob_rms: root mean square of the differences: the largest of 300 is a matter of chance.
        lead: at the first difference, by how much either side preferred its token to the other's; `None` without one.
    """

    prompt_tokens: int
    tokens: int
    agreeing: int
    logprob_gap: float
    logprob_rms: float
    lead: float | None

    @classmethod
    def of(cls, left: Answer, right: Answer) -> Agreement:
        """Compare two answers of the same length to the same prompt.

        Raises:
            ValueError: they are not.
        """
        if (left.prompt_tokens, len(left.ids)) != (right.prompt_tokens, len(right.ids)):
            raise ValueError(f"cannot compare {len(left.ids)} tokens after {left.prompt_tokens} with {len(right.ids)} after {right.prompt_tokens}")
        agreeing = next((i for i, (a, b) in enumerate(zip(left.ids, right.ids)) if a != b), len(left.ids))
        gaps = [abs(a - b) for a, b in zip(left.logprobs[:agreeing], right.logprobs[:agreeing])]
        gap = math.nan if any(map(math.isnan, gaps)) else max(gaps, default=0.0)
        rms = math.sqrt(math.fsum(gap * gap for gap in gaps) / agreeing) if agreeing else 0.0
        lead = None
        if agreeing < len(left.ids):
            lead = max(left.lead_over(right.ids[agreeing], agreeing), right.lead_over(left.ids[agreeing], agreeing))
        return cls(left.prompt_tokens, len(left.ids), agreeing, gap, rms, lead)

    def within(self, bar: float = LOGPROB_BAR) -> bool:
        """The logprobs agree within `bar` as long as the tokens do, and the tokens part only where noise of that size can part them.

        Without the second half, two answers that differ in their first token would agree.
        """
        return self.logprob_gap <= bar and (self.lead is None or self.lead <= 2 * bar)

    def to_json(self) -> dict[str, Any]:
        """A flat object; a lead that is no near tie at all is null beside `near_tie` false."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "agreeing": self.agreeing,
            "logprob_gap": _finite(self.logprob_gap),
            "logprob_rms": _finite(self.logprob_rms),
            "lead_at_difference": _finite(self.lead),
            "near_tie": None if self.lead is None else self.lead <= 2 * LOGPROB_BAR,
            "within_bar": self.within(),
        }


def agree(agreements: Sequence[Agreement], rms_bar: float = LOGPROB_RMS_BAR) -> bool:
    """Whether answers to several prompts agree: in some token at all, each within its bar, and all of them together within `rms_bar`."""
    rms = over_all(agreements)["logprob_rms"]
    return rms is not None and rms <= rms_bar and all(agreement.within() for agreement in agreements)


def over_all(agreements: Sequence[Agreement]) -> dict[str, Any]:
    """Of several prompts together: tokens, how many agree, and the largest and the root mean square (None of no token) of the logprob differences
    of those."""
    agreeing = sum(agreement.agreeing for agreement in agreements)
    gaps = [agreement.logprob_gap for agreement in agreements]
    squares = math.fsum(agreement.logprob_rms**2 * agreement.agreeing for agreement in agreements)
    return {
        "tokens": sum(agreement.tokens for agreement in agreements),
        "agreeing": agreeing,
        "logprob_gap": None if any(map(math.isnan, gaps)) else _finite(max(gaps, default=0.0)),
        "logprob_rms": _finite(math.sqrt(squares / agreeing) if agreeing else None),
    }


def _finite(value: float | None) -> float | None:
    return round(value, 5) if value is not None and math.isfinite(value) else None
