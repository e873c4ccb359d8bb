"""The time token: real processes on the fake GPU with its own clock, the library preloaded, and the arbiter."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.component.enforcement.limiter.harness import (
    Container,
    Node,
    arbitrated,
    claim_work,
    containers_of,
    gpu_time_percent,
    started,
)

_MS = 10_000
#: For many works at the same shares.
_SHORT_MS = 3_000
#: What ten seconds have for work if the arbiter ends in them: no container has a turn until its heartbeat is 200 ms old.
_WITHOUT_SILENCE = 0.98


@pytest.mark.parametrize("work", ["products", "graph"])
@pytest.mark.parametrize("shares", [(25, 75), (5, 95), (25, 50), (20, 30, 50), (5, 5, 10, 10, 15, 15, 20, 20)], ids=str)
def test_tenants_that_want_all_get_their_shares(node: Node, tmp_path: Path, shares: tuple[int, ...], work: str) -> None:
    _, tenants = arbitrated(node, containers_of(tmp_path, shares))
    held = gpu_time_percent(tenants, [work] * len(shares))
    assert held == pytest.approx(list(shares), abs=3)
    assert sum(held) >= 0.97 * sum(shares)


#: The fake GPU's time of an unlimited loop of small kernels, which is bound by its launches (test_fake_gpu.py).
_UNLIMITED_PERCENT = {"products": 100, "graph": 100, "small": 83}


@pytest.mark.parametrize("work", _UNLIMITED_PERCENT)
@pytest.mark.parametrize("share", [25, 50, 75])
@pytest.mark.parametrize("arbiter", [True, False], ids=["arbiter", "none"])
def test_a_tenant_that_is_alone_gets_its_share(node: Node, tmp_path: Path, share: int, work: str, *, arbiter: bool) -> None:
    """Without an arbiter it limits itself. The end of a turn costs no time: at once the process looks whether its work has ended."""
    containers = containers_of(tmp_path, [share])
    if arbiter:
        node.arbitrate(containers)
    [held] = gpu_time_percent([started(node, containers[0])], [work], milliseconds=_SHORT_MS)
    assert -1 < 100 * held / _UNLIMITED_PERCENT[work] - share < 3


@pytest.mark.parametrize("away_seconds", [0.05, 0.3, 1, 8])
@pytest.mark.parametrize("shares", [(25, 75), (20, 30, 50), (5, 95)], ids=str)
def test_shares_hold_while_the_arbiter_is_killed_and_restarted(
    node: Node, tmp_path: Path, shares: tuple[int, ...], away_seconds: float
) -> None:
    """While it is away, the tenants limit themselves, one after the other."""
    containers = containers_of(tmp_path, shares)
    node.arbitrate(containers, away_seconds)
    held = gpu_time_percent([started(node, container) for container in containers], ["products"] * len(shares), others=1)
    assert held == pytest.approx([share * _WITHOUT_SILENCE for share in shares], abs=3)


@pytest.mark.parametrize("away_seconds", [0.3, 1])
def test_shares_hold_while_the_arbiter_is_stopped(node: Node, tmp_path: Path, away_seconds: float) -> None:
    """As by a debugger. No tenant pays for that time afterwards."""
    containers = containers_of(tmp_path, [50, 50], 100)
    node.arbitrate(containers, away_seconds, stops=True)
    held = gpu_time_percent([started(node, container) for container in containers], ["products"] * 2, others=1)
    assert held == pytest.approx([50, 50], abs=3)


def test_a_tenant_that_needed_no_turn_keeps_to_its_share_without_the_arbiter(node: Node, tmp_path: Path) -> None:
    """A killed arbiter leaves in the page that launches need none."""
    container = Container(tmp_path / "0", share_percent=25, ceiling_percent=100)
    node.arbitrate([container]).kill()
    tenant = started(node, container)
    gpu_time_percent([tenant], ["products"], milliseconds=500)  # until the library has noticed, and its thread has begun
    assert gpu_time_percent([tenant], ["products"]) == pytest.approx([25], abs=3)


def _parts(containers: Sequence[Container], gpu: int) -> set[int]:
    """The percents of the time in which one of the containers works on a GPU without an arbiter; each percent is one container's."""
    parts = [container.part_while_away(gpu) for container in containers if container.gpus > gpu]
    percents = {(begin + percent) % 100 for begin, share in parts for percent in range(share)}
    assert len(percents) == sum(share for _, share in parts)
    return percents


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
def test_a_container_has_the_same_part_of_the_time_on_its_gpus(node: Node, tmp_path: Path) -> None:
    """Without an arbiter. Parts move together when a container ends, so that the next one finds its own in one piece."""
    shares = ((20, 1), (30, 2), (15, 1), (35, 2))
    containers = [
        Container(tmp_path / f"{number}", share_percent=share, gpus=gpus) for number, (share, gpus) in enumerate(shares)
    ]
    arbiter = node.arbitrate(containers)
    assert len(_parts(containers, 0)) == 100
    assert len(_parts(containers, 1)) == 65
    assert containers[1].part_while_away(0) == containers[1].part_while_away(1) == (20, 30)
    arbiter.remove(0)
    while [containers[3].part_while_away(gpu) for gpu in range(2)] != [(45, 35)] * 2:
        pass
    assert _parts(containers[1:], 0) == set(range(80))


