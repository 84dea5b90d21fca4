"""DENSE_MLA is timed with arguments that its decoder takes, in every way that a shape is decoded."""

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_ins import BATCH, CONTEXT, HEADS, PAGE_SIZE, stand_in, two_requests

from benchmarks.batch_shape import BatchShape
from benchmarks.contenders import forward_contender, invariant_contender, our_contenders, peer_contenders, planned_contender, portable_contenders
from benchmarks.decode_inputs import DecodeInputs
from vllm_dense_mla.settings import load_settings

pytest.importorskip("vllm")


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> DecodeInputs:
    return two_requests(monkeypatch)


def test_the_portable_kernel_is_forced(inputs: DecodeInputs, decoder_calls: SimpleNamespace) -> None:
    for contender, dtype in zip(portable_contenders(["bf16", "fp32"]), (torch.bfloat16, torch.float32), strict=True):
        contender.prepare(inputs)(inputs.caches[0], inputs.empty_outputs()[0])
        assert contender.kernel == "dense_mla+sm80"
        assert (decoder_calls.prepared[-1]["kernel"], decoder_calls.prepared[-1]["problem"].partial_dtype) == ("sm80", dtype)
    our_contenders(["bf16"])[0].prepare(inputs)
    assert decoder_calls.prepared[-1]["kernel"] is None


@pytest.fixture
def decoder_calls(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What a stand-in for DenseMLADecoder was asked for."""
    decoder_module = pytest.importorskip("dense_mla.decoder")
    source, name = Path(decoder_module.__file__), "DenseMLADecoder"
    asked = SimpleNamespace(prepared=[], planned=[], calls=[])
    methods = {
        "empty_schedule": lambda self: torch.zeros(8, dtype=torch.int32),
        "workspace_size": lambda self, num_requests: SimpleNamespace(total_bytes=1000 * num_requests),
        "schedule": stand_in(source, "schedule", None, asked.planned, name),
        "run": stand_in(source, "run", None, asked.calls, name),
    }
    fake = type(name, (), methods)
    fake.prepare = classmethod(stand_in(source, "prepare", fake(), asked.prepared, name))  # type: ignore[attr-defined]
    monkeypatch.setattr(decoder_module, name, fake)
    return asked


def test_dense_mla_with_an_e4m3_cache(decoder_calls: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8_inputs = two_requests(monkeypatch, 2, torch.float8_e4m3fn, 0.5)
    call = our_contenders(["bf16"])[0].prepare(fp8_inputs)
    call(fp8_inputs.caches[0], fp8_inputs.empty_outputs()[0])
    problem = decoder_calls.prepared[0]["problem"]
    assert (problem.kv_dtype, problem.query_dtype, problem.query_len) == (torch.float8_e4m3fn, torch.bfloat16, 2)
    assert decoder_calls.calls[0]["k_scale"] is fp8_inputs.k_scale
    assert decoder_calls.calls[0]["kv_cache"].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("kernel", "schedules", "limit"),
    [("dense_mla", 1, CONTEXT), ("dense_mla+schedule", 3, CONTEXT), ("dense_mla+planned", 1, 2**20), ("dense_mla+invariant", 1, CONTEXT)],
)
def test_dense_mla(kernel: str, schedules: int, limit: int, inputs: DecodeInputs, decoder_calls: SimpleNamespace) -> None:
    prepared, planned, calls = decoder_calls.prepared, decoder_calls.planned, decoder_calls.calls
    contender = next(c for c in [*our_contenders(["fp32"]), planned_contender("fp32", 2**20), invariant_contender("fp32")] if c.kernel == kernel)
    call, outs = contender.prepare(inputs), inputs.empty_outputs()
    for layer in (0, 1):
        call(inputs.caches[layer], outs[layer])
    assert (prepared[0]["problem"].partial_dtype, prepared[0]["max_requests"]) == (torch.float32, BATCH)
    assert len(planned) == schedules and len(calls) == 2
    assert calls[1]["kv_cache"].data_ptr() == inputs.caches[1].data_ptr() and calls[1]["out"].data_ptr() == outs[1].data_ptr()
    assert calls[1]["schedule"].data_ptr() == planned[0]["schedule"].data_ptr()
    assert prepared[0]["problem"].kv_dtype == torch.bfloat16 and calls[1]["k_scale"] is None
    assert prepared[0]["problem"].batch_invariant == (kernel == "dense_mla+invariant")
    assert calls[1]["max_seq_len"] == limit and calls[1]["block_table"].shape == (BATCH, limit // PAGE_SIZE)
    assert torch.equal(calls[1]["block_table"][:, : CONTEXT // PAGE_SIZE], inputs.block_table)
    assert calls[1]["workspace"].numel() == 2000 and calls[1]["workspace"].view(torch.float32).isnan().all()


@pytest.mark.parametrize(("seq_lens", "answers"), [((CONTEXT, 100), False), ((60, 64), True)])
def test_the_forward_alone_launches_no_merge(seq_lens: tuple[int, int], answers: bool, inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real decoder around stand-ins for its compiled kernels: a request of 4,096 keys is split over 132 SMs, two of one tile are not."""
    compiled = pytest.importorskip("dense_mla.compiled")
    decoder_module = importlib.import_module("dense_mla.decoder")
    launched: list[str] = []
    kernels = compiled.CompiledKernels(*(lambda *_, name=name: launched.append(name) for name in ("schedule", "forward", "merge")), row_tiles=1)

    def prepare(problem: Any, device: torch.device, *, max_requests: int, kernel: str | None, cache_dir: Path | None) -> Any:
        assert (problem.num_heads, kernel) == (HEADS, None)
        assert cache_dir is not None and cache_dir == load_settings().cache_folder
        return decoder_module.DenseMLADecoder(problem, device, max_requests, kernels)

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(compiled, "prepared_kernels", lambda problem, device: kernels)
    monkeypatch.setattr(decoder_module.DenseMLADecoder, "prepare", prepare)
    monkeypatch.setattr(importlib.import_module("dense_mla.launch_arguments"), "ALIGNMENT", 16)  # the host's allocator gives no 256 bytes
    shape = BatchShape("2 requests", seq_lens)
    inputs = DecodeInputs(shape, inputs.q, inputs.caches, inputs.block_table, torch.tensor(seq_lens, dtype=torch.int32))
    forward, whole = forward_contender("bf16"), our_contenders(["bf16"])[0]
    for contender, expected in ((forward, ["schedule", "forward"]), (whole, ["schedule", "forward", "merge"])):
        launched.clear()
        contender.prepare(inputs)(inputs.caches[0], inputs.empty_outputs()[0])
        assert launched == expected
    assert forward.answers(inputs) is answers and whole.answers(inputs)


def test_only_a_peer_that_quantises_q_may_be_percents_off() -> None:
    assert [c.max_relative_l2 for c in peer_contenders(["FLASHMLA", "TRITON_MLA"], torch.float8_e4m3fn)] == [0.1, 0.01]
    assert [c.max_relative_l2 for c in peer_contenders(["FLASHMLA", "TRITON_MLA"])] == [0.01, 0.01]
    assert all(c.max_relative_l2 == 0.01 for c in our_contenders(["bf16", "fp32"]))
