"""The layer's side: what it refuses, the workspace that it reserves, and one decode through builder, layer and reference."""

from __future__ import annotations

import pytest
import torch
from conftest import HEADS, MAX_NUM_SEQS, SCALE, SM_COUNT, cache_and_query, make_builder, make_impl, prepared_buckets, step

from dense_mla import reference
from dense_mla.problem import DecodeProblem
from vllm_dense_mla import impl as impl_module
from vllm_dense_mla.buckets import size_buckets
from vllm_dense_mla.registration import PARTIAL_DTYPE_VARIABLE


@pytest.mark.parametrize("partial_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("pair", [True, False], ids=["pair", "one tensor"])
@pytest.mark.parametrize("page_size", [64, 48])
def test_decode_through_builder_and_layer(vllm_config, prepared, workspace, monkeypatch, partial_dtype, pair, page_size):
    """One step as vLLM drives it, against plain attention in FP64: requests of 0 to 300 keys, one of them split."""
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, partial_dtype)
    layer = make_impl(vllm_config)
    metadata = make_builder(vllm_config, page_size).build(0, step([300, 1, 0, 64, 65]))
    cache, q = cache_and_query(5 * 8 + 1, page_size, 5, pair)
    out, lse = layer.forward_mqa(q, cache, metadata, layer=None)
    exact, _ = reference.attention(q, cache, metadata.decode.block_table, metadata.decode.seq_lens, SCALE)
    assert out.shape == (5, HEADS, 512) and out.dtype == torch.bfloat16 and lse is None
    assert reference.relative_l2(out, exact) < 5e-3
    assert not out[2].any()


def test_run_gets_what_vllm_hands_over(vllm_config, prepared, workspace):
    layer = make_impl(vllm_config)
    metadata = make_builder(vllm_config).build(0, step([70, 3, 5]))
    cache, q = cache_and_query(25, 64, 3, pair=True)
    out, _ = layer.forward_mqa(q, cache, metadata, layer=None)
    (run,) = prepared[0].runs
    decode = metadata.decode
    assert run["q"] is q and run["kv_cache"] is cache and run["out"] is out
    assert run["block_table"] is decode.block_table and run["seq_lens"] is decode.request_lens and run["schedule"] is decode.schedule
    assert (run["scale"], run["max_seq_len"]) == (SCALE, 70)
    assert run["workspace"].dtype == torch.uint8 and run["workspace"].numel() >= decode.bucket.total_bytes


def test_scales_of_the_kv_cache_do_not_count(vllm_config, prepared, no_workspace):
    """Fault 52, a scale applied to a BF16 cache: the layer's scales are not even looked at."""

    class Layer:
        def __getattr__(self, name):
            raise AssertionError(f"{name} was read")

    metadata = make_builder(vllm_config).build(0, step([70]))
    cache, q = cache_and_query(9, 64, 1, pair=False)
    make_impl(vllm_config).forward_mqa(q, cache, metadata, Layer())


