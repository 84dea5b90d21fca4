"""One run of the tiny model: a backend, a partial dtype, and either vLLM's offline engine or `vllm serve` over HTTP."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.answers import LOGPROBS, MAX_TOKENS, Answer
from benchmarks.engine_log import OURS, unsaid
from benchmarks.engine_process import EngineProcess, free_port, metrics, post, wait_until_healthy
from benchmarks.evidence import error_text
from benchmarks.gpu_memory import processes_by_gpu
from benchmarks.variants import PLAIN, PROMPT_TOKENS, Variant, prompts, variant_of

PARTIAL_DTYPE_VARIABLE = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"
MODEL_NAME = "tiny-mla"
VLLM_COMMAND = "vllm.entrypoints.cli.main"
ENTRY_POINT_GROUP = "vllm.general_plugins"
OFFLINE_ENGINE = Path(__file__).with_name("offline_engine.py")
UNTUNED = Path(__file__).with_name("untuned.py")

# One list for both ways to start: a difference between them would be a difference between the answers. KV cache by bytes, because runs side
# by side on one GPU would count each other's memory in a profile.
ENGINE_OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": 8192,
    "max_num_seqs": 16,
    "seed": 0,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**30,
}
# What vLLM does by itself, which is torch.compile with full graphs of decode steps and piecewise ones of the others; or no compilation, full graphs
# of decode steps alone, and Triton kernels that are not tuned (untuned.py): it starts sooner.
VLLMS_OWN, UNCOMPILED = "vllm", "none"
COMPILATIONS: dict[str, dict[str, Any]] = {
    VLLMS_OWN: {},
    UNCOMPILED: {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}


@dataclass(frozen=True)
class ServedRun:
    """What to start. `own_rounds` are the lengths of the prompts where the variant has none of its own, `compilation` is a key of `COMPILATIONS`."""

    path: Literal["offline", "serve"]
    backend: str
    partial_dtype: str | None = None
    variant_name: str = PLAIN
    own_rounds: tuple[tuple[int, ...], ...] = (PROMPT_TOKENS,)
    compilation: str = VLLMS_OWN

    @property
    def name(self) -> str:
        """Name in the evidence and of the log file."""
        variant = None if self.variant_name == PLAIN else self.variant_name
        return "_".join(part.lower() for part in (self.path, self.backend, self.partial_dtype, variant) if part)

    @property
    def variant(self) -> Variant:
        """How the model is served."""
        return variant_of(self.variant_name)

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """Lengths of the prompts, a batch after the other."""
        return self.variant.rounds or self.own_rounds

    @property
    def options(self) -> dict[str, Any]:
        """Engine options."""
        return ENGINE_OPTIONS | COMPILATIONS[self.compilation] | dict(self.variant.options)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that this run sets."""
        return dict(self.variant.environment) | ({PARTIAL_DTYPE_VARIABLE: self.partial_dtype} if self.partial_dtype else {})

    def command(self, checkpoint: Path, scratch: Path, port: int, serve_arguments: list[str]) -> list[str]:
        """Command line of the child."""
        if self.path == "offline":
            options = self.options | {"attention_backend": self.backend}
            arguments = [str(checkpoint), str(scratch / f"{self.name}.json"), json.dumps(options), json.dumps(self.rounds)]
            program = [str(UNTUNED), "benchmarks.offline_engine"] if self.compilation == UNCOMPILED else [str(OFFLINE_ENGINE)]
            return [sys.executable, *program, *arguments]
        program = [str(UNTUNED), VLLM_COMMAND] if self.compilation == UNCOMPILED else ["-m", VLLM_COMMAND]
        return [sys.executable, *program, "serve", str(checkpoint), *server_arguments(self.backend, port, self.options), *serve_arguments]


@dataclass
class RunRecord:
    """What came of a run, as the evidence holds it. `error` is None exactly if it answered every prompt, shut down by itself, and its log says that
    it served as it was asked to.

    `source` is the commit that was served, where the run is of an earlier file; None is the file's own.
    `gpu_processes`, of a server on several GPUs: the processes on each, by their ids; empty where the driver does not tell.
    """

    name: str
    path: str
    backend: str
    partial_dtype: str | None
    variant: str = PLAIN
    source: str | None = None
    command: str = ""
    seconds: float = 0.0
    exit_status: int | None = None
    error: str | None = None
    log_lines: list[str] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    gpu_processes: dict[str, list[int]] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunRecord:
        """From an earlier evidence file."""
        return cls(**dict(content) | {"answers": [Answer.from_json(answer) for answer in content["answers"]]})

    def to_json(self) -> dict[str, Any]:
        """A plain object."""
        return asdict(self)


def server_arguments(backend: str, port: int, options: Mapping[str, Any] = ENGINE_OPTIONS) -> list[str]:
    """Arguments of `vllm serve` after the model: the options of the offline engine, strict about the environment, on loopback."""
    options = dict(options)
    compilation = options.pop("compilation_config", {})
    if not options.get("disable_log_stats", True):  # as a server does by itself; it has a flag for the opposite alone
        del options["disable_log_stats"]
    arguments = ["--attention-backend", backend, "--fail-on-environ-validation", "--served-model-name", MODEL_NAME]
    arguments += ["--host", "127.0.0.1", "--port", str(port), *(f"-cc.{name}={value}" for name, value in compilation.items())]
    for name, value in options.items():
        flag = name.replace("_", "-")
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        arguments += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", text]
    return arguments


