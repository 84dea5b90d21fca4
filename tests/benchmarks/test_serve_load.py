"""The load test's own judgement, with a small server in place of vLLM."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_memory, serve_load
from benchmarks.answers import Answer
from benchmarks.gpu_memory import growth_mib
from benchmarks.request_mix import LONGEST_ANSWER, LONGEST_PROMPT, SAMPLE_PROMPTS, load_requests
from benchmarks.serve_load import LoadResult, evidence_of, loaded, parse_arguments

COUNTED = dict.fromkeys(serve_load.COUNTERS, 5.0)
FLAT = [(float(second), 1000) for second in range(8)]

# Completions as vLLM answers them; `fault` makes it misbehave once it is under load, which it knows by the number of requests.
FAKE_SERVER = """
import json, signal, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
port, fault = int(sys.argv[1]), sys.argv[2]
print("Using AttentionBackendEnum.DENSE_MLA backend.", flush=True)
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
        if fault == "error" and first:
            print("ERROR: x ERROR y", flush=True)
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


def run(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(gpu_memory, "INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr(gpu_memory, "used_mib", lambda: 1000)
    monkeypatch.setattr(serve_load, "server_command", lambda args, checkpoint, port: [sys.executable, "-c", FAKE_SERVER, str(port), fault])
    args = parse_arguments(["--requests", "240", "--clients", "16", "--json", str(folder / "a.json")])
    return loaded(args, folder, folder / "a.log", time.monotonic() + 60)


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
    ],
)
def test_a_broken_promise_fails(fault: str, unmet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = run(fault, tmp_path, monkeypatch)
    assert not content["passed"]
    assert any(unmet in line for line in content["unmet"]), content["unmet"]


def test_a_server_that_does_not_start_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_load, "server_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    content = loaded(parse_arguments([]), tmp_path, tmp_path / "a.log", time.monotonic() + 30)
    assert not content["passed"] and "ended with status 3" in content["unmet"][0]


def judged(memory: Any = FLAT, counted: Any = COUNTED, **changes: Any) -> list[str]:
    answer = Answer(1, (5,), (-0.2,), (9,), (-2.0,))
    result = LoadResult(**{"completed": 9, "aborted": 1, "seconds": 1.0, "latencies": [1.0] * 9, "sampled": [(0, answer)]} | changes)
    unmet: list[str] = evidence_of(10, result, counted, memory, [answer], [answer])["unmet"]
    return unmet


def test_what_has_to_be_met() -> None:
    assert judged() == []
    assert judged(memory=[*FLAT, (9.0, 1065)]) == ["GPU memory grew by 65 MiB after the first quarter, allowed is 64"]
    assert judged(memory=[]) == ["GPU memory grew by None MiB after the first quarter, allowed is 64"]
    assert judged(completed=8) == ["8 answered + 1 aborted of 10 requests"]
    assert judged(aborted=0, completed=10) == ["no aborted request: the load did not test it"]
    assert judged(sampled=[]) == ["no answer of the sample: the load did not test it"]
    assert judged(counted=COUNTED | {"vllm:prefix_cache_hits": 0.0}) == ["no prefix-cache hit: the load did not test it"]


def test_memory_growth_is_what_comes_after_the_first_quarter() -> None:
    assert growth_mib([(0, 10), (1, 50), (2, 40), (3, 50), (4, 55), (5, 45), (6, 50), (7, 50)]) == 5
    assert growth_mib([(0, 10), (1, 50), (2, 40)]) is None
    assert growth_mib([(0, 50), (1, 40), (2, 40), (3, 40)]) == 0


def test_error_lines() -> None:
    lines = ["INFO fine", "(EngineCore pid=1) ERROR 12-01 [core.py] dead", "Traceback (most recent call last):", "no errors here"]
    assert serve_load.error_lines(lines) == lines[1:3]


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
    assert (parsed.jit_monitor_mode, parsed.num_gpu_blocks_override, parsed.block_size, parsed.max_num_seqs) == ("error", 500, 64, 64)
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
