"""Which containers wait for the launches of others."""

import pytest

from gpumgr.enforcement.hami_core.repairs import due
from gpumgr.ledger.gpu_share import GpuShare
from tests.shares import TWO_GPUS, gpu_share


def share(name: str, priority: int, *gpus: int) -> GpuShare:
    return gpu_share(name, *(TWO_GPUS[gpu] for gpu in gpus), priority=priority)


@pytest.mark.parametrize(
    ("containers", "expected"),
    [
        # (priority, GPUs, recent_kernel) of each, and the words to write
        pytest.param([(1, [0], 2), (1, [0], 2)], [None, None], id="one priority: nothing is written"),
        pytest.param([(1, [0], -1), (1, [0], 2)], [0, None], id="one priority: none waits"),
        pytest.param([(0, [0], 2), (1, [0], 2)], [1, -1], id="the higher one launches"),
        pytest.param([(0, [0], 2), (1, [0], -1)], [1, None], id="and still does"),
        pytest.param([(0, [0], 1), (1, [0], -1)], [0, 0], id="it has stopped"),
        pytest.param([(0, [0], 0), (1, [0], -1)], [None, 0], id="and launches no more"),
        pytest.param([(0, [0], 2), (1, [1], 2)], [1, 1], id="on another GPU"),
        pytest.param([(0, [0], 2), (1, [0, 1], -1), (2, [1], 2)], [1, None, 1], id="one that waits delays none"),
        pytest.param([(0, [0], 0), (1, [0], 2), (2, [0], 2)], [None, 1, -1], id="the highest that launches counts"),
        pytest.param([(0, [0], 2), (0, [0], 2), (5, [0], 0)], [1, 1, -1], id="equals do not wait for each other"),
        pytest.param([(0, [0], 2**31 - 1), (1, [0], 2)], [1, -1], id="no word counts for longer"),
        pytest.param([(0, [0], -(2**31)), (1, [0], 2)], [0, 1], id="and no container keeps itself waiting"),
    ],
)
def test_words(containers: list[tuple[int, list[int], int]], expected: list[int | None]) -> None:
    shares = [share(f"a{number}", priority, *gpus) for number, (priority, gpus, _) in enumerate(containers)]
    found = dict(zip(shares, (word for *_, word in containers), strict=True))
    written = due(found)
    assert [written.get(each) for each in shares] == expected
