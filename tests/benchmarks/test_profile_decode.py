"""Samples of the program counter by role and class, on pieces of two real exports (columns and lines left out), and the script around them."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import nsight_compute, profile_decode
from benchmarks.evidence import EVIDENCE_DIR, RunFacts
from benchmarks.nsight_compute import read_metrics
from benchmarks.profile_decode import Work, parse_arguments
from benchmarks.sass_samples import CLASSES, SampledCode

WIDE = """\
"Kernel Name","kernel_cutlass_kernel_dense_mlaforward_sm90_wideForwardSm90W",
"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb","stall_selected","stall_wait","stall_barrier (Not Issued)"
"0x7ff24f7ad8b0","@P0   BRA 0x7ff24f7add10","0","1584","0","0","0","0","0"
"0x7ff24f7addc0","      UCGABAR_WAIT","17","1584","17","0","0","0","17"
"0x7ff24f7adec0","@P1   BRA 0x7ff24f7af190","1","1584","0","0","0","1","0"
"0x7ff24f7adee0","      USETMAXREG.DEALLOC.CTAPOOL 0x28","62","528","0","59","0","3","0"
"0x7ff24f7ae2c0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9+0x90], R9","62","147456","0","0","6","42","0"
"0x7ff24f7ae2d0","@!P0  BRA 0x7ff24f7b9730","475","147456","0","448","5","5","0"
"0x7ff24f7ae5b0","@P0   BRA 0x7ff24f7b9630","0","528","0","0","0","0","0"
"0x7ff24f7af180","      BRA 0x7ff24f7ae670","0","124","0","0","0","0","0"
"0x7ff24f7af1a0","      USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8","0","1900","0","0","0","0","0"
"0x7ff24f7af1c0","@!P0  BRA 0x7ff24f7af190","0","1900","0","0","0","0","0"
"0x7ff24f7af5e0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR13+0x120], R0","0","2048","0","0","0","0","0"
"0x7ff24f7af5f0","@!P0  BRA 0x7ff24f7b97f0","48","2048","0","48","0","0","0"
"0x7ff24f7b0060","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R189+URZ+-0x8], R190","7","65536","0","0","3","4","0"
"0x7ff24f7b0100","@!P0  BRA 0x7ff24f7b9840","2825","65536","0","2820","1","0","0"
"0x7ff24f7b0aa0","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","61","65536","0","0","2","49","0"
"0x7ff24f7b0dd0","      BAR.SYNC.DEFER_BLOCKING R192, 0x100","13","64512","0","0","1","8","0"
"0x7ff24f7b0de0","      LDS R195, [R193+0x150]","318","64512","296","0","3","10","242"
"0x7ff24f7b1900","      HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8].tnspB, R24","271","64512","0","0","3","5","0"
"0x7ff24f7b1a70","      HGMMA.64x256x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0","36","64512","0","0","1","35","0"
"0x7ff24f7b1b10","@!P0  BRA 0x7ff24f7b9b10","143","65536","0","139","4","0","0"
"0x7ff24f7b1d50","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","34","65536","0","0","3","26","0"
"0x7ff24f7b1d80","      WARPGROUP.DEPBAR.LE gsb0, 0x1","861","64512","857","0","3","0","805"
"0x7ff24f7b26e0","      HGMMA.64x64x16.F32.BF16 R152, gdesc[UR8], R152, gsb0","46","65536","0","0","5","40","0"
"0x7ff24f7b26f0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","418","65536","410","0","5","2","359"
"0x7ff24f7b3980","      BAR.ARV R2, 0x100","182","65536","0","161","1","20","0"
"0x7ff24f7b43d0","      HGMMA.64x256x16.F32.BF16 R24, R164, gdesc[UR4].tnspB, R24, gsb0","82","65536","0","0","1","51","0"
"0x7ff24f7b43e0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","1496","65536","1455","0","2","2","1003"
"0x7ff24f7b43f0","@P0   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R0+URZ+0x90], RZ","8","65536","0","0","4","3","0"
"0x7ff24f7b44b0","@!P0  BRA 0x7ff24f7aff50","8","65536","0","0","2","5","0"
"0x7ff24f7b9620","@P1   BRA 0x7ff24f7af400","0","2048","0","0","0","0","0"
"0x7ff24f7b9630","      LDC R0, c[0x0][0x140]","2","1584","0","0","0","0","0"
"0x7ff24f7b96e0","      UCGABAR_WAIT","5630","1584","5630","0","0","0","3763"
"0x7ff24f7b9700","      EXIT","0","1584","0","0","0","0","0"
"0x7ff24f7b9730","      IMAD.U32 R2, RZ, RZ, UR9","0","10773","0","0","0","0","0"
"0x7ff24f7b9740","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ+0x90], R9","0","10773","0","0","0","0","0"
"0x7ff24f7b9750","@!P0  NANOSLEEP.SYNCS 0x989680","1","10773","0","1","0","0","0"
"0x7ff24f7b9770","@!P0  BRA 0x7ff24f7b9730","0","10773","0","0","0","0","0"
"0x7ff24f7b9780","      BRA 0x7ff24f7ae2e0","0","7238","0","0","0","0","0"
"0x7ff24f7b9840","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R189+URZ+-0x8], R190","0","50816","0","0","0","0","0"
"0x7ff24f7b9850","@!P0  NANOSLEEP.SYNCS 0x989680","0","50816","0","0","0","0","0"
"0x7ff24f7b9860","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R189+URZ+-0x8], R190","0","50816","0","0","0","0","0"
"0x7ff24f7b9870","@!P0  BRA 0x7ff24f7b9840","0","50816","0","0","0","0","0"
"0x7ff24f7b9880","      BRA 0x7ff24f7b0110","0","18577","0","0","0","0","0"
"""
FP8 = """\
"Kernel Name","kernel_cutlass_kernel_dense_mlaforward_sm90_fp8ForwardSm90Fp",
"Address","Source","# Samples","Instructions Executed","stall_barrier","stall_long_sb","stall_selected","stall_wait","stall_barrier (Not Issued)"
"0x7f2b2b7b5c40","      BAR.SYNC.DEFER_BLOCKING 0x0","0","1584","0","0","0","0","0"
"0x7f2b2b7b5cd0","@P0   BRA 0x7f2b2b7b6d10","3","1584","0","3","0","0","0"
"0x7f2b2b7b5cf0","      USETMAXREG.DEALLOC.CTAPOOL 0x28","93","528","0","87","0","5","0"
"0x7f2b2b7b5d00","@P1   EXIT","3","528","0","0","0","3","0"
"0x7f2b2b7b6430","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R13+URZ+0xc8], R12","5","85205","0","0","0","4","0"
"0x7f2b2b7b6440","@!P0  NANOSLEEP.SYNCS 0x989680","385","85205","0","384","0","1","0"
"0x7f2b2b7b6460","@!P0  BRA 0x7f2b2b7b6420","10","85205","0","10","0","0","0"
"0x7f2b2b7b6cf0","@!P0  EXIT","0","161","0","0","0","0","0"
"0x7f2b2b7b6d00","      BRA 0x7f2b2b7b5d80","8","30","0","0","0","0","0"
"0x7f2b2b7b6d20","      USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8","0","1835","0","0","0","0","0"
"0x7f2b2b7b6d40","@!P0  BRA 0x7f2b2b7b6d10","0","1835","0","0","0","0","0"
"0x7f2b2b7b7850","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R15+URZ], R14","0","1288","0","0","0","0","0"
"0x7f2b2b7b7860","@!P0  NANOSLEEP.SYNCS 0x989680","22","1288","0","22","0","0","0"
"0x7f2b2b7b90d0","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0+URZ+0xc8], R21","19","32818","0","0","1","15","0"
"0x7f2b2b7b90e0","@!P0  NANOSLEEP.SYNCS 0x989680","81","32818","0","76","2","0","0"
"0x7f2b2b7b90f0","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R0+URZ+0xc8], R21","14","32818","0","0","1","10","0"
"0x7f2b2b7b9100","@!P0  BRA 0x7f2b2b7b90d0","60","32818","0","52","3","2","0"
"0x7f2b2b7b9140","      SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R168+URZ], R21","15","32782","0","0","1","10","0"
"0x7f2b2b7b9150","@!P0  NANOSLEEP.SYNCS 0x989680","394","32782","0","386","1","2","0"
"0x7f2b2b7b9160","@!P0  SYNCS.PHASECHK.TRANS64 P0, [R168+URZ], R21","15","32782","0","0","3","8","0"
"0x7f2b2b7b9170","@!P0  BRA 0x7f2b2b7b9140","66","32782","0","58","4","2","0"
"0x7f2b2b7b9310","      F2FP.F16.E4M3.UNPACK_B R106, R21.H1","1","32768","0","0","1","0","0"
"0x7f2b2b7b93a0","      HGMMA.64x16x16.F32 R24, R108, gdesc[UR48], RZ, !UPT","140","32768","0","0","0","17","0"
"0x7f2b2b7b9450","      HGMMA.64x16x16.F32 R24, R96, gdesc[UR48], R24, gsb0","10","32768","0","0","1","7","0"
"0x7f2b2b7ba050","      F2FP.F16.E4M3.UNPACK_B R108, R100","57","32768","0","0","5","3","0"
"0x7f2b2b7ba2c0","      HGMMA.64x16x16.F32 R24, R96, gdesc[UR40], R24, gsb0","4","32768","0","0","0","4","0"
"0x7f2b2b7ba2d0","      WARPGROUP.DEPBAR.LE gsb0, 0x0","164","32768","164","0","0","0","115"
"0x7f2b2b7ba870","      BAR.SYNC.DEFER_BLOCKING R200, 0x80","4","32768","0","0","4","0","0"
"0x7f2b2b7ba880","      PRMT R151, R23, 0x3120, R23","60","32768","0","0","1","0","0"
"0x7f2b2b7ba8b0","      LDS.64 R136, [R146+-0x10]","45","32768","43","0","2","0","35"
"0x7f2b2b7bafb0","      FENCE.VIEW.ASYNC.S","51","32768","0","33","3","12","0"
"0x7f2b2b7bc0b0","      HGMMA.64x16x16.F32 R40, R172, gdesc[UR52].tnspB, R40, gsb0","11","32768","0","0","0","9","0"
"0x7f2b2b7bc0c0","      WARPGROUP.DEPBAR.LE gsb0, 0x2","11","32768","0","0","0","7","0"
"0x7f2b2b7bc110","      HGMMA.64x16x16.F32 R32, R96, gdesc[UR52].tnspB, R32, gsb0","18","32768","0","0","1","13","0"
"0x7f2b2b7bc120","      WARPGROUP.DEPBAR.LE gsb0, 0x0","165","32768","163","0","2","0","120"
"0x7f2b2b7bc160","@P0   SYNCS.ARRIVE.TRANS64.ART0 RZ, [R0+URZ+0xc8], R21","5","32124","0","0","0","5","0"
"0x7f2b2b7bc190","@!P0  BRA 0x7f2b2b7b8fd0","24","32768","0","0","1","23","0"
"0x7f2b2b7c0830","      EXIT","0","1048","0","0","0","0","0"
"""
DETAILS = """\
    Section: GPU Speed Of Light Throughput
    ----------------------- ----------- ------------
    Metric Name             Metric Unit Metric Value
    ----------------------- ----------- ------------
    DRAM Frequency                  Ghz         3.20
    SM Frequency                    Ghz         1.70
    Elapsed Cycles                cycle      449,138
    Memory Throughput                 %        52.64
    DRAM Throughput                   %        50.06
    Duration                         us       263.23
    L1/TEX Cache Throughput           %        55.24
    L2 Cache Throughput               %        62.89
    SM Active Cycles              cycle   425,311.88
    Compute (SM) Throughput           %        60.51
    ----------------------- ----------- ------------
    Section: Memory Workload Analysis
    -------------------------------------- ----------- ------------
    Metric Name                            Metric Unit Metric Value
    -------------------------------------- ----------- ------------
    Memory Throughput                          Tbyte/s         2.41
    Mem Busy                                         %        52.64
    Max Bandwidth                                    %        50.06
    -------------------------------------- ----------- ------------
    Section: Warp State Statistics
    ---------------------------------------- ----------- ------------
    Metric Name                              Metric Unit Metric Value
    ---------------------------------------- ----------- ------------
    Warp Cycles Per Issued Instruction             cycle        10.29
    Warp Cycles Per Executed Instruction           cycle        10.29
    ---------------------------------------- ----------- ------------
