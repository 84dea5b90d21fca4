"""Functions with the parameters of those that do not import without a GPU, and the inputs that they are called with."""

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import decode_inputs
from benchmarks.batch_shape import BatchShape
from benchmarks.decode_inputs import DecodeInputs

BATCH, HEADS, PAGE_SIZE, CONTEXT = 2, 16, 64, 4096


def two_requests(monkeypatch: pytest.MonkeyPatch, query_len: int = 1, kv_dtype: torch.dtype = torch.bfloat16, k_scale: float = 1.0) -> DecodeInputs:
    """Of 4,096 keys and of 100, with two caches."""
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    shape = BatchShape("2 requests", (CONTEXT, 100), query_len)
    return DecodeInputs.random(shape, HEADS, PAGE_SIZE, torch.device("cpu"), kv_dtype, k_scale)


def installed(package: str, path: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / path


def stand_in(source: Path, name: str, result: Any, calls: list[dict[str, Any]], within: str | None = None) -> Callable[..., Any]:
    """A function with the parameters of the one in `source`, that notes its arguments."""
    body: list[Any] = ast.parse(source.read_text()).body
    if within:
        body = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == within).body
    # The last definition: before it may stand overloads.
    arguments = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name][-1]
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    scope: dict[str, Any] = {"note": calls.append, "result": result}
    exec(f"def {name}({ast.unparse(arguments)}):\n    note(dict(locals()))\n    return result", scope)
    return scope[name]  # type: ignore[no-any-return]


def stub_module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
