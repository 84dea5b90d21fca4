"""The documents against the code: versions, commands, links, settings, and the numbers of the worked example."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dense_mla import arch
from dense_mla.merge_plan import THREADS, merge_shares
from dense_mla.paged_kv import PageTiling
from dense_mla.problem import FIXED_COST
from dense_mla.schedule import plan
from vllm_dense_mla import __version__, cli
from vllm_dense_mla.registration import BACKEND_NAME, CACHE_DIR_VARIABLE, PARTIAL_DTYPE_VARIABLE
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
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" in target:
            continue
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{document.name} links to {target}#{anchor}"


def anchors(page: Path) -> list[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


STOPS = re.findall(r"`([\w.]+)`\s+in\s+\[[^]]+\]\(\.\./([\w/.]+\.py)\)", read("docs/decode_step.md"))
FORWARD_PARTS = [(name, "kernels/dense_mla/forward_sm90.py") for name in re.findall(r"^- `(\w+)`", read("docs/decode_step.md"), re.M)]


@pytest.mark.parametrize(("name", "path"), [*STOPS, *FORWARD_PARTS])
def test_every_stop_of_decode_step_is_in_the_file_that_it_names(name: str, path: str) -> None:
    assert len(STOPS) >= 9 and len(FORWARD_PARTS) >= 3
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
    blocks = [share.blocks for share in merge_shares(schedule.splits, 12, 132)]
    assert f"{sum(blocks)} blocks of {THREADS} threads" in text and blocks.count(1) == sum(blocks) == 132 - blocks.count(0)


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


def docs_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_support_page_is_current() -> None:
    """Written from what the backend answers vLLM: after a change of the backend, run the command again."""
    assert read("docs/support.md") == docs_script("support_page").render(), "run: python docs/support_page.py"


def test_the_readme_and_the_contract_name_every_gpu_and_where_the_kernels_ran() -> None:
    (served,) = re.findall(r"^\| GPU \| (.*?) \|", read("README.md"), re.M)
    (contract,) = re.findall(r"^- A GPU of compute capability .*?(?=^- )", read("kernels/README.md"), re.M | re.S)
    for text in (served, contract):
        assert sorted(re.findall(r"\b\d+\.\d\b", text)) == sorted(map(arch.capability_name, arch.ARCHITECTURES))
    tested, compiled_only = (re.findall(r"\b\d+\.\d\b", part) for part in served.split("; compiled only"))
    assert compiled_only == [arch.capability_name(each) for each in arch.ARCHITECTURES if arch.ran_on(each) is None]
    assert tested == [arch.capability_name(each) for each in arch.ARCHITECTURES if arch.ran_on(each) is not None]


def test_the_support_page_asks_everything_that_vllm_asks() -> None:
    """A question that a new vLLM asks of a backend has to get its line."""
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = set(docs_script("support_page").QUESTIONS)
    elsewhere = {"head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "attn_type"}
    never_of_mla = {"use_mm_prefix", "use_per_head_quant_scales", "use_rswa"}
    assert asked | elsewhere | never_of_mla == set(AttentionSelectorConfig._fields)


def test_the_picture_of_the_schedule_is_current_and_shows_what_the_ctas_do() -> None:
    script = docs_script("schedule_picture")
    assert read("docs/schedule.svg") == script.draw(), "run: python docs/schedule_picture.py"
    planned = script.pieces_by_cta(plan(script.LENS, script.PAGE_SIZE, script.CTAS))
    for units, own in zip(script.units_by_cta(), planned, strict=True):
        drawn = [(request, tile) for request, tile in units if tile is not None]
        assert drawn == [(piece.request, tile) for piece in own for tile in range(piece.first_tile, piece.end_tile)]


def test_the_commands_of_the_deployment_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Those whose output is shown print just that; the others parse."""
    text = read("docs/deploy.md")
    shown = re.findall(r"^```console\n\$ vllm-dense-mla (.*?)\n(.*?)^```$", text, re.M | re.S)
    assert shown
    for command, output in shown:
        assert cli.main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output
    for command in re.findall(r"^vllm-dense-mla (.*)$", text, re.M):
        cli._parser().parse_args(shlex.split(command))