"""
FACTS = RunFacts("python x", "c0ffee", False, "NVIDIA H200", "580.1", "2.11", None, "4.8.0", "2026-12-01T00:00:00+00:00")
EXPORT = ["--gpu", "NVIDIA H200", "--torch", "2.11.0", "--date", "2026-12-01", "--commit", "0d73e1c", "--dirty", "no"]
FAKE_NCU = """#!{python}
import pathlib, sys
folder = pathlib.Path({folder!r})
mode = (folder / "mode").read_text()
if "-i" in sys.argv:
    print((folder / ("wide.csv" if "source" in sys.argv else "wide.txt")).read_text())
    sys.exit()
(folder / "argv").write_text("\\n".join(sys.argv[1:]))
if mode == "report":
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("report")
print({{
    "permission": "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target device 0.",
    "broken": "==ERROR== The application returned an error code (1).",
    "nothing": "==WARNING== No kernels were profiled.",
    "report": "==PROF== Disconnected",
}}[mode])
sys.exit(mode in ("permission", "broken"))
"""


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    for name, text in (("wide.csv", WIDE), ("fp8.csv", FP8), ("wide.txt", DETAILS), ("fp8.txt", DETAILS)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def fake_ncu(exports: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that behaves as Nsight Compute does in the way that the file `mode` names."""
    program = exports / "ncu"
    program.write_text(FAKE_NCU.format(python=sys.executable, folder=str(exports)))
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(profile_decode, "collect_facts", lambda commit, dirty: FACTS)
    return program


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["profile_decode.py", *arguments])
    return profile_decode.main()


