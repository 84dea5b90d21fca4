"""What the decoder refuses, before it launches anything. No GPU: the launches are recorded, the tensors lie on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dense_mla import decoder as decoder_module
from dense_mla.compiled import CompiledKernels
from dense_mla.decoder import DenseMLADecoder
from dense_mla.problem import ContextShard, DecodeProblem
from dense_mla.tile_sm80 import row_tiles

REQUESTS, HEADS, PAGE_SIZE, PAGES = 3, 12, 64, 5
Arguments = dict[str, Any]


@pytest.fixture
def launches() -> list[str]:
    return []


@pytest.fixture
def decoder(launches: list[str], monkeypatch: pytest.MonkeyPatch) -> DenseMLADecoder:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    kernels = CompiledKernels(*(lambda *args, name=name: launches.append(name) for name in ("schedule", "forward", "merge")), row_tiles=1)
    return DenseMLADecoder(DecodeProblem(HEADS, PAGE_SIZE, return_lse=True), torch.device("cpu"), 8, kernels)


@pytest.fixture
def arguments(decoder: DenseMLADecoder) -> Arguments:
    return {
        "q": torch.zeros(REQUESTS, HEADS, 576, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(PAGES, PAGE_SIZE, 576, dtype=torch.bfloat16),
        "block_table": torch.zeros(REQUESTS, 4, dtype=torch.int32),
        "seq_lens": torch.zeros(REQUESTS, dtype=torch.int32),
        "schedule": decoder.empty_schedule(),
        "workspace": aligned_bytes(decoder.workspace_size(REQUESTS).total_bytes),
        "out": torch.zeros(REQUESTS, HEADS, 512, dtype=torch.bfloat16),
        "lse": torch.zeros(REQUESTS, HEADS),
        "scale": 0.1,
    }


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_no_more_ranges_than_the_workspace_holds(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernel cuts a request's rows by 32, the problem by whole tokens: 17 heads x 4 are three CTAs of the one, four of the other."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    fewer = 0
    for heads in range(1, 129):
        for query_len in (1, 2, 4, 7, 16):
            problem = DecodeProblem(heads, PAGE_SIZE, kv_dtype=kv_dtype, query_len=query_len)
            kernels = CompiledKernels(print, print, print, row_tiles=row_tiles(problem.rows))
            decoder = DenseMLADecoder(problem, torch.device("cpu"), 8, kernels)
            assert 1 <= decoder.num_ranges <= problem.num_ranges(132)
            assert decoder.num_ranges * kernels.row_tiles <= 132 or decoder.num_ranges == 1
            fewer += kernels.row_tiles < problem.row_tiles
    assert (fewer > 0) == (kv_dtype == torch.float8_e4m3fn)


def aligned_bytes(size: int) -> torch.Tensor:
    buffer = torch.zeros(size + 256, dtype=torch.uint8)
    return buffer[-buffer.data_ptr() % 256 :][:size]


def test_valid_arguments_launch_forward_then_merge(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    decoder.run(**arguments)
    assert launches == ["forward", "merge"]


def test_the_pair_is_accepted(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    q = arguments["q"]
    decoder.run(**arguments | {"q": (q[..., :512].contiguous(), q[..., 512:].contiguous())})
    assert launches == ["forward", "merge"]


def test_an_empty_batch_launches_nothing(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    empty = {name: arguments[name][:0] for name in ("q", "block_table", "seq_lens", "out", "lse")}
    decoder.schedule(empty["seq_lens"], empty["block_table"], arguments["schedule"])
    decoder.run(**arguments | empty)
    assert launches == []


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same shape, `elements` further than an aligned address."""
    flat = torch.zeros(tensor.numel() + elements + 256, dtype=tensor.dtype)
    flat = flat[(-flat.data_ptr() % 256) // flat.element_size() :]
    return flat[elements : elements + tensor.numel()].view(tensor.shape)


BAD: dict[str, tuple[str, Callable[[torch.Tensor], object], str]] = {
    "q heads": ("q", lambda q: q[:, :8], r"q must be \(3, 12, 576\), got \(3, 8, 576\)"),
    "q width": ("q", lambda q: q[..., :512], r"q must be \(3, 12, 576\), got \(3, 12, 512\)"),
    "q dtype": ("q", lambda q: q.half(), r"q must be torch\.bfloat16, got torch\.float16"),
    "q requests": ("q", lambda q: q[:2], r"q must be \(3, 12, 576\), got \(2, 12, 576\)"),
    "q device": ("q", lambda q: q.to("meta"), r"q must be on cpu, got meta"),
    "q alignment": ("q", lambda q: shifted(q, 1), r"q must start at a multiple of 16 bytes, got an address 2 past one"),
    "q row stride": (
        "q",
        lambda q: torch.zeros(3, 12, 580, dtype=q.dtype)[..., :576],
        r"q must have strides that are multiples of 16 bytes \(8 elements\), got \(6960, 580, 1\)",
    ),
    "q columns apart": ("q", lambda q: torch.zeros(3, 12, 1152, dtype=q.dtype)[..., ::2], r"q must be dense in its last dimension"),
    "latent part": ("q", lambda q: (q[:, :8, :512], q[..., 512:]), r"q_nope must be \(3, 12, 512\), got \(3, 8, 512\)"),
    "rope part": ("q", lambda q: (q[..., :512], q[..., 504:]), r"q_rope must be \(3, 12, 64\), got \(3, 12, 72\)"),
    "cache dtype": ("kv_cache", lambda kv: kv.float(), r"kv_cache must be torch\.bfloat16, got torch\.float32"),
    "cache page size": ("kv_cache", lambda kv: kv[:, :32], r"kv_cache must be \[pages, 64, 576\] with at least one page, got \(5, 32, 576\)"),
    "no pages": ("kv_cache", lambda kv: kv[:0], r"with at least one page, got \(0, 64, 576\)"),
    "cache rows apart": (
        "kv_cache",
        lambda kv: kv.repeat(1, 2, 1)[:, ::2],
        r"kv_cache must have dense rows \(stride 576\) within a page, got stride 1152",
    ),
    "table dtype": ("block_table", lambda t: t.long(), r"block_table must be torch\.int32, got torch\.int64"),
    "table rows": ("block_table", lambda t: t[:2], r"block_table must be \[3, width\] with dense rows, got shape \(2, 4\)"),
    "table columns apart": ("block_table", lambda t: t.repeat(1, 2)[:, ::2], r"block_table must be \[3, width\] with dense rows"),
    "lens dtype": ("seq_lens", lambda s: s.long(), r"seq_lens must be torch\.int32, got torch\.int64"),
    "too many requests": ("seq_lens", lambda s: torch.zeros(9, dtype=s.dtype), r"seq_lens holds 9 requests, the decoder was prepared for at most 8"),
    "lens apart": ("seq_lens", lambda s: s.repeat(2)[::2], r"seq_lens must be contiguous \[requests\], got shape \(3,\), strides \(2,\)"),
    "schedule size": ("schedule", lambda s: s[:-1], r"schedule must be a buffer of empty_schedule\(\) \(2648 words\), got shape \(2647,\)"),
    "schedule apart": ("schedule", lambda s: s.repeat(2)[::2], r"schedule must be a buffer of .*, got shape \(2648,\), strides \(2,\)"),
    "schedule alignment": ("schedule", lambda s: shifted(s, 1), r"schedule must be a buffer of .* at an address 4 past a multiple of 16"),
    "workspace dtype": ("workspace", lambda w: w.view(torch.int8), r"workspace must be torch\.uint8, got torch\.int8"),
    "workspace size": ("workspace", lambda w: w[:-256], r"workspace must be contiguous uint8 of at least \d+ bytes for 3 requests"),
    "workspace alignment": ("workspace", lambda w: shifted(w, 16), r"aligned to 256, got shape \(\d+,\) at an address 16 past a multiple"),
    "out dtype": ("out", lambda o: o.float(), r"out must be torch\.bfloat16, got torch\.float32"),
    "out shape": ("out", lambda o: o[..., :256], r"out must be \(3, 12, 512\), got \(3, 12, 256\)"),
    "lse missing": ("lse", lambda lse: None, r"lse must be given exactly if the problem has return_lse, got return_lse=True and lse missing"),
    "lse dtype": ("lse", lambda lse: lse.bfloat16(), r"lse must be torch\.float32, got torch\.bfloat16"),
    "lse strides": ("lse", lambda lse: lse.repeat(1, 2)[:, ::2], r"lse must be contiguous \(3, 12\), got shape \(3, 12\), strides \(24, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_one_line_names_the_argument(name: str, decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    argument, spoil, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        decoder.run(**arguments | {argument: spoil(arguments[argument])})
    assert "\n" not in str(error.value)
    assert launches == []


def test_a_table_too_narrow_for_the_known_length(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    decoder.run(**arguments, max_seq_len=256)
    launches.clear()
    with pytest.raises(ValueError, match=r"block_table has 4 pages of 64 keys \(256\), too few for max_seq_len 257"):
        decoder.run(**arguments, max_seq_len=257)
    assert launches == []


def test_lse_for_a_problem_without_it(launches: list[str], decoder: DenseMLADecoder, arguments: Arguments) -> None:
    plain = DenseMLADecoder(DecodeProblem(HEADS, PAGE_SIZE), torch.device("cpu"), 8, decoder._kernels)
    with pytest.raises(ValueError, match="got return_lse=False and lse given"):
        plain.run(**arguments)
    assert launches == []


def test_a_single_request_may_have_any_stride(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    """Fault 69: the stride of a dimension of size 1 is never walked, and must not be refused nor reach a tensor map."""
    forward: list[tuple[Any, ...]] = []
    kernels = CompiledKernels(lambda *args: None, lambda *args: forward.append(args), lambda *args: None, 1)
    one = {name: arguments[name][:1] for name in ("block_table", "seq_lens", "out", "lse")}
    odd = torch.zeros(12 * 576, dtype=torch.bfloat16).as_strided((1, 12, 576), (3, 576, 1))
    DenseMLADecoder(decoder.problem, decoder.device, 8, kernels).run(**arguments | one | {"q": odd})
    assert all(stride % 8 == 0 for q in forward[0][1:3] for stride in q.stride()[:-1])


def test_prepare_refuses_what_it_cannot_serve() -> None:
    problem = DecodeProblem(HEADS, PAGE_SIZE)
    with pytest.raises(ValueError, match="device must be a CUDA device, got cpu"):
        DenseMLADecoder.prepare(problem, torch.device("cpu"), max_requests=8)
    for max_requests in (0, 4097):
        with pytest.raises(ValueError, match=f"max_requests must be from 1 to 4096, got {max_requests}"):
            DenseMLADecoder.prepare(problem, torch.device("cpu"), max_requests=max_requests)


@pytest.mark.parametrize(
    ("facts", "sm_count", "reason"),
    [
        ({}, 600, r"num_ranges must be at most 512, got 600 \(600 SMs over 1 row tiles\)"),
        ({"num_heads": 128, "batch_invariant": True}, 132, r"a batch-invariant batch of 128 rows a request must have at most 1023 requests .*"),
    ],
)
def test_what_the_kernels_have_no_room_for_is_refused_before_anything_compiles(
    facts: dict[str, Any], sm_count: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=sm_count))
    monkeypatch.setattr(decoder_module, "prepared_kernels", lambda *args: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=f"^{reason}$"):
        DenseMLADecoder.prepare(replace(DecodeProblem(HEADS, PAGE_SIZE), **facts), torch.device("cuda", 0), max_requests=4096)


@pytest.mark.parametrize(("devices", "device"), [(0, "cuda"), (0, "cuda:0"), (1, "cuda:1"), (2, "cuda:7")])
def test_prepare_refuses_a_device_that_is_not_there(devices: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose local index is beyond what its process sees."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    with pytest.raises(ValueError, match=f"^device must be one of the {devices} CUDA devices that this process sees, got {device}$"):
        DenseMLADecoder.prepare(DecodeProblem(HEADS, PAGE_SIZE), torch.device(device), max_requests=8)


class OnTheSecondGpu(torch.Tensor):
    """A tensor of the CPU that says it is on a device that this machine does not have."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["q", "kv_cache", "block_table", "seq_lens", "schedule", "workspace", "out", "lse"])
def test_a_tensor_of_another_ranks_device_is_refused(name: str, decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    spoiled = arguments | {name: arguments[name].as_subclass(OnTheSecondGpu)}
    with pytest.raises(ValueError, match=f"^{name} must be on cpu, got cuda:1$"):
        decoder.run(**spoiled)
    assert launches == []


@pytest.mark.parametrize("name", ["seq_lens", "block_table", "schedule"])
def test_a_plan_over_two_devices_is_refused(name: str, decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    planned = {each: arguments[each] for each in ("seq_lens", "block_table", "schedule")}
    with pytest.raises(ValueError, match=f"^{name} must be on cpu, got cuda:1$"):
        decoder.schedule(**planned | {name: planned[name].as_subclass(OnTheSecondGpu)})
    assert launches == []


def decoder_of(problem: DecodeProblem, launches: list[str]) -> DenseMLADecoder:
    kernels = CompiledKernels(*(lambda *args, name=name: launches.append(name) for name in ("schedule", "forward", "merge")), row_tiles=1)
    return DenseMLADecoder(problem, torch.device("cpu"), 8, kernels)


def test_total_lens_come_exactly_where_the_causal_rule_needs_them(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    """Needed with several tokens on several ranks, and only there."""
    with pytest.raises(ValueError, match=r"total_lens is not needed by the problem .* but was given"):
        decoder.run(**arguments, total_lens=arguments["seq_lens"])
    tokens = decoder_of(DecodeProblem(HEADS, PAGE_SIZE, query_len=2, context=ContextShard(2, 1)), launches)
    rows = {name: arguments[name].repeat(2, 1, 1) for name in ("q", "out")} | {"lse": None}
    rows["workspace"] = aligned_bytes(tokens.workspace_size(REQUESTS).total_bytes)
    with pytest.raises(ValueError, match=r"total_lens is needed by the problem .* but was missing"):
        tokens.run(**arguments | rows)
    with pytest.raises(ValueError, match=r"total_lens must be contiguous \(3,\), got shape \(2,\)"):
        tokens.run(**arguments | rows, total_lens=arguments["seq_lens"][:2])
    with pytest.raises(ValueError, match=r"total_lens must be contiguous \(3,\), got shape \(3,\), strides \(2,\)"):
        tokens.run(**arguments | rows, total_lens=arguments["seq_lens"].repeat(2)[::2])
    with pytest.raises(ValueError, match=r"q must be \(6, 12, 576\), got \(3, 12, 576\)"):
        tokens.run(**arguments | rows | {"q": arguments["q"]}, total_lens=arguments["seq_lens"])
    assert launches == []
    tokens.run(**arguments | rows, total_lens=arguments["seq_lens"])
    assert launches == ["forward", "merge"]


@pytest.mark.parametrize("scale", [0.0, -0.07, float("nan"), float("inf")])
def test_a_scale_that_would_turn_the_order_of_the_scores_or_leave_none_is_refused(
    scale: float, decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]
) -> None:
    with pytest.raises(ValueError, match=f"^scale must be positive and finite, got {scale}$"):
        decoder.run(**arguments | {"scale": scale})
    assert launches == []


def test_k_scale_comes_exactly_with_an_e4m3_cache(decoder: DenseMLADecoder, arguments: Arguments, launches: list[str]) -> None:
    """Fault 52: a scale never touches a BF16 cache."""
    with pytest.raises(ValueError, match=r"k_scale must be given exactly if kv_dtype is torch\.float8_e4m3fn, got torch\.bfloat16 and k_scale given"):
        decoder.run(**arguments, k_scale=torch.ones(1))
    fp8 = decoder_of(DecodeProblem(HEADS, PAGE_SIZE, kv_dtype=torch.float8_e4m3fn), launches)
    cache = {"kv_cache": arguments["kv_cache"].to(torch.float8_e4m3fn), "lse": None}
    cache["workspace"] = aligned_bytes(fp8.workspace_size(REQUESTS).total_bytes)
    wrong = {
        "and k_scale missing": None,
        r"k_scale must be \(1,\), got \(2,\)": torch.ones(2),
        r"k_scale must be torch\.float32": torch.ones(1).bfloat16(),
    }
    for message, k_scale in wrong.items():
        with pytest.raises(ValueError, match=message):
            fp8.run(**arguments | cache, k_scale=k_scale)
    with pytest.raises(ValueError, match=r"kv_cache must be torch\.float8_e4m3fn, got torch\.bfloat16"):
        fp8.run(**arguments | cache | {"kv_cache": arguments["kv_cache"]}, k_scale=torch.ones(1))
    assert launches == []
    fp8.run(**arguments | cache, k_scale=torch.ones(1))
    assert launches == ["forward", "merge"]
