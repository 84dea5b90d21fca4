"""The KV cache as vLLM lays it out: a layer's view of a buffer that it shares with other layers, in every order that a KV connector may ask for."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import SCALE, make_builder, make_impl, step

from dense_mla import reference

LAYERS, BLOCKS, WIDTH = 3, 17, 8
OTHERS = 4096  # bytes of a block that belong to layers of another kind
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


def views(layout, block_size, kernel_block_size):
    """vLLM's views of its buffer, one a layer, bound as its MLA layers bind them: [pages, kernel_block_size, 576]."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.v1.kv_cache_interface import KVCacheTensor, MLAAttentionSpec, create_kv_cache_views
    from vllm.v1.kv_cache_layout import KVCacheLayout

    order = KVCacheLayout[layout]
    spec = MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    page = spec.page_size_bytes
    packed = LAYERS * page + OTHERS
    strides = (BLOCKS * page, page) if order.is_layer_compact else (page, packed)
    tensor = KVCacheTensor(BLOCKS * packed, [f"layer{n}" for n in range(LAYERS)], *strides, offset=OTHERS)
    raw = torch.full((BLOCKS * packed + OTHERS,), -1, dtype=torch.int8)  # NaN, read as BF16
    config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=False))
    for view in create_kv_cache_views(raw, spec, BLOCKS, order, tensor, kernel_block_size):
        layer = SimpleNamespace(_vllm_config=config)
        MLAAttention.bind_kv_cache(layer, view)
        yield layer.kv_cache


@pytest.mark.parametrize(("block_size", "kernel_block_size"), [(64, 64), (768, 768), (128, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(vllm_config, prepared, no_workspace, layout, block_size, kernel_block_size):
    """The view of each layer has the strides and the alignment that `run` asks for, is handed on as it is, and answers as a copy does."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert set(LAYOUTS) == set(KVCacheLayout.__members__)
    if block_size != kernel_block_size and not KVCacheLayout[layout].is_layer_compact:
        with pytest.raises(ValueError, match="cannot be split"):  # vLLM's own refusal
            list(views(layout, block_size, kernel_block_size))
        return
    impl, builder = make_impl(vllm_config), make_builder(vllm_config, kernel_block_size)
    metadata = builder.build(0, step([300, 70], width=WIDTH))
    q = torch.randn(2, 12, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    for seed, cache in enumerate(views(layout, block_size, kernel_block_size)):
        for pages, seq_len in zip(metadata.decode.block_table.long(), [300, 70], strict=True):
            for page in range(math.ceil(seq_len / kernel_block_size)):
                keys = min(kernel_block_size, seq_len - page * kernel_block_size)
                cache[pages[page], :keys] = torch.randn(keys, 576, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert cache.shape[1:] == (kernel_block_size, 576) and cache.stride()[1:] == (576, 1)
        assert cache.stride(0) * 2 % 16 == cache.storage_offset() * 2 % 16 == 0
        out, _ = impl.forward_mqa(q, cache, metadata, layer=None)
        exact, _ = reference.attention(q, cache.contiguous(), metadata.decode.block_table, metadata.decode.seq_lens, SCALE)
        assert prepared[0].runs[-1]["kv_cache"] is cache and reference.relative_l2(out, exact) < 5e-3
