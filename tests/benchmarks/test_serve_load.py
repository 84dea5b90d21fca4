"""The load test's own judgement, with a small server in place of vLLM."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engines import SAYS

from benchmarks import gpu_memory, load_client, serve_load
from benchmarks.answers import Answer
from benchmarks.gpu_memory import growth_mib
from benchmarks.load_client import LoadResult
from benchmarks.request_mix import LONGEST_ANSWER, LONGEST_PROMPT, SAMPLE_PROMPTS, load_requests
from benchmarks.serve_load import LoadRun, evidence_of, loaded, parse_arguments

COUNTED = dict.fromkeys(serve_load.COUNTERS, 5.0)
LOG = [
    "Using AttentionBackendEnum.DENSE_MLA backend.",
    "DENSE_MLA backend: kernel K, KV cache bfloat16, partial dtype bf16 (X), workspace 8 bytes",
    "Capturing CUDA graphs (FULL): 100%",
]
FLAT = [(float(second), 1000) for second in range(8)]

# Completions as vLLM answers them; `fault` makes it misbehave once it is under load, which it knows by the number of requests.
FAKE_SERVER = (
    SAYS
    + """
import json, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, fault = int(sys.argv[1]), sys.argv[2]
says("DENSE_MLA")
lock, served, broken = threading.Lock(), 0, False
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content, kind="application/json"):
        self.send_response(status); self.send_header("Content-Type", kind); self.end_headers()
        self.wfile.write(content if isinstance(content, bytes) else json.dumps(content).encode())
    def do_GET(self):
        if self.path == "/health":
            return self.reply(200, {})
        names = ("num_preemptions", "prefix_cache_hits", "prefix_cache_queries", "prompt_tokens", "generation_tokens")
        lines = [f'vllm:{name}_total{{engine="0"}} {0.0 if fault == "calm" and name == "num_preemptions" else served}' for name in names]
        self.reply(200, ("# HELP\\n" + "\\n".join(lines)).encode(), "text/plain")
    def do_POST(self):
        global served, broken
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            served += 1
            loaded = served > 40
            first = served > 60 and not broken and not body.get("stream")
            broken = broken or first
        if body.get("stream"):
            return self.reply(200, b"data: {}\\n\\n" * 3)
        if fault == "hang" and broken:
            return time.sleep(60)
        if fault == "dead" and first:
            os._exit(1)
        if fault == "compiles" and first:
            print("WARNING Triton kernel JIT compilation during inference: _merge. This causes a latency spike", flush=True)
        if fault == "error" and first:
            print("(EngineCore pid=1) ERROR x", flush=True)
            return self.reply(500, {"error": "EngineDeadError"})
        tokens = [5 + len(body["prompt"][0]) % 3] * body["max_tokens"]
        logprob = -0.9 if fault == "drift" and loaded else -0.25
        top = {f"token_id:{tokens[0]}": float("nan") if fault == "nan" and first else logprob, "token_id:9": -2.0}
        self.reply(200, {"choices": [{"index": 0, "token_ids": tokens, "logprobs": {"top_logprobs": [top] * len(tokens)}}]})
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
class Server(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True
Server(("127.0.0.1", port), Handler).serve_forever()
"""
)


def run(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = 60, saved: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    monkeypatch.setattr(gpu_memory, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(gpu_memory, "used_mib", lambda: 1000)
    monkeypatch.setattr(serve_load, "server_command", lambda args, checkpoint, port: [sys.executable, "-c", FAKE_SERVER, str(port), fault])
    args = parse_arguments(["--requests", "240", "--clients", "16", "--json", str(folder / "a.json")])
    return loaded(args, folder, folder / "a.log", time.monotonic() + seconds, ([] if saved is None else saved).append)


def test_a_load_that_keeps_every_promise_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run("none", tmp_path, monkeypatch)
    assert (content["passed"], content["unmet"], content["exit_status"]) == (True, [], 0)
    assert content["completed"] + content["aborted"] == 240 and content["aborted"] > 5
    assert len(content["comparisons"]) == 2 * len(SAMPLE_PROMPTS)
    assert content["counters"]["vllm:num_preemptions"] > 200
    assert content["gpu_memory_growth_mib"] == 0


@pytest.mark.parametrize(
    ("fault", "unmet"),
    [
        ("error", "1 of 240 requests failed"),
        ("nan", "1 of 240 requests failed"),
        ("drift", "an answer under load differs from the quiet one"),
        ("calm", "no preemption: the load did not test it"),
        ("compiles", "compiled while serving: Triton kernel JIT compilation: _merge"),
    ],
)
def test_a_broken_promise_fails(fault: str, unmet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run(fault, tmp_path, monkeypatch)
    assert not content["passed"]
    assert any(unmet in line for line in content["unmet"]), content["unmet"]


@pytest.mark.parametrize(("fault", "seconds"), [("dead", 60), ("hang", 8)])
def test_a_server_that_dies_or_hangs_leaves_what_came_before(fault: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run(fault, tmp_path, monkeypatch, seconds)
    assert content["unmet"][0].startswith("not finished: ") and not content["passed"]
    assert content["completed"] > 20 and content["errors"] and content["seconds"] > 0 and content["gpu_memory_mib"]
    assert any("requests failed" in line for line in content["unmet"])


def test_the_evidence_is_written_while_the_load_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "SAVED_EVERY_S", 0.01)
    saved: list[dict[str, Any]] = []
    run("none", tmp_path, monkeypatch, saved=saved)
    assert len(saved) > 3 and saved[0]["unmet"][0] == "not finished: the server has not started yet"
    assert saved[1]["unmet"][0] == "not finished: the load" and [content["passed"] for content in saved] == [False] * (len(saved) - 1) + [True]
    done = [content["completed"] for content in saved]
    assert done == sorted(done) and 0 < done[-2] <= done[-1]


def test_only_errors_from_the_healthy_server_to_its_shutdown_count() -> None:
    lines = [*LOG, "ERROR while it starts", "ERROR at the first request", "ERROR at the last", "ERROR at its shutdown"]
    unmet = evidence_of(LoadRun(1, log=lines, served_lines=(4, 6)), "bf16", 1)
    assert unmet["log_errors"] == lines[4:6]


def test_a_server_that_does_not_start_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_load, "server_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    content = loaded(parse_arguments([]), tmp_path, tmp_path / "a.log", time.monotonic() + 30)
    assert not content["passed"] and "the server has not started yet: RuntimeError: the server ended with status 3" in content["unmet"][0]


ANSWER = Answer(1, (5,), (-0.2,), ((9,),), ((-2.0,),))


def judged(memory: Any = FLAT, counted: Any = COUNTED, log: Any = LOG, exit_status: int = 0, again: Any = (ANSWER,), **changes: Any) -> list[str]:
    result = LoadResult(**{"completed": 9, "aborted": 1, "seconds": 1.0, "latencies": [1.0] * 9, "sampled": [(0, ANSWER)]} | changes)
    load = LoadRun(10, result, memory, [ANSWER], again, counted, log, exit_status=exit_status, unfinished=None)
    unmet: list[str] = evidence_of(load, "bf16", 100)["unmet"]
    return unmet


def test_what_has_to_be_met() -> None:
    assert judged() == []
    assert judged(memory=[*FLAT, (9.0, 1065)]) == ["GPU memory grew by 65 MiB after the first quarter, allowed is 64"]
    assert judged(memory=[]) == ["GPU memory grew by None MiB after the first quarter, allowed is 64"]
    assert judged(completed=8) == ["8 answered + 1 aborted of 10 requests"]
    assert judged(aborted=0, completed=10) == ["no aborted request: the load did not test it"]
    assert judged(sampled=[]) == ["no answer of the sample: the load did not test it"]
    assert judged(counted=COUNTED | {"vllm:prefix_cache_hits": 0.0}) == ["no prefix-cache hit: the load did not test it"]
    spared = ["no token that an aborted request was spared: the load did not test it"]
    assert judged(counted=COUNTED | {"vllm:generation_tokens": 100.0}) == spared
    assert judged(again=()) == ["no quiet answer after the load: the load did not test it"]
    assert judged(log=LOG[1:]) == ["the log does not say that DENSE_MLA was used"]
    assert judged(log=[*LOG, "ERROR x"]) == ["the log holds 1 error lines"]
    assert judged(exit_status=-15) == [] and judged(exit_status=-9) == ["the server shut down with status -9"]


def test_memory_growth_is_what_comes_after_the_first_quarter() -> None:
    assert growth_mib([(0, 10), (1, 50), (2, 40), (3, 50), (4, 55), (5, 45), (6, 50), (7, 50)]) == 5
    assert growth_mib([(0, 10), (1, 50), (2, 40)]) is None
    assert growth_mib([(0, 50), (1, 40), (2, 40), (3, 40)]) == 0


def test_the_load_is_mixed_and_the_same_every_time() -> None:
    requests = load_requests(2000)
    assert requests == load_requests(2000)
    lengths = sorted(len(request.prompt) for request in requests)
    assert lengths[0] == 1 and LONGEST_PROMPT * 0.9 < lengths[-1] <= LONGEST_PROMPT
    assert max(request.max_tokens for request in requests) <= LONGEST_ANSWER
    assert 60 < sum(request.aborted for request in requests) < 140
    assert {request.sample for request in requests} == {None, *range(len(SAMPLE_PROMPTS))}
    beginnings = [request.prompt[:1024] for request in requests if len(request.prompt) > 1024 and request.sample is None]
    assert len(set(beginnings)) < len(beginnings) / 2


def test_vllm_takes_the_servers_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.common.cli_args import make_arg_parser
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if not current_platform.device_type:  # the parser asks for the kind of device
        monkeypatch.setattr(current_platform, "device_type", "cuda")
    command = serve_load.server_command(parse_arguments([]), tmp_path, 8123)
    parsed: Any = make_arg_parser(FlexibleArgumentParser()).parse_args(command[command.index("serve") + 1 :])
    assert (parsed.jit_monitor_mode, parsed.num_gpu_blocks_override, parsed.block_size, parsed.max_num_seqs) == ("warn", 500, 64, 64)
    assert parsed.enable_prefix_caching is True and parsed.attention_backend == "DENSE_MLA"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--requests", "100"], "--requests must be at least 240, got 100"), (["--kv-blocks", "64"], "--kv-blocks must be at least 130, got 64")],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