def test_a_tenant_without_a_limit_of_cores_takes_no_part_of_the_time_without_an_arbiter(node: Node, tmp_path: Path) -> None:
    containers = containers_of(tmp_path, [0, 30, 70])
    node.arbitrate(containers)
    assert len(_parts(containers, 0)) == 100


@pytest.mark.parametrize("away_seconds", [0, 8])
def test_processes_of_a_container_share_its_turn_and_its_part_while_the_arbiter_is_away(
    node: Node, tmp_path: Path, away_seconds: int
) -> None:
    containers = containers_of(tmp_path, [40, 60])
    node.arbitrate(containers, away_seconds, tenants=4)
    tenants = [started(node, containers[number]) for number in (0, 0, 0, 1)]
    *parts, other = gpu_time_percent(tenants, ["products"] * 4, others=away_seconds > 0)
    working = _WITHOUT_SILENCE if away_seconds else 1
    assert [sum(parts), other] == pytest.approx([40 * working, 60 * working], abs=3)


def test_a_restarted_arbiter_wakes_processes_that_sleep(node: Node, tmp_path: Path) -> None:
    """They wait until the count of turns changes, so it never starts anew."""
    [container] = containers_of(tmp_path, [50])
    counts = []
    for _ in range(3):
        arbiter = node.arbitrate([container])
        counts.append(container.turns())
        arbiter.kill()
    assert 0 < counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
def test_the_arbiter_seldom_reads_the_pages_of_idlecontainers_of(node: Node, tmp_path: Path) -> None:
    """While two tenants share one of the GPUs, 32 idle tenants of both are read every 5 ms, and for their heartbeat."""
    containers = containers_of(tmp_path, [25, 75])
    idle = [Container(tmp_path / f"idle-{number}", share_percent=50, gpus=2) for number in range(16)]
    arbiter = node.arbitrate([*containers, *idle])
    tenants = [started(node, container) for container in containers]
    before = arbiter.reads()
    gpu_time_percent(tenants, ["products"] * 2)
    seconds = _MS / 1000
    assert arbiter.reads() - before < 32 * 300 * seconds + 2 * 5000 * seconds


def test_a_free_gpu_is_used_up_to_the_ceiling(node: Node, tmp_path: Path) -> None:
    container = Container(tmp_path / "0", share_percent=25, ceiling_percent=60)
    node.arbitrate([container, Container(tmp_path / "1", share_percent=75)])
    [held] = gpu_time_percent([started(node, container)], ["products"])
    assert held == pytest.approx(60, abs=3)


def test_small_kernels_beside_products_hold_their_share(node: Node, tmp_path: Path) -> None:
    """Their time held, in which the GPU waits for their launches."""
    arbiter, tenants = arbitrated(node, containers_of(tmp_path, [25, 75]))
    gpu_time_percent(tenants, ["small", "products"], milliseconds=_SHORT_MS)
    assert [held_ns / 30e6 for held_ns, _, _ in arbiter.figures()] == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("share", [25, 50, 90])
