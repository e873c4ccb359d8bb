"""Texts of messages."""

import pytest

from gpumgr.cluster.simulation.texts import count_text, short


@pytest.mark.parametrize(("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_plural(count: int, text: str) -> None:
    assert count_text(count, "node") == text


def test_short_texts_are_printable() -> None:
    assert short("a\x1b" + "b" * 50) == "a?" + "b" * 35 + "..."