def execute(
    run: ServedRun, checkpoint: Path, scratch: Path, log: Path, deadline: float, serve_arguments: list[str], started: Callable[[EngineProcess], None]
) -> RunRecord:
    """Start the run, get its answers, end it. Errors are in the record, not raised. `started` gets the process, to end it from outside."""
    record = RunRecord(run.name, run.path, run.backend, run.partial_dtype, run.variant_name)
    port, begin = free_port(), time.monotonic()
    command = run.command(checkpoint, scratch, port, serve_arguments)
    record.command = recorded_child(command, run.environment, checkpoint, scratch)
    process = EngineProcess(command, {"HF_HUB_OFFLINE": "1", **run.environment}, log)  # the checkpoint is all there is to load
    started(process)
    try:
        if run.path == "offline":
            record.exit_status = process.wait(deadline)
            if record.exit_status:
                raise RuntimeError(f"the offline engine ended with status {record.exit_status}")
            content = json.loads((scratch / f"{run.name}.json").read_text())
            record.answers = [Answer.from_json(answer) for answer in content["answers"]]
            record.counters = content["counters"]
        else:
            wait_until_healthy(process, port, deadline)
            record.answers = [answer for lengths in run.rounds for answer in complete(port, prompts(lengths), deadline)]
            record.counters = metrics(port, [run.variant.exercised]) if run.variant.exercised else {}
            record.gpu_processes = processes_by_gpu() if run.variant.gpus > 1 else {}
            record.exit_status = process.stop()
            if record.exit_status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
                raise RuntimeError(f"the server shut down with status {record.exit_status}")
        check_answers(record.answers, run.rounds)
        if run.variant.exercised and not record.counters.get(run.variant.exercised):
            raise RuntimeError(f"{run.variant.exercised} is 0 at the end: the run shows nothing of {run.variant_name}")
        if everywhere := on_several(record.gpu_processes):
            raise RuntimeError(f"every rank must keep to its own GPU, but these processes were on several: {everywhere}")
        check_log(run, process.log_lines())
    except Exception as error:  # the other runs go on; this one's record says what happened
        record.error = error_text(error)
    finally:
        process.kill()
    record.seconds = round(time.monotonic() - begin, 1)
    record.log_lines = process.notable_lines()
    return record


def complete(port: int, asked: Sequence[Sequence[int]], deadline: float) -> list[Answer]:
    """Greedy answers to prompts from the completions endpoint, in one request: the batch of the offline run."""
    choices = post(port, "/v1/completions", completion_body(asked, MAX_TOKENS), deadline)["choices"]
    if [choice["index"] for choice in choices] != list(range(len(asked))):
        raise RuntimeError(f"the server answered prompts {[choice['index'] for choice in choices]} of {len(asked)}")
    return [answer_of(len(prompt), choice) for prompt, choice in zip(asked, choices)]


def completion_body(asked: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    """A request for greedy answers with the logprobs of the likeliest tokens."""
    return {
        "model": MODEL_NAME,
        "prompt": asked,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
        "logprobs": LOGPROBS,
        "return_tokens_as_token_ids": True,  # without a tokenizer there is no other name for a token
    }


def answer_of(prompt_tokens: int, choice: Mapping[str, Any]) -> Answer:
    """Answer in one choice of a completion, whose tokens are named `token_id:N`."""
    steps = [{int(name.removeprefix("token_id:")): value for name, value in step.items()} for step in choice["logprobs"]["top_logprobs"]]
    return Answer.from_steps(prompt_tokens, choice["token_ids"], steps)


def recorded_child(command: list[str], environment: Mapping[str, str], checkpoint: Path, scratch: Path) -> str:
    """The child's command line as it is written down: without this machine's folders."""
    scripts = {str(script): f"kernels/benchmarks/{script.name}" for script in (OFFLINE_ENGINE, UNTUNED)}
    names = scripts | {sys.executable: "python", str(checkpoint): "CHECKPOINT"}
    words = [names.get(word, word.replace(f"{scratch}/", "")) for word in command]
    return " ".join([*(f"{name}={value}" for name, value in environment.items()), *words])


def on_several(gpu_processes: Mapping[str, Sequence[int]]) -> list[int]:
    """Processes that are on more than one GPU."""
    everyone = [process for processes in gpu_processes.values() for process in processes]
    return sorted({process for process in everyone if everyone.count(process) > 1})


def check_answers(answers: Sequence[Answer], rounds: Sequence[Sequence[int]]) -> None:
    """RuntimeError unless there is a whole answer to every prompt, in order: what is missing would not be compared."""
    found = [(answer.prompt_tokens, len(answer.ids)) for answer in answers]
    wanted = [(length, MAX_TOKENS) for lengths in rounds for length in lengths]
    if found != wanted:
        raise RuntimeError(f"the answers must be of (prompt, answer) tokens {wanted}, got {found}")


def check_log(run: ServedRun, lines: Sequence[str]) -> None:
    """RuntimeError where the engine's log does not say that it served as the run asks."""
    missing = unsaid(
        lines,
        run.backend,
        run.partial_dtype,
        full_graphs=run.backend == OURS,
        kv_cache_dtype=run.options.get("kv_cache_dtype", "auto"),
        batch_invariant="VLLM_BATCH_INVARIANT" in run.environment,
    )
    if missing:
        raise RuntimeError(missing)


def check_plugin(backends: Sequence[str]) -> None:
    """ValueError where vLLM could not find the plugin: DENSE_MLA would be an unknown name to it."""
    names = {point.name for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if OURS in backends and "dense_mla" not in names:
        raise ValueError(
            f"no entry point dense_mla in group {ENTRY_POINT_GROUP} (found: {', '.join(sorted(names)) or 'none'}); "
            "install the project first: python -m pip install --no-deps --no-build-isolation ."
        )