def entry(sampled: SampledCode, samples: int) -> tuple[str, str]:
    """Role and class of the one instruction with so many samples."""
    (index,) = (i for i, instruction in enumerate(sampled.code) if instruction.samples == samples)
    return sampled.roles[index], sampled.main_class(index)


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        (17, ("all", "other")),  # the cluster's barrier at the start is no idleness
        (5630, ("idle", "other")),  # the one at the end is
        (475, ("producer", "free_stages")),
        (2825, ("consumer", "keys")),  # the branch that stands between the wait and its loop out of line
        (48, ("consumer", "rare_waits")),  # queries: once a request
        (318, ("consumer", "barriers")),  # the load behind a BAR.SYNC
        (182, ("consumer", "barriers")),
        (271, ("consumer", "product_issue")),
        (861, ("consumer", "value_products")),  # leaves the scores behind it pending
        (418, ("consumer", "score_products")),
        (1496, ("consumer", "value_products")),
    ],
)
def test_roles_and_classes_of_a_cluster_kernel(samples: int, wanted: tuple[str, str]) -> None:
    assert entry(SampledCode.of_export(WIDE), samples) == wanted


@pytest.mark.parametrize(
    ("samples", "wanted"),
    [
        (93, ("producer", "other")),
        (385, ("producer", "free_stages")),
        (22, ("consumer", "rare_waits")),
        (394, ("consumer", "keys")),
        (66, ("consumer", "keys")),
        (81, ("consumer", "stage_order")),  # at the barrier where consumers give stages back
        (57, ("consumer", "key_conversion")),
        (164, ("consumer", "score_products")),
        (165, ("consumer", "value_products")),
        (45, ("consumer", "barriers")),
        (51, ("consumer", "other")),
    ],
)
def test_roles_and_classes_of_a_kernel_that_converts(samples: int, wanted: tuple[str, str]) -> None:
    assert entry(SampledCode.of_export(FP8), samples) == wanted