@pytest.mark.parametrize(("text", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_constructor_reserves_the_largest_bucket(vllm_config, workspace, monkeypatch, text, dtype):
    """Fault 34, allocation after the lock. Kimi-K3's layer calls no other hook than the constructor."""
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, text)
    make_impl(vllm_config)
    largest = size_buckets(DecodeProblem(HEADS, 64, dtype), [1, 2], MAX_NUM_SEQS, SM_COUNT).largest
    assert workspace._workspace_size_bytes(workspace._current_workspaces[0]) == largest.total_bytes


def test_locked_workspace_serves_every_batch_at_one_address(vllm_config, prepared, workspace):
    """Faults 33 and 34, an arena that grows under captured graphs, or may not grow: small batch, lock, largest batch, small again."""
    layer, builder = make_impl(vllm_config), make_builder(vllm_config)
    cache, _ = cache_and_query(MAX_NUM_SEQS * 8 + 1, 64, 1, pair=False)
    workspace.lock()
    for rows in (1, MAX_NUM_SEQS, 3, 8, 1):
        q = torch.zeros(rows, HEADS, 576, dtype=torch.bfloat16)
        layer.forward_mqa(q, cache, builder.build(0, step([9] * rows)), layer=None)
    assert len({run["workspace"].data_ptr() for run in prepared[0].runs}) == 1


def test_micro_batch_has_its_whole_workspace_from_its_first_step(vllm_config, prepared, workspace, monkeypatch):
    """Fault 33 for the second micro-batch: its own arena must not grow from bucket to bucket while its graphs are captured."""
    from vllm.v1.worker import workspace as module

    layer, builder = make_impl(vllm_config), make_builder(vllm_config)
    monkeypatch.setattr(module, "dbo_current_ubatch_id", lambda: 1)
    cache, q = cache_and_query(9, 64, 1, pair=False)
    layer.forward_mqa(q, cache, builder.build(0, step([9])), layer=None)
    sizes = [workspace._workspace_size_bytes(arena) for arena in workspace._current_workspaces]
    assert sizes == [prepared_buckets(builder)[1].largest.total_bytes] * 2


def test_a_drafting_model_s_lane_has_its_whole_workspace_before_the_lock(vllm_config, prepared, monkeypatch):
    """vLLM loads and runs some draft models in a workspace of their own, beside the target's: each layer reserves where it is made."""
    from vllm.v1.worker import workspace as module

    monkeypatch.setattr(module, "_manager", None)
    monkeypatch.setattr(impl_module, "current_sm_count", lambda: SM_COUNT)
    module.init_workspace_manager(torch.device("cpu"), num_ubatches=1, num_lanes=2)
    target = make_impl(vllm_config)
    with module.use_workspace_lane(1):
        draft = make_impl(vllm_config, num_heads=16)
    manager, metadata = module.current_workspace_manager(), make_builder(vllm_config).build(0, step([9]))
    sizes = [manager._workspace_size_bytes(arena) for arena in manager._current_workspaces]
    assert sizes == [size_buckets(DecodeProblem(heads, 64), [1], MAX_NUM_SEQS, SM_COUNT).largest.total_bytes for heads in (HEADS, 16)]
    manager.lock()
    cache, q = cache_and_query(9, 64, 1, pair=False)
    for lane, layer in enumerate((target, draft)):
        with module.use_workspace_lane(lane):
            layer.forward_mqa(q, cache, metadata, layer=None)
    addresses = [run["workspace"].data_ptr() for run in prepared[0].runs]
    assert addresses == [arena.data_ptr() for arena in manager._current_workspaces]


def test_profile_run_reserves_again_without_growing(vllm_config, workspace):
    layer = make_impl(vllm_config)
    workspace.lock()
    layer.reserve_workspace()


def test_works_without_workspace_manager_and_without_gpu(vllm_config, prepared, no_workspace, monkeypatch):
    monkeypatch.setattr(impl_module, "current_sm_count", lambda: pytest.fail("asked for a GPU"))
    layer = make_impl(vllm_config)
    metadata = make_builder(vllm_config).build(0, step([70, 3]))
    cache, q = cache_and_query(17, 64, 2, pair=False)
    layer.forward_mqa(q, cache, metadata, layer=None)
    assert prepared[0].runs[0]["workspace"].numel() == metadata.decode.bucket.total_bytes


def test_bad_setting_stops_the_layer(vllm_config, workspace, monkeypatch):
    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, "half")
    with pytest.raises(ValueError, match=f"^{PARTIAL_DTYPE_VARIABLE} must be .* got 'half'$"):
        make_impl(vllm_config)


def test_flags_of_an_instance(vllm_config, no_workspace):
    """vLLM's base class would have it quantise queries. Without context ranks nobody needs the LSE."""
    layer = make_impl(vllm_config)
    assert not layer.supports_quant_query_input and not layer.need_to_return_lse_for_decode
    assert layer.can_return_lse_for_decode and layer.lse_base_on_e


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi_slopes": [0.5]}, r"DENSE_MLA does not support alibi_slopes, got \[0.5\]"),
        ({"sliding_window": 128}, "DENSE_MLA does not support sliding_window, got 128"),
        ({"logits_soft_cap": 30.0}, "DENSE_MLA does not support logits_soft_cap, got 30.0"),
        ({"attn_type": "encoder"}, "DENSE_MLA supports attn_type decoder, got encoder"),
        ({"kv_sharing_target_layer_name": "other"}, "KV sharing is not supported for MLA"),
        (
            {"kv_cache_dtype": "float16"},
            "DENSE_MLA: kv_cache_dtype must be auto or the model's dtype, bfloat16, got float16: queries and keys are multiplied as they are",
        ),
        ({"kv_lora_rank": 256}, "DENSE_MLA supports kv_lora_rank 512 with qk_rope_head_dim 64, got 256 with 64"),
        ({"qk_rope_head_dim": 0}, "DENSE_MLA supports kv_lora_rank 512 with qk_rope_head_dim 64, got 512 with 0"),
    ],
)
def test_refusals(vllm_config, no_workspace, changes, message):
    with pytest.raises(NotImplementedError, match=f"^{message}$"):
        make_impl(vllm_config, **changes)


def test_too_many_heads(vllm_config, workspace):
    with pytest.raises(ValueError, match=r"^a rank must attend with at most 128 query heads, got 129$"):
        make_impl(vllm_config, num_heads=129)
