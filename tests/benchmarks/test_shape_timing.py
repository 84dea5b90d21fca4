"""What a captured graph needs to live as long as its replays."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import shape_timing
from benchmarks.contenders import Contender
from benchmarks.shape_timing import CapturedDecode


class Workspace:
    """Something that a call owns and a graph only has the address of."""


def test_a_captured_decode_keeps_what_its_graph_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph owns no memory: with the call gone, its workspace and schedule went to the next contender while the graph was still replayed."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(shape_timing, "us_of", lambda call: 10.0)
    monkeypatch.setattr(shape_timing, "capture", lambda calls: SimpleNamespace(replay=lambda: None))
    owned: list[weakref.ref[Workspace]] = []

    def prepare(inputs: Any) -> Any:
        workspace = Workspace()
        owned.append(weakref.ref(workspace))

        def call(kv_cache: torch.Tensor, out: torch.Tensor) -> None:
            assert isinstance(workspace, Workspace)

        return call

    inputs = SimpleNamespace(caches=torch.zeros(2, 1), calls=2, empty_outputs=lambda: torch.zeros(2, 1))
    decode = CapturedDecode.of(Contender("dense_mla", "bf16", prepare), inputs)  # type: ignore[arg-type]
    gc.collect()
    assert owned[0]() is not None
    del decode
    gc.collect()
    assert owned[0]() is None
