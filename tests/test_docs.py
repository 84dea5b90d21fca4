"""The documents against the code: versions, commands, links, settings, and the numbers of the worked example."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dense_mla.paged_kv import PageTiling
from dense_mla.schedule import FIXED_COST, plan
from vllm_dense_mla import __version__, cli
from vllm_dense_mla.settings import DenseMLASettings, load_settings

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "kernels/README.md", *ROOT.glob("docs/*.md")])


def read(path: str) -> str:
    return (ROOT / path).read_text()


def readme_commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```$", read("README.md"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines()]


def test_the_changelog_is_at_this_version() -> None:
    versions = re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)
    assert versions[0] == __version__
    assert len(set(versions)) == len(versions)


def test_ci_runs_the_readme_test_command_as_it_stands() -> None:
    setup, check = readme_commands()[:2]
    assert check.endswith(".venv/bin/pytest") and setup.endswith(".venv/bin/vllm-dense-mla demo")
    assert read(".ci/run").rstrip().splitlines()[-1] == check


def test_the_extra_and_the_script_of_the_readme_exist() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert "test" in project["optional-dependencies"]
    assert project["scripts"] == {"vllm-dense-mla": "vllm_dense_mla.cli:main"}


def test_the_plan_command_of_the_readme_works(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [line for line in readme_commands() if line.startswith("vllm-dense-mla plan")]
    assert cli.main(command.split()[1:]) == 0
    assert "bytes" in capsys.readouterr().out


def test_the_readme_marks_where_the_numbers_go_and_names_their_evidence() -> None:
    (block,) = re.findall(r"<!-- numbers:start -->\n(.*?)<!-- numbers:end -->", read("README.md"), re.S)
    if re.search(r"\d", block):
        evidence = re.findall(r"docs/evidence/[\w.]+\.json", block)
        assert evidence and all((ROOT / path).is_file() for path in evidence)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (document.parent / target).exists(), f"{document.name} links to {target}"


STOPS = re.findall(r"`([\w.]+)`\s+in\s+\[[^]]+\]\(\.\./([\w/.]+\.py)\)", read("docs/decode_step.md"))
FORWARD_PARTS = [(name, "kernels/dense_mla/forward_sm90.py") for name in re.findall(r"^- `(\w+)`", read("docs/decode_step.md"), re.M)]


@pytest.mark.parametrize(("name", "path"), [*STOPS, *FORWARD_PARTS])
def test_every_stop_of_decode_step_is_in_the_file_that_it_names(name: str, path: str) -> None:
    assert len(STOPS) >= 9 and len(FORWARD_PARTS) >= 4
    for part in name.split("."):
        assert re.search(rf"^ *(def|class) {part}\b", read(path), re.M), f"{path} has no {part}"


def test_the_worked_example_of_decode_step_is_what_the_schedule_does() -> None:
    text = read("docs/decode_step.md")
    tiles = [PageTiling(64).num_tiles(n) for n in (5000, 64, 0)]
    units = [FIXED_COST + t if t else 1 for t in tiles]
    schedule = plan([5000, 64, 0], 64, 132)
    idle = sum(r.last_request < r.first_request for r in schedule.ranges)
    (split,) = schedule.splits
    assert f"makes {' + '.join(map(str, tiles))} tiles" in text
    assert f"{' + '.join(map(str, units))} = {sum(units)} units" in text
    assert f"each of the {sum(tiles)} tiles is a CTA's whole work" in text and f"and {idle} have none" in text
    assert split.request == 0 and f"Request 0 lies in {split.pieces} ranges" in text and f"the {split.pieces} pieces" in text


def test_settings_are_documented_as_the_model_has_them() -> None:
    text = read("docs/settings.md")
    sections = dict(re.findall(r"^## (VLLM_\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    fields = {str(field.validation_alias): field for field in DenseMLASettings.model_fields.values()}
    assert sections.keys() == fields.keys()
    for name, field in fields.items():
        assert f"Default: `{field.default}`" in sections[name]
        assert field.description and field.description.strip() in sections[name]


def test_the_mistake_of_the_settings_page_says_what_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = re.search(r"^\$ (VLLM_\w+)=(\w+) .*\n(.+)$", read("docs/settings.md"), re.M)
    assert shown
    monkeypatch.setenv(shown[1], shown[2])
    load_settings.cache_clear()
    try:
        with pytest.raises(ValueError, match=f"^{re.escape(shown[3])}$"):
            load_settings()
    finally:
        load_settings.cache_clear()
