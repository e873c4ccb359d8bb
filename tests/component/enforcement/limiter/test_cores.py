"""The time token: real processes on the fake GPU with its own clock, the library preloaded, and the arbiter."""

import time
from collections.abc import Sequence

import pytest

from tests.component.enforcement.limiter.harness import TWO_GPUS, Container, Node, gpu_time_percent

_MS = 10_000
#: For many works at the same shares.
_SHORT_MS = 3_000
#: What ten seconds have for work if the arbiter ends in them: no container has a turn until its heartbeat is 200 ms old.
_WITHOUT_SILENCE = 0.98


@pytest.mark.parametrize("work", ["products", "graph"])
@pytest.mark.parametrize("shares", [(25, 75), (5, 95), (25, 50), (20, 30, 50), (5, 5, 10, 10, 15, 15, 20, 20)], ids=str)
def test_tenants_that_want_all_get_their_shares(node: Node, shares: tuple[int, ...], work: str) -> None:
    _, tenants = node.arbitrated(node.containers(*shares))
    held = gpu_time_percent(tenants, work)
    assert held == pytest.approx(list(shares), abs=3)
    assert sum(held) >= 0.97 * sum(shares)


#: The fake GPU's time of an unlimited loop of small kernels, which is bound by its launches (test_fake_gpu.py).
_UNLIMITED_PERCENT = {"products": 100, "graph": 100, "small": 83}


@pytest.mark.parametrize("work", _UNLIMITED_PERCENT)
@pytest.mark.parametrize("share", [25, 50, 75])
@pytest.mark.parametrize("arbiter", [True, False], ids=["arbiter", "none"])
def test_a_tenant_that_is_alone_gets_its_share(node: Node, share: int, work: str, *, arbiter: bool) -> None:
    """Without an arbiter it limits itself. The end of a turn costs no time: at once the process looks whether its work has ended."""
    containers = node.containers(share)
    if arbiter:
        node.arbitrate(containers)
    [held] = gpu_time_percent([node.started(containers[0])], work, milliseconds=_SHORT_MS)
    assert -1 < 100 * held / _UNLIMITED_PERCENT[work] - share < 3


@pytest.mark.parametrize("away_seconds", [0.05, 0.3, 1, 8])
@pytest.mark.parametrize("shares", [(25, 75), (20, 30, 50), (5, 95)], ids=str)
def test_shares_hold_while_the_arbiter_is_killed_and_restarted(node: Node, shares: tuple[int, ...], away_seconds: float) -> None:
    """While it is away, the tenants limit themselves, one after the other."""
    containers = node.containers(*shares)
    node.arbitrate(containers, away_seconds)
    held = gpu_time_percent([node.started(container) for container in containers], "products", others=1)
    assert held == pytest.approx([share * _WITHOUT_SILENCE for share in shares], abs=3)


@pytest.mark.parametrize("away_seconds", [0.3, 1])
def test_shares_hold_while_the_arbiter_is_stopped(node: Node, away_seconds: float) -> None:
    """As by a debugger. No tenant pays for that time afterwards."""
    containers = node.containers(50, 50, ceiling=100)
    node.arbitrate(containers, away_seconds, stops=True)
    held = gpu_time_percent([node.started(container) for container in containers], "products", others=1)
    assert held == pytest.approx([50, 50], abs=3)


def test_a_tenant_that_needed_no_turn_keeps_to_its_share_without_the_arbiter(node: Node) -> None:
    """A killed arbiter leaves in the page that launches need none."""
    container = node.container(25, 100)
    node.arbitrate([container]).kill()
    tenant = node.started(container)
    gpu_time_percent([tenant], "products", milliseconds=500)  # until the library has noticed, and its thread has begun
    assert gpu_time_percent([tenant], "products") == pytest.approx([25], abs=3)


def _part(container: Container, gpu: int) -> tuple[int, int]:
    """The part of the time that it uses without an arbiter, in percent: where it begins, and its share."""
    limits = container.limits.gpu[gpu]
    return limits.away_from - 1, limits.share


def _parts(containers: Sequence[Container], gpu: int) -> set[int]:
    """The percents of the time in which one of the containers works on a GPU without an arbiter; each percent is one container's."""
    parts = [_part(container, gpu) for container in containers if container.gpus > gpu]
    percents = {(begin + percent) % 100 for begin, share in parts for percent in range(share)}
    assert len(percents) == sum(share for _, share in parts)
    return percents


