"""Preparing with the cache: what is loaded is what was compiled, by one process for all, and kernels are shared where they are the same."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import test_kernel_cache
import test_shared_cache
from dense_mla import arch, compiled
from dense_mla.compiled import prepared_kernels
from dense_mla.kernel_cache import KernelCache
from dense_mla.problem import DecodeProblem
from test_kernel_cache import DEVICE, PROBLEM, fetch, fresh_process

PROCESSES = 8
cache, forks, hopper = test_kernel_cache.cache, test_shared_cache.forks, test_kernel_cache.hopper  # fixtures


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, compiling fails the test."""
    import cutlass.cute as cute

    return lambda: monkeypatch.setattr(cute, "compile", lambda *args, **kwargs: pytest.fail("compiled"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels of PROBLEM, compiled once. Read only."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        fresh_process(monkeypatch)
        prepared_kernels(PROBLEM, DEVICE, cache_dir=folder)
        assert (compiled.preparation().compiled, compiled.preparation().loaded) == (3, 0)
    return folder


def refuses(kernel: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as error:
        kernel(*arguments)
    return str(error.value)


def test_a_hit_compiles_nothing(filled: Path, no_compiler: Callable[[], None]) -> None:
    no_compiler()
    kernels = prepared_kernels(PROBLEM, DEVICE, cache_dir=filled)
    assert (compiled.preparation().compiled, compiled.preparation().loaded) == (0, 3)
    assert all(map(callable, (kernels.schedule, kernels.forward, kernels.merge))) and kernels.row_tiles == 1
    assert prepared_kernels(PROBLEM, DEVICE, cache_dir=filled) is kernels and compiled.preparation().loaded == 3
    assert sorted(path.name.partition("-")[0] for path in filled.iterdir()) == ["ForwardSm90", "Merge", "ScheduleKernel"]


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((12, 0), r"shared memory of a CTA must be at least \d+ bytes for 16 query rows, got 65536"),
        ((7, 5), r"compute capability 7\.5 is not supported: there is no kernel for it; supported: 8\.0, .*, 12\.1"),
    ],
)
@pytest.mark.parametrize("kernel", [None, "sm80"])
def test_what_a_gpu_cannot_run_is_refused_before_anything_compiles(
    capability: tuple[int, int], reason: str, kernel: str | None, no_compiler: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel, or none that fits its shared memory: a smaller one than any GPU of the list has."""
    no_compiler()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setitem(arch.ARCHITECTURES, (12, 0), replace(arch.ARCHITECTURES[12, 0], shared_memory_limit=65_536))
    with pytest.raises(ValueError, match=f"^{reason}$"):
        prepared_kernels(DecodeProblem(16, 64), DEVICE, kernel)


def test_a_loaded_kernel_checks_its_arguments_as_the_compiled_one(cache: KernelCache) -> None:
    """On the host: with arguments in generic memory the kernels' wrappers can be called where no GPU is."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32
    from cutlass.cute.runtime import make_fake_tensor

    @cute.jit
    def scale(x: cute.Tensor, y: cute.Tensor, times: Int32) -> None:
        x[0] = x[0] * times

    def host(shape: tuple[Any, ...], stride: tuple[Any, ...], align: int) -> Any:
        return make_fake_tensor(Float32, shape, stride, assumed_align=align, memspace=cute.AddressSpace.generic)

    rows = cute.sym_int()
    arguments = host((rows, 4), (cute.sym_int64(divisibility=4), 1), 16), host((rows,), (1,), 4), Int32(1)
    kernel = cute.compile(scale, *arguments, options="--gpu-arch sm_90a --enable-tvm-ffi")
    fetched, compiled_times = fetch(cache, kernel)
    loaded, compiled_again = fetch(cache, kernel)
    assert (compiled_times, compiled_again) == (1, 0)
    x, y = torch.ones(3, 4), torch.ones(3)
    bad: list[tuple[Any, ...]] = [
        (x.double(), y, 2),  # dtype
        (x[:, :3], y, 2),  # width
        (x[0], y, 2),  # rank
        (torch.ones(3, 6)[:, :4], y, 2),  # stride
        (torch.ones(17)[1:].view(4, 4)[:3], y, 2),  # alignment
        (x, torch.ones(4), 2),  # rows that must be equal
        (x, y, "2"),
    ]
    for wrong in bad:
        said = refuses(kernel, *wrong)
        assert said == refuses(loaded, *wrong) == refuses(fetched, *wrong) and "argument" in said
    for good in (kernel, fetched, loaded):
        good(x, y, 2)
    assert x[0, 0] == 8


def test_kernels_that_a_problem_shares_are_compiled_and_loaded_once(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A speculative deployment: its problems differ in query_len alone, and the schedule kernel does not know it."""
    fetched: list[str] = []
    monkeypatch.setattr(KernelCache, "fetch", lambda self, name, key, compile_kernel: (fetched.append(f"{name} {key}") or (len(fetched),), True))
    kernels = [prepared_kernels(replace(PROBLEM, query_len=tokens), DEVICE, cache_dir=filled) for tokens in (1, 2, 3)]
    kernels.append(prepared_kernels(replace(PROBLEM, query_len=3, causal=False), DEVICE, cache_dir=filled))
    names = [each.partition(" ")[0] for each in fetched]
    assert (names.count("ScheduleKernel"), names.count("Merge"), len(names), len(set(fetched))) == (1, 3, 8, 8)
    assert len({each.schedule for each in kernels}) == 1 and len({each.merge for each in kernels}) == 3 and kernels[3].merge == kernels[2].merge


def test_threads_that_prepare_at_once_compile_one_after_the_other_and_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's state is global: two threads in it abort the process."""
    inside, compiled_names, together = 0, [], []

    def compile_slowly(source: compiled.KernelSource, options: str) -> str:
        nonlocal inside
        inside += 1
        together.append(inside)
        time.sleep(0.02)
        inside -= 1
        compiled_names.append(source.name)
        return source.name

    monkeypatch.setattr(compiled.KernelSource, "compile", compile_slowly)
    problems = [PROBLEM, replace(PROBLEM, query_len=2)] * 4
    with ThreadPoolExecutor(len(problems)) as threads:
        found = list(threads.map(lambda problem: prepared_kernels(problem, DEVICE), problems))
    assert all(kernels is found[place % 2] for place, kernels in enumerate(found)) and found[0] is not found[1]
    assert set(together) == {1} and sorted(compiled_names) == ["ForwardSm90"] * 2 + ["Merge"] * 2 + ["ScheduleKernel"]


def test_another_device_has_its_own(filled: Path) -> None:
    prepared_kernels(PROBLEM, DEVICE, cache_dir=filled)
    prepared_kernels(PROBLEM, torch.device("cuda", 1), cache_dir=filled)
    assert compiled.preparation().loaded == 6


def test_nothing_is_loaded_during_capture(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="must run before CUDA graph capture"):
        prepared_kernels(PROBLEM, DEVICE, cache_dir=filled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernels = prepared_kernels(PROBLEM, DEVICE, cache_dir=filled)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert prepared_kernels(PROBLEM, DEVICE, cache_dir=filled) is kernels


def prepare_in_a_process(folder: Path, results: Any) -> None:
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    kernels = prepared_kernels(PROBLEM, DEVICE, cache_dir=folder)
    took = compiled.preparation()
    results.put((took.compiled, took.loaded, refuses(kernels.forward)))


def test_of_eight_processes_one_compiles_each_kernel(forks: Any, tmp_path: Path) -> None:
    folder, results = tmp_path / "cache", forks.SimpleQueue()
    processes = [forks.Process(target=prepare_in_a_process, args=(folder, results)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    found = [results.get() for _ in processes]
    assert sum(compiled for compiled, _, _ in found) == 3 and all(compiled + loaded == 3 for compiled, loaded, _ in found)
    assert len({said for _, _, said in found}) == 1 and "Expects 13 parameters" in found[0][2]
    assert [path.suffix for path in folder.iterdir()] == [".o"] * 3


def decode_in_a_process(problem: DecodeProblem, cache_dir: Path | None, results: Any) -> None:
    """The answers of a batch with requests that are split, eager and from a graph, and what preparing took."""
    from cases import gaussian
    from dense_mla.decoder import DenseMLADecoder

    case = gaussian([9000, 1, 700, 64, 30_000], DEVICE, heads=problem.num_heads, page_size=problem.page_size, query_len=problem.query_len)
    decoder = DenseMLADecoder.prepare(problem, DEVICE, max_requests=5, cache_dir=cache_dir)
    buffer, outs = decoder.empty_schedule(), [torch.full_like(case.q[..., :512], torch.nan) for _ in range(2)]
    workspace = torch.empty(decoder.workspace_size(5).total_bytes, dtype=torch.uint8, device=DEVICE)

    def step(out: torch.Tensor) -> None:
        decoder.schedule(case.seq_lens, case.block_table, buffer)
        decoder.run(case.q, case.kv_cache, case.block_table, case.seq_lens, schedule=buffer, workspace=workspace, out=out, scale=case.scale)

    step(outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(outs[1])
    outs[1].fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all(out.isfinite().all() for out in outs)
    took = compiled.preparation()
    results.put((took.compiled, took.loaded, [out.view(torch.int16).cpu().numpy() for out in outs]))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [PROBLEM, DecodeProblem(64, 64), DecodeProblem(12, 768, query_len=4)], ids=["few rows", "many rows", "drafts"])
def test_loaded_kernels_give_the_bits_of_compiled_ones(problem: DecodeProblem, tmp_path: Path) -> None:
    """Each in a fresh process: compiled without a cache, compiled into one, and loaded from it; eager and in a captured graph."""
    context = multiprocessing.get_context("spawn")
    found = []
    for cache_dir in (None, tmp_path / "cache", tmp_path / "cache"):
        results = context.Queue()
        process = context.Process(target=decode_in_a_process, args=(problem, cache_dir, results))
        process.start()
        found.append(results.get(timeout=200))
        process.join(60)
        assert process.exitcode == 0
    assert [(compiled, loaded) for compiled, loaded, _ in found] == [(3, 0), (3, 0), (0, 3)]
    answers = [out for _, _, outs in found for out in outs]
    assert all((out == answers[0]).all() for out in answers)
