"""DENSE_MLA: an MLA decode attention backend for vLLM, with prepared split-KV kernels.

Importing this package loads neither torch, nor CUTLASS, nor vLLM, and starts no CUDA. `register` is its entry point in the group
`vllm.general_plugins`: vLLM calls it in every one of its processes.
"""

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Make the name DENSE_MLA known to vLLM. Harmless when called again.

    Imports vLLM's backend registry and environment table, and nothing that vLLM has not imported by the time it loads plugins (torch
    included: `import vllm` imports it). Loads no kernel, starts no CUDA, and reads no setting: a bad setting has to stop the engine,
    with its line, and not the processes that only parse arguments or inspect models.
    """
    from .registration import register_backend_name, register_environment_variables

    register_backend_name()
    register_environment_variables()