def test_a_kernel_that_is_longer_than_two_turns_is_paid_for_afterwards(node: Node, tmp_path: Path, share: int) -> None:
    """The other tenant gets back what the driver's time slices took from it, and no more than that, if its ceiling allows it."""
    arbiter, tenants = arbitrated(node, containers_of(tmp_path, [share, 100 - share], 100))
    gpu_time_percent(tenants, ["slow", "products"], milliseconds=2 * _MS)
    (held_ns, overruns, _), (other_ns, _, _) = arbiter.figures()
    assert 100 * held_ns / (held_ns + other_ns) == pytest.approx(share, abs=3)
    assert overruns > 10


def test_long_kernels_cost_nothing_while_no_other_tenant_wants_the_gpu(node: Node, tmp_path: Path) -> None:
    containers = [Container(tmp_path / str(ceiling), share_percent=50, ceiling_percent=ceiling) for ceiling in (50, 100)]
    _, tenants = arbitrated(node, containers)
    assert tenants[0].ask("work slow 4000 1")[0] == 0
    assert gpu_time_percent(tenants, ["products"] * 2) == pytest.approx([50, 50], abs=3)


@pytest.mark.parametrize(
    ("shares", "ceiling", "seconds", "percent"),
    [  # four seconds without a turn at half of the time; 18 at a tenth beside the other one, after 20 in which both had time slices
        ((50,), 50, 20, 15),
        ((10, 90), 100, 50, 2.4),
    ],
    ids=["alone", "two"],
)
def test_a_very_long_kernel_is_paid_for_with_two_seconds_at_most(
    node: Node, tmp_path: Path, shares: Sequence[int], ceiling: int, seconds: int, percent: float
) -> None:
    """One kernel of ten seconds, then short ones, which alone count here."""
    _, tenants = arbitrated(node, containers_of(tmp_path, shares, ceiling))
    works = ["giant", "products"][: len(shares)]
    assert gpu_time_percent(tenants, works, milliseconds=1000 * seconds)[0] == pytest.approx(percent, abs=1)


def test_no_more_is_queued_than_a_turn_may_overrun(node: Node, tmp_path: Path) -> None:
    """Each launches 210 ms of work without waiting for it."""
    arbiter, tenants = arbitrated(node, containers_of(tmp_path, [50, 50]))
    assert gpu_time_percent(tenants, ["deep"] * 2) == pytest.approx([50, 50], abs=3)
    assert [overruns for _, overruns, _ in arbiter.figures()] == [0, 0]


def test_a_tenant_that_comes_back_has_no_claim_on_the_time_before(node: Node, tmp_path: Path) -> None:
    _, tenants = arbitrated(node, containers_of(tmp_path, [50, 50], 100))
    assert tenants[0].ask(f"work products {_MS} 1")[0] == 0
    assert gpu_time_percent(tenants, ["products"] * 2) == pytest.approx([50, 50], abs=3)


def test_a_tenant_that_used_a_free_gpu_does_not_pay_for_it_when_another_one_comes(node: Node, tmp_path: Path) -> None:
    """Also if it pauses at that moment."""
    _, tenants = arbitrated(node, containers_of(tmp_path, [10, 90], 100))
    for tenant, milliseconds in ((tenants[0], 3000), (started(node, None), 500), (tenants[1], 20)):
        assert tenant.ask(f"work products {milliseconds} 1")[0] == 0
    assert gpu_time_percent(tenants, ["products"] * 2) == pytest.approx([10, 90], abs=3)


def test_a_tenant_that_launches_seldom_leaves_its_turn_to_the_other(node: Node, tmp_path: Path) -> None:
    """It gives the turn back a millisecond after its work has ended; a turn lasts 20 ms."""
    _, tenants = arbitrated(node, containers_of(tmp_path, [50, 50], 100))
    assert gpu_time_percent(tenants, ["sparse", "products"])[1] > 70