def test_a_loop_out_of_line_belongs_to_the_wait_that_leads_to_it() -> None:
    sampled = SampledCode.of_export(WIDE)
    classes = {instruction.address: name for instruction, name in zip(sampled.code, sampled.classes)}
    assert {classes[0x7FF24F7B9840 + 16 * i] for i in range(5)} == {"keys"}
    assert {classes[0x7FF24F7B9730 + 16 * i] for i in (0, 1, 2, 4, 5)} == {"free_stages"}


def test_every_sample_is_counted_once() -> None:
    for text in (WIDE, FP8):
        sampled = SampledCode.of_export(text)
        roles = sampled.samples_by_role()
        assert sum(roles.values()) == sampled.samples > 1000
        for role, samples in roles.items():
            classes = sampled.samples_by_class(role)
            assert tuple(classes) == CLASSES and sum(classes.values()) == samples


def test_samples_behind_a_barrier_are_the_barriers_and_the_rest_is_not() -> None:
    """The load behind the BAR.SYNC: 296 of its 318 samples wait at the barrier."""
    without = SampledCode.of_export("\n".join(line for line in WIDE.splitlines() if "LDS R195" not in line))
    before, after = (sampled.samples_by_class("consumer") for sampled in (without, SampledCode.of_export(WIDE)))
    assert (after["barriers"] - before["barriers"], after["other"] - before["other"]) == (296, 22)