def test_the_errors_of_the_deployment_page_are_the_self_test_s() -> None:
    from vllm_dense_mla.self_test import SELF_TESTS, answer

    (said,) = re.findall(r"^\| error against FP64.*\| ([\d.]+) \| ([\d.]+) \|$", read("docs/deploy.md"), re.M)
    found = [answer(replace(SELF_TESTS[0], partial_dtype=dtype), None)["error"] for dtype in (torch.bfloat16, torch.float32)]
    assert said == tuple(f"{error:.1f}" for error in found)


CALLERS = ("arch.py", "decoder.py", "launch_arguments.py", "reference.py", "compiled.py", "schedule.py", "problem.py")  # not of operators


NAMES = {"BACKEND_NAME": BACKEND_NAME, "CACHE_DIR_VARIABLE": CACHE_DIR_VARIABLE, "PARTIAL_DTYPE_VARIABLE": PARTIAL_DTYPE_VARIABLE}


def template(node: ast.expr) -> Iterator[str]:
    """The text of a message, with … for every value; both of a conditional one."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield re.sub(r"%[sd]", "…", node.value)  # of logging
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else NAMES.get(ast.unparse(part.value), "…") for part in node.values)
    elif isinstance(node, ast.IfExp):
        yield from (*template(node.body), *template(node.orelse))


@cache
def messages() -> dict[str, str]:
    """Every message that the packages raise, refuse with, warn of or report as failed: its template, and the file."""
    found: dict[str, str] = {}
    for path in sorted([*ROOT.glob("vllm_dense_mla/*.py"), *ROOT.glob("kernels/dense_mla/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            texts: list[ast.expr] = []
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                texts = list(node.exc.args[:1])
            elif isinstance(node, ast.FunctionDef) and node.name.removeprefix("_").startswith(("explain", "refuse_", "unsupported_reason")):
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            elif isinstance(node, ast.Lambda) and path.name == "backend.py":
                texts = [node.body]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "reasons.append":
                texts = node.args
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("logger.warning", "logger.warning_once", "_warn_once"):
                texts = node.args[:1]
            elif isinstance(node, ast.Call) and [ast.unparse(argument) for argument in node.args[1:2]] == ["'failed'"]:
                texts = node.args[2:3]
            for text in texts:
                # A report's text ends with what is wrong.
                found |= {each.splitlines()[-1]: path.name for each in template(text)}
    return {text: name for text, name in found.items() if re.search(r"\w", text)}


def documented(section: str = "") -> list[str]:
    text = read("docs/troubleshooting.md")
    parts = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    theirs = parts.pop("The backend is not there")  # vLLM's words
    assert theirs
    chosen = [parts[section]] if section else list(parts.values())
    return [pattern for part in chosen for pattern in re.findall(r"^\| `([^`]+)`", part, re.M)]


def fits(pattern: str, text: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("…"))), text, re.S) is not None


def test_every_message_has_its_cure() -> None:
    """A pattern of the callers' section is too wide for an operator's message: it counts for the kernels' files alone."""
    own = documented("Calling dense_mla yourself")
    for text, name in messages().items():
        patterns = documented() if name in CALLERS else [pattern for pattern in documented() if pattern not in own]
        assert any(fits(pattern, text) for pattern in patterns), f"docs/troubleshooting.md has nothing on {text!r} ({name})"


def test_every_row_has_something_to_do() -> None:
    assert not re.findall(r"^\| `[^`]+`[^|]*\| *\|$", read("docs/troubleshooting.md"), re.M)


def test_every_cure_is_for_a_message_that_exists() -> None:
    texts = messages()
    assert len(texts) > 50
    for pattern in documented():
        assert any(fits(pattern, text) for text in texts), f"no code says {pattern!r}"


def test_the_messages_of_vllm_are_its_own() -> None:
    """The part of each before its first value is in vLLM's source."""
    import vllm

    root = Path(vllm.__file__).parent
    sources = ["v1/attention/backends/registry.py", "plugins/__init__.py", "platforms/interface.py", "platforms/cuda.py"]
    sources += ["v1/worker/workspace.py", "config/device.py"]
    source = re.sub(r'"\s*\n\s*f?"', "", "\n".join((root / path).read_text() for path in sources))
    text = read("docs/troubleshooting.md").split("## ")[1]
    said = re.findall(r"^\| `([^`]+)`", text, re.M)
    assert len(said) == 6
    for message in said:
        assert re.split(r"'DENSE_MLA'| dense_mla|: VLLM_| …", message)[0] in source, message