def test_a_tenant_does_not_pay_for_time_that_others_may_not_use(node: Node, tmp_path: Path) -> None:
    """One is at its ceiling; when the third one comes, each has its share at once."""
    containers = [
        Container(tmp_path / f"{number}", share_percent=share, ceiling_percent=ceiling)
        for number, (share, ceiling) in enumerate(((40, 40), (20, 100), (40, 100)))
    ]
    _, tenants = arbitrated(node, containers)
    gpu_time_percent(tenants[:2], ["products"] * 2)
    assert gpu_time_percent(tenants, ["products"] * 3) == pytest.approx([40, 20, 40], abs=3)


def test_tenants_divide_by_their_shares_what_one_that_launches_seldom_leaves(node: Node, tmp_path: Path) -> None:
    """Its time is far behind theirs."""
    _, tenants = arbitrated(node, containers_of(tmp_path, [10, 5, 85], 100))
    large, small, _ = gpu_time_percent(tenants, ["products", "products", "sparse"])
    assert large / small == pytest.approx(2, abs=0.2)
    assert large + small > 80


_LAUNCHES = ("extended", "cooperative", "several", "grid")
_COPIES = ("copies", "unified", "peers", "rectangles", "boxes", "boxpeers", "fills", "halves", "rows", "words")
_ARRAYS = ("toarrays", "fromarrays", "arrays")
_BATCHES = ("batches", "oldbatches", "boxbatches", "oldboxbatches")  # of CUDA 13 and 12.8
_NEWER = ("attributed", "attributedboxes", "fabric", "decompressed")  # of CUDA 13.2 and 13.5; the last one is of 12.6


@pytest.mark.parametrize("work", [*_LAUNCHES, *_COPIES, *_ARRAYS, *_BATCHES, *_NEWER])
def test_every_kind_of_launch_waits_for_the_turn(node: Node, tmp_path: Path, work: str) -> None:
    _, tenants = arbitrated(node, containers_of(tmp_path, [25, 75]))
    assert gpu_time_percent(tenants, [work, "products"], milliseconds=_SHORT_MS) == pytest.approx([25, 75], abs=3)


def test_a_batch_of_copies_from_the_host_needs_no_turn(node: Node, tmp_path: Path) -> None:
    """Also with less than a MiB inside the device."""
    containers = containers_of(tmp_path, [50, 50])
    node.arbitrate(containers)
    tenant = started(node, containers[0])
    assert tenant.ask("work offloads 100 1")[0] == 0
    result, gpu_ns, _ = tenant.ask("work products 100 1")
    assert result == 0
    expected = gpu_ns / 210_000 + 2  # a kernel precedes each kind of work
    while containers[0].launches() < expected:
        pass
    assert containers[0].launches() == expected


@pytest.mark.parametrize("lookup", ["proc", "stream"], ids=["streams", "per-thread"])
def test_threads_share_the_turn(node: Node, tmp_path: Path, lookup: str) -> None:
    """Some have a stream of their own, the others the default stream, or the default streams of the threads."""
    containers = containers_of(tmp_path, [25, 75])
    node.arbitrate(containers)
    tenants = [started(node, container, lookup) for container in containers]
    assert gpu_time_percent(tenants, ["products"] * 2, threads=4) == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("threads", [1, 8])
def test_the_time_waited_is_that_of_the_container(node: Node, tmp_path: Path, threads: int) -> None:
    """Not the sum over its threads. These two wait whenever they do not hold the GPU."""
    arbiter, tenants = arbitrated(node, containers_of(tmp_path, [25, 75]))
    gpu_time_percent(tenants, ["products"] * 2, threads=threads)
    assert [10 * waited for waited in arbiter.waited_seconds()] == pytest.approx([75, 25], abs=3)


