"""Each row of docs/failure-modes.md names tests that exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failure-modes.md").read_text("utf-8")
LINES = PAGE.partition("## What is tried")[0].splitlines()
ROWS = [line for line in LINES if line.startswith("|") and not re.match(r"\| (fault|---) \|", line)]


@functools.cache
def _tests_of(file: str) -> set[str]:
    """Names as pytest has them, `Class::test_x` of a class."""
    found = set()
    for node in ast.parse((TESTS / file).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{f.name}" for f in node.body if hasattr(f, "name")}
    return found


def test_there_are_rows():
    assert len(ROWS) >= 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_a_row_names_tests_that_exist(row: str):
    cells = row.strip("|").split(" | ")
    assert len(cells) == 5
    named = re.findall(r"`([^`]+\.py)::([^`]+)`", cells[-1])
    assert named
    assert len(named) == cells[-1].count("::test_")
    for file, test in named:
        assert (TESTS / file).is_file(), file
        assert test.rpartition("::")[2].startswith("test_")
        assert test in _tests_of(file), f"{file}::{test}"
