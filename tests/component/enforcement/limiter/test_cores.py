"""The time token: real processes on the fake GPU with its own clock, the library preloaded, and the arbiter."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import Container, Node, Tenant

_MS = 10_000


def _containers(folder: Path, shares: Sequence[int]) -> list[Container]:
    return [Container(folder / str(number), share_percent=share) for number, share in enumerate(shares)]


def _started(node: Node, container: Container, lookup: str = "proc") -> Tenant:
    tenant = node.start(container, lookup, clock=True)
    assert tenant.ask("init 0")[0] == 0
    return tenant


def _gpu_time_percent(tenants: Sequence[Tenant], works: Sequence[str], milliseconds: int = _MS) -> list[float]:
    for tenant, work in zip(tenants, works, strict=True):
        tenant.send(f"work {work} {milliseconds} {len(tenants)}")
    answers = [tenant.answer() for tenant in tenants]
    assert [result for result, _, _ in answers] == [0] * len(tenants)
    return [100 * gpu / elapsed for _, gpu, elapsed in answers]


@pytest.mark.parametrize("work", ["products", "graph"])
@pytest.mark.parametrize("shares", [(25, 75), (20, 30, 50)], ids=str)
def test_tenants_that_want_all_get_their_shares(node: Node, tmp_path: Path, shares: tuple[int, ...], work: str) -> None:
    containers = _containers(tmp_path, shares)
    node.arbitrate(containers)
    tenants = [_started(node, container) for container in containers]
    held = _gpu_time_percent(tenants, [work] * len(shares))
    assert held == pytest.approx(list(shares), abs=3)


#: The fake GPU's time of an unlimited loop of small kernels, which is bound by its launches (test_fake_gpu.py).
_UNLIMITED_PERCENT = {"products": 100, "graph": 100, "small": 83}


@pytest.mark.parametrize("work", _UNLIMITED_PERCENT)
@pytest.mark.parametrize("share", [25, 50, 75])
@pytest.mark.parametrize("arbiter", [True, False], ids=["arbiter", "none"])
def test_a_tenant_that_is_alone_gets_its_share(node: Node, tmp_path: Path, share: int, work: str, *, arbiter: bool) -> None:
    """Without an arbiter it limits itself."""
    containers = _containers(tmp_path, [share])
    if arbiter:
        node.arbitrate(containers)
    [held] = _gpu_time_percent([_started(node, containers[0])], [work])
    assert 100 * held / _UNLIMITED_PERCENT[work] == pytest.approx(share, abs=3)


def test_a_free_gpu_is_used_up_to_the_ceiling(node: Node, tmp_path: Path) -> None:
    container = Container(tmp_path / "0", share_percent=25, ceiling_percent=60)
    node.arbitrate([container, Container(tmp_path / "1", share_percent=75)])
    [held] = _gpu_time_percent([_started(node, container)], ["products"])
    assert held == pytest.approx(60, abs=3)


def test_processes_of_a_container_share_its_turn(node: Node, tmp_path: Path) -> None:
    containers = _containers(tmp_path, [40, 60])
    node.arbitrate(containers)
    tenants = [_started(node, containers[number]) for number in (0, 0, 0, 1)]
    *parts, other = _gpu_time_percent(tenants, ["products"] * 4)
    assert [sum(parts), other] == pytest.approx([40, 60], abs=3)


def test_a_tenant_that_dies_in_its_turn_is_passed_over(node: Node, tmp_path: Path) -> None:
    containers = [Container(tmp_path / str(number), share_percent=50, ceiling_percent=100) for number in range(2)]
    node.arbitrate(containers)
    victim, neighbour = [_started(node, container) for container in containers]
    victim.send(f"work products {_MS} 2")
    neighbour.send(f"work products {_MS} 2")
    while not containers[0].holds_a_turn_after(10):
        pass
    victim.kill()
    result, gpu, elapsed = neighbour.answer()
    assert result == 0
    assert 100 * gpu / elapsed > 85
