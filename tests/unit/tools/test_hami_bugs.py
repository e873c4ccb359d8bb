"""The table of HAMi's defects in tests/hami_defects.md has every number; the tests that it names exist, and are marked with the number."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
#: The numbers in our list of HAMi's defects.
NUMBERS = range(1, 41)


def rows() -> Iterator[tuple[int, list[str], str]]:
    """Number, tests, and the last column."""
    for line in (PROJECT / "tests" / "hami_defects.md").read_text().splitlines():
        if row := re.match(r"\| ([0-9][0-9, ]*) \|.*\| (.*) \|$", line):
            for number in row[1].split(","):
                yield int(number), re.findall(r"`(test_\w+)`", row[2]), row[2]


def marks() -> dict[str, set[int]]:
    """Test -> the numbers of its mark."""
    found: dict[str, set[int]] = {}
    for file in (PROJECT / "tests").rglob("test_*.py"):
        text = file.read_text()
        for node in ast.parse(text).body if "hami_bug" in text else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                texts = [each for each in map(ast.unparse, node.decorator_list) if "hami_bug" in each]
                found.setdefault(node.name, set()).update(
                    int(number) for each in texts for number in re.findall(r"\bB([0-9]+)\b", each)
                )
    return found


def test_every_number_has_a_row_with_tests_or_a_reason() -> None:
    assert sorted(number for number, _, _ in rows()) == [*NUMBERS]
    assert all(tests or reason.strip() for _, tests, reason in rows())


def test_the_named_tests_have_the_numbers_as_their_marks() -> None:
    marked = marks()
    assert [(number, test) for number, tests, _ in rows() for test in tests if number not in marked.get(test, ())] == []