@TWO_GPUS
def test_a_container_has_the_same_part_of_the_time_on_its_gpus(node: Node) -> None:
    """Without an arbiter. Parts move together when a container ends, so that the next one finds its own in one piece."""
    shares = ((20, 1), (30, 2), (15, 1), (35, 2))
    containers = [node.container(share, gpus=gpus) for share, gpus in shares]
    arbiter = node.arbitrate(containers)
    assert len(_parts(containers, 0)) == 100
    assert len(_parts(containers, 1)) == 65
    assert _part(containers[1], 0) == _part(containers[1], 1) == (20, 30)
    arbiter.remove(0)
    while [_part(containers[3], gpu) for gpu in range(2)] != [(45, 35)] * 2:
        pass
    assert _parts(containers[1:], 0) == set(range(80))


def test_a_tenant_without_a_limit_of_cores_takes_no_part_of_the_time_without_an_arbiter(node: Node) -> None:
    containers = node.containers(0, 30, 70)
    node.arbitrate(containers)
    assert len(_parts(containers, 0)) == 100


@pytest.mark.parametrize("away_seconds", [0, 8])
def test_processes_of_a_container_share_its_turn_and_its_part_while_the_arbiter_is_away(node: Node, away_seconds: int) -> None:
    containers = node.containers(40, 60)
    node.arbitrate(containers, away_seconds, tenants=4)
    tenants = [node.started(containers[number]) for number in (0, 0, 0, 1)]
    *parts, other = gpu_time_percent(tenants, "products", others=away_seconds > 0)
    working = _WITHOUT_SILENCE if away_seconds else 1
    assert [sum(parts), other] == pytest.approx([40 * working, 60 * working], abs=3)


def test_a_restarted_arbiter_wakes_processes_that_sleep(node: Node) -> None:
    """They wait until the count of turns changes, so it never starts anew."""
    [container] = node.containers(50)
    counts = []
    for _ in range(3):
        arbiter = node.arbitrate([container])
        counts.append(container.turn.gpu[0].grants)
        arbiter.kill()
    assert 0 < counts[0] < counts[1] < counts[2]


@TWO_GPUS
def test_the_arbiter_seldom_reads_the_pages_of_idle_containers(node: Node) -> None:
    """While two tenants share one of the GPUs, 32 idle tenants of both are read every 5 ms, and for their heartbeat."""
    containers = node.containers(25, 75)
    arbiter = node.arbitrate([*containers, *node.containers(*[50] * 16, gpus=2)])
    tenants = [node.started(container) for container in containers]
    before = arbiter.reads()
    gpu_time_percent(tenants, "products")
    seconds = _MS / 1000
    assert arbiter.reads() - before < 32 * 300 * seconds + 2 * 5000 * seconds


def test_a_free_gpu_is_used_up_to_the_ceiling(node: Node) -> None:
    container = node.container(25, 60)
    node.arbitrate([container, node.container(75)])
    [held] = gpu_time_percent([node.started(container)], "products")
    assert held == pytest.approx(60, abs=3)


def test_small_kernels_beside_products_hold_their_share(node: Node) -> None:
    """Their time held, in which the GPU waits for their launches."""
    arbiter, tenants = node.arbitrated(node.containers(25, 75))
    gpu_time_percent(tenants, "small", "products", milliseconds=_SHORT_MS)
    assert [held_ns / 30e6 for held_ns, _, _ in arbiter.figures()] == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("share", [25, 50, 90])
def test_a_kernel_that_is_longer_than_two_turns_is_paid_for_afterwards(node: Node, share: int) -> None:
    """The other tenant gets back what the driver's time slices took from it, and no more than that, if its ceiling allows it."""
    arbiter, tenants = node.arbitrated(node.containers(share, 100 - share, ceiling=100))
    gpu_time_percent(tenants, "slow", "products", milliseconds=2 * _MS)
    (held_ns, overruns, _), (other_ns, _, _) = arbiter.figures()
    assert 100 * held_ns / (held_ns + other_ns) == pytest.approx(share, abs=3)
    assert overruns > 10


