"""A deployment before it runs: what vLLM makes of a serve config and a model's config.json, as far as decode attention is concerned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn

from dense_mla.problem import HEAD_DIM_QK

from .absent_gpu import CAPABILITY, planned_gpu, settle_page_size
from .decode_steps import DecodeSteps, read_steps

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Deployment:
    """What one rank decodes with.

    Attributes:
        model: name or path, as the serve config has it.
        steps: the decode steps that its layers see, as the backend reads them from the config.
        mla_layers: MLA layers of the pipeline stage that has most of them; `model_mla_layers` is all of the model's.
        page_size: keys of a page as the kernels see it.
        draft: the model that drafts speculative tokens, where there is one; its KV cache is its own.
        micro_batches: into which vLLM may cut a step (dual batch overlap); each has its own workspace.
    """

    model: str
    steps: DecodeSteps
    mla_layers: int
    model_mla_layers: int
    page_size: int
    draft: str | None
    max_model_len: int
    tensor_parallel: int
    pipeline_parallel: int
    micro_batches: int = 1

    @property
    def key_bytes(self) -> int:
        """Bytes of one key in one layer's KV cache."""
        return HEAD_DIM_QK * self.steps.kv_dtype.itemsize

    @property
    def token_bytes(self) -> float:
        """KV bytes of one token on one rank, all MLA layers of the stage. Decode context parallelism shares the tokens out."""
        return self.mla_layers * self.key_bytes / self.steps.context_world


def read_deployment(serve_arguments: Sequence[str], model_config: Path | None = None, capability: tuple[int, int] = CAPABILITY) -> Deployment:
    """The deployment that `vllm serve` with these arguments starts. Needs no GPU and no weights.

    Args:
        serve_arguments: as after `vllm serve`: ["--config", FILE], or options.
        model_config: config.json of the model or the directory that it is in, where it is not to be looked for under the model's name.
        capability: compute capability of the GPUs that it runs on.

    Raises:
        ValueError: what vLLM or DENSE_MLA refuses about it, or a model whose config.json is not found; one line.
    """
    vllm_config, model = engine_config(serve_arguments, model_config, capability)
    return describe(vllm_config, model)


def engine_config(
    serve_arguments: Sequence[str], model_config: Path | None = None, capability: tuple[int, int] = CAPABILITY
) -> tuple[VllmConfig, str]:
    """vLLM's own config of a deployment, with the backend's consent and the page size settled, and the model's name. As `read_deployment`."""
    import vllm_dense_mla

    vllm_dense_mla.register()
    with planned_gpu(capability), TemporaryDirectory() as directory:
        args = _parse(serve_arguments)
        model = args.model_tag or args.model
        path = model_config or _find_config(model, args.revision)
        # vLLM takes a directory for a model; one with nothing but the config is enough, because no weight and no tokenizer is read.
        (Path(directory) / "config.json").write_text(json.dumps(_read_config(path)))
        config = _build(args, directory)
        _ask_backend(config)
        settle_page_size(config)
    return config, model


def describe(vllm_config: VllmConfig, model: str) -> Deployment:
    """The facts of a config that `engine_config` made."""
    from vllm.v1.worker.utils import select_common_block_size

    from .backend import DenseMLABackend

    model_config, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers = _mla_layers(model_config.hf_text_config)
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative else None
    return Deployment(
        model=model,
        steps=read_steps(vllm_config, model_config.get_num_attention_heads(parallel), vllm_config.cache_config.cache_dtype),
        mla_layers=max(_in_stages(layers, model_config.get_total_num_hidden_layers(), parallel.pipeline_parallel_size)),
        model_mla_layers=len(layers),
        page_size=int(select_common_block_size(vllm_config.cache_config.block_size, [DenseMLABackend])),
        draft=str(speculative.model or speculative.method) if draft is not None else None,
        max_model_len=model_config.max_model_len,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        # Data-parallel ranks agree on a cut step by step; one rank alone makes none.
        micro_batches=parallel.num_ubatches if parallel.use_ubatching and parallel.data_parallel_size > 1 else 1,
    )


def _parse(serve_arguments: Sequence[str]) -> Any:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    parser.error = _raise  # vLLM's own prints its usage, some hundred lines
    try:
        return parser.parse_args(["serve", *serve_arguments])
    except ValueError:
        raise
    except Exception as error:  # vLLM lets through what YAML raises, and an AttributeError where the file holds no options
        _raise(f"{type(error).__name__}: {_first_lines(error)}")


def _raise(message: str) -> NoReturn:
    raise ValueError(f"vllm serve does not take these arguments: {message}")


def _find_config(model: str, revision: str | None) -> Path:
    """A local directory, or config.json of the Hugging Face cache or, where the machine may download, of the hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except Exception as error:  # the hub's, the network's or the cache's; any means that it is not here
        raise ValueError(
            f"config.json of {model} is neither on this machine nor on a hub in reach ({type(error).__name__}): give the file with --model"
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    """A config.json, or that of a directory, without its `auto_map`: that names Python files, and vLLM has classes of its own for these models."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json must be a model's, got {path}: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict) or "architectures" not in config:
        raise ValueError(f"config.json must be a model's, with `architectures`, got {path}")
    for part in (config, config.get("text_config") or {}):
        part.pop("auto_map", None)
    return config


def _build(args: Any, directory: str) -> VllmConfig:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    args.model, args.model_tag = directory, None
    args.skip_tokenizer_init = True
    try:
        return AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (ValueError, AssertionError, NotImplementedError, RuntimeError, OSError) as error:
        raise ValueError(f"vLLM does not take this deployment: {_first_lines(error)}") from None


def _first_lines(error: BaseException) -> str:
    """The message of an error on one line. pydantic's holds the whole config after it."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        return "; ".join(" ".join(str(each["msg"]).removeprefix("Value error, ").split()) for each in errors())
    return " ".join(str(error).split())[:600] or type(error).__name__


def _ask_backend(vllm_config: VllmConfig) -> None:
    """vLLM's selection, as an MLA layer of the model runs it."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model_config = vllm_config.model_config
    if not model_config.use_mla:
        raise ValueError(f"{model_config.architecture} has no Multi-head Latent Attention that vLLM serves as such")
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            model_config.get_head_size(),
            model_config.dtype,
            vllm_config.cache_config.cache_dtype,
            use_mla=True,
            use_sparse=hasattr(model_config.hf_text_config, "index_topk"),
            num_heads=model_config.get_num_attention_heads(vllm_config.parallel_config),
        )
    from .backend import DenseMLABackend

    if not issubclass(backend, DenseMLABackend):
        raise ValueError(f"attention-backend must be DENSE_MLA, got {backend.get_name()}")


def _mla_layers(text_config: Any) -> tuple[int, ...]:
    """Indices of the MLA layers, from 0. Kimi's hybrids list them from 1; in the other models every layer is one."""
    linear = getattr(text_config, "linear_attn_config", None)
    if linear:
        return tuple(layer - 1 for layer in linear["full_attn_layers"])
    return tuple(range(text_config.num_hidden_layers))


def _in_stages(layers: Sequence[int], num_layers: int, stages: int) -> list[int]:
    """How many of `layers` each pipeline stage holds."""
    from vllm.distributed.utils import get_pp_indices

    bounds = [get_pp_indices(num_layers, stage, stages) for stage in range(stages)]
    return [sum(start <= layer < end for layer in layers) for start, end in bounds]
