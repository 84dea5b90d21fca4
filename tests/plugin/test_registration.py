"""The name DENSE_MLA in vLLM: registered in any process, any number of times, and carried into spawned ones."""

from __future__ import annotations

import copy
import operator
import os
import pickle
import subprocess
import sys
import tomllib
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import cloudpickle
import pytest

import vllm_dense_mla
from vllm_dense_mla.registration import BACKEND_NAME, BACKEND_PATH, CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE

ROOT = Path(__file__).parents[2]


def python(code: str, **environment: str) -> list[str]:
    """Words that a fresh Python prints."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def attention_config():
    from vllm.config import AttentionConfig

    return AttentionConfig(backend="dense_mla")


def member():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum[BACKEND_NAME]


def test_import_loads_neither_torch_nor_cutlass_nor_vllm():
    """Fault 77, out-of-tree registration: the package is imported in every vLLM process, and before one unpickles its config."""
    assert python("import sys, vllm_dense_mla; print(*({'torch', 'cutlass', 'vllm', 'pydantic'} & set(sys.modules)))") == []


def test_register_imports_nothing_more_than_vllm_has():
    """Fault 77: no CUDA context, no CUTLASS, and a bad setting raises where it is used, not while plugins load."""
    code = """
import sys, vllm.envs, vllm.v1.attention.backends.registry
before = set(sys.modules)
import vllm_dense_mla
vllm_dense_mla.register()
vllm_dense_mla.register()
import torch
assert not torch.cuda.is_initialized() and "cutlass" not in sys.modules
print(*sorted(set(sys.modules) - before))
"""
    loaded = python(code, VLLM_K3_DENSE_MLA_PARTIAL_DTYPE="int3", VLLM_LOGGING_LEVEL="ERROR")
    assert loaded[-2:] == ["vllm_dense_mla", "vllm_dense_mla.registration"] and len(loaded) == 2


def test_spawned_process_unpickles_a_config_with_the_member():
    """Fault 77, spawn: the engine gets the config by pickle and unpickles it before it has loaded any plugin."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        name = pool.submit(operator.attrgetter("backend.name"), attention_config()).result(timeout=240)
        path = pool.submit(operator.methodcaller("get_path"), member()).result(timeout=240)
    assert (name, path) == (BACKEND_NAME, BACKEND_PATH)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_member_survives_pickle(protocol):
    assert pickle.loads(pickle.dumps(member(), protocol)) is member()


def test_member_survives_cloudpickle_and_deepcopy():
    assert cloudpickle.loads(cloudpickle.dumps({"backend": member()})) == {"backend": member()}
    assert copy.deepcopy(member()) is member()
    assert copy.deepcopy(attention_config()).backend is member()


def test_pickle_names_the_plugin_and_not_the_value():
    """The pickle must rebuild the member in a process that has not registered it: only our function can."""
    assert b"vllm_dense_mla.registration" in pickle.dumps(member())


def test_registering_again_changes_nothing():
    """Fault 77, double load: vLLM's own registration raises the second time."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    before = member(), len(AttentionBackendEnum)
    vllm_dense_mla.register()
    assert (member(), len(AttentionBackendEnum)) == before
    assert member().get_path() == BACKEND_PATH


def test_the_path_leads_to_the_backend():
    from vllm_dense_mla.backend import DenseMLABackend

    assert member().get_class() is DenseMLABackend
    assert DenseMLABackend.get_name() == member().name


@pytest.mark.parametrize("name", ["DENSE_MLA", "dense_mla"])
def test_attention_config_takes_the_name(name):
    from vllm.config import AttentionConfig

    assert AttentionConfig(backend=name).backend is member()
    assert AttentionConfig(backend_per_kind={"mla_attention": name}).backend_per_kind["mla_attention"] is member()


def test_engine_args_take_the_name(engine_config):
    assert engine_config.attention_config.backend is member()


def test_custom_is_ours_where_nobody_took_it():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert AttentionBackendEnum.CUSTOM.get_path() == BACKEND_PATH


def test_custom_of_another_plugin_stays_theirs():
    """Fault 77, one CUSTOM slot."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, "other.plugin.Backend")
    try:
        vllm_dense_mla.register()
        assert custom.get_path() == "other.plugin.Backend"
    finally:
        custom.clear_override()
        vllm_dense_mla.register()
    assert custom.get_path() == BACKEND_PATH


@pytest.mark.parametrize("variable", [PARTIAL_DTYPE_VARIABLE, CACHE_DIR_VARIABLE])
def test_environment_check_knows_the_variables(monkeypatch, variable):
    from vllm import envs
    from vllm.platforms import current_platform

    monkeypatch.setattr(os, "environ", {variable: "fp32"})
    current_platform.validate_environ(hard_fail=True)
    monkeypatch.delitem(envs.environment_variables, variable)
    with pytest.raises(ValueError, match=variable):
        current_platform.validate_environ(hard_fail=True)


def test_variable_is_a_compile_factor(monkeypatch):
    from vllm import envs

    monkeypatch.setenv(PARTIAL_DTYPE_VARIABLE, "fp32")
    assert envs.compile_factors()[PARTIAL_DTYPE_VARIABLE] == "fp32"


def test_where_kernels_are_kept_is_no_compile_factor(monkeypatch):
    """Another folder must not make vLLM compile the model anew."""
    from vllm import envs

    before = envs.compile_factors()
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "/somewhere/else")
    assert envs.compile_factors() == before


@pytest.mark.parametrize("variable", [PARTIAL_DTYPE_VARIABLE, CACHE_DIR_VARIABLE])
def test_ray_carries_the_variables(monkeypatch, variable):
    """Fault 76, variables not carried to Ray workers: vLLM copies those that start with VLLM_, known to its table or not."""
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv(variable, "fp32")
    assert variable in get_env_vars_to_copy()
    monkeypatch.delitem(envs.environment_variables, variable)
    assert variable in get_env_vars_to_copy()


def test_entry_point_is_register():
    """The name on the left is what VLLM_PLUGINS selects."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    module, function = group["dense_mla"].split(":")
    assert getattr(import_module(module), function) is vllm_dense_mla.register


def test_backend_loads_without_compilers_on_the_path():
    """Fault 78, nvcc missing: neither nvcc, nor ptxas, nor gcc is looked for to load the backend."""
    code = """
import vllm_dense_mla
vllm_dense_mla.register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from dense_mla.arch import forward_class
print(forward_class((9, 0)).__name__, AttentionBackendEnum.DENSE_MLA.get_class().get_name())
"""
    assert python(code, PATH="", CUDA_HOME="", VLLM_LOGGING_LEVEL="ERROR")[-2:] == ["ForwardSm90", BACKEND_NAME]
