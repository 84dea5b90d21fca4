"""The judgement over a shape's kernels, on the CPU: graphs are replaced by lists of calls, kernels by torch. And what a graph needs to live."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode_inputs, graph_timing, shape_timing
from benchmarks.batch_shape import BatchShape
from benchmarks.contenders import Contender
from benchmarks.decode_inputs import Call, DecodeInputs
from benchmarks.evidence import DecodeEvidence, DecodeRow, RunFacts
from benchmarks.shape_timing import CapturedDecode, ShapeTiming

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


class Workspace:
    """Something that a call owns and a graph only has the address of."""


def test_a_captured_decode_keeps_what_its_graph_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph owns no memory: with the call gone, its workspace and schedule went to the next contender while the graph was still replayed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(shape_timing, "us_of", lambda call: 10.0)
    monkeypatch.setattr(shape_timing, "capture", lambda calls: SimpleNamespace(replay=lambda: None))
    owned: list[weakref.ref[Workspace]] = []

    def prepare(inputs: Any) -> Any:
        workspace = Workspace()
        owned.append(weakref.ref(workspace))

        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
            assert isinstance(workspace, Workspace)

        return call

    inputs = SimpleNamespace(caches=torch.zeros(2, 1), calls=2, empty_outputs=lambda: torch.zeros(2, 1))
    decode = CapturedDecode.of(Contender("dense_mla", "bf16", prepare), inputs)  # type: ignore[arg-type]
    gc.collect()
    assert owned[0]() is not None
    del decode
    gc.collect()
    assert owned[0]() is None
