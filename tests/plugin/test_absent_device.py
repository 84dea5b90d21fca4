"""A rank whose GPU is not there: the builder of its KV-cache group refuses it, before anything is compiled."""

import pytest
import torch


def test_a_builder_on_a_second_gpu_that_is_not_there(vllm_config, monkeypatch):
    """vLLM's half of the builder allocates on the device, which no machine without it can do: that half is on the CPU here."""
    from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadataBuilder
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    from vllm_dense_mla.metadata import DenseMLAMetadataBuilder

    vllms_half = MLACommonMetadataBuilder.__init__

    def build(self, spec, layer_names, config, device, *rest, **options):
        vllms_half(self, spec, layer_names, config, torch.device("cpu"), *rest, **options)
        self.device = device

    monkeypatch.setattr(MLACommonMetadataBuilder, "__init__", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("dense_mla.decoder.prepared_kernels", lambda *_: pytest.fail("kernels were prepared"))
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, cache_dtype_str="auto")
    with pytest.raises(ValueError, match=r"^device must be one of the 1 CUDA devices that this process sees, got cuda:1$"):
        DenseMLAMetadataBuilder(spec, ["layer"], vllm_config, torch.device("cuda", 1))
