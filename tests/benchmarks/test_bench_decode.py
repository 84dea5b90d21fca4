"""The benchmark's own judgement, on the CPU: graphs are replaced by lists of calls, kernels by torch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_decode, decode_inputs
from benchmarks.batch_shape import BatchShape
from benchmarks.bench_decode import Contender, WrongAnswerError, measure_shape, parse_arguments, time_contender
from benchmarks.decode_inputs import DecodeInputs
from benchmarks.evidence import DecodeEvidence, RunFacts
from benchmarks.peers import Call

CPU = torch.device("cpu")


class CallList:
    """Stands for a CUDA graph."""

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self.calls = list(calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench_decode, "capture", CallList)
    monkeypatch.setattr(bench_decode, "time_launches", lambda launch, samples: [launch() or 160.0] * samples)
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)


def torch_decode(change: Callable[[torch.Tensor], Any] = lambda out: None) -> Contender:
    def prepare(inputs: DecodeInputs) -> Call:
        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
            layer = next(i for i, cache in enumerate(inputs.caches) if cache.data_ptr() == kv_cache.data_ptr())
            out.copy_(inputs.reference(layer))
            change(out)

        return call

    return Contender("dense_mla", "bf16", prepare)


def measured(contender: Contender) -> tuple[list[float], float]:
    inputs = DecodeInputs.random(BatchShape("ragged", (70, 1)), 4, 64, CPU)
    return time_contender(contender, inputs, {layer: inputs.reference(layer) for layer in (0, 1)}, 20)


def test_samples_are_microseconds_a_call() -> None:
    samples, relative_l2 = measured(torch_decode())
    assert samples == [10.0] * 20  # 160 us a replay of 16 calls
    assert 0 < relative_l2 < 4e-3  # BF16 output


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: out[1].mul_(1.02), id="a request 2 % off"),
        pytest.param(lambda out: out[0, 3, 100:].fill_(float("nan")), id="elements not written"),
        pytest.param(lambda out: out[0].zero_(), id="zeros"),
    ],
)
def test_a_wrong_answer_has_no_time(change: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(WrongAnswerError, match="relative L2"):
        measured(torch_decode(change))


def test_a_kernel_that_writes_nothing_has_no_time() -> None:
    with pytest.raises(WrongAnswerError, match="nan"):
        measured(Contender("PEER", None, lambda inputs: lambda kv_cache, out: None))


def test_a_failing_peer_is_recorded_and_the_others_go_on() -> None:
    def broken(inputs: DecodeInputs) -> Call:
        raise RuntimeError("no such extension")

    facts = RunFacts("", "", False, "", None, "", None, None, "")
    evidence = DecodeEvidence(facts, 4000.0)
    alive = measure_shape(evidence, [Contender("PEER", None, broken), torch_decode()], BatchShape("2x64", (64, 64)), 4, 64, 20, CPU)
    assert alive
    assert [(failure.kernel, failure.error) for failure in evidence.failures] == [("PEER", "RuntimeError: no such extension")]
    (row,) = evidence.rows
    assert (row.kernel, row.partial_dtype, row.us, row.batch, row.keys, row.calls) == ("dense_mla", "bf16", 10.0, 2, 128, 16)
    assert row.GBps == pytest.approx(128 * 1152 / 10 / 1e3, abs=0.1)
    assert row.floor_us == pytest.approx(128 * 1152 / 4000 / 1e3, abs=1e-3)


def test_defaults_are_the_eight_shapes_in_both_dtypes_beside_three_peers(tmp_path: Path) -> None:
    args = parse_arguments(["--json", str(tmp_path / "a.json")])
    assert [shape.label for shape in args.shapes] == bench_decode.SHAPES.split(",")
    assert (args.heads, args.partial_dtypes, args.peers) == ([16], ["bf16", "fp32"], ["FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"])
    names = [(contender.kernel, contender.partial_dtype) for contender in bench_decode.our_contenders(args.partial_dtypes)]
    assert names == [("dense_mla", "bf16"), ("dense_mla", "fp32"), ("dense_mla+schedule", "bf16")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x4096,8"], "shape must be"),
        (["--peers", "FLASHMLA,FA9"], "'FA9' is not one of FLASHMLA"),
        (["--partial-dtypes", "fp16"], "'fp16' is not one of bf16, fp32"),
        (["--heads", "16,200"], "num_heads must be from 1 to 128, got 200"),
        (["--page-size", "24"], "page_size must be a positive multiple of 16, got 24"),
        (["--replays", "5"], "--replays must be at least 20, got 5"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
