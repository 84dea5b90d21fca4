"""The metadata builder: prepares once, and once a step picks the bucket and schedules."""

from __future__ import annotations

import logging
import re
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import HEADS, MAX_MODEL_LEN, MAX_NUM_SEQS, make_builder, prepared_buckets, step

from dense_mla.compiled import Preparation
from vllm_dense_mla import metadata
from vllm_dense_mla.metadata import DenseMLADecodeMetadata, DenseMLAMetadata
from vllm_dense_mla.registration import CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE


@pytest.mark.parametrize("page_size", [16, 64, 768, 944])
def test_page_size_is_the_kernels_block_size(vllm_config, prepared, page_size):
    """Fault 51, planned with another block size: the config says 16, and the cache has pages of what its spec says."""
    assert vllm_config.cache_config.block_size == 16
    make_builder(vllm_config, page_size)
    (decoder,) = prepared
    assert (decoder.problem.page_size, decoder.problem.num_heads, decoder.problem.query_len) == (page_size, HEADS, 1)
    assert decoder.max_requests == MAX_NUM_SEQS and not decoder.problem.return_lse


@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("FP32", torch.float32)])
def test_partial_dtype_is_the_setting(vllm_config, prepared, monkeypatch, text, dtype):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    make_builder(vllm_config)
    assert prepared[0].problem.partial_dtype == dtype


def test_bad_setting_stops_the_builder(vllm_config, prepared, monkeypatch):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, "fp64")
    with pytest.raises(ValueError, match=f"^{PARTIAL_DTYPE_VARIABLE} must be bf16, fp32, .* got 'fp64'$"):
        make_builder(vllm_config)
    assert not prepared


def test_decode_step(vllm_config, prepared):
    builder = make_builder(vllm_config)
    common = step([70, 3, 1000], width=16)
    metadata = builder.build(0, common)
    decode = metadata.decode
    assert isinstance(metadata, DenseMLAMetadata) and isinstance(decode, DenseMLADecodeMetadata)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (3, 3, 0)
    assert decode.decoder is prepared[0] and prepared[0].scheduled == [[70, 3, 1000]]
    assert decode.bucket == prepared_buckets(builder)[1].bucket_for(3) and decode.bucket.requests == 4
    assert decode.block_table.data_ptr() == common.block_table_tensor.data_ptr()
    assert decode.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert decode.max_seq_len == 1000 and decode.dcp_tot_seq_lens is None
    assert (decode.query_len, decode.request_lens.tolist(), decode.total_lens) == (1, [70, 3, 1000], None)


def test_steps_prepare_nothing_and_keep_the_addresses(vllm_config, prepared):
    """Fault 73, compiling on the first request: all of it happens when the builder is built. A graph keeps the schedule's address."""
    builder = make_builder(vllm_config)
    addresses = {builder.build(0, step([10] * rows)).decode.schedule.data_ptr() for rows in (1, 2, 5, 8, 12, 1)}
    assert len(prepared) == 1 and len(prepared[0].scheduled) == 6
    assert len(addresses) == 1


def test_builders_share_no_schedule(vllm_config, prepared):
    """vLLM builds one for each micro-batch, and they are in flight at once."""
    first, second = (make_builder(vllm_config).build(0, step([10])).decode for _ in range(2))
    assert first.schedule.data_ptr() != second.schedule.data_ptr()


def test_a_draft_model_s_layers_have_kernels_for_their_own_heads(vllm_config, prepared, log):
    """Two models in one process, each with MLA layers: a builder sees its layers alone, and the log names the heads of both."""
    layers = vllm_config.compilation_config.static_forward_context
    layers["draft"] = copy(layers["layer"])
    layers["draft"].impl = SimpleNamespace(num_heads=16)  # the layer's own number may be that of all ranks
    target, draft = make_builder(vllm_config), make_builder(vllm_config, layer="draft")
    assert [decoder.problem.num_heads for decoder in prepared] == [HEADS, 16]
    assert [builder.build(0, step([10])).decode.decoder for builder in (target, draft)] == prepared
    heads = [re.search(r"(\d+) heads per rank", line.getMessage()) for line in log]
    assert [found[1] for found in heads if found] == [str(HEADS), "16"]


def test_capture_step_is_bounded_by_the_model(vllm_config, prepared):
    """A graph is captured with length 1 and a maximum of max_model_len. vLLM's bound may also run past it."""
    builder = make_builder(vllm_config)
    captured = builder.build_for_cudagraph_capture(step([1] * 8, max_seq_len=MAX_MODEL_LEN))
    assert captured.decode.bucket.requests == 8 and captured.decode.max_seq_len == MAX_MODEL_LEN
    assert builder.build(0, step([1] * 8, max_seq_len=MAX_MODEL_LEN + 3)).decode.max_seq_len == MAX_MODEL_LEN


