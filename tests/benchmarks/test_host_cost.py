"""The host's cost of a step, through vLLM's real builders and layers with torch in place of every kernel."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import decode_inputs, host_cost
from benchmarks.batch_shape import BatchShape
from benchmarks.decode_inputs import DecodeInputs

pytest.importorskip("vllm")
BACKENDS = ["DENSE_MLA", "FLASHMLA", "FLASH_ATTN_MLA"]


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> DecodeInputs:
    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    return DecodeInputs.random(BatchShape.parse("4x100"), 8, 64, torch.device("cpu"))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, inputs: DecodeInputs) -> Iterator[list[str]]:
    """Each backend's kernels answer with the reference; the list is of the launches, in order."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import fa_utils

    import vllm_dense_mla
    from vllm_dense_mla import metadata
    from vllm_dense_mla.settings import load_settings

    launches: list[str] = []
    answer = inputs.reference(0).bfloat16()

    def launched(name: str, result: Any = None) -> Any:
        launches.append(name)
        return result

    class Decoder(SimpleNamespace):
        def empty_schedule(self) -> torch.Tensor:
            return torch.zeros(1, dtype=torch.int32)

        def schedule(self, *_: Any, **__: Any) -> None:
            launched("ours schedule")

        def run(self, *_: Any, out: torch.Tensor, **__: Any) -> None:
            launched("ours run")
            out.copy_(answer)

    if not current_platform.device_type:
        monkeypatch.setattr(current_platform, "device_type", "cuda")
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", lambda **_: launched("fa3 run", answer), raising=False)
    monkeypatch.setattr(fa_utils, "get_scheduler_metadata", lambda **_: launched("fa3 schedule", torch.zeros(17, dtype=torch.int32)), raising=False)
    from vllm.v1.attention.backends.mla import flashattn_mla, flashmla

    monkeypatch.setattr(flashattn_mla, "flash_attn_supports_mla", lambda: True)
    monkeypatch.setattr(flashattn_mla, "get_flash_attn_version", lambda: 3)
    monkeypatch.setattr(flashmla, "is_flashmla_dense_supported", lambda: (True, None))
    monkeypatch.setattr(flashmla, "num_compute_units", lambda index: 132)
    monkeypatch.setattr(flashmla, "get_mla_metadata", lambda *_, **__: (None, None))
    lse = torch.zeros(4, 8, 1)
    monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", lambda **_: launched("flashmla run", (answer.unsqueeze(1), lse)))
    monkeypatch.setattr(
        metadata,
        "DenseMLADecoder",
        SimpleNamespace(
            prepare=lambda problem, device, **_: Decoder(problem=problem, device=device, sm_count=132, num_ranges=132, workspace_size=None)
        ),
    )
    monkeypatch.setattr(metadata, "device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: launches.append("wait"))
    vllm_dense_mla.register()
    load_settings.cache_clear()
    yield launches
    load_settings.cache_clear()


def test_every_backend_builds_and_launches_through_its_own_classes(kernels: list[str], inputs: DecodeInputs) -> None:
    steps, failures = host_cost.prepared_steps(BACKENDS, inputs)
    assert failures == []
    assert [type(step.builder).__name__ for step in steps] == ["DenseMLAMetadataBuilder", "FlashMLAMetadataBuilder", "FlashAttnMLAMetadataBuilder"]
    kernels.clear()
    rows = host_cost.measure(steps, inputs, "pair", 100)
    assert [(row["kernel"], row["q"], row["batch"], row["context"]) for row in rows] == [(name, "pair", 4, 100) for name in BACKENDS]
    for row in rows:
        assert len(row["build_us_samples"]) == len(row["launch_us_samples"]) == 100
        assert 0 < row["build_us"] < row["us"] and 0 < row["launch_us"] < row["us"]
    assert [kernels.count(name) for name in ("ours schedule", "ours run", "flashmla run", "fa3 schedule", "fa3 run")] == [120] * 5
    # In turn: a group of each backend between two waits, after the warm-up of each.
    groups = [group.split()[-2] for group in " ".join(kernels).split("wait") if group.strip()]
    assert groups == ["ours", "flashmla", "fa3"] * 3
    text = json.dumps({"rows": rows, "comparisons": host_cost.comparisons(rows)}, allow_nan=False)
    assert json.loads(text)["comparisons"][0]["q"] == "pair"


def test_a_wrong_answer_is_not_timed(kernels: list[str], inputs: DecodeInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.mla import flashmla

    zeros = torch.zeros(4, 1, 8, 512, dtype=torch.bfloat16)
    monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", lambda **_: (zeros, None))
    steps, failures = host_cost.prepared_steps(["DENSE_MLA", "FLASHMLA"], inputs)
    assert [step.backend for step in steps] == ["DENSE_MLA"]
    assert failures[0]["backend"] == "FLASHMLA" and "WrongAnswerError: relative L2" in failures[0]["error"]


def test_ours_is_compared_with_the_fastest_peer() -> None:
    rows = [{"kernel": name, "q": "tensor", "us": us} for name, us in (("DENSE_MLA", 50.0), ("FLASHMLA", 80.0), ("FLASH_ATTN_MLA", 100.0))]
    assert host_cost.comparisons(rows) == [{"q": "tensor", "fastest_peer": "FLASHMLA", "ours_over_fastest_peer": 0.625}]
    assert host_cost.comparisons(rows[:1]) == [] == host_cost.comparisons(rows[1:])


def test_an_error_leaves_the_rows_before_it(kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(steps: list[Any], inputs: DecodeInputs, form: str, count: int) -> list[dict[str, Any]]:
        if form == "pair":
            raise RuntimeError("unspecified launch failure")
        return [{"kernel": step.backend, "q": form} for step in steps]

    monkeypatch.setattr(host_cost, "measure", measure)
    args = host_cost.parse_arguments(["--shape", "4x100", "--heads", "8"])
    rows, failures = host_cost.measured(BACKENDS, args, torch.device("cpu"))
    assert [row["q"] for row in rows] == ["tensor"] * 3
    assert failures == [{"backend": "every backend", "error": "RuntimeError: unspecified launch failure"}]


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--steps", "70"], "--steps must be a positive multiple of 50, got 70"), (["--shape", "8"], "shape must be")]
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        host_cost.parse_arguments([*arguments, "--json", str(tmp_path / "a.json")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
