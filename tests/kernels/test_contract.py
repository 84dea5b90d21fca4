"""kernels/README.md: its example runs, and it says where everything is."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dense_mla
from dense_mla import decoder, launch_arguments
from dense_mla.compiled import CompiledKernels

PACKAGE = Path(dense_mla.__file__).parent
CONTRACT = (PACKAGE.parent / "README.md").read_text()


def test_the_example_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: the launches are recorded, and its buffers lie where torch puts them."""
    launches: list[str] = []
    kernels = CompiledKernels(*(lambda *args, name=name: launches.append(name) for name in ("schedule", "forward", "merge")), row_tiles=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # nothing is loaded
    monkeypatch.setattr(decoder, "_present", lambda device: device)
    monkeypatch.setattr(decoder, "prepared_kernels", lambda *args: kernels)
    monkeypatch.setattr(launch_arguments, "ALIGNMENT", 1)
    (example,) = re.findall(r"^```python\n(.*?)^```$", CONTRACT, re.M | re.S)
    layer = SimpleNamespace(
        q=torch.zeros(3, 12, 576, dtype=torch.bfloat16),
        kv_cache=torch.zeros(5, 64, 576, dtype=torch.bfloat16),
        out=torch.zeros(3, 12, 512, dtype=torch.bfloat16),
    )
    table, lens = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    exec(example.replace('"cuda"', '"cpu"'), {"block_table": table, "seq_lens": lens, "layers": [layer] * 2, "scale": 0.1})
    assert launches == ["schedule", *("forward", "merge") * 2]


def test_every_file_of_the_package_has_its_place() -> None:
    named = set(re.findall(r"`(\w+\.py)`", CONTRACT.partition("## Where is what")[2]))
    assert named == {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
