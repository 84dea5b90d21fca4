"""A vLLM process with its log: started in a process group of its own, and never left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NOTABLE = re.compile(
    r"DENSE_MLA|dense_mla|Using \S+ (attention )?backend|CUDA ?[Gg]raph|cudagraph|JIT|rows.*slots|attention block size|store kv cache"
)
MAX_NOTABLE_LINES = 80
STOP_SECONDS = 45.0

# Loopback only: a proxy from the environment has no business here.
_LOCAL = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineProcess:
    """One child process and the file with its stdout and stderr."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.command = list(command)
        self.log = log
        with log.open("wb") as sink:
            # A group and no session: whoever ends this session still reaches the engine's own children.
            self._process = subprocess.Popen(
                self.command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, process_group=0
            )

    def wait(self, deadline: float) -> int:
        """Exit status. TimeoutError once `time.monotonic()` passes the deadline."""
        try:
            return self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"still running at the time limit: {self.log.name}") from None

    def exit_status(self) -> int | None:
        """Exit status, `None` while it runs."""
        return self._process.poll()

    def stop(self) -> int:
        """Ask it to shut down as an operator would, with SIGTERM to the server alone; its exit status. What is left then is killed."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self.wait(time.monotonic() + STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and its children now. Harmless when they have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def log_lines(self) -> list[str]:
        """The log so far. A progress bar is a line a state."""
        return re.split(r"[\r\n]+", self.log.read_text(errors="replace"))

    def notable_lines(self) -> list[str]:
        """Lines about the attention backend, its workspace table and CUDA graphs, without repeated progress."""
        lines = [line.strip() for line in self.log_lines() if NOTABLE.search(line)]
        finished = [line for line in dict.fromkeys(lines) if "%|" not in line or "100%|" in line]
        return [line[:400] for line in finished[:MAX_NOTABLE_LINES]]


def wait_until_healthy(server: EngineProcess, port: int, deadline: float) -> None:
    """Return when the server answers /health.

    Raises:
        RuntimeError: it ended.
        TimeoutError: `time.monotonic()` passed the deadline.
    """
    while True:
        if (status := server.exit_status()) is not None:
            raise RuntimeError(f"the server ended with status {status} before it was healthy")
        try:
            with _LOCAL.open(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > deadline:
                raise TimeoutError("the server was not healthy at the time limit") from None
            time.sleep(0.5)


def post(port: int, path: str, body: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    """JSON answer to a JSON request. RuntimeError with the server's own text for an HTTP error."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    try:
        with _LOCAL.open(request, timeout=max(deadline - time.monotonic(), 1)) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"POST {path} answered {error.code}: {error.read().decode(errors='replace')[:500]}") from error


def hang_up(port: int, path: str, body: Mapping[str, Any], deadline: float) -> None:
    """Send a streaming request and close the connection at the first line of its answer. RuntimeError for an HTTP error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(deadline - time.monotonic(), 1))
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"POST {path} answered {response.status}: {response.read(500).decode(errors='replace')}")
        response.readline()


def metrics(port: int, names: Sequence[str]) -> dict[str, float]:
    """Sums over all labels of the server's counters; a name is given without its `_total`."""
    with _LOCAL.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = [line.rsplit(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return {name: sum(float(value) for label, value in found if label.split("{")[0] == f"{name}_total") for name in names}


def free_port() -> int:
    """A TCP port that nothing listens on. Below the range that the kernel hands out: a server takes half a minute to get to its port."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """SIGTERM raises SystemExit here: `finally` clauses run, and no child stays behind."""

    def stop(_signal: int, _frame: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
