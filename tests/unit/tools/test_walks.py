"""The paths that the project takes most often stay short, and the tool counts what it says."""

from collections.abc import Callable

import pytest

from gpumgr.common.units import Amounts
from tools.walks import WALKS, modules_entered

MOST = {
    ("filter", "share"): 8,
    ("filter", "whole GPUs"): 15,
    ("filter", "no GPU"): 3,
    ("snapshot", "the same GPUs"): 6,
    ("snapshot", "one GPU more"): 6,
}


async def test_each_entered_module_counts_once_and_results_are_awaited() -> None:
    async def add() -> Amounts:
        return Amounts(1) + Amounts(2) + Amounts(3)

    calls: list[Callable[[], object]] = [add, lambda: Amounts(1) + Amounts(2)]
    assert [await modules_entered(call) for call in calls] == [["common/units"]] * 2
    assert await modules_entered(lambda: None) == []


@pytest.mark.parametrize("name", WALKS)
async def test_walks_are_short(name: str) -> None:
    async for title, call in WALKS[name]():
        found = await modules_entered(call)
        assert len(found) <= MOST.get((name, title), 25), (title, found)
