"""Decode throughput: which steps count, engines that are measured one at a time, and the file that comes of it."""

import itertools
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engines import FACTS, SAYS

from benchmarks import throughput_engine
from benchmarks.serve_throughput import ThroughputRun, earlier_engines, engine_options, evidence_of, measured, parse_arguments, rows_of
from benchmarks.throughput_engine import prompt, step_times

pytest.importorskip("vllm")

# Ready after a moment, measures for a moment, and notes when. FLASHMLA ends after its first row, SLOW never, NONE says that it is TRITON_MLA.
FAKE_ENGINE = (
    SAYS
    + """
import json, sys, time
from pathlib import Path
result, spans, backend, seconds = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
says("TRITON_MLA" if backend == "NONE" else backend)
time.sleep(seconds)
result.with_suffix(".ready").touch()
while not result.with_suffix(".go").exists():
    time.sleep(0.01)
begin = time.time()
time.sleep(0.2)
rows = [
    {"batch": batch, "context": 1024, "runs": [{"tokens_per_s": n * batch, "step_ms_samples": [1.0]} for n in (5.0, 9.0, 7.0)]} for batch in (1, 8)
]
def write(rows):  # at once, as the engine does: who reads meanwhile must not find half a file
    scratch = result.with_suffix(".scratch")
    scratch.write_text(json.dumps({"measurements": rows}))
    scratch.replace(result)
write(rows[:1])
if backend == "FLASHMLA":
    sys.exit("no such kernel")
time.sleep(60 if backend == "SLOW" else 0.2)
write(rows)
with spans.open("a") as file:
    file.write(json.dumps([begin, time.time(), os.environ.get("VLLM_K3_DENSE_MLA_PARTIAL_DTYPE")]) + "\\n")
"""
)


