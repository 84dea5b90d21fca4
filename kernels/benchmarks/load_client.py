"""The clients of a load: requests from many threads, and what came back of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from benchmarks.answers import Answer
from benchmarks.engine_process import hang_up, post
from benchmarks.evidence import error_text
from benchmarks.request_mix import LoadRequest, sample_requests
from benchmarks.served_run import answer_of, completion_body

SAVED_EVERY_S = 5.0


@dataclass
class LoadResult:
    """What came back of a load; `seconds` since its start, and so are `latencies`. `sampled` are answers to the sample, by its index."""

    completed: int = 0
    aborted: int = 0
    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    sampled: list[tuple[int, Answer]] = field(default_factory=list)


def quiet_answers(port: int, deadline: float) -> list[Answer]:
    """The sample's answers, one request at a time."""
    return [answered(port, request, deadline) for request in sample_requests()]


def answered(port: int, request: LoadRequest, deadline: float) -> Answer:
    """The answer to one request.

    Raises:
        RuntimeError: an HTTP error.
        ValueError: an answer without the tokens that were asked for, or with a logprob that is not finite.
    """
    choice = post(port, "/v1/completions", completion_body([list(request.prompt)], request.max_tokens), deadline)["choices"][0]
    answer = answer_of(len(request.prompt), choice)
    if len(answer.ids) != request.max_tokens:
        raise ValueError(f"asked for {request.max_tokens} tokens after {len(request.prompt)}, got {len(answer.ids)}")
    return answer


def under_load(
    port: int, requests: Sequence[LoadRequest], clients: int, deadline: float, result: LoadResult, progress: Callable[[], None] = lambda: None
) -> None:
    """Send all requests from `clients` threads, each as soon as one is free, and none after the deadline.

    `result` grows while they are under way; `progress` is called every few seconds. However this is left, no further request is sent.
    """
    lock, begin = threading.Lock(), time.monotonic()

    def send(request: LoadRequest) -> None:
        sent = time.monotonic()
        if sent > deadline:
            return
        try:
            if request.aborted:
                hang_up(port, "/v1/completions", completion_body([list(request.prompt)], request.max_tokens) | {"stream": True}, deadline)
                with lock:
                    result.aborted += 1
                return
            answer = answered(port, request, deadline)
        except Exception as error:
            with lock:
                result.errors.append(error_text(error, 300))
            return
        with lock:
            result.completed += 1
            result.latencies.append(time.monotonic() - sent)
            if request.sample is not None:
                result.sampled.append((request.sample, answer))

    pool = ThreadPoolExecutor(clients)
    try:
        pending = {pool.submit(send, request) for request in requests}
        while pending:
            _, pending = wait(pending, timeout=SAVED_EVERY_S)
            result.seconds = time.monotonic() - begin
            progress()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a server that hangs would hold up a thread until the deadline
