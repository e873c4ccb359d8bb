"""What a hostile or broken tenant costs the others, on the fake GPU with its own clock."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from gpumgr.enforcement.limiter import pages
from tests.component.enforcement.limiter.harness import Container, Node, Tenant, gpu_time_percent

_MS = 10_000


@contextlib.contextmanager
def _again_and_again(container: Container, how: str) -> Iterator[None]:
    ended = threading.Event()

    def damage() -> None:
        while not ended.wait(0.0005):
            container.damage(how)

    thread = threading.Thread(target=damage)
    thread.start()
    yield
    ended.set()
    thread.join()


_DAMAGES = ("random", "zero", "truncated", "grown", "grant")


@pytest.mark.parametrize("how", [*_DAMAGES, "claim"])
@pytest.mark.parametrize("share", [50, 75])
def test_a_tenant_that_keeps_rewriting_its_page_costs_the_other_nothing(node: Node, share: int, how: str) -> None:
    containers = node.containers(100 - share, share)
    arbiter = node.arbitrate(containers)
    other = node.started(containers[1])
    with _again_and_again(containers[0], how):
        other.send(f"work products {_MS} 1")
        percent = other.gpu_percent()
        (_, overruns, spoiled), (_, _, intact) = arbiter.figures()
    assert percent > share - 5
    assert how == "claim" or percent < share + 5
    assert (overruns if how == "claim" else spoiled) > 0
    assert intact == 0


@pytest.mark.parametrize("how", _DAMAGES)
def test_a_damaged_page_is_made_whole(node: Node, how: str) -> None:
    [container] = node.containers(50)
    arbiter = node.arbitrate([container])
    container.damage(how)
    while not arbiter.figures()[0][2]:
        time.sleep(0.01)
    turn = container.turn
    assert (turn.magic, turn.version, container.path("turn").stat().st_size) == (
        pages.MAGIC,
        pages.VERSION,
        ctypes.sizeof(pages.Turn),
    )


@pytest.mark.parametrize("how", ["random", "zero", "grown", "grant"])
def test_a_tenant_whose_page_was_damaged_has_its_share_again(node: Node, how: str) -> None:
    containers = node.containers(25, 75)
    arbiter, tenants = node.arbitrated(containers)
    for tenant in tenants:
        tenant.send(f"work products {_MS} 2")
    turn = containers[0].turn.gpu[0]
    while not (turn.holding_since_ns and turn.grants > 10):
        pass
    containers[0].damage(how)
    assert [tenant.gpu_percent() for tenant in tenants] == pytest.approx([25, 75], abs=3)
    assert [spoiled > 0 for _, _, spoiled in arbiter.figures()] == [True, False]


@pytest.mark.parametrize("processes", [1, 3])
def test_processes_without_a_slot_share_the_turn(node: Node, processes: int) -> None:
    containers = node.containers(40, 60)
    containers[0].take_all_slots()
    node.arbitrate(containers)
    tenants = [node.started(containers[number]) for number in [0] * processes + [1]]
    *parts, other = gpu_time_percent(tenants, "products")
    assert sum(parts) == pytest.approx(40, abs=5)
    assert other == pytest.approx(60, abs=5)


def test_a_thousand_processes_cost_the_other_nothing(node: Node) -> None:
    """More than there are slots; those of the container that work have its share."""
    containers = node.containers(40, 60)
    node.arbitrate(containers)
    crowd, hostile, other = [node.started(containers[number]) for number in (0, 0, 1)]
    assert crowd.ask("crowd 1030")[1] == 1030
    assert gpu_time_percent([hostile, other], "products") == pytest.approx([40, 60], abs=5)


def _slice_percent(node: Node, container: Container | None, works: Sequence[str], hostile: Tenant) -> float:
    """The GPU time of a second tenant, which has the second work."""
    other = node.started(container)
    hostile.send(f"work {works[0]} {_MS} 2")
    other.send(f"work {works[1]} {_MS} 2")
    return other.gpu_percent()


def test_work_that_does_not_end_leaves_the_other_its_time_slices(node: Node) -> None:
    containers = node.containers(25, 75)
    arbiter = node.arbitrate(containers)
    works = ("endless", "products")
    endless = node.started(containers[0])
    assert _slice_percent(node, containers[1], works, endless) > 36  # without a limiter 41
    assert arbiter.figures()[0][1] == 1


def test_launches_without_the_turn_leave_the_other_its_time_slices(node: Node) -> None:
    """The process has not loaded the library; no figure of the arbiter shows it."""
    containers = node.containers(25, 75)
    node.arbitrate(containers)
    assert _slice_percent(node, containers[1], ("products", "products"), node.started()) > 0.75 * 50


def test_a_turn_that_a_tenant_grants_to_itself_leaves_the_other_its_time_slices(node: Node) -> None:
    containers = node.containers(25, 75)
    arbiter = node.arbitrate(containers)
    hostile = node.started(containers[0])
    with _again_and_again(containers[0], "grant"):
        assert _slice_percent(node, containers[1], ("products", "products"), hostile) > 0.75 * 50
    assert arbiter.figures()[0][2] > 0