def test_a_kernel_without_roles_has_none() -> None:
    text = "\n".join(line for line in FP8.splitlines() if "USETMAXREG" not in line)
    sampled = SampledCode.of_export(text)
    assert sampled.samples_by_role() == {"consumer": 0, "producer": 0, "idle": 0, "all": sampled.samples}


def test_code_addresses_are_read_as_indices() -> None:
    sampled = SampledCode.of_export(WIDE)
    (index,) = (i for i, instruction in enumerate(sampled.code) if instruction.samples == 2825)
    place = int(sampled.readable(index).removeprefix("@!P0 BRA #"))
    assert sampled.code[place].address == 0x7FF24F7B9840
    assert sampled.readable(0).endswith("0x7ff24f7add10")  # a line that the excerpt lacks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==PROF== nothing", "source page of one kernel, got 0"),
        (WIDE + FP8, "source page of one kernel, got 2"),
        (WIDE.replace("# Samples", "Samples"), "lacks # Samples"),
        (WIDE.replace('"2825"', '"many"'), "counts in every line, got '0x7ff24f7b0100"),
        (WIDE + '"0x7ff24f7b9890","EXIT","0"\n', "counts in every line, got '0x7ff24f7b9890"),
    ],
)
def test_broken_exports_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        SampledCode.of_export(text)
    assert "\n" not in str(raised.value)


def test_metrics_are_read_from_their_sections_in_our_units() -> None:
    metrics = read_metrics(DETAILS)
    assert metrics["elapsed_cycles"] == 449138 and metrics["duration_us"] == 263.23
    assert metrics["memory_throughput_percent"] == 52.64  # not the TB/s of another section
    assert metrics["cycles_per_issued_instruction"] == 10.29
    assert read_metrics(DETAILS.replace("Ghz         1.70", "Mhz          990"))["sm_frequency_GHz"] == 0.99
    with pytest.raises(ValueError, match="Duration must be in ns or us or ms, got s"):
        read_metrics(DETAILS.replace("us       263.23", "s          0.26"))
    with pytest.raises(ValueError, match="must have Elapsed Cycles"):
        read_metrics("no page")


