"""Samples of the program counter by role and class, on pieces of two real exports."""

import pytest
from nsight_pages import FP8, WIDE

from benchmarks.sass_samples import CLASSES, SampledCode


def entry(sampled: SampledCode, samples: int) -> tuple[str, str]:
    """Role and class of the one instruction with so many samples."""
    (index,) = (i for i, instruction in enumerate(sampled.code) if instruction.samples == samples)
    return sampled.roles[index], sampled.main_class(index)


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        (17, ("all", "other")),  # the cluster's barrier at the start is no idleness
        (5630, ("idle", "other")),  # the one at the end is
        (475, ("producer", "free_stages")),
        (2825, ("consumer", "keys")),  # the branch that stands between the wait and its loop out of line
        (48, ("consumer", "rare_waits")),  # queries: once a request
        (318, ("consumer", "barriers")),  # the load behind a BAR.SYNC
        (182, ("consumer", "barriers")),
        (271, ("consumer", "product_issue")),
        (861, ("consumer", "value_products")),  # leaves the scores behind it pending
        (418, ("consumer", "score_products")),
        (1496, ("consumer", "value_products")),
    ],
)
def test_roles_and_classes_of_a_cluster_kernel(samples: int, wanted: tuple[str, str]) -> None:
    assert entry(SampledCode.of_export(WIDE), samples) == wanted


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        (93, ("producer", "other")),
        (385, ("producer", "free_stages")),
        (22, ("consumer", "rare_waits")),
        (394, ("consumer", "keys")),
        (66, ("consumer", "keys")),
        (81, ("consumer", "stage_order")),  # at the barrier where consumers give stages back
        (57, ("consumer", "key_conversion")),
        (164, ("consumer", "score_products")),
        (165, ("consumer", "value_products")),
        (45, ("consumer", "barriers")),
        (51, ("consumer", "other")),
    ],
)
def test_roles_and_classes_of_a_kernel_that_converts(samples: int, wanted: tuple[str, str]) -> None:
    assert entry(SampledCode.of_export(FP8), samples) == wanted


def test_a_loop_out_of_line_belongs_to_the_wait_that_leads_to_it() -> None:
    sampled = SampledCode.of_export(WIDE)
    classes = {instruction.address: name for instruction, name in zip(sampled.code, sampled.classes)}
    assert {classes[0x7FF24F7B9840 + 16 * i] for i in range(5)} == {"keys"}
    assert {classes[0x7FF24F7B9730 + 16 * i] for i in (0, 1, 2, 4, 5)} == {"free_stages"}


def test_every_sample_is_counted_once() -> None:
    for text in (WIDE, FP8):
        sampled = SampledCode.of_export(text)
        roles = sampled.samples_by_role()
        assert sum(roles.values()) == sampled.samples > 1000
        for role, samples in roles.items():
            classes = sampled.samples_by_class(role)
            assert tuple(classes) == CLASSES and sum(classes.values()) == samples


def test_samples_behind_a_barrier_are_the_barriers_and_the_rest_is_not() -> None:
    """The load behind the BAR.SYNC: 296 of its 318 samples wait at the barrier."""
    without = SampledCode.of_export("\n".join(line for line in WIDE.splitlines() if "LDS R195" not in line))
    before, after = (sampled.samples_by_class("consumer") for sampled in (without, SampledCode.of_export(WIDE)))
    assert (after["barriers"] - before["barriers"], after["other"] - before["other"]) == (296, 22)


def test_a_kernel_without_roles_has_none() -> None:
    text = "\n".join(line for line in FP8.splitlines() if "USETMAXREG" not in line)
    sampled = SampledCode.of_export(text)
    assert sampled.samples_by_role() == {"consumer": 0, "producer": 0, "idle": 0, "all": sampled.samples}


def test_code_addresses_are_read_as_indices() -> None:
    sampled = SampledCode.of_export(WIDE)
    (index,) = (i for i, instruction in enumerate(sampled.code) if instruction.samples == 2825)
    place = int(sampled.readable(index).removeprefix("@!P0 BRA #"))
    assert sampled.code[place].address == 0x7FF24F7B9840
    assert sampled.readable(0).endswith("0x7ff24f7add10")  # a line that the excerpt lacks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== nothing", "source page of one kernel, got 0"),
        (WIDE + FP8, "source page of one kernel, got 2"),
        (WIDE.replace("# Samples", "Samples"), "lacks # Samples"),
        (WIDE.replace('"2825"', '"many"'), "counts in every line, got '0x7ff24f7b0100"),
        (WIDE + '"0x7ff24f7b9890","EXIT","0"\n', "counts in every line, got '0x7ff24f7b9890"),
    ],
)
def test_broken_exports_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SampledCode.of_export(text)
    assert "\n" not in str(raised.value)
