"""Small programs in place of vLLM, and the answers that they give."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.answers import Answer
from benchmarks.evidence import RunFacts
from benchmarks.served_run import ServedRun
from benchmarks.variants import PROMPT_TOKENS

FACTS = RunFacts("python x", "c0ffee", False, "NVIDIA H200", "580.1", "2.11", "0.33.0", "4.8.0", "2026-12-01T00:00:00+00:00")

# What an engine says of itself, DENSE_MLA's line with the partial dtype that it was told.
SAYS = """
import os
def says(backend):
    print(f"Using AttentionBackendEnum.{backend} backend.", flush=True)
    if backend == "DENSE_MLA":
        dtype = os.environ["VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"]
        tail = ", batch invariant" if os.environ.get("VLLM_BATCH_INVARIANT") else ""
        print(f"DENSE_MLA backend: kernel K for sm_90a, KV cache bfloat16, partial dtype {dtype} (X), workspace 8 bytes{tail}", flush=True)
    print("Capturing CUDA graphs (FULL):   0%|          | 0/5", flush=True)
"""
# Answers as vLLM's completions endpoint does for a model without a tokenizer; /health only after a moment.
FAKE_SERVER = (
    SAYS
    + """
import json, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
says("DENSE_MLA")
ready = time.monotonic() + 0.7
class Handler(BaseHTTPRequestHandler):
    def reply(self, status, content):
        self.send_response(status); self.end_headers(); self.wfile.write(json.dumps(content).encode())
    def do_GET(self):
        self.reply(200 if time.monotonic() > ready else 503, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if os.environ.get("FAKE_REFUSES"):
            return self.reply(400, {"error": "no such thing"})
        step = {"token_id:5": -0.25, "token_id:9": -2.0}
        n = body["max_tokens"]
        choice = {"token_ids": [5] * n, "logprobs": {"top_logprobs": [step] * n}}
        self.reply(200, {"choices": [{"index": i} | choice for i, _ in enumerate(body["prompt"])]})
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
)
# RESULT, its content, and the backend.
FAKE_ENGINE = (
    SAYS
    + """
import sys
says(sys.argv[3])
open(sys.argv[1], "w").write(sys.argv[2])
"""
)


def answers(logprob: float = -0.25, prompt_tokens: Sequence[int] = PROMPT_TOKENS) -> list[Answer]:
    return [Answer(n, (5,) * 48, (logprob,) * 48, ((9,),) * 48, ((-2.0,),) * 48) for n in prompt_tokens]


def fake_command(
    run: ServedRun, checkpoint: Path, scratch: Path, port: int, serve_arguments: list[str], counters: dict[str, int] | None = None
) -> list[str]:
    """In place of ServedRun.command."""
    if run.path == "serve":
        return [sys.executable, "-c", FAKE_SERVER, str(port)]
    found = answers(prompt_tokens=[length for lengths in run.rounds for length in lengths])
    content = json.dumps({"answers": [asdict(answer) for answer in found], "counters": counters or {}})
    return [sys.executable, "-c", FAKE_ENGINE, str(scratch / f"{run.name}.json"), content, run.backend]
