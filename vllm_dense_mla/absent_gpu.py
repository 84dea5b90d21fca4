"""vLLM's config of a deployment on H200s, made on a machine without them.

vLLM asks its platform object about the GPU while it builds a config. `planned_gpu` answers for the GPU that is planned and not there, through
the platform's own methods, and takes the answers back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CAPABILITY = (9, 0)
MEMORY_BYTES = 140 * 2**30  # an H200's, as its driver counts it; decides vLLM's default of max_num_seqs
NAME = "NVIDIA H200"
MANY = 1024  # GPUs; a plan does not depend on how many are here


@contextmanager
def planned_gpu(capability: tuple[int, int] = CAPABILITY) -> Iterator[None]:
    """Within the block vLLM's platform describes an H200 machine of any size.

    Args:
        capability: compute capability that attention backends are asked to support.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.selector import _cached_get_attn_backend

    def select(selected: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        return _select(selected, attn_selector_config, capability)

    answers: dict[str, Any] = {
        "device_type": "cuda",
        "device_count": lambda: MANY,
        "support_static_graph_mode": lambda: True,
        "get_device_total_memory": lambda *_: MEMORY_BYTES,
        "get_device_name": lambda *_: NAME,
        "get_attn_backend_cls": select,
    }
    own = vars(current_platform)
    before = {name: own[name] for name in answers if name in own}
    own.update(answers)
    # vLLM remembers a selection, but not which GPU it was for.
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        _cached_get_attn_backend.cache_clear()
        for name in answers:
            del own[name]
        own.update(before)


def _select(selected: Any, asked: Any, capability: tuple[int, int]) -> str:
    """What vLLM's CUDA platform does with a backend that was named: its class, or its reasons as one error."""
    from vllm.platforms.interface import DeviceCapability

    from .backend import DenseMLABackend

    if selected is None:
        raise ValueError("no attention backend is named: set attention-backend to DENSE_MLA")
    backend = selected.get_class()
    reasons = backend.validate_configuration(device_capability=DeviceCapability(*capability), **asked._asdict())
    if reasons:
        if not issubclass(backend, DenseMLABackend):
            raise ValueError(f"attention-backend must be DENSE_MLA, got {selected.name}")
        raise ValueError(f"{selected.name} does not take this deployment: {'; '.join(reasons)}")
    return f"{backend.__module__}.{backend.__qualname__}"


def settle_page_size(vllm_config: VllmConfig) -> int:
    """Keys of a KV-cache page as the kernels of DENSE_MLA see it. vLLM settles it once the layers exist; this is the same code without them.

    Changes `vllm_config.cache_config.block_size`, as vLLM does.
    """
    from vllm.platforms.interface import Platform
    from vllm.v1.worker.utils import select_common_block_size

    from .backend import DenseMLABackend

    class OneBackend(Platform):
        @classmethod
        def _find_non_ssm_backends(cls, vllm_config: VllmConfig) -> list[Any]:
            return [DenseMLABackend]

    OneBackend.update_block_size_for_backend(vllm_config)
    return int(select_common_block_size(vllm_config.cache_config.block_size, [DenseMLABackend]))
