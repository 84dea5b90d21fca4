"""tests/FAULTS.md against the tests: it lists every fault that one of them names, and nothing else."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = "tests/kernels/cases.py"
NUMBERS = re.compile(r"\bfault(?: (\d+)|s (\d+(?:(?:,|,? and) \d+)+))", re.I)


def numbers(text: str) -> set[int]:
    """Of `fault 7`, `Faults 18 and 20` and `Faults 36, 56, 60`."""
    return {int(number) for one, several in NUMBERS.findall(" ".join(text.split())) for number in re.findall(r"\d+", one or several)}


def comments(source: str) -> dict[int, str]:
    return {token.start[0]: token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.COMMENT}


@cache
def named() -> dict[str, set[int]]:
    """The faults that the docstring and the comments of every function name, by `file::function`; `file::` for what is outside of one."""
    found: dict[str, set[int]] = defaultdict(set)
    for path in sorted(ROOT.glob("tests/**/*.py")):
        if path == Path(__file__):
            continue
        source = path.read_text()
        tree, said = ast.parse(source), comments(source)
        name = path.relative_to(ROOT)
        found[f"{name}::"] |= numbers(ast.get_docstring(tree) or "")
        for node in (each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)):
            lines = range(min([node.lineno, *(each.lineno for each in node.decorator_list)]), (node.end_lineno or node.lineno) + 1)
            texts = [said.pop(line) for line in lines if line in said]
            texts += [ast.get_docstring(each) or "" for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
            found[f"{name}::{node.name}"] |= set().union(*map(numbers, texts))
        for comment in said.values():
            found[f"{name}::"] |= numbers(comment)
    return found


def table() -> dict[int, list[str]]:
    rows = re.findall(r"^\| (\d+) \| [A-Z][^|\n]+[.] \| ([^|\n]+) \|$", (ROOT / "tests/FAULTS.md").read_text(), re.M)
    assert len(rows) == len({number for number, _ in rows}), "a number has two rows"
    return {int(number): re.findall(r"`([^`]+)`", tests) for number, tests in rows}


def test_numbers_are_read_as_tests_write_them() -> None:
    assert numbers("Fault 46: 3 rows.") == numbers("(fault 46)") == {46}
    assert numbers("Faults 7 and 28: 4 of them") == {7, 28}
    assert numbers("Faults 56, 57 and\n    60: natural") == {56, 57, 60}
    assert numbers("Faults 36, 56, 60: every rank") == {36, 56, 60}
    assert numbers("page ids that fault; by default 5") == set()


def test_every_fault_that_a_test_names_is_in_the_table() -> None:
    rows = table()
    assert len(rows) > 50
    for test, faults in named().items():
        for fault in faults:
            assert fault in rows, f"tests/FAULTS.md has no fault {fault}, which {test} names"
            assert test.endswith("::") or test in rows[fault], f"tests/FAULTS.md does not give {test} for fault {fault}"


def test_every_test_of_the_table_exists_and_names_the_fault() -> None:
    for fault, tests in table().items():
        assert tests, f"tests/FAULTS.md has no test for fault {fault}"
        for test in tests:
            assert fault in named().get(test, set()), f"{test} does not exist or does not name fault {fault}"


def test_every_row_is_read() -> None:
    """A row that the pattern misses would be checked by nothing."""
    lines = [line for line in (ROOT / "tests/FAULTS.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == len(table()) + 2
    assert list(table()) == sorted(table())


def test_every_input_of_the_table_is_run() -> None:
    """An input counts as a test because it is in cases.FAULTS, over which `test_known_faults` goes."""
    body = ast.parse((ROOT / CASES).read_text()).body
    (faults,) = [node for node in body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAULTS"]
    run = {node.id for node in ast.walk(faults) if isinstance(node, ast.Name)}
    inputs = {test.removeprefix(f"{CASES}::") for tests in table().values() for test in tests if test.startswith(CASES)}
    assert len(inputs) > 10 and inputs <= run