class FakeEngine:
    """Prefills one request a step, then decodes all of them; a step takes as many milliseconds as it has requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: dict[str, list[int]] = {}
        self.limits: dict[str, int] = {}
        self.waiting: list[str] = []
        self.now = 0.0
        self.seen: list[tuple[str, int]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def add_request(self, name: str, content: dict[str, list[int]], sampling: Any) -> None:
        self.waiting.append(name)
        self.limits[name] = sampling.max_tokens
        self.seen.append((name, len(content["prompt_token_ids"])))

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.requests)

    def step(self) -> list[Any]:
        if self.waiting:
            self.requests[self.waiting.pop(0)] = []
        self.now += len(self.requests) / 1e3
        outputs = []
        for name, tokens in list(self.requests.items()):
            tokens.append(1)
            finished = len(tokens) == self.limits[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(tokens))], finished=finished))
            if finished:
                del self.requests[name]
        return outputs


def test_only_steps_that_decode_every_request_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # The fourth request starts in step 4 and the first one ends in step 20: steps 4 to 19 decode all, with 15 spans between them.
    steps = step_times(FakeEngine(monkeypatch), [[1]] * 4, 20, "run")
    assert steps == [pytest.approx(4.0)] * 15


def test_a_run_that_never_decodes_its_whole_batch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="only 3 steps of 16 decoded all of 12 requests"):
        step_times(FakeEngine(monkeypatch), [[1]] * 12, 16, "run")


def test_every_batch_and_context_has_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(monkeypatch)
    rows = list(throughput_engine.measure(engine, {"batches": [1, 4], "contexts": [10, 30], "runs": 3, "tokens": 16}))
    assert [(row["batch"], row["context"], len(row["runs"])) for row in rows] == [(1, 10, 3), (4, 10, 3), (1, 30, 3), (4, 30, 3)]
    assert [run["tokens_per_s"] for run in rows[1]["runs"]] == [1000.0] * 3  # 4 tokens in 4 ms
    assert len(rows[1]["runs"][0]["step_ms_samples"]) == 11
    assert engine.seen[:4] == [(f"fill-{i}", 30) for i in range(4)]  # the longest prompts first
    assert len({name for name, _ in engine.seen}) == len(engine.seen)


def test_prompts_differ_and_longer_ones_begin_with_the_shorter() -> None:
    assert prompt(3, 100)[:40] == prompt(3, 40)
    assert prompt(3, 40) != prompt(4, 40)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    spans = tmp_path / "spans"

    def command(self: ThroughputRun, checkpoint: Path, result: Path, options: Any, plan: Any) -> list[str]:
        # FP32's engine starts last and is measured second all the same.
        return [sys.executable, "-c", FAKE_ENGINE, str(result), str(spans), self.backend, "0.5" if self.partial_dtype == "fp32" else "0"]

    monkeypatch.setattr(ThroughputRun, "command", command)
    return spans


def arguments_of(backends: str, folder: Path) -> Any:
    shapes = ["--together", "4", "--layers", "1", "--contexts", "1024", "--batches", "1,8"]
    return parse_arguments(["--backends", backends, *shapes, "--json", str(folder / "out" / "a.json")])


def test_engines_start_together_and_are_measured_one_at_a_time(fake_engine: Path, tmp_path: Path) -> None:
    args = arguments_of("DENSE_MLA,FLASHMLA,TRITON_MLA", tmp_path)
    engines = dict(measured(args.engine_runs, args, time.monotonic() + 60))
    assert list(engines) == ["throughput_dense_mla_bf16", "throughput_dense_mla_fp32", "throughput_flashmla", "throughput_triton_mla"]
    assert [engine["error"] for engine in engines.values()] == [None, None, "the engine ended with status 1", None]
    spans = [json.loads(line) for line in fake_engine.read_text().splitlines()]
    assert [dtype for _, _, dtype in spans] == ["bf16", "fp32", None]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    rows = rows_of(engines)
    assert [(row["kernel"], row["partial_dtype"], row["tokens_per_s"]) for row in rows] == [
        ("DENSE_MLA", "bf16", 7.0), ("DENSE_MLA", "bf16", 56.0), ("DENSE_MLA", "fp32", 7.0), ("DENSE_MLA", "fp32", 56.0),
        ("FLASHMLA", None, 7.0), ("TRITON_MLA", None, 7.0), ("TRITON_MLA", None, 56.0),
    ]  # fmt: skip
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(evidence_of(FACTS, args, engines)))
    assert earlier_engines(path) == {name: {"source": "c0ffee"} | engine for name, engine in engines.items()}


def test_what_an_engine_has_measured_is_there_before_it_ends(fake_engine: Path, tmp_path: Path) -> None:
    args = arguments_of("SLOW,TRITON_MLA", tmp_path)
    found = measured(args.engine_runs, args, time.monotonic() + 3)
    name, first = next(found)
    content = evidence_of(FACTS, args, {name: first})
    assert (first["error"], content["not_run"], len(content["rows"])) == ("not finished", ["throughput_triton_mla"], 1)
    rest = list(found)
    assert [(name, record["error"], len(record["measurements"])) for name, record in rest] == [
        ("throughput_slow", "still running at the time limit", 1), ("throughput_triton_mla", "still running at the time limit", 0),
    ]  # fmt: skip


def test_a_measurement_of_another_backend_or_of_less_than_was_asked_for_is_none(fake_engine: Path, tmp_path: Path) -> None:
    args = arguments_of("NONE", tmp_path)
    (engine,) = dict(measured(args.engine_runs, args, time.monotonic() + 60)).values()
    assert (engine["error"], engine["measurements"]) == ("the log does not say that NONE was used", [])
    args.batches = [1, 8, 64]
    args.engine_runs = [ThroughputRun("TRITON_MLA", None)]
    (engine,) = dict(measured(args.engine_runs, args, time.monotonic() + 60)).values()
    assert (
        engine["error"] == "the (context, batch, runs) measured must be [(1024, 1, 3), (1024, 8, 3), (1024, 64, 3)], got [(1024, 1, 3), (1024, 8, 3)]"
    )
    assert len(rows_of({"x": engine})) == 2


def test_vllm_takes_the_engine_options_and_the_cache_holds_every_prompt() -> None:
    from vllm.engine.arg_utils import EngineArgs

    options = engine_options(parse_arguments([]), "FLASHMLA")
    assert options.keys() <= {field.name for field in fields(EngineArgs)}
    assert options["kv_cache_memory_bytes"] > 64 * 32768 * 4 * 1152
    assert options["max_model_len"] == 33792 and options["compilation_config"]["cudagraph_capture_sizes"] == [1, 8, 64]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "8"], "--tokens must be at least 16, got 8"),
        (["--batches", "1,0"], "must be numbers from 1, got '1,0'"),
        (["--backends", ","], "--backends names none"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
