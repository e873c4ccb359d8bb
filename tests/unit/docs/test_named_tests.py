"""The tests that tests/hami_defects.md names exist."""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]


def test_every_test_that_the_table_names_exists() -> None:
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", (PROJECT / "tests" / "hami_defects.md").read_text()))
    assert len(named) > 20
    code = "\n".join(path.read_text() for path in (PROJECT / "tests").rglob("test_*.py"))
    missing = {name for name in named if not re.search(rf"def {name}\(", code)}
    assert not missing, missing
