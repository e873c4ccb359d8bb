"""Breaths change nothing of what is worked on."""

from gpumgr.metrics.pace import paced


def test_all_items_come_in_their_order() -> None:
    assert list(paced(range(1000))) == list(range(1000))
    assert list(paced(())) == []