@pytest.mark.parametrize(
    ("shares", "ceiling", "seconds", "percent"),
    [  # four seconds without a turn at half of the time; 18 at a tenth beside the other one, after 20 in which both had time slices
        ((50,), 50, 20, 15),
        ((10, 90), 100, 50, 2.4),
    ],
    ids=["alone", "two"],
)
def test_a_very_long_kernel_is_paid_for_with_two_seconds_at_most(
    node: Node, shares: Sequence[int], ceiling: int, seconds: int, percent: float
) -> None:
    """One kernel of ten seconds, then short ones, which alone count here."""
    _, tenants = node.arbitrated(node.containers(*shares, ceiling=ceiling))
    works = ["giant", "products"][: len(shares)]
    assert gpu_time_percent(tenants, *works, milliseconds=1000 * seconds)[0] == pytest.approx(percent, abs=1)


def test_no_more_is_queued_than_a_turn_may_overrun(node: Node) -> None:
    """Each launches 210 ms of work without waiting for it."""
    arbiter, tenants = node.arbitrated(node.containers(50, 50))
    assert gpu_time_percent(tenants, "deep") == pytest.approx([50, 50], abs=3)
    assert [overruns for _, overruns, _ in arbiter.figures()] == [0, 0]


@pytest.mark.parametrize(
    ("tenants", "before"),
    [  # share and ceiling; which tenant worked (2: one without the library), and for how many milliseconds
        pytest.param([(50, 100), (50, 100)], ["0 products 10000"], id="another one was away"),
        pytest.param([(50, 50), (50, 100)], ["0 slow 4000"], id="one had long kernels"),
        pytest.param(
            [(10, 100), (90, 100)], ["0 products 3000", "2 products 500", "1 products 20"], id="one used a free GPU, and pauses"
        ),
    ],
)
def test_no_tenant_pays_for_the_time_in_which_no_other_one_wanted_the_gpu(
    node: Node, tenants: Sequence[tuple[int, int]], before: Sequence[str]
) -> None:
    _, limited = node.arbitrated([node.container(*each) for each in tenants])
    everyone = [*limited, node.started()]
    for number, _, work in (each.partition(" ") for each in before):
        assert everyone[int(number)].ask(f"work {work} 1")[0] == 0
    assert gpu_time_percent(limited, "products") == pytest.approx([share for share, _ in tenants], abs=3)


def test_a_tenant_that_launches_seldom_leaves_its_turn_to_the_other(node: Node) -> None:
    """It gives the turn back a millisecond after its work has ended; a turn lasts 20 ms."""
    _, tenants = node.arbitrated(node.containers(50, 50, ceiling=100))
    assert gpu_time_percent(tenants, "sparse", "products")[1] > 70


def test_a_tenant_does_not_pay_for_time_that_others_may_not_use(node: Node) -> None:
    """One is at its ceiling; when the third one comes, each has its share at once."""
    _, tenants = node.arbitrated([node.container(*each) for each in ((40, 40), (20, 100), (40, 100))])
    gpu_time_percent(tenants[:2], "products")
    assert gpu_time_percent(tenants, "products") == pytest.approx([40, 20, 40], abs=3)


def test_tenants_divide_by_their_shares_what_one_that_launches_seldom_leaves(node: Node) -> None:
    """Its time is far behind theirs."""
    _, tenants = node.arbitrated(node.containers(10, 5, 85, ceiling=100))
    large, small, _ = gpu_time_percent(tenants, "products", "products", "sparse")
    assert large / small == pytest.approx(2, abs=0.2)
    assert large + small > 80


_LAUNCHES = ("extended", "cooperative", "several", "grid")
_COPIES = ("copies", "unified", "peers", "rectangles", "boxes", "boxpeers", "fills", "halves", "rows", "words")
_ARRAYS = ("toarrays", "fromarrays", "arrays")
_BATCHES = ("batches", "oldbatches", "boxbatches", "oldboxbatches")  # of CUDA 13 and 12.8
_NEWER = ("attributed", "attributedboxes", "fabric", "decompressed")  # of CUDA 13.2 and 13.5; the last one is of 12.6


@pytest.mark.parametrize("work", [*_LAUNCHES, *_COPIES, *_ARRAYS, *_BATCHES, *_NEWER])
def test_every_kind_of_launch_waits_for_the_turn(node: Node, work: str) -> None:
    _, tenants = node.arbitrated(node.containers(25, 75))
    assert gpu_time_percent(tenants, work, "products", milliseconds=_SHORT_MS) == pytest.approx([25, 75], abs=3)


