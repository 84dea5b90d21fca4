"""What bench_decode times for its arguments, in which order, and what it leaves where it is stopped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_engines import FACTS

from benchmarks import bench_decode
from benchmarks.batch_shape import BatchShape
from benchmarks.bench_decode import contenders_of, ordered_work, parse_arguments
from benchmarks.contenders import our_contenders


@pytest.mark.parametrize("ended", ["whole", "at the limit", "context lost", "signal"])
def test_what_has_not_run_is_named_however_it_ends(ended: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, seen = tmp_path / "a.json", []
    monkeypatch.setattr(bench_decode, "collect_facts", lambda commit, dirty: FACTS)
    monkeypatch.setattr(bench_decode, "measure_read_ceiling", lambda device: 4000.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def measure(*_: object) -> bool:
        seen.append(json.loads(path.read_text())["not_run"])
        if ended == "signal" and len(seen) == 2:
            raise SystemExit(143)
        return ended != "context lost"

    monkeypatch.setattr(bench_decode, "ShapeTiming", lambda *_: SimpleNamespace(measure=measure))
    limit = "0" if ended == "at the limit" else "60"
    monkeypatch.setattr("sys.argv", ["x", "--shapes", "1x64,2x64", "--also", "", "--time-limit-s", limit, "--json", str(path)])
    left = ["16 heads, 1x64", "16 heads, 2x64"]
    if ended == "signal":
        with pytest.raises(SystemExit):
            bench_decode.main()
    else:
        assert bench_decode.main() == (0 if ended == "whole" else 1)
    assert seen == {"whole": [left, left[1:]], "at the limit": [], "context lost": [left], "signal": [left, left[1:]]}[ended]
    assert json.loads(path.read_text())["not_run"] == {"whole": [], "at the limit": left, "context lost": left[1:], "signal": left[1:]}[ended]


def test_defaults_are_the_eight_shapes_and_two_uneven_ones_in_both_dtypes_beside_three_peers(tmp_path: Path) -> None:
    args = parse_arguments(["--json", str(tmp_path / "a.json")])
    assert [shape.label for shape in args.shapes] == [*bench_decode.UNIFORM_SHAPES.split(","), *bench_decode.UNEVEN_SHAPES.split(",")]
    assert (args.heads, args.partial_dtypes, args.peers) == ([16], ["bf16", "fp32"], ["FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"])
    names = [(contender.kernel, contender.partial_dtype) for contender in our_contenders(args.partial_dtypes)]
    assert names == [("dense_mla", "bf16"), ("dense_mla", "fp32"), ("dense_mla+schedule", "bf16")]


def test_the_most_important_shapes_come_first() -> None:
    args = parse_arguments(["--heads", "8,16,64,128", "--shapes", "mixed:4:100,1x4096,8x8192", "--also", "8:1x64q8"])
    assert [(heads, shape.label) for heads, shape in ordered_work(args.heads, args.shapes, args.also, args.uneven_heads)] == [
        (16, "1x4096"), (16, "8x8192"),
        (8, "1x64q8"),
        (64, "1x4096"), (64, "8x8192"), (128, "1x4096"), (128, "8x8192"),
        (16, "mixed:4:100"),
        (8, "1x4096"), (8, "8x8192"),
        (8, "mixed:4:100"), (64, "mixed:4:100"), (128, "mixed:4:100"),
    ]  # fmt: skip


def test_uneven_batches_are_not_decoded_with_every_head_count_unless_asked_for() -> None:
    args = parse_arguments(["--heads", "8,11,12,16,24,32,64,128"])
    work = ordered_work(args.heads, args.shapes, args.also, args.uneven_heads)
    assert len(work) == 8 * 8 + 4 + 3 * 2
    assert [(heads, shape.label) for heads, shape in work[8:12]] == [(16, "1x32768q4"), (16, "32x4096q4"), (8, "1x65536"), (8, "1x65536q8")]
    assert sorted({heads for heads, shape in work if not shape.is_uniform}) == [16, 64, 128]


def test_other_heads_are_timed_beside_triton_mla_at_two_shapes_unless_it_was_asked_for() -> None:
    def with_triton(*arguments: str, heads: int) -> list[str]:
        args = parse_arguments(list(arguments))
        return [shape.label for shape in args.shapes if "TRITON_MLA" in [contender.kernel for contender in contenders_of(args, heads, shape)]]

    assert with_triton(heads=12) == with_triton("--kv-dtype", "fp8", heads=8) == ["1x4096", "32x4096"]
    for found in (with_triton(heads=64), with_triton("--peers", "TRITON_MLA", heads=12), with_triton("--kernel", "sm80", heads=8)):
        assert len(found) == 10


@pytest.mark.parametrize(
    ("arguments", "heads", "shape", "planned"),
    [([], 16, "1x4096", [2**20]), ([], 12, "1x4096", []), ([], 16, "8x8192", []), (["--planned-for", "0"], 16, "1x4096", [])],
)
def test_the_longer_capture_is_timed_beside_the_others(arguments: list[str], heads: int, shape: str, planned: list[int]) -> None:
    contenders = contenders_of(parse_arguments(arguments), heads, BatchShape.parse(shape))
    assert [contender.planned_for for contender in contenders if contender.kernel == "dense_mla+planned"] == planned
    assert contenders[0].kernel == "dense_mla" and contenders[-1].kernel == "TRITON_MLA"
    for extra in ("dense_mla+invariant", "dense_mla+forward"):
        assert [contender.kernel for contender in contenders].count(extra) == (heads == 16)


def test_the_forward_alone_is_timed_where_the_price_of_the_merge_is_asked_for() -> None:
    args = parse_arguments([])
    for label, count in (("8x8192", 1), ("mixed:4:100", 0), ("8x8192q4", 0)):
        assert [contender.kernel for contender in contenders_of(args, 16, BatchShape.parse(label))].count("dense_mla+forward") == count


def test_several_query_tokens_are_timed_beside_the_peers_that_take_them() -> None:
    args = parse_arguments([])
    assert [(heads, shape.label, shape.query_len) for heads, shape in args.also][-2:] == [(8, "1x65536", 1), (8, "1x65536q8", 8)]
    names = [contender.kernel for contender in contenders_of(args, 8, BatchShape.parse("1x65536q8"))]
    assert names == ["dense_mla", "dense_mla", "dense_mla+schedule", "FLASHMLA", "FLASH_ATTN_MLA"]


@pytest.mark.parametrize(("kv_dtype", "evidence"), [("bf16", "decode_sm80_on_h200.json"), ("fp8", "decode_sm80_fp8_on_h200.json")])
@pytest.mark.parametrize(("found", "peers"), [(True, ["TRITON_MLA", "B12X"]), (False, ["TRITON_MLA"])])
def test_the_portable_kernel_is_timed_alone_beside_its_own_peers(
    found: bool, peers: list[str], kv_dtype: str, evidence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_decode, "b12x_is_installed", lambda: found)
    args = parse_arguments(["--kernel", "sm80", "--kv-dtype", kv_dtype, "--heads", "8,16", "--also", ""])
    assert (args.also, args.json.name) == ([], evidence)
    for heads in args.heads:
        names = [contender.kernel for contender in contenders_of(args, heads, BatchShape.parse("1x4096"))]
        assert names == ["dense_mla+sm80", "dense_mla+sm80", *peers]


def test_an_e4m3_run_has_its_own_peers_bounds_and_evidence_file() -> None:
    args = parse_arguments(["--kv-dtype", "fp8", "--k-scale", "0.06"])
    assert (args.peers, args.k_scale, args.json.name) == (["FLASHMLA", "TRITON_MLA"], 0.06, "decode_fp8_h200.json")
    bounds = {contender.kernel: contender.max_relative_l2 for contender in contenders_of(args, 16, BatchShape.parse("8x8192"))}
    assert bounds["FLASHMLA"] == 0.1 and {bound for name, bound in bounds.items() if name != "FLASHMLA"} == {0.01}
    assert parse_arguments([]).json.name == "decode_h200.json"
    assert parse_arguments(["--kv-dtype", "fp8", "--json", "a.json"]).json == Path("a.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shapes", "1x4096,8"], "shape must be"),
        (["--peers", "FLASHMLA,FA9"], "'FA9' is not one of FLASHMLA"),
        (["--partial-dtypes", "fp16"], "'fp16' is not one of bf16, fp32"),
        (["--heads", "16,200"], "num_heads must be from 1 to 128, got 200"),
        (["--page-size", "24"], "page_size must be a positive multiple of 16, got 24"),
        (["--replays", "5"], "--replays must be at least 20, got 5"),
        (["--also", "1x65536"], "work must be HEADS:SHAPE, got '1x65536'"),
        (["--shapes", "1x4096q32"], "query_len must be from 1 to 16, got 32"),
        (["--kernel", "sm90"], "invalid choice: 'sm90'"),
        (["--kv-dtype", "fp16"], "invalid choice: 'fp16'"),
        (["--kv-dtype", "fp8", "--k-scale", "0"], "--k-scale must be a positive number, got 0.0"),
        (["--kv-dtype", "fp8", "--k-scale", "nan"], "--k-scale must be a positive number, got nan"),
        (["--k-scale", "0.5"], "--k-scale is of an E4M3 cache and needs --kv-dtype fp8, got 0.5 with --kv-dtype bf16"),
        (["--kv-dtype", "fp8", "--peers", "FLASH_ATTN_MLA"], "--peers with --kv-dtype fp8 must be of FLASHMLA, TRITON_MLA, B12X, got FLASH_ATTN_MLA"),
        (["--planned-for", "-1"], "--planned-for must be 0 or more, got -1"),
    ],
)
def test_bad_arguments_say_what_is_allowed(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