def test_padded_rows_of_a_graph_are_requests_without_keys(vllm_config, prepared):
    builder = make_builder(vllm_config)
    builder.build(0, step([70, 0, 3, 0]))
    assert prepared[0].scheduled == [[70, 0, 3, 0]]


def test_mixed_batch_schedules_its_decodes_only(vllm_config, prepared):
    """Without speculation several query tokens are a prompt's."""
    builder = make_builder(vllm_config)
    metadata = builder.build(0, step([70, 3, 40, 90], query_lens=[1, 1, 4, 90]))
    assert (metadata.num_decodes, metadata.num_prefills, metadata.decode.seq_lens.tolist()) == (2, 2, [70, 3])
    assert prepared[0].scheduled == [[70, 3]] and metadata.prefill is not None


def test_prefill_batch_schedules_nothing(vllm_config, prepared):
    metadata = make_builder(vllm_config).build(0, step([90], query_lens=[90]))
    assert metadata.decode is None and prepared[0].scheduled == []


def test_more_requests_than_prepared_are_refused(vllm_config, prepared):
    """Fault 34, a first real batch larger than any of the warm-up: max_num_seqs holds, and beyond is an error before any launch."""
    builder = make_builder(vllm_config)
    builder.build(0, step([5] * MAX_NUM_SEQS))
    with pytest.raises(ValueError, match=f"at most {MAX_NUM_SEQS} requests .* got {MAX_NUM_SEQS + 1}"):
        builder.build(0, step([5] * (MAX_NUM_SEQS + 1)))
    assert len(prepared[0].scheduled) == 1


@pytest.mark.parametrize(("text", "source"), [(None, "default"), ("fp32", PARTIAL_DTYPE_VARIABLE)])
def test_one_line_says_what_is_live(vllm_config, prepared, log, monkeypatch, text, source):
    """Fault 75, VLLM_ATTENTION_BACKEND is ignored: the log says which backend runs, once, with the table of its workspace (fault 38)."""
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON_MLA")
    if text:
        monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    builder = make_builder(vllm_config)
    make_builder(vllm_config)
    builder.build(0, step([10]))
    line, kernels, table = log
    assert line.getMessage() == (
        f"DENSE_MLA backend: kernel ForwardSm90 for sm_90a, KV cache bfloat16, partial dtype {text or 'bf16'} ({source}), "
        f"{HEADS} heads per rank, 1 query token, page size 64, workspace {prepared_buckets(builder)[1].largest.total_bytes} bytes"
    )
    assert table.getMessage() == f"DENSE_MLA workspace of each decode batch:\n{prepared_buckets(builder)[1]}"
    assert line.levelno == kernels.levelno == table.levelno == logging.INFO


@pytest.mark.parametrize(
    ("text", "place", "folder"),
    [
        (None, "/caches/vllm-dense-mla", Path("/caches/vllm-dense-mla")),
        ("/somewhere/else", "/somewhere/else", Path("/somewhere/else")),
        ("off", "off", None),
    ],
)
def test_a_line_says_where_kernels_come_from(vllm_config, prepared, log, monkeypatch, text, place, folder):
    """What preparing took until now; the folder is that of the settings."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv(CACHE_DIR_VARIABLE) if text is None else monkeypatch.setenv(CACHE_DIR_VARIABLE, text)
    monkeypatch.setattr(metadata, "preparation", lambda: Preparation(compiled=4, loaded=7, seconds=3.25))
    make_builder(vllm_config)
    assert log[1].getMessage() == f"DENSE_MLA kernels: 4 compiled, 7 loaded from the cache ({place}), 3.2 s"
    assert prepared[0].cache_dir == folder


def test_a_gpu_of_a_kind_that_nothing_ran_on_is_a_warning(vllm_config, prepared, log, monkeypatch):
    """The line names the kernel, and the command that tries it; once."""
    monkeypatch.setattr(metadata, "device_capability", lambda device: (12, 0))
    for _ in range(2):
        make_builder(vllm_config)
    assert [line.levelno for line in log] == [logging.INFO, logging.WARNING, logging.INFO, logging.INFO]
    assert log[0].getMessage().startswith("DENSE_MLA backend: kernel ForwardSm80 for sm_120a, ")
    assert log[1].getMessage() == (
        "DENSE_MLA kernel ForwardSm80 for sm_120a was compiled and never run on a GPU of compute capability 12.0: "
        "try it with `vllm-dense-mla check` before you rely on it"
    )


def test_other_ranks_are_silent(vllm_config, prepared, log, monkeypatch):
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "is_global_first_rank", lambda: False)
    make_builder(vllm_config)
    assert log == []
