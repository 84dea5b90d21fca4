"""What the documents say about speed is what the evidence says: in this checkout, and for evidence made up here."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import evidence as evidence_module
from benchmarks import render
from benchmarks.evidence import DecodeEvidence, DecodeRow, Failure, RunFacts

ROOT = Path(__file__).parents[2]
FACTS = RunFacts("python x.py", "c0ffee" * 6, False, "NVIDIA H200", "580.1", "2.11", "0.33.0", "4.8.0", "2026-12-01T00:00:00+00:00")
ROW = DecodeRow(
    kernel="dense_mla", shape="1x4096", heads=16, query_len=1, batch=1, context=4096, keys=4096, page_size=64, kv_dtype="bf16",
    partial_dtype="bf16", planned_for=4096, us_samples=(7.0,), us=7.0, GBps=674.1, relative_l2=0.002, floor_us=1.05, caches=85, calls=85,
    sm_clock_mhz=1980,
)  # fmt: skip


def decode_rows() -> list[DecodeRow]:
    return [
        ROW,
        replace(ROW, partial_dtype="fp32", us=7.14),
        replace(ROW, kernel="dense_mla+planned", planned_for=2**20, us=7.21),
        replace(ROW, kernel="FLASHMLA", partial_dtype=None, us=21.0, GBps=224.7),
        replace(ROW, kernel="FLASH_ATTN_MLA", partial_dtype=None, us=14.0, GBps=337.0),
        replace(ROW, shape="8x8192", us=25.0, GBps=3019.9, floor_us=20.0),
        replace(ROW, shape="8x8192", us=24.0, kernel="FLASHMLA", partial_dtype=None, floor_us=20.0),
        replace(ROW, kernel="dense_mla+invariant", shape="8x8192", us=27.5, floor_us=20.0),
        replace(ROW, kernel="dense_mla+forward", us=5.6, relative_l2=None),
        replace(ROW, kernel="dense_mla+forward", shape="8x8192", us=24.5, floor_us=20.0),
        replace(ROW, shape="mixed:64:32768", us=400.0, floor_us=380.0),
        replace(ROW, shape="mixed:64:32768", us=500.0, floor_us=380.0, kernel="FLASHMLA", partial_dtype=None),
        replace(ROW, shape="1x4096q8", query_len=8, us=9.1),
        replace(ROW, heads=128, us=9.0),
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A root with a README and, at first, no evidence."""
    (tmp_path / "docs" / "evidence").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"# x\n\n## Numbers\n\n{render.START}{render.NOTHING}\n{render.END}\n\n## Next\n")
    return tmp_path


def save(project: Path, name: str, content: dict[str, Any]) -> None:
    (project / name).write_text(json.dumps(content))


def written(project: Path) -> dict[str, str]:
    files = render.rendered(project)
    for path, text in files.items():
        path.write_text(text)
    assert render.rendered(project) == files, "a second run changes what the first wrote"
    return {str(path.relative_to(project)): text for path, text in files.items()}


def test_the_documents_of_this_checkout_are_what_the_evidence_says() -> None:
    for path, text in render.rendered(ROOT).items():
        assert path.exists() and path.read_text() == text, f"{path.name} differs from the evidence: run python kernels/benchmarks/render.py"
    has_evidence = (ROOT / render.DECODE).exists()
    block = (ROOT / "README.md").read_text().split(render.START)[1].split(render.END)[0]
    assert (block == f"{render.NOTHING}\n") is not has_evidence
    assert (ROOT / render.CHART).exists() is has_evidence


def test_without_evidence_nothing_is_claimed(project: Path) -> None:
    files = written(project)
    assert set(files) == {"README.md", "docs/benchmarks.md"}
    assert files["docs/benchmarks.md"].count(render.NOTHING) == len(render.DECODE_SECTIONS) + len(render.SECTIONS)
    assert f"{render.START}{render.NOTHING}\n{render.END}" in files["README.md"]


