"""Banned words and constructions: the check finds them where they are, and the source tree has none."""

from pathlib import Path

import pytest

from tools.prose import findings, findings_in


def test_the_source_tree_is_in_plain_english() -> None:
    found = [str(each) for each in findings()]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "text", "lines"),
    [
        ("a.py", '"""First.\n\nIt tells more.\n"""\n', [3]),
        ("a.py", 'def f():\n    """Whose?"""\n    return 1  # nobody\n', [2, 3]),
        ("a.py", 'class A:\n    b: int\n    #: Rule 1 of it\n    c: str = "it was told"\n', [3]),
        ("a.py", "tell = told = 1\n", []),
        ("a.py", '"""The method `tell` and ``told()`` are code."""\n', []),
        ("a.md", "# A\n\nTells.\n\n```\nnobody\n```\n\nWhoever `tells`\nwhose\n", [3, 9, 10]),
        ("a.md", "intelligible, warden, the rule 1, Law, stationary\n", []),
        ("a.yaml", "#!tell\na: tell # told\nb: 'x#told'\n", [2]),
        ("Makefile", "## x\na: ## tells\n", [2]),
        ("a.py", '"""Of each node its state."""\n# One of two.\n# Of three.\na = 1  # b. Of c\n', [1, 3, 4]),
        ("a.py", '"""Parts of which, those that, no more."""\n', [1, 1, 1]),
        ("a.py", '"""It stands, and comes from a file."""\n', [1, 1]),
        ("a.md", "| Of a | it takes no more than 3 of them, stand by |\n", [1]),
        ("a.md", f"A pod,\n\nthat {'word ' * 25}.\n", []),
        ("a.md", f"A pod,\n\nthat {'word ' * 26}.\n", [3]),
        ("a.py", f"#: A pod\n# that {'word ' * 13}\n# {'word ' * 13}\na = 1\n", [2]),
        ("a.c", '// told\nchar *a = "tell"; /* b\n whose */\n', [1, 3]),
    ],
)
def test_prose_alone_is_checked(name: str, text: str, lines: list[int]) -> None:
    assert [each.line for each in findings_in(Path(name), text)] == lines


def test_a_finding_names_the_replacement() -> None:
    (found,) = findings_in(Path("docs/a.md"), "It is told.\n")
    assert str(found) == "docs/a.md:1: 'told': write log, report, publish, return or notify"