def test_a_batch_of_copies_from_the_host_needs_no_turn(node: Node) -> None:
    """Also with less than a MiB inside the device."""
    containers = node.containers(50, 50)
    node.arbitrate(containers)
    tenant = node.started(containers[0])
    assert tenant.ask("work offloads 100 1")[0] == 0
    result, gpu_ns, _ = tenant.ask("work products 100 1")
    assert result == 0
    expected, counted = gpu_ns / 210_000 + 2, containers[0].use.slot[0].gpu[0]  # a kernel precedes each kind of work
    while counted.launches < expected:
        pass
    assert counted.launches == expected


@pytest.mark.parametrize("lookup", ["proc", "stream"], ids=["streams", "per-thread"])
def test_threads_share_the_turn(node: Node, lookup: str) -> None:
    """Some have a stream of their own, the others the default stream, or the default streams of the threads."""
    containers = node.containers(25, 75)
    node.arbitrate(containers)
    tenants = [node.started(container, lookup) for container in containers]
    assert gpu_time_percent(tenants, "products", threads=4) == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("threads", [1, 8])
def test_the_time_waited_is_that_of_the_container(node: Node, threads: int) -> None:
    """Not the sum over its threads. These two wait whenever they do not hold the GPU."""
    arbiter, tenants = node.arbitrated(node.containers(25, 75))
    gpu_time_percent(tenants, "products", threads=threads)
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
    node: Node, containers: int, lookup: str, calls: float
) -> None:
    """A container needs no turn while it has the GPU for itself. The markers of small kernels are about a millisecond apart; only of a
    per-thread stream the last one is recorded again with each launch."""
    all_of_them = node.containers(*[50] * containers, ceiling=100)
    node.arbitrate(all_of_them)
    tenant = node.started(all_of_them[0] if containers else None, lookup)
    before = tenant.ask("calls")[1]
    result, gpu_ns, _ = tenant.ask("work small 1000 1")
    assert result == 0
    assert (tenant.ask("calls")[1] - before) / (gpu_ns / 2500) <= calls
    for container in all_of_them[:1]:
        counted = container.use.slot[0].gpu[0]
        while counted.launches < gpu_ns / 2500 + 1:
            pass  # the limiter's thread adds to it once per millisecond
        assert counted.launches == gpu_ns / 2500 + 1


def test_captures_in_another_thread_are_not_disturbed(node: Node) -> None:
    """In global mode, in which many calls of any thread end a capture."""
    containers = node.containers(50, 50)
    node.arbitrate(containers)
    result, captures, _ = node.started(containers[0]).ask("captures 2000")
    assert result == 0
    assert captures > 0


@pytest.mark.parametrize("per_thread", [0, 1], ids=["", "ptsz"])
@pytest.mark.parametrize("how", ["new", "given", "again"])
def test_a_launch_that_is_captured_waits_for_no_turn(node: Node, how: str, per_thread: int) -> None:
    """Here the container never gets one."""
    [container] = node.containers(50)
    container.limits.heartbeat_ns = 1 << 62
    assert node.started(container).ask(f"captured {how} {per_thread}") == (0, how != "new", 0)


@pytest.mark.parametrize(
    ("command", "lookup"),
    [("events 20", "proc"), ("passing 100", "stream"), ("retains 100", "stream"), ("retains 100 1", "stream")],
)
def test_markers_are_used_again(node: Node, command: str, lookup: str) -> None:
    """When they can't be recorded, as in a broken context; after the end of threads, each with a default stream of its own; after the
    release of a context that is retained elsewhere; after the last release of the primary context beside another one."""
    containers = node.containers(50, 50)
    node.arbitrate(containers)
    result, events, _ = node.started(containers[0], lookup).ask(command)
    assert result == 0
    assert 0 < events <= 16


def test_a_turn_lasts_until_the_work_of_each_thread_has_a_marker(node: Node) -> None:
    """A thread that loses its CPU between a launch and the marker, which no other thread can record in its default stream."""
    containers = node.containers(50, 50)
    node.arbitrate(containers)
    tenants = [node.started(container, lookup) for container, lookup in zip(containers, ("stream", "proc"), strict=True)]
    assert tenants[0].ask("exchanges 22000000")[0] == 0
    assert gpu_time_percent(tenants, "long", "products") == pytest.approx([50, 50], abs=3)