@pytest.mark.parametrize(
    ("containers", "lookup", "calls"),
    [  # 200 launches, then a wait; within a turn the current context is asked for, too, and a marker takes three calls
        (0, "proc", 1.006),
        (1, "proc", 1.006),
        (2, "proc", 2.04),
        (2, "stream", 5.04),
    ],
    ids=["bare", "unlimited", "limited", "per-thread"],
)
def test_a_small_launch_calls_the_driver_once_and_its_turn_seldom_adds_a_marker(
    node: Node, tmp_path: Path, containers: int, lookup: str, calls: float
) -> None:
    """A container needs no turn while it has the GPU for itself. The markers of small kernels are about a millisecond apart; only of a
    per-thread stream the last one is recorded again with each launch."""
    all_of_them = [Container(tmp_path / str(number), share_percent=50, ceiling_percent=100) for number in range(containers)]
    node.arbitrate(all_of_them)
    tenant = node.start(all_of_them[0] if containers else None, lookup, clock=True)
    assert tenant.ask("init 0")[0] == 0
    before = tenant.ask("calls")[1]
    result, gpu_ns, _ = tenant.ask("work small 1000 1")
    assert result == 0
    assert (tenant.ask("calls")[1] - before) / (gpu_ns / 2500) <= calls
    while containers and all_of_them[0].launches() < gpu_ns / 2500 + 1:
        pass  # the limiter's thread adds to it once per millisecond
    assert not containers or all_of_them[0].launches() == gpu_ns / 2500 + 1


def test_captures_in_another_thread_are_not_disturbed(node: Node, tmp_path: Path) -> None:
    """In global mode, in which many calls of any thread end a capture."""
    containers = containers_of(tmp_path, [50, 50])
    node.arbitrate(containers)
    result, captures, _ = started(node, containers[0]).ask("captures 2000")
    assert result == 0
    assert captures > 0


@pytest.mark.parametrize("per_thread", [0, 1], ids=["", "ptsz"])
@pytest.mark.parametrize("how", ["new", "given", "again"])
def test_a_launch_that_is_captured_waits_for_no_turn(node: Node, tmp_path: Path, how: str, per_thread: int) -> None:
    """Here the container never gets one."""
    [container] = containers_of(tmp_path, [50])
    container.beat_for_ever()
    assert started(node, container).ask(f"captured {how} {per_thread}") == (0, how != "new", 0)


@pytest.mark.parametrize(
    ("command", "lookup"),
    [("events 20", "proc"), ("passing 100", "stream"), ("retains 100", "stream"), ("retains 100 1", "stream")],
)
def test_markers_are_used_again(node: Node, tmp_path: Path, command: str, lookup: str) -> None:
    """When they can't be recorded, as in a broken context; after the end of threads, each with a default stream of its own; after the
    release of a context that is retained elsewhere; after the last release of the primary context beside another one."""
    containers = containers_of(tmp_path, [50, 50])
    node.arbitrate(containers)
    result, events, _ = started(node, containers[0], lookup).ask(command)
    assert result == 0
    assert 0 < events <= 16


def test_a_turn_lasts_until_the_work_of_each_thread_has_a_marker(node: Node, tmp_path: Path) -> None:
    """A thread that loses its CPU between a launch and the marker, which no other thread can record in its default stream."""
    containers = containers_of(tmp_path, [50, 50])
    node.arbitrate(containers)
    tenants = [started(node, container, lookup) for container, lookup in zip(containers, ("stream", "proc"), strict=True)]
    assert tenants[0].ask("exchanges 22000000")[0] == 0
    assert gpu_time_percent(tenants, ["long", "products"]) == pytest.approx([50, 50], abs=3)


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
def test_turns_of_different_gpus_are_independent(node: Node, tmp_path: Path) -> None:
    """Each of two tenants that share both GPUs works on one, up to its ceiling."""
    containers = containers_of(tmp_path, [50, 50], 90, 2)
    node.arbitrate(containers)
    tenants = [started(node, container, gpu=number) for number, container in enumerate(containers)]
    assert gpu_time_percent(tenants, ["products"] * 2) == pytest.approx([90, 90], abs=3)


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
@pytest.mark.parametrize("together", [0, 1], ids=["launches", "one-launch"])
@pytest.mark.parametrize("ceiling", [50, 100])
def test_collectives_over_two_shared_gpus_go_on(node: Node, tmp_path: Path, ceiling: int, together: int) -> None:
    """A kernel on one GPU waits for its partner on the other one, where the other tenant's kernel waits for its own partner. One of both
    tenants yields, so that no turn ends only at its bound."""
    containers = containers_of(tmp_path, [50, 50], ceiling, 2)
    arbiter, tenants = arbitrated(node, containers)
    for number, tenant in enumerate(tenants):
        tenant.send(f"reduce {number} {number} {_SHORT_MS} 2 {together}")
    answers = [tenant.answer() for tenant in tenants]
    assert [result for result, _, _ in answers] == [0, 0]
    assert min(rounds for _, rounds, _ in answers) > 1500
    assert sum(overruns for _, overruns, _ in arbiter.figures()) < 5


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
def test_collectives_go_on_while_there_is_no_arbiter(node: Node, tmp_path: Path) -> None:
    """The container shares only one of its GPUs. A round takes 200 us, and the container has half of the time."""
    containers = [Container(tmp_path / str(gpus), share_percent=50, gpus=gpus) for gpus in (1, 2)]
    node.arbitrate(containers).kill()
    result, rounds, _ = started(node, containers[1]).ask(f"reduce 0 0 {_MS} 1")
    assert result == 0
    assert rounds > 15_000


