"""The benchmark's own judgement, on the CPU: graphs are replaced by lists of calls, kernels by torch."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bench_decode, decode_inputs, graph_timing, shape_timing
from benchmarks.batch_shape import BatchShape
from benchmarks.bench_decode import contenders_of, ordered_work, parse_arguments
from benchmarks.contenders import Contender, our_contenders
from benchmarks.decode_inputs import DecodeInputs
from benchmarks.evidence import DecodeEvidence, DecodeRow, RunFacts
from benchmarks.peers import Call
from benchmarks.shape_timing import ShapeTiming

CPU = torch.device("cpu")


class CallList:
    """Stands for a CUDA graph."""

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self.calls = list(calls)

    def replay(self) -> None:
        for call in self.calls:
            call()


def replayed(launches: Sequence[Callable[[], None]], samples: int, meanwhile: Callable[[], None]) -> list[list[float]]:
    for _ in range(samples):
        for launch in launches:
            launch()
    meanwhile()
    return [[160.0] * samples for _ in launches]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(shape_timing, "capture", CallList)
    monkeypatch.setattr(shape_timing, "time_in_rounds", replayed)
    monkeypatch.setattr(shape_timing, "sm_clock_mhz", lambda: 1980)
    monkeypatch.setattr(shape_timing, "us_of", lambda call: 10.0)
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)


def torch_decode(change: Callable[[torch.Tensor], Any] = lambda out: None) -> Contender:
    def prepare(inputs: DecodeInputs) -> Call:
        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
            layer = next(i for i, cache in enumerate(inputs.caches) if cache.data_ptr() == kv_cache.data_ptr())
            out.copy_(inputs.reference(layer))
            change(out)

        return call

    return Contender("dense_mla", "bf16", prepare)


def measured(*contenders: Contender, kv_dtype: torch.dtype = torch.bfloat16) -> tuple[DecodeEvidence, bool]:
    evidence = DecodeEvidence(RunFacts("", "", False, "", None, "", None, None, ""), 4000.0)
    alive = ShapeTiming(evidence, BatchShape("ragged", (70, 1)), 4, 64, CPU, kv_dtype, 0.5).measure(contenders, 20)
    return evidence, alive


def row_of(*contenders: Contender) -> DecodeRow:
    evidence, alive = measured(*contenders)
    assert alive and not evidence.failures
    (row,) = evidence.rows
    return row


def error_of(*contenders: Contender) -> str:
    evidence, alive = measured(*contenders)
    assert alive and not evidence.rows
    (failure,) = evidence.failures
    assert (failure.kernel, failure.shape, failure.heads, failure.page_size) == (contenders[0].kernel, "ragged", 4, 64)
    return failure.error


def test_samples_are_microseconds_a_call() -> None:
    row = row_of(torch_decode())
    assert row.us_samples == (10.0,) * 20 and row.us == 10.0  # 160 us a replay of 16 calls
    assert 0 < row.relative_l2 < 4e-3  # BF16 output
    assert (row.kernel, row.partial_dtype, row.batch, row.keys, row.calls, row.planned_for, row.sm_clock_mhz) == (
        "dense_mla",
        "bf16",
        2,
        71,
        16,
        70,
        1980,
    )
    assert row.GBps == pytest.approx(71 * 1152 / 10 / 1e3, abs=0.1)
    assert row.floor_us == pytest.approx(71 * 1152 / 4000 / 1e3, abs=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: out[1].mul_(1.02), id="a request 2 % off"),
        pytest.param(lambda out: out[0, 3, 100:].fill_(float("nan")), id="elements not written"),
        pytest.param(lambda out: out[0].zero_(), id="zeros"),
    ],
)
def test_a_wrong_answer_has_no_time(change: Callable[[torch.Tensor], Any]) -> None:
    assert "WrongAnswerError: relative L2" in error_of(torch_decode(change))


def test_an_answer_that_breaks_during_the_timing_has_no_time() -> None:
    calls = 0

    def late(out: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls > 100:  # 1 call before the capture and 16 in the checked replay
            out[1].mul_(1.02)

    assert "WrongAnswerError: relative L2" in error_of(torch_decode(late))


def test_a_kernel_that_writes_nothing_has_no_time() -> None:
    assert "nan" in error_of(Contender("PEER", None, lambda inputs: lambda kv_cache, out: None))


def test_an_e4m3_cache_is_576_bytes_a_key() -> None:
    evidence, _ = measured(torch_decode(), kv_dtype=torch.float8_e4m3fn)
    (row,) = evidence.rows
    assert row.kv_dtype == "fp8_e4m3" and 0 < row.relative_l2 < 4e-3
    assert row.GBps == pytest.approx(71 * 576 / 10 / 1e3, abs=0.1)
    assert row.floor_us == pytest.approx(71 * 576 / 4000 / 1e3, abs=1e-3)


def own_output(factor: float, allowed: float, calls: list[torch.Tensor]) -> Contender:
    """A kernel that takes no output and returns a new one in every call."""

    def prepare(inputs: DecodeInputs) -> Call:
        kept: dict[int, torch.Tensor] = {}

        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            layer = next(i for i, cache in enumerate(inputs.caches) if cache.data_ptr() == kv_cache.data_ptr())
            kept.setdefault(layer, torch.empty_like(out)).copy_(inputs.reference(layer) * factor)  # an address that a graph would write again
            calls.append(out)
            return kept[layer]

        return call

    return Contender("PEER", None, prepare, max_relative_l2=allowed)


def test_an_output_of_the_kernels_own_is_what_is_checked() -> None:
    calls: list[torch.Tensor] = []
    row = row_of(own_output(1.03, 0.05, calls))
    assert row.relative_l2 == pytest.approx(0.03, abs=2e-3)
    assert calls[0].isnan().all()  # what was offered stays poisoned


def test_an_error_beyond_the_contenders_own_bound_has_no_time() -> None:
    assert "allowed is 0.01" in error_of(own_output(1.03, 0.01, []))
    assert "allowed is 0.05" in error_of(own_output(1.06, 0.05, []))


def test_a_slow_kernel_makes_fewer_calls_over_the_same_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for us, calls in ((10.0, 16), (400.0, 14), (1200.0, 6), (10_000.0, 2)):
        monkeypatch.setattr(shape_timing, "us_of", lambda call, us=us: us)
        row = row_of(torch_decode())
        assert (row.calls, row.caches, row.us) == (calls, 2, round(160 / calls, 3))


def test_a_kernel_that_leaves_requests_open_has_a_time_and_no_error() -> None:
    def prepare(inputs: DecodeInputs) -> Call:
        return lambda kv_cache, out: None

    assert row_of(Contender("dense_mla+forward", "bf16", prepare, answers=lambda inputs: False)).relative_l2 is None
    assert "nan" in error_of(Contender("dense_mla+forward", "bf16", prepare, answers=lambda inputs: True))


def test_a_failing_peer_is_recorded_and_the_others_go_on() -> None:
    def broken(inputs: DecodeInputs) -> Call:
        raise RuntimeError("no such extension")

    evidence, alive = measured(Contender("PEER", None, broken), torch_decode())
    assert alive
    assert [(failure.kernel, failure.error) for failure in evidence.failures] == [("PEER", "RuntimeError: no such extension")]
    assert [row.kernel for row in evidence.rows] == ["dense_mla"]


def test_an_error_during_the_timing_is_every_kernels_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(shape_timing, "time_in_rounds", lost)
    evidence, _ = measured(torch_decode(), Contender("PEER", None, torch_decode().prepare))
    assert not evidence.rows
    assert [(failure.kernel, failure.error) for failure in evidence.failures] == [
        ("dense_mla", "RuntimeError: unspecified launch failure"),
        ("PEER", "RuntimeError: unspecified launch failure"),
    ]


def test_every_round_times_each_kernel_once_in_an_order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        clock = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = Event.clock

        def elapsed_time(self, other: Any) -> float:
            return float(other.at - self.at)

    order: list[str] = []

    def launch(name: str, milliseconds: float) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            Event.clock += milliseconds

        return run

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(graph_timing, "_seconds_of_round", lambda launches: 0.01)
    launches = [launch("A", 1.0), launch("B", 2.0), launch("C", 4.0)]
    queued: list[int] = []
    times = graph_timing.time_in_rounds(launches, 30, budget_s=1.0, meanwhile=lambda: queued.append(len(order)))
    assert order[:30] == ["A", "B", "C"] * 10 and queued == [120]  # 0.1 s of warm-up in rounds of 0.01 s
    rounds = [tuple(order[start : start + 3]) for start in range(30, 120, 3)]
    assert set(rounds) == set(itertools.permutations("ABC"))  # nobody always follows the same one
    assert times == [pytest.approx([1000.0] * 30), pytest.approx([2000.0] * 30), pytest.approx([4000.0] * 30)]
    assert [len(samples) for samples in graph_timing.time_in_rounds(launches, 30, budget_s=0.25)] == [25, 25, 25]
    assert [len(samples) for samples in graph_timing.time_in_rounds(launches, 30, budget_s=0.01)] == [20, 20, 20]


def test_defaults_are_the_eight_shapes_and_two_uneven_ones_in_both_dtypes_beside_three_peers(tmp_path: Path) -> None:
    args = parse_arguments(["--json", str(tmp_path / "a.json")])
    assert [shape.label for shape in args.shapes] == [*bench_decode.UNIFORM_SHAPES.split(","), *bench_decode.UNEVEN_SHAPES.split(",")]
    assert (args.heads, args.partial_dtypes, args.peers) == ([16], ["bf16", "fp32"], ["FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"])
    names = [(contender.kernel, contender.partial_dtype) for contender in our_contenders(args.partial_dtypes)]
    assert names == [("dense_mla", "bf16"), ("dense_mla", "fp32"), ("dense_mla+schedule", "bf16")]


def test_the_most_important_shapes_come_first() -> None:
    args = parse_arguments(["--heads", "8,16,64,128", "--shapes", "mixed:4:100,1x4096,8x8192", "--also", "8:1x64q8"])
    assert [(heads, shape.label) for heads, shape in ordered_work(args.heads, args.shapes, args.also, args.uneven_heads)] == [
        (16, "1x4096"), (16, "8x8192"),
        (8, "1x64q8"),
        (64, "1x4096"), (64, "8x8192"), (128, "1x4096"), (128, "8x8192"),
        (16, "mixed:4:100"),
        (8, "1x4096"), (8, "8x8192"),
        (8, "mixed:4:100"), (64, "mixed:4:100"), (128, "mixed:4:100"),
    ]  # fmt: skip


def test_uneven_batches_are_not_decoded_with_every_head_count_unless_asked_for() -> None:
    args = parse_arguments(["--heads", "8,11,12,16,24,32,64,128"])
    work = ordered_work(args.heads, args.shapes, args.also, args.uneven_heads)
    assert len(work) == 8 * 8 + 4 + 3 * 2
    assert [(heads, shape.label) for heads, shape in work[8:12]] == [(16, "1x32768q4"), (16, "32x4096q4"), (8, "1x65536"), (8, "1x65536q8")]
    assert sorted({heads for heads, shape in work if not shape.is_uniform}) == [16, 64, 128]


def test_other_heads_are_timed_beside_triton_mla_at_two_shapes_unless_it_was_asked_for() -> None:
    def with_triton(*arguments: str, heads: int) -> list[str]:
        args = parse_arguments(list(arguments))
        return [shape.label for shape in args.shapes if "TRITON_MLA" in [contender.kernel for contender in contenders_of(args, heads, shape)]]

    assert with_triton(heads=12) == with_triton("--kv-dtype", "fp8", heads=8) == ["1x4096", "32x4096"]
    for found in (with_triton(heads=64), with_triton("--peers", "TRITON_MLA", heads=12), with_triton("--kernel", "sm80", heads=8)):
        assert len(found) == 10


@pytest.mark.parametrize(
    ("arguments", "heads", "shape", "planned"),
    [([], 16, "1x4096", [2**20]), ([], 12, "1x4096", []), ([], 16, "8x8192", []), (["--planned-for", "0"], 16, "1x4096", [])],
)
def test_the_longer_capture_is_timed_beside_the_others(arguments: list[str], heads: int, shape: str, planned: list[int]) -> None:
    contenders = contenders_of(parse_arguments(arguments), heads, BatchShape.parse(shape))
    assert [contender.planned_for for contender in contenders if contender.kernel == "dense_mla+planned"] == planned
    assert contenders[0].kernel == "dense_mla" and contenders[-1].kernel == "TRITON_MLA"
    for extra in ("dense_mla+invariant", "dense_mla+forward"):
        assert [contender.kernel for contender in contenders].count(extra) == (heads == 16)


def test_the_forward_alone_is_timed_where_the_price_of_the_merge_is_asked_for() -> None:
    args = parse_arguments([])
    for label, count in (("8x8192", 1), ("mixed:4:100", 0), ("8x8192q4", 0)):
        assert [contender.kernel for contender in contenders_of(args, 16, BatchShape.parse(label))].count("dense_mla+forward") == count


def test_several_query_tokens_are_timed_beside_the_peers_that_take_them() -> None:
    args = parse_arguments([])
    assert [(heads, shape.label, shape.query_len) for heads, shape in args.also][-2:] == [(8, "1x65536", 1), (8, "1x65536q8", 8)]
    names = [contender.kernel for contender in contenders_of(args, 8, BatchShape.parse("1x65536q8"))]
    assert names == ["dense_mla", "dense_mla", "dense_mla+schedule", "FLASHMLA", "FLASH_ATTN_MLA"]


@pytest.mark.parametrize(("kv_dtype", "evidence"), [("bf16", "decode_sm80_on_h200.json"), ("fp8", "decode_sm80_fp8_on_h200.json")])
@pytest.mark.parametrize(("found", "peers"), [(True, ["TRITON_MLA", "B12X"]), (False, ["TRITON_MLA"])])
def test_the_portable_kernel_is_timed_alone_beside_its_own_peers(
    found: bool, peers: list[str], kv_dtype: str, evidence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_decode, "b12x_is_installed", lambda: found)
    args = parse_arguments(["--kernel", "sm80", "--kv-dtype", kv_dtype, "--heads", "8,16", "--also", ""])
    assert (args.also, args.json.name) == ([], evidence)
    for heads in args.heads:
        names = [contender.kernel for contender in contenders_of(args, heads, BatchShape.parse("1x4096"))]
        assert names == ["dense_mla+sm80", "dense_mla+sm80", *peers]


def test_an_e4m3_run_has_its_own_peers_bounds_and_evidence_file() -> None:
    args = parse_arguments(["--kv-dtype", "fp8", "--k-scale", "0.06"])
    assert (args.peers, args.k_scale, args.json.name) == (["FLASHMLA", "TRITON_MLA"], 0.06, "decode_fp8_h200.json")
    bounds = {contender.kernel: contender.max_relative_l2 for contender in contenders_of(args, 16, BatchShape.parse("8x8192"))}
    assert bounds["FLASHMLA"] == 0.1 and {bound for name, bound in bounds.items() if name != "FLASHMLA"} == {0.01}
    assert parse_arguments([]).json.name == "decode_h200.json"
    assert parse_arguments(["--kv-dtype", "fp8", "--json", "a.json"]).json == Path("a.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x4096,8"], "shape must be"),
        (["--peers", "FLASHMLA,FA9"], "'FA9' is not one of FLASHMLA"),
        (["--partial-dtypes", "fp16"], "'fp16' is not one of bf16, fp32"),
        (["--heads", "16,200"], "num_heads must be from 1 to 128, got 200"),
        (["--page-size", "24"], "page_size must be a positive multiple of 16, got 24"),
        (["--replays", "5"], "--replays must be at least 20, got 5"),
        (["--also", "1x65536"], "work must be HEADS:SHAPE, got '1x65536'"),
        (["--shapes", "1x4096q32"], "query_len must be from 1 to 16, got 32"),
        (["--kernel", "sm90"], "invalid choice: 'sm90'"),
        (["--kv-dtype", "fp16"], "invalid choice: 'fp16'"),
        (["--kv-dtype", "fp8", "--k-scale", "0"], "--k-scale must be a positive number, got 0.0"),
        (["--kv-dtype", "fp8", "--k-scale", "nan"], "--k-scale must be a positive number, got nan"),
        (["--k-scale", "0.5"], "--k-scale is of an E4M3 cache and needs --kv-dtype fp8, got 0.5 with --kv-dtype bf16"),
        (["--kv-dtype", "fp8", "--peers", "FLASH_ATTN_MLA"], "--peers with --kv-dtype fp8 must be of FLASHMLA, TRITON_MLA, B12X, got FLASH_ATTN_MLA"),
        (["--planned-for", "-1"], "--planned-for must be 0 or more, got -1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
