"""The DENSE_MLA member of vLLM's backend enum, made safe to pickle into spawned processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

BACKEND_NAME = "DENSE_MLA"
BACKEND_PATH = "vllm_dense_mla.backend.DenseMLABackend"
PARTIAL_DTYPE_VARIABLE = "VLLM_K3_DENSE_MLA_PARTIAL_DTYPE"
CACHE_DIR_VARIABLE = "VLLM_K3_DENSE_MLA_CACHE_DIR"


def register_backend_name() -> AttentionBackendEnum:
    """Add DENSE_MLA to vLLM's attention backends, and answer to CUSTOM too where no other plugin does. Returns the member."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, BACKEND_PATH)
    member = AttentionBackendEnum[BACKEND_NAME]
    # An enum member pickles as a look-up of its value. vLLM sends it to the engine and to its workers inside the config, and they unpickle
    # that before they load plugins: the look-up would fail. This one registers the name first.
    member.__reduce_ex__ = _reduce
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND_PATH)
    return member


def register_environment_variables() -> None:
    """Make our variables ones that vLLM knows: it warns about others that start with VLLM_, and refuses them when told to validate."""
    from vllm import envs

    # The raw text: a bad value is reported by settings.py, where it is used.
    envs.environment_variables[PARTIAL_DTYPE_VARIABLE] = lambda: os.environ.get(PARTIAL_DTYPE_VARIABLE)
    # No value: vLLM compiles a model anew when one of its variables has another, and where kernels are kept changes none.
    envs.environment_variables[CACHE_DIR_VARIABLE] = lambda: None


def _reduce(protocol: int) -> tuple[Any, ...]:
    return register_backend_name, ()