@pytest.mark.parametrize("node", [2], indirect=True, ids=["gpus"])
def test_tenants_that_want_all_of_two_gpus_get_their_shares(node: Node, tmp_path: Path) -> None:
    """Each holds a GPU for which the other one waits, all the time."""
    containers = containers_of(tmp_path, [25, 75], 100, 2)
    node.arbitrate(containers)
    tenants = [started(node, container, gpu=gpu) for container in containers for gpu in range(2)]
    assert gpu_time_percent(tenants, ["products"] * 4) == pytest.approx([25, 25, 75, 75], abs=3)


@pytest.mark.parametrize("command", ["child", "close", "exec"])
def test_a_program_that_forks_closes_or_executes_keeps_its_share(node: Node, tmp_path: Path, command: str) -> None:
    """Fork without exec after the use of CUDA, dlclose of the driver, exec."""
    _, tenants = arbitrated(node, containers_of(tmp_path, [25, 75]))
    if command == "exec":
        tenants[0].send(command)
        assert tenants[0].ask("init 0")[0] == 0
    else:
        assert tenants[0].ask(command)[0] == 0
    assert gpu_time_percent(tenants, ["products"] * 2) == pytest.approx([25, 75], abs=3)


def test_a_holder_that_is_stopped_costs_the_other_nothing(node: Node, tmp_path: Path) -> None:
    containers = containers_of(tmp_path, [50, 50], 100)
    _, (stopped, other) = arbitrated(node, containers)
    stopped.send(f"work halt {_MS} 2")
    other.send(f"work products {_MS} 2")
    result, gpu, elapsed = other.answer()
    assert result == 0
    assert 100 * gpu / elapsed > 85
    stopped.resume()
    assert stopped.answer()[0] == 0


def test_a_child_while_a_thread_waits_ends(node: Node, tmp_path: Path) -> None:
    """The child has neither the turn nor the thread that waits; it launches all the same, and exits."""
    containers = containers_of(tmp_path, [50, 50])
    claim_work(containers[0].page("turn"), seconds=4)
    node.arbitrate(containers)
    assert started(node, containers[1]).ask("forks 50")[0] == 0


def test_tenants_that_are_killed_anywhere_cost_the_other_nothing(node: Node, tmp_path: Path) -> None:
    containers = containers_of(tmp_path, [50, 50], 100)
    node.arbitrate(containers)
    other = started(node, containers[0])
    other.send(f"work products {_MS} 1")
    for number in range(8):
        victim = started(node, containers[1])
        victim.send(f"work products {_MS} 1")
        time.sleep(0.01 * number)
        victim.kill()
    result, gpu, elapsed = other.answer()
    assert result == 0
    assert 100 * gpu / elapsed > 45


def test_a_tenant_that_dies_in_its_turn_is_passed_over(node: Node, tmp_path: Path) -> None:
    containers = containers_of(tmp_path, [50, 50], 100)
    _, (victim, neighbour) = arbitrated(node, containers)
    victim.send(f"work dies {_MS} 2")
    neighbour.send(f"work products {_MS} 2")
    result, gpu, elapsed = neighbour.answer()
    assert result == 0
    assert 100 * gpu / elapsed > 85
