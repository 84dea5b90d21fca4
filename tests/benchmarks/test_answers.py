"""When two answers agree: the comparison that decides whether DENSE_MLA serves the same model."""

import math
from dataclasses import asdict, replace

import pytest

from benchmarks.answers import Agreement, Answer, agree, over_all
from benchmarks.variants import PROMPT_TOKENS, VARIANTS, prompts


def answer(ids: tuple[int, ...], logprobs: tuple[float, ...], runner_up: int = 90, lead: float = 3.0) -> Answer:
    return Answer(17, ids, logprobs, ((runner_up,),) * len(ids), tuple((value - lead,) for value in logprobs))


LEFT = answer((5, 6, 7), (-0.5, -0.6, -0.7))


def test_equal_ids_within_the_bar() -> None:
    agreement = Agreement.of(LEFT, answer((5, 6, 7), (-0.55, -0.6, -0.62)))
    assert (agreement.agreeing, agreement.tokens, agreement.lead) == (3, 3, None)
    assert agreement.logprob_gap == pytest.approx(0.08)
    assert agreement.within(0.1) and not agreement.within(0.07)


def test_rms_is_over_the_tokens_that_agree() -> None:
    first = Agreement.of(LEFT, answer((5, 6, 7), (-0.55, -0.6, -0.62)))
    assert first.logprob_rms == pytest.approx(math.sqrt((0.05**2 + 0.08**2) / 3))
    second = Agreement.of(LEFT, answer((5, 8, 7), (-0.6, -0.9, -0.9)))  # one token agrees, 0.1 apart
    assert (second.agreeing, second.logprob_rms) == (1, pytest.approx(0.1))
    both = over_all([first, second])
    assert (both["tokens"], both["agreeing"]) == (6, 4)
    assert both["logprob_gap"] == pytest.approx(0.1)
    assert both["logprob_rms"] == pytest.approx(math.sqrt((0.05**2 + 0.08**2 + 0.1**2) / 4), abs=1e-5)


def test_many_small_differences_are_as_bad_as_a_large_one() -> None:
    same, apart = Agreement.of(LEFT, LEFT), Agreement.of(LEFT, answer((5, 6, 7), (-0.53, -0.63, -0.73)))
    assert apart.within() and not agree([apart])
    assert agree([same, same, apart])  # 0.03 / sqrt(3)
    assert not agree([same, Agreement.of(LEFT, answer((5, 6, 7), (-0.5, -0.71, -0.7)))])
    assert not agree([Agreement.of(LEFT, answer((5, 6, 7), (-0.5, math.nan, -0.7)))])


def test_nothing_is_measured_where_no_token_agrees_or_a_logprob_is_nan() -> None:
    none = Agreement.of(LEFT, answer((8, 6, 7), (-0.5, -0.6, -0.7)))
    assert over_all([none]) == {"tokens": 3, "agreeing": 0, "logprob_gap": 0.0, "logprob_rms": None}
    nan = over_all([none, Agreement.of(LEFT, answer((5, 6, 7), (-0.5, math.nan, -0.7)))])
    assert (nan["logprob_gap"], nan["logprob_rms"]) == (None, None)


def test_gap_counts_only_while_ids_agree() -> None:
    near = replace(answer((5, 60, 7), (-0.5, -0.6, -5.0)), other_ids=((90,), (6,), (90,)), other_logprobs=((-3.5,), (-0.65,), (-9.0,)))
    left = replace(LEFT, other_ids=((90,), (3, 60), (90,)), other_logprobs=((-3.5,), (-0.7, -0.75), (-3.7,)))
    agreement = Agreement.of(left, near)
    assert (agreement.agreeing, agreement.logprob_gap) == (1, 0.0)
    assert agreement.lead == pytest.approx(0.15)  # the larger of the two sides' preferences
    assert agreement.within(0.1)
    assert not agreement.within(0.05)


def test_different_tokens_that_were_no_near_tie_fail_though_no_logprob_differs() -> None:
    agreement = Agreement.of(LEFT, answer((8, 6, 7), (-0.5, -0.6, -0.7)))
    assert (agreement.agreeing, agreement.logprob_gap, agreement.lead) == (0, 0.0, math.inf)
    assert not agreement.within()
    content = agreement.to_json()
    assert (content["lead_at_difference"], content["near_tie"], content["within_bar"]) == (None, False, False)


def test_nan_never_passes() -> None:
    agreement = Agreement.of(LEFT, answer((5, 6, 7), (-0.5, math.nan, -0.7)))
    assert not agreement.within()
    assert agreement.to_json()["logprob_gap"] is None


def test_answers_of_other_prompts_or_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="cannot compare 3 tokens after 17 with 2 after 17"):
        Agreement.of(LEFT, answer((5, 6), (-0.5, -0.6)))
    with pytest.raises(ValueError, match="after 17 with 3 after 64"):
        Agreement.of(LEFT, replace(LEFT, prompt_tokens=64))


def test_answer_keeps_the_likeliest_other_tokens() -> None:
    made = Answer.from_steps(17, [5, 6], [{5: -0.1, 9: -3.0, 4: -2.0}, {2: -0.2, 6: -0.4}])
    assert made == Answer(17, (5, 6), (-0.1, -0.4), ((4, 9), (2,)), ((-2.0, -3.0), (-0.2,)))
    assert Answer.from_json(asdict(made)) == made


@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
def test_a_logprob_that_is_no_finite_number_is_refused(value: float) -> None:
    """Of another token too; None is what JSON makes of NaN."""
    with pytest.raises(ValueError, match="a logprob of the answer to the prompt of 17 tokens is not finite"):
        Answer.from_steps(17, [5], [{5: -0.1, 9: value}])


@pytest.mark.parametrize("steps", [[{5: -0.1, 9: -1.0}], [{5: -0.1, 9: -1.0}, {7: -0.1, 9: -1.0}], [{5: -0.1, 9: -1.0}, {6: -0.1}]])
def test_answer_without_its_logprobs_is_refused(steps: list[dict[int, float]]) -> None:
    with pytest.raises(ValueError, match="prompt of 17 tokens lacks logprobs"):
        Answer.from_steps(17, [5, 6], steps)


def test_prompts_are_the_same_every_time_and_of_the_lengths_promised() -> None:
    asked = prompts(PROMPT_TOKENS)
    assert asked == prompts(PROMPT_TOKENS) and len({tuple(prompt[:2]) for prompt in asked}) == len(PROMPT_TOKENS)
    assert tuple(map(len, asked)) == PROMPT_TOKENS
    assert min(PROMPT_TOKENS) == 1 and max(PROMPT_TOKENS) == 4000
    assert all(2 <= token < 1024 for prompt in asked for token in prompt)


def test_prompts_for_drafts_repeat_their_tokens() -> None:
    """A draft needs an earlier occurrence of the last token: each long prompt holds a fifth of the vocabulary or more."""
    lengths = VARIANTS["spec4"].rounds
    assert lengths is not None
    assert [len(set(prompt)) for prompt in prompts(lengths[0])] == [1000, 500, 1000, 250, 200]
