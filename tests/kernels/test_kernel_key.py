"""The key of a compiled kernel: everything that decides its object file changes it, and each kernel counts what it depends on alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dense_mla import compiled, kernel_key
from dense_mla.problem import ContextShard, DecodeProblem

BASE = DecodeProblem(12, 64, query_len=3)
OTHER_FACTS: dict[str, Any] = {
    "num_heads": 13,
    "page_size": 128,
    "partial_dtype": torch.float32,
    "kv_dtype": torch.float16,
    "query_len": 2,
    "causal": False,
    "return_lse": True,
    "batch_invariant": True,
    "context": ContextShard(2, 1, 16),
}


def key(problem: DecodeProblem = BASE, name: str = "ForwardSm90", target: str = "sm_90a", options: str = "--gpu-arch sm_90a", **rest: Any) -> str:
    return kernel_key.kernel_key(name, problem, target, options, **rest)


def test_the_same_facts_have_the_same_key() -> None:
    assert key() == key(DecodeProblem(12, 64, query_len=3)) and len(key()) == 64


@pytest.mark.parametrize("fact", [field.name for field in fields(DecodeProblem)])
def test_every_fact_counts(fact: str) -> None:
    assert key(replace(BASE, **{fact: OTHER_FACTS[fact]})) != key()


@pytest.mark.parametrize("fact", [field.name for field in fields(ContextShard)])
def test_every_fact_of_the_context_counts(fact: str) -> None:
    shard = ContextShard(3, 1, 4)
    assert key(replace(BASE, context=replace(shard, **{fact: getattr(shard, fact) + 1}))) != key(replace(BASE, context=shard))


@pytest.mark.parametrize("other", [{"name": "Merge"}, {"target": "sm_100a"}, {"options": "--opt-level 2"}, {"forced": "sm80"}])
def test_kernel_target_options_and_a_forced_kernel_count(other: dict[str, str]) -> None:
    assert key(**other) != key()


@pytest.mark.parametrize("distribution", [*kernel_key.DISTRIBUTIONS, "nvidia-cutlass-dsl-libs-cu13"])
def test_every_version_counts(distribution: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_key, "toolkit", lambda: "cu13")
    installed = dict.fromkeys((*kernel_key.DISTRIBUTIONS, "nvidia-cutlass-dsl-libs-cu13"), "4.8.0")
    keys = set()
    for version in ("4.8.0", "4.8.1", None):
        monkeypatch.setattr(kernel_key, "_version", (installed | {distribution: version}).__getitem__)
        kernel_key._versions.cache_clear()
        keys.add(key())
    kernel_key._versions.cache_clear()
    assert len(keys) == 3


def test_the_versions_are_those_of_installed_packages() -> None:
    """A misspelt distribution would have the version None for ever."""
    assert kernel_key.toolkit() in ("cu12", "cu13")
    assert all(kernel_key._versions().values())


def _other_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = kernel_key._versions()
    monkeypatch.setattr(kernel_key, "_versions", lambda: versions)
    monkeypatch.setattr(kernel_key, "toolkit", lambda: "cu99")


@pytest.mark.parametrize(
    "change",
    [
        _other_toolkit,
        lambda monkeypatch: monkeypatch.setattr(kernel_key, "_cpu", lambda: {"machine": "x86_64", "flags": "sse2"}),
        lambda monkeypatch: monkeypatch.setattr(kernel_key.sys, "version_info", (3, 99, 0)),
        lambda monkeypatch: monkeypatch.setattr(kernel_key, "SOURCES", "0" * 64),
        lambda monkeypatch: monkeypatch.setenv("CUTE_DSL_LINEINFO", "1"),
    ],
    ids=["toolkit", "processor", "python", "sources", "environment of the DSL"],
)
def test_the_environment_counts(change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    change(monkeypatch)
    assert key() != before


def test_the_processor_is_named_with_its_instructions() -> None:
    """The host part of an object holds whatever instructions the compiling machine has."""
    found = kernel_key._cpu()
    assert found["machine"] and any(len(value.split()) > 5 for value in found.values())


def test_every_byte_of_every_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dense_mla"
    shutil.copytree(Path(kernel_key.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernel_key, "__file__", str(package / "kernel_key.py"))
    digests = {kernel_key.sources_digest()}
    assert digests == {kernel_key.SOURCES}
    sources = sorted(package.glob("*.py"))
    assert len(sources) > 20
    for path in sources:
        text = path.read_bytes()
        path.write_bytes(text[:-1] + b" ")
        digests.add(kernel_key.sources_digest())
        path.write_bytes(text)
    (package / "new.py").touch()
    digests.add(kernel_key.sources_digest())
    assert len(digests) == len(sources) + 2


def test_the_package_is_imported_without_cutlass() -> None:
    code = "import sys; from dense_mla import kernel_cache, kernel_key; print('cutlass' in sys.modules)"
    path = str(Path(kernel_key.__file__).parents[1])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True).stdout == "False\n"


class WatchedProblem(DecodeProblem):
    """A problem that notes which of its facts are read."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in OTHER_FACTS:
            object.__getattribute__(self, "__dict__").setdefault("read", set()).add(name)
        return value


def read_facts(use: Callable[[DecodeProblem], Any], **facts: Any) -> set[str]:
    problem = WatchedProblem(12, 64, **facts)
    problem.__dict__.pop("read", None)
    use(problem)
    return set(problem.__dict__.get("read", ()))


def varied(shared: Callable[[DecodeProblem], DecodeProblem]) -> set[str]:
    """The facts that make a difference to a shared kernel's problem."""
    bases = [BASE, replace(BASE, kv_dtype=torch.float8_e4m3fn)]
    return {name for base in bases for name, value in OTHER_FACTS.items() if shared(replace(base, **{name: value})) != shared(base)}


def test_the_shared_kernels_read_nothing_that_their_key_leaves_out() -> None:
    """Their constructors take from the problem all that they trace with; a fact that one begins to read has to go into its problem."""
    from dense_mla import merge, schedule_kernel

    merge_of = partial(merge.Merge, dependent_launch=True, shared_memory_bytes=0)
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert read_facts(schedule_kernel.ScheduleKernel, kv_dtype=kv_dtype) <= varied(compiled.schedule_problem)
        read = read_facts(merge_of, kv_dtype=kv_dtype) | read_facts(merge.fake_arguments, kv_dtype=kv_dtype)
        assert read <= varied(compiled.merge_problem)
    kernels = schedule_kernel.ScheduleKernel(BASE), merge_of(BASE)
    assert not any(isinstance(value, DecodeProblem) for kernel in kernels for value in vars(kernel).values())


def test_what_the_shared_kernels_depend_on() -> None:
    assert varied(compiled.schedule_problem) == {"page_size", "batch_invariant", "kv_dtype"}
    assert varied(compiled.merge_problem) == {"num_heads", "query_len", "partial_dtype", "kv_dtype", "return_lse", "batch_invariant"}
    fp8, bf16 = replace(BASE, kv_dtype=torch.float8_e4m3fn), BASE
    assert compiled.merge_problem(fp8) == compiled.merge_problem(bf16), "q and the output are BF16 in both"
    assert compiled.schedule_problem(replace(BASE, kv_dtype=torch.float16)) == compiled.schedule_problem(bf16), "requests cost the same to start"