@TWO_GPUS
def test_turns_of_different_gpus_are_independent(node: Node) -> None:
    """Each of two tenants that share both GPUs works on one, up to its ceiling."""
    containers = node.containers(50, 50, ceiling=90, gpus=2)
    node.arbitrate(containers)
    tenants = [node.started(container, gpu=number) for number, container in enumerate(containers)]
    assert gpu_time_percent(tenants, "products") == pytest.approx([90, 90], abs=3)


@TWO_GPUS
@pytest.mark.parametrize("together", [0, 1], ids=["launches", "one-launch"])
@pytest.mark.parametrize("ceiling", [50, 100])
def test_collectives_over_two_shared_gpus_go_on(node: Node, ceiling: int, together: int) -> None:
    """A kernel on one GPU waits for its partner on the other one, where the other tenant's kernel waits for its own partner. One of both
    tenants yields, so that no turn ends only at its bound."""
    containers = node.containers(50, 50, ceiling=ceiling, gpus=2)
    arbiter, tenants = node.arbitrated(containers)
    for number, tenant in enumerate(tenants):
        tenant.send(f"reduce {number} {number} {_SHORT_MS} 2 {together}")
    answers = [tenant.answer() for tenant in tenants]
    assert [result for result, _, _ in answers] == [0, 0]
    assert min(rounds for _, rounds, _ in answers) > 1500
    assert sum(overruns for _, overruns, _ in arbiter.figures()) < 5


@TWO_GPUS
def test_collectives_go_on_while_there_is_no_arbiter(node: Node) -> None:
    """The container shares only one of its GPUs. A round takes 200 us, and the container has half of the time."""
    containers = [node.container(50, gpus=gpus) for gpus in (1, 2)]
    node.arbitrate(containers).kill()
    result, rounds, _ = node.started(containers[1]).ask(f"reduce 0 0 {_MS} 1")
    assert result == 0
    assert rounds > 15_000


@TWO_GPUS
def test_tenants_that_want_all_of_two_gpus_get_their_shares(node: Node) -> None:
    """Each holds a GPU for which the other one waits, all the time."""
    containers = node.containers(25, 75, ceiling=100, gpus=2)
    node.arbitrate(containers)
    tenants = [node.started(container, gpu=gpu) for container in containers for gpu in range(2)]
    assert gpu_time_percent(tenants, "products") == pytest.approx([25, 25, 75, 75], abs=3)


@pytest.mark.parametrize("command", ["child", "close", "exec"])
def test_a_program_that_forks_closes_or_executes_keeps_its_share(node: Node, command: str) -> None:
    """Fork without exec after the use of CUDA, dlclose of the driver, exec."""
    _, tenants = node.arbitrated(node.containers(25, 75))
    if command == "exec":
        tenants[0].send(command)
        assert tenants[0].ask("init 0")[0] == 0
    else:
        assert tenants[0].ask(command)[0] == 0
    assert gpu_time_percent(tenants, "products") == pytest.approx([25, 75], abs=3)


@pytest.mark.parametrize("work", ["halt", "dies"])
def test_a_holder_that_is_stopped_or_dies_costs_the_other_nothing(node: Node, work: str) -> None:
    _, (holder, other) = node.arbitrated(node.containers(50, 50, ceiling=100))
    holder.send(f"work {work} {_MS} 2")
    other.send(f"work products {_MS} 2")
    assert other.gpu_percent() > 85
    if work == "halt":
        holder.resume()
        assert holder.answer()[0] == 0


def test_a_child_while_a_thread_waits_ends(node: Node) -> None:
    """The child has neither the turn nor the thread that waits; it launches all the same, and exits."""
    containers = node.containers(50, 50)
    containers[0].claim_work(seconds=4)
    node.arbitrate(containers)
    assert node.started(containers[1]).ask("forks 50")[0] == 0


def test_tenants_that_are_killed_anywhere_cost_the_other_nothing(node: Node) -> None:
    containers = node.containers(50, 50, ceiling=100)
    node.arbitrate(containers)
    other = node.started(containers[0])
    other.send(f"work products {_MS} 1")
    for number in range(8):
        victim = node.started(containers[1])
        victim.send(f"work products {_MS} 1")
        time.sleep(0.01 * number)
        victim.kill()
    assert other.gpu_percent() > 45