def test_decode_evidence_becomes_block_page_and_chart(project: Path) -> None:
    failure = Failure("TRITON_MLA", "1x4096", 16, 64, None, "RuntimeError: a | b")
    save(project, render.DECODE, DecodeEvidence(FACTS, 4543.2, decode_rows(), [failure], ["8 heads, 1x4096", "8 heads, 8x8192"]).to_json())
    files = written(project)
    readme, page, chart = files["README.md"], files["docs/benchmarks.md"], files[render.CHART]
    assert "| 1x4096 | 7.0 | 14.0 (FLASH_ATTN_MLA) | 2.00 x | 15% |" in readme
    assert "| 8x8192 | 25.0 | 24.0 (FLASHMLA) | 0.96 x | 80% |" in readme
    assert "With 16 heads, faster than the fastest peer in 2 of 3 cases; 0.96 x in the worst, 8x8192 at 16 heads." in readme
    assert render.NOTHING not in readme and readme.startswith("# x\n") and readme.endswith("\n\n## Next\n")
    assert "- Faster than the fastest peer in 2 of 3 cases: not in 8x8192 at 16 heads (0.96)." in page
    assert "- FP32 partials take from 1.020 (1x4096, 16 heads) to 1.020 (1x4096, 16 heads) of the time of BF16 partials." in page
    assert "| requests x keys | floor | dense_mla bf16 | dense_mla fp32 | FLASHMLA | FLASH_ATTN_MLA | FP32 / BF16 partials |" in page
    assert "| 1x4096 | 1.1 | 7.0 | 7.1 | 21.0 | 14.0 | 1.020 | 2.00 | 6.67 | 1980 |" in page
    assert "| 8x8192 | 20.0 | 25.0 | - | 24.0 | - | - | 0.96 | 1.25 | 1980 |" in page
    assert "### The price of batch invariance" in page and "| 16 | 8x8192 | 25.0 | 27.5 | 1.100 |" in page
    assert "### Captured for longer requests" in page and "| 16 | 1x4096 | 1,048,576 keys | 7.0 | 7.2 | 1.030 |" in page
    assert "### The merge's share" in page
    assert "| 16 | 1x4096 | yes | 7.0 | 5.6 | 1.4 | 20% |" in page and "| 16 | 8x8192 | no | 25.0 | 24.5 | 0.5 | 2% |" in page
    assert "### Uneven batches" in page and "| 16 | mixed:64:32768 | 400.0 | 95% | 500.0 (FLASHMLA) | 76% |" in page
    assert "- 8 query tokens of 16 heads at 1x4096 take 1.30 of the time of 1." in page and "1x4096q8" not in readme
    assert "### 128 heads" in page and "- Not run with 8 heads: 1x4096, 8x8192." in page
    assert "- TRITON_MLA has no time at 16 heads, 1x4096: RuntimeError: a   b" in page
    tree = ElementTree.fromstring(chart)
    titles = [title.text for title in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[1:] == [
        "dense_mla, 1x4096: 674 GB/s, 7.0 us", "FLASHMLA, 1x4096: 225 GB/s, 21.0 us", "FLASH_ATTN_MLA, 1x4096: 337 GB/s, 14.0 us",
        "dense_mla, 8x8192: 3020 GB/s, 25.0 us", "FLASHMLA, 8x8192: 674 GB/s, 24.0 us",
        "dense_mla, mixed:64:32768: 674 GB/s, 400.0 us", "FLASHMLA, mixed:64:32768: 674 GB/s, 500.0 us",
    ]  # fmt: skip
    assert "read ceiling 4543 GB/s" in chart


def test_errors_stand_beside_the_times_of_an_fp8_cache(project: Path) -> None:
    fp8 = replace(ROW, kv_dtype="fp8_e4m3", relative_l2=0.0021)
    rows = [fp8, replace(fp8, kernel="FLASHMLA", partial_dtype=None, us=12.0, relative_l2=0.0606), replace(fp8, kernel="dense_mla+invariant", us=8.0)]
    save(project, render.DECODE_FP8, DecodeEvidence(FACTS, 4543.2, rows).to_json())
    files = written(project)
    readme, page = files["README.md"], files["docs/benchmarks.md"]
    assert "| 1x4096 | 1.1 | 7.0 (0.2%) | 12.0 (6.1%) | - | 1.71 | 6.67 | 1980 |" in page and "relative L2 error" in page
    assert "| 1x4096 | 7.0 (0.2%) | 12.0 (FLASHMLA, 6.1%) | 1.71 x | 15% |" in readme and "BF16 KV cache" not in readme
    assert page.count(render.NOTHING) == len(render.DECODE_SECTIONS) + len(render.SECTIONS) - 1 and render.CHART not in files


def test_both_caches_have_a_table_in_the_readme(project: Path) -> None:
    save(project, render.DECODE, DecodeEvidence(FACTS, 4543.2, [ROW]).to_json())
    save(project, render.DECODE_FP8, DecodeEvidence(FACTS, 4543.2, [replace(ROW, kv_dtype="fp8_e4m3", us=6.0)]).to_json())
    readme = written(project)["README.md"]
    assert "| 1x4096 | 7.0 | - | - | 15% |" in readme and "| 1x4096 | 6.0 (0.2%) | - | - | 18% |" in readme
    assert "](docs/evidence/decode_fp8_h200.json)" in readme and readme.count("docs/benchmarks.md") == 2  # one link, its name and its address


def test_the_portable_kernel_is_ours_in_its_own_section(project: Path) -> None:
    ours = replace(ROW, kernel="dense_mla+sm80", us=10.0)
    rows = [ours, replace(ours, partial_dtype="fp32", us=9.5), replace(ROW, kernel="B12X", partial_dtype=None, us=15.0)]
    for name, kv_dtype in (("decode_sm80_on_h200.json", "bf16"), ("decode_sm80_fp8_on_h200.json", "fp8_e4m3")):
        content = DecodeEvidence(FACTS, 4543.2, [replace(row, kv_dtype=kv_dtype) for row in rows])
        save(project, f"docs/evidence/{name}", content.to_json())
    files = written(project)
    page = files["docs/benchmarks.md"]
    assert "| 1x4096 | 1.1 | 10.0 | 9.5 | 15.0 | 0.950 | 1.50 | 9.52 | 1980 |" in page
    assert "| 1x4096 | 1.1 | 10.0 (0.2%) | 9.5 (0.2%) | 15.0 (0.2%) | 0.950 | 1.50 | 9.52 | 1980 |" in page
    assert page.count("- Faster than the fastest peer in 1 of 1 cases.") == 2
    assert f"{render.START}{render.NOTHING}\n{render.END}" in files["README.md"]  # the kernel that a Hopper GPU does not run by itself


def test_uncommitted_changes_are_said(project: Path) -> None:
    save(project, render.DECODE, DecodeEvidence(replace(FACTS, dirty=True), 4543.2, decode_rows()).to_json())
    files = written(project)
    assert "with uncommitted changes" in files["README.md"] and "with uncommitted changes" in files["docs/benchmarks.md"]


def test_a_changed_number_is_found(project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    save(project, render.DECODE, DecodeEvidence(FACTS, 4543.2, decode_rows()).to_json())
    written(project)
    monkeypatch.setattr(render, "ROOT", project)
    monkeypatch.setattr("sys.argv", ["render.py", "--check"])
    assert render.main() == 0
    readme = project / "README.md"
    readme.write_text(readme.read_text().replace("| 7.0 |", "| 6.0 |"))
    assert render.main() == 1
    assert capsys.readouterr().out == "differs from the evidence: README.md\n"


def test_serving_evidence_becomes_sections(project: Path) -> None:
    facts = asdict(FACTS)
    row = {"kernel": "DENSE_MLA", "q": "tensor", "batch": 8, "build_us": 20.0, "launch_us": 30.0, "us": 50.5}
    ratio = {"q": "tensor", "fastest_peer": "FLASHMLA", "ours_over_fastest_peer": 0.8}
    save(project, "docs/evidence/host_cost_h200.json", facts | {"rows": [row], "comparisons": [ratio], "failures": []})
    engines = [{"name": "throughput_flashmla", "error": "TimeoutError: slow"}, {"name": "throughput_x", "error": None, "source": "abc"}]
    speed = {"kernel": "DENSE_MLA", "partial_dtype": "bf16", "batch": 8, "context": 1024, "tokens_per_s": 1234.4}
    slow = speed | {"context": 8192, "tokens_per_s": 90.0}
    rows = [speed, slow, *(row | {"kernel": "TRITON_MLA", "partial_dtype": None, "tokens_per_s": 100.0} for row in (speed, slow))]
    throughput = {"layers": 4, "heads": 12, "rows": rows, "engines": engines, "not_run": ["throughput_triton_mla"]}
    save(project, "docs/evidence/serve_throughput_h200.json", facts | throughput)
    prompts = [{"logprob_gap": 0.03, "within_bar": True}, {"logprob_gap": 0.2, "within_bar": False}]
    comparison = {"run": "offline_dense_mla_bf16", "with": "offline_triton_mla", "prompts": prompts, "within_bar": False, "required": True}
    peer = comparison | {"run": "offline_flashmla", "prompts": prompts[:1], "tokens": 48, "agreeing": 40, "logprob_rms": 0.0123, "required": False}
    runs = [{"name": name, "error": None} for name in ("offline_dense_mla_bf16", "offline_triton_mla", "offline_dense_mla_bf16_heads96")]
    control = {"prompts": [{"agreeing": 0}, {"agreeing": 2}]}
    bars = {"logprob_gap": 0.1, "logprob_rms": 0.02}
    served = {
        "bars": bars,
        "not_run": ["serve_dense_mla_bf16"],
        "comparisons": [comparison, peer],
        "compilation": "none",
        "control": control,
        "max_tokens": 48,
        "runs": runs,
        "passed": False,
    }
    save(project, "docs/evidence/serve_k3_shape_h200.json", facts | served)
    page = written(project)["docs/benchmarks.md"]
    assert (
        "| DENSE_MLA | tensor | 8 | 20.0 | 30.0 | 50.5 |" in page
        and "takes 0.800 of the time of FLASHMLA, the fastest peer; the aim, no longer than it, is met." in page
    )
    assert "| 8 | 1024 | 1234 | 100 |" in page and "- throughput_flashmla failed: TimeoutError: slow" in page
    assert "- More tokens per second than the fastest peer in 1 of 2 cases: not in 8 x 8192 (0.90)." in page
    assert "- Not run: throughput_triton_mla." in page and "- Of commit abc: throughput_x." in page
    assert "| offline_dense_mla_bf16 | offline_triton_mla | 1 of 2 | - | - | 0.02 | 0.200 | not within the bars |" in page
    assert "- Not run: serve_dense_mla_bf16." in page
    assert "Not passed: the bar was a difference of 0.1 for every token's logprob, and what the table says for their root mean square." in page
    assert "Compilation: none, full graphs of decode steps, Triton kernels not tuned." in page
    assert "| offline_flashmla | offline_triton_mla | 1 of 1 | 40 of 48 | 0.0123 | 0.02 | 0.030 | not within the bars (not required) |" in page
    assert "these many stay the same: 0, 2." in page and "compared with nobody: offline_dense_mla_bf16_heads96." in page
    assert page.count(render.NOTHING) == len(render.DECODE_SECTIONS) + 4  # the load, the other served model, the other ways, and two GPUs


def test_what_a_run_on_two_gpus_writes_can_be_rendered(project: Path) -> None:
    """The part of it that has run so far: what is missing is named, and nothing is said to have passed."""
    from benchmarks.answers import Answer
    from benchmarks.serve_tp2 import evidence_of, planned_runs
    from benchmarks.served_run import RunRecord

    answer = Answer(1, (5,), (-0.2,), ((9,),), ((-2.0,),))
    runs = [run for run in planned_runs() if run.partial_dtype != "fp32"]
    records = {run.name: RunRecord(run.name, run.path, run.backend, run.partial_dtype, run.variant_name, answers=[answer]) for run in runs}
    save(project, "docs/evidence/serve_tp2_h200.json", evidence_of(FACTS, records))
    page = written(project)["docs/benchmarks.md"]
    assert "| serve_dense_mla_bf16_dcp2_spec4 | offline_dense_mla_bf16_spec4 | 1 of 1 | 1 of 1 | 0.0000 | 0.02 | 0.000 | within the bars |" in page
    assert "- Not run: offline_dense_mla_fp32, " in page and "Not passed: " in page


def test_what_the_load_test_writes_can_be_rendered(project: Path) -> None:
    from benchmarks.answers import Answer
    from benchmarks.load_client import LoadResult
    from benchmarks.serve_load import COUNTERS, LoadRun, evidence_of

    def rendered(load: LoadRun) -> str:
        content = evidence_of(load, "bf16", 9)
        save(project, "docs/evidence/serve_load_h200.json", asdict(FACTS) | content | {"passed": not content["unmet"]})
        return written(project)["docs/benchmarks.md"]

    answer = Answer(1, (5,), (-0.2,), ((9,),), ((-2.0,),))
    result = LoadResult(completed=1999, aborted=1, seconds=20.0, latencies=[1.0] * 1999, sampled=[(0, answer)])
    log = [
        "Using AttentionBackendEnum.DENSE_MLA backend.", "Capturing CUDA graphs (FULL): 100%",
        "DENSE_MLA backend: kernel K, KV cache bfloat16, partial dtype bf16 (X), workspace 8 bytes",
    ]  # fmt: skip
    load = LoadRun(2000, result, [(float(i), 1000) for i in range(8)], [answer], [answer], dict.fromkeys(COUNTERS, 7.0), log, unfinished=None)
    page = rendered(load)
    assert "2000 requests in 20 s: 1999 answered, 1 aborted by the client. 7 preemptions, 7 tokens found" in page and "\nPassed.\n" in page
    page = rendered(replace(load, log=[*log, "ERROR x"], unfinished="not finished: the load"))
    assert "Not passed:\n\n- not finished: the load\n- the log holds 1 error lines\n" in page
    page = rendered(LoadRun(2000))
    assert "2000 requests in 0 s: 0 answered, 0 aborted by the client. No counter was read." in page
    assert "- not finished: the server has not started yet\n" in page and "Passed." not in page


def test_a_throughput_run_of_nothing_says_so(project: Path) -> None:
    content = {"layers": 4, "heads": 12, "rows": [], "engines": [], "not_run": ["throughput_triton_mla"]}
    save(project, "docs/evidence/serve_throughput_h200.json", asdict(FACTS) | content)
    page = written(project)["docs/benchmarks.md"]
    assert "Nothing was measured.\n- Not run: throughput_triton_mla." in page


def test_evidence_lies_where_the_scripts_write_it() -> None:
    assert evidence_module.EVIDENCE_DIR == ROOT / "docs" / "evidence"
    names = [name for _, name, *_ in (*render.DECODE_SECTIONS, *render.SECTIONS)]
    scripts = [*(ROOT / "kernels" / "benchmarks").glob("*.py")]
    for name in names:
        assert any(Path(name).name in script.read_text() for script in scripts if script.name != "render.py"), f"no script writes {name}"