def test_exports_become_one_evidence_file(exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(exports)
    files = ["--csv", "wide.csv,fp8.csv", "--details", "wide.txt,fp8.txt", "--json", "out.json"]
    assert run(monkeypatch, "--work", "128:128x4096,16:32x16384:fp8", *files, *EXPORT) == 0
    content = json.loads(Path("out.json").read_text())
    assert (content["commit"], content["dirty"], content["gpu"], content["vllm"]) == ("0d73e1c", False, "NVIDIA H200", None)
    assert "--csv wide.csv,fp8.csv" in content["command"] and "--json" not in content["command"]
    wide, fp8 = content["rows"]
    assert (wide["heads"], wide["shape"], wide["kv_dtype"]) == (128, "128x4096", "bf16")
    assert (fp8["heads"], fp8["shape"], fp8["kv_dtype"]) == (16, "32x16384", "fp8_e4m3")
    wait = max((item for item in wide["instructions"] if item["role"] == "consumer"), key=lambda item: item["samples"])
    assert (wait["class"], wait["samples"], wait["executed"], wait["stalls"]) == ("keys", 2825, 65536, {"long_sb": 2820, "unnamed": 4, "selected": 1})
    assert wait["share"] == round(2825 / wide["samples"], 4)
    assert wait["share_of_role"] == round(2825 / wide["roles"]["consumer"]["samples"], 4)
    assert all(item["samples"] >= 0.005 * wide["samples"] for item in wide["instructions"])
    assert sum(item["samples"] for item in wide["consumer_classes"].values()) == wide["roles"]["consumer"]["samples"]
    printed = capsys.readouterr().out
    assert "128 heads, 128x4096, bf16 cache" in printed and "@!P0 BRA #" in printed and "idle" in printed


def test_a_profile_is_taken_of_the_second_of_three_decodes(fake_ncu: Path, exports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (exports / "mode").write_text("report")
    out = exports / "out.json"
    assert run(monkeypatch, "--ncu", str(fake_ncu), "--work", "16:2x300:fp8", "--partial-dtype", "fp32", "--json", str(out)) == 0
    content = json.loads(out.read_text())
    assert content["profiler"] == nsight_compute.PROFILER and content["rows"][0]["partial_dtype"] == "fp32"
    argv = (exports / "argv").read_text().splitlines()
    assert argv[: len(nsight_compute.OPTIONS.split())] == nsight_compute.OPTIONS.split()
    child = argv[argv.index(sys.executable) + 2 :]
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(profile_decode, "decode", lambda *arguments: calls.append(arguments))
    assert run(monkeypatch, *child) == 0
    assert calls == [(Work.parse("16:2x300:fp8"), 64, "fp32")]


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("permission", "no permission to read the GPU's performance counters (ERR_NVGPUCTRPERM)"),
        ("broken", "ncu ended with status 1: ==ERROR== The application returned an error code (1)."),
        ("nothing", "ncu wrote no report: ==WARNING== No kernels were profiled."),
    ],
)
def test_what_nsight_compute_refuses_is_one_line(
    mode: str, message: str, fake_ncu: Path, exports: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (exports / "mode").write_text(mode)
    out = exports / "out.json"
    assert run(monkeypatch, "--ncu", str(fake_ncu), "--work", "16:2x300", "--json", str(out)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not out.exists()


def test_without_nsight_compute_or_a_gpu_it_says_so(fake_ncu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--ncu", "/nowhere/ncu") == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(monkeypatch, "--ncu", str(fake_ncu)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "no program /nowhere/ncu" in first and "no CUDA device" in second


def test_the_decode_goes_over_the_caches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import decode_inputs

    seen: list[int] = []

    def ours(inputs: Any, *, partial_dtype: torch.dtype) -> Any:
        assert partial_dtype == torch.float32 and inputs.heads == 8 and inputs.caches.dtype == torch.float8_e4m3fn
        return lambda cache, out: seen.append(cache.data_ptr() - inputs.caches.data_ptr())

    monkeypatch.setattr(decode_inputs, "num_caches", lambda cache_bytes: 2)
    monkeypatch.setattr(profile_decode, "ours", ours)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    profile_decode.decode(Work.parse("8:2x100:fp8"), 64, "fp32")
    assert seen[0] == seen[2] == 0 < seen[1]


def test_work_reads_the_shapes_of_the_benchmark() -> None:
    work = Work.parse("64:mixed:8:300")
    assert (work.heads, work.shape.label, work.kv_dtype) == (64, "mixed:8:300", torch.bfloat16)
    assert Work.parse("16:1x4096q4:fp8").shape.query_len == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--work", "x:1x4096"], "work must be HEADS:SHAPE"),
        (["--work", "16:4096"], "shape must be BATCHxKEYS"),
        (["--work", "16:1x4096", "--page-size", "24"], "page_size must be"),
        (["--work", "16:1x4096", "--csv", "a,b", "--details", "c", *EXPORT], "a file each for 1 items of --work, got 2 and 1"),
        (["--work", "16:1x4096", "--csv", "a", "--details", "c"], "--csv must come with --gpu, --torch, --date and --commit"),
        (["--date", "2026-12-01"], "need --csv"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(arguments)
    assert raised.value.code == 2 and message in capsys.readouterr().err


def test_the_recorded_evidence_adds_up_and_is_what_the_document_quotes() -> None:
    content = json.loads((EVIDENCE_DIR / "profile_h200.json").read_text())
    quoted = re.findall(r"(\d+) % of the consumers' time", (EVIDENCE_DIR.parent / "kernel_sm90.md").read_text())
    assert quoted == [f"{100 * row['consumer_classes']['keys']['share']:.0f}" for row in content["rows"]]
    assert content["dirty"] is False and content["rows"]
    for row in content["rows"]:
        assert sum(item["samples"] for item in row["roles"].values()) == row["samples"]
        assert sum(item["samples"] for item in row["consumer_classes"].values()) == row["roles"]["consumer"]["samples"]
