"""Resizes on a node of two GPUs with 2 GiB each: decisions, the limits that reach the mechanisms, and what is left for others."""

import asyncio
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts
from gpumgr.kube.pod_annotations import _resize_answers
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.ledger.node import node_devices
from gpumgr.ledger.suspension import Suspension
from gpumgr.placement.pods import NO_RESIZE, PodKey, PodView, ResizeRequest
from tests.unit.web.metrics.pictures import allocation

from .node import Node, breathe
from .test_bursts import GPU, PIDS, TRAIN, WEB, rule, share, uses
from .test_suspensions import inline, sampled, with_driver

from tests.unit.ledger.samples import container  # isort: skip


#: 50 cores and 512 MiB; 30 cores and 1024 MiB.
A, T = share("a", WEB, 0b11, cores=(1 << 50) - 1), share("t", TRAIN, 0b111100, cores=((1 << 30) - 1) << 50)
MOST = Amounts(100, 2048)
MIB = 1 << 20


def node_with(*allocations: Allocation, most: Amounts = MOST, burst: bool = False) -> Node:
    node = Node(*allocations)
    node.memory_watcher.apply(
        replace(rule(allowed=burst), max_growth_cores=most.cores, max_growth_memory_mebibytes=most.memory_mebibytes)
    )
    for each in allocations:
        assert each.pod is not None
        ask(node, each.id, each.pod)
        node.runs(container(each.id, each.pod), PIDS[each.id])
    return node


def ask(node: Node, letter: str, pod: PodKey, asked: ResizeRequest = NO_RESIZE, **others: object) -> None:
    view = PodView(namespace=pod[0], name=pod[1], uid=f"uid-{letter}", resizes=(("main", asked),) if asked != NO_RESIZE else ())
    node.pods.views[pod] = replace(view, **others)


def wants(cores: int | None = None, mebibytes: int | None = None, at: str = "") -> ResizeRequest:
    return ResizeRequest(cores=cores, memory_mebibytes=mebibytes, requested_at=at)


def limits(node: Node) -> dict[str, tuple[int, int]]:
    """By allocation, the cores and the MiB that the mechanisms got last."""
    _, running = node.backends.seen[-1]
    return {each.tenant.allocation: (each.tenant.gpus[0].cores, each.tenant.gpus[0].limit_bytes >> 20) for each, _ in running}


def offered(node: Node) -> tuple[int, int]:
    """How many cores and blocks of GPU 0 the kubelet may still assign."""
    state = node.agent_state
    first, _ = node_devices(state.ledger, state.inventory.view(state.ledger.gpu_registry), failed=())
    cores, blocks = state.ledger.held("core").get(GPU, 0), state.ledger.held("memory").get(GPU, 0)
    return (first.healthy_cores & ~cores).bit_count(), (first.healthy_blocks & ~blocks).bit_count()


def told(node: Node) -> list[str]:
    return [f"{entry.code}: {entry.why}" for entry in node.told]


async def test_growth_closes_free_ids_and_they_go_back_at_the_end() -> None:
    node = node_with(A, T)
    await node.sampled(uses(a=100, t=0))
    assert (limits(node), offered(node)) == ({"a": (50, 512), "t": (30, 1024)}, (20, 2))
    ask(node, "a", WEB, wants(60, 700))
    await node.sampled(uses(a=100, t=0))
    assert (limits(node)["a"], offered(node)) == ((60, 700), (10, 1)), "188 MiB close one block"
    (entry,) = told(node)
    assert entry == f"GpuResized: container main may use 60 cores and 700 MiB of GPU {GPU}, before 50 cores and 512 MiB"
    await node.sampled(uses(a=700, t=0))
    assert not node.memory_watcher.over
    ask(node, "a", WEB)
    await node.sampled(uses(a=100, t=0))
    assert (limits(node)["a"], offered(node)) == ((50, 512), (20, 2)), "without the annotation it has what it requests"
    ask(node, "a", WEB, wants(60))
    await node.sampled(uses(a=100, t=0))
    node.frees("a")
    assert offered(node) == (70, 4)


async def test_what_was_shrunk_serves_others_and_never_the_kubelet() -> None:
    node = node_with(A, T)
    ask(node, "a", WEB, wants(10, 256))
    await node.sampled(uses(a=256, t=0))
    assert (limits(node)["a"], offered(node)) == ((10, 256), (20, 2))
    ask(node, "t", TRAIN, wants(90, 1792))
    await node.sampled(uses(a=256, t=0), times=3)
    assert (limits(node), offered(node)) == ({"a": (10, 256), "t": (90, 1792)}, (0, 0))
    ask(node, "a", WEB, wants(50, 256))
    await node.sampled(uses(a=256, t=0))
    assert (
        "GpuResizeRefused: container main is not resized: GPU 00000000 has 0 cores left for it, and it needs 40 more; "
        in told(node)[-1]
    )
    assert "team/train (main) has 60 cores above its request there" in told(node)[-1]
    assert limits(node)["a"] == (10, 256)
    node.frees("t")
    ask(node, "a", WEB, wants(50, 512, at="again"))
    await node.sampled(uses(a=256))
    assert limits(node)["a"] == (50, 512)


async def test_growth_waits_until_a_lower_limit_of_memory_is_in_force() -> None:
    node = node_with(A, T)
    node.set_timeout(0.01)
    await node.sampled(uses(a=0, t=1024))
    node.backends.ready.clear()
    ask(node, "t", TRAIN, wants(mebibytes=1024 + 256))
    ask(node, "a", WEB, wants(mebibytes=256))

    def granted() -> int:
        return node.agent_state.ledger.allocations["t"].limits_on(GPU).memory_mebibytes

    await node.sampled(uses(a=0, t=1024))
    before = granted()
    ask(node, "t", TRAIN, wants(mebibytes=1792))
    await node.sampled(uses(a=0, t=1024), times=3)
    assert granted() == before, "the mechanism has not lowered the limit of the other yet"
    node.backends.ready.set()
    await breathe()
    await node.sampled(uses(a=0, t=1024), times=4)
    assert granted() == 1792


async def test_growth_waits_for_a_runtime_that_answers_late_after_a_restart() -> None:
    before = node_with(A, T)
    ask(before, "a", WEB, wants(mebibytes=256))
    await before.sampled(uses(a=100, t=0))
    node = node_with(*before.agent_state.ledger.allocations.values())
    node.set_timeout(0.01)
    node.runtime.answers.clear()
    ask(node, "a", WEB, wants(mebibytes=256))
    ask(node, "t", TRAIN, wants(mebibytes=1792))
    await node.sampled(uses(a=100, t=0), times=3)
    assert node.agent_state.ledger.allocations["t"].resize is None
    (entry,) = node.told
    assert (entry.code, entry.pod, entry.why) == (
        "GpuResizeWaits",
        TRAIN,
        "the resize of container main waits: the lower memory limit of team/web (main) on GPU 00000000 is not in force: the container "
        "runtime has not listed it yet",
    )
    node.runtime.answers.set()
    await node.sampled(uses(a=100, t=0), times=4)
    assert limits(node) == {"a": (50, 256), "t": (30, 1792)}


async def test_less_memory_waits_for_it_too_since_what_is_in_use_is_not_known() -> None:
    node = node_with(A)
    node.set_timeout(0.01)
    node.runtime.answers.clear()
    containers, node.runtime.containers = node.runtime.containers, []
    ask(node, "a", WEB, wants(mebibytes=256))
    await node.sampled(uses(a=100), times=3)
    assert node.agent_state.ledger.allocations["a"].resize is None
    assert [entry.code for entry in node.told] == ["GpuResizeWaits"]
    node.runtime.containers = containers
    node.runtime.answers.set()
    await node.sampled(uses(a=100), times=4)
    assert limits(node) == {"a": (50, 256)}


async def test_a_request_is_decided_once() -> None:
    node = node_with(A, T)
    ask(node, "a", WEB, wants(99))
    await node.sampled(uses(a=1, t=0), times=3)
    assert len(told(node)) == 1
    node.frees("t")
    await node.sampled(uses(a=1))
    assert limits(node)["a"] == (50, 512), "the refusal stays, although the GPU has the cores now"
    ask(node, "a", WEB, wants(99, at="now"))
    await node.sampled(uses(a=1))
    assert limits(node)["a"] == (99, 512)
    assert len(told(node)) == 2


async def test_after_the_ledger_was_lost_the_annotation_is_decided_again_before_a_limit_changes() -> None:
    node = node_with(A)
    ask(node, "a", WEB, wants(60, 1024))
    await node.sampled(uses(a=1000))
    node.agent_state.ledger = node.agent_state.ledger.occupy(A)
    await node.sampled(uses(a=1000))
    assert limits(node)["a"] == (60, 1024)
    assert not node.memory_watcher.over


async def test_a_decision_that_is_not_saved_changes_no_limit() -> None:
    node = node_with(A)
    node.agent_state.checkpoint.full = True
    ask(node, "a", WEB, wants(20))
    with capture_logs() as logs:
        await node.sampled(uses(a=1), times=3)
    assert (limits(node), told(node)) == ({"a": (50, 512)}, [])
    assert [each["event"] for each in logs] == ["resize_not_saved"]
    node.agent_state.checkpoint.full = False
    await node.sampled(uses(a=1))
    assert limits(node) == {"a": (20, 512)}


def whole() -> Allocation:
    return allocation("a", WEB, cores={0: (1 << 100) - 1}, blocks={0: 0b11})


@pytest.mark.parametrize(
    ("made", "asked", "why"),
    [
        (lambda: node_with(A), wants(100), "a share of a GPU has 1 to 99 cores, not 100"),
        (lambda: node_with(A), wants(0), "1 to 99 cores, not 0"),
        (lambda: node_with(A), wants(mebibytes=0), "1 MiB of memory or more, not 0"),
        (
            lambda: node_with(A),
            wants(mebibytes=299),
            "it uses 300 MiB of GPU 00000000, more than 299 MiB; free memory in it first",
        ),
        (lambda: node_with(A), wants(mebibytes=2049), "GPU 00000000 has 1536 MiB left for it, and it needs 1537 more"),
        (lambda: node_with(A, most=Amounts()), wants(51), "would have 1 cores above its requests, and this node allows 0"),
        (
            lambda: node_with(A, most=Amounts(0, 99)),
            wants(mebibytes=612),
            "have 100 MiB above its requests, and this node allows 99",
        ),
        (lambda: node_with(whole()), wants(50), "only a container with a share of a GPU can be resized"),
        (lambda: node_with(replace(A, init=True)), wants(40), "an init container can't be resized"),
        (lambda: node_with(share("a", WEB, 0b11, "vcuda", cores=0b1)), wants(mebibytes=300), "the backend vcuda can't"),
        (lambda: node_with(share("a", WEB, 0b11, "nvml-memory", cores=0b1)), wants(2), "no backend limits the container's cores"),
        (lambda: node_with(replace(A, limits={GPU: Amounts(99, 512)})), wants(40), "grants cores or memory more than once"),
        (lambda: node_with(A), ResizeRequest(problem="it is no JSON"), "it is no JSON"),
        (
            lambda: node_with(
                replace(A, device_ids={}, claim=ClaimRequest(namespace="team", name="c", uid="c", request="gpu", share_ids={}))
            ),
            wants(40),
            "the capacity of a ResourceClaim is fixed by the API",
        ),
    ],
)
async def test_refusals_have_the_reason_and_change_nothing(made: Callable[[], Node], asked: ResizeRequest, why: str) -> None:
    node = made()
    await node.sampled(uses(a=300))
    before = limits(node)
    ask(node, "a", WEB, asked)
    await node.sampled(uses(a=300))
    assert limits(node) == before
    (entry,) = told(node)
    assert entry.startswith("GpuResizeRefused: container main is not resized: ")
    assert why in entry
    (a,) = node.agent_state.ledger.allocations.values()
    assert a.resize is not None
    assert why in a.resize.refused


async def test_memory_that_is_not_known_can_not_be_taken_away() -> None:
    node = node_with(A)
    ask(node, "a", WEB, wants(mebibytes=256))
    await node.sampled(replace(uses(a=1), gpus={}))
    assert "how much memory it uses on GPU 00000000 is not known" in told(node)[0]


async def test_the_most_counts_for_all_containers_of_a_pod_together() -> None:
    b = replace(share("t", WEB, 0b1111_00, cores=((1 << 30) - 1) << 50), uid="uid-a", container="side")
    node = node_with(A, b, most=Amounts(10, 100))
    resizes = (("main", wants(56)), ("side", wants(35)))
    ask(node, "a", WEB, resizes=resizes)
    await node.sampled(uses(a=1, t=1))
    assert sorted(each.split(":")[0] for each in told(node)) == ["GpuResizeRefused", "GpuResized"]
    assert "the pod would have 11 cores above its requests" in " ".join(told(node))


async def test_a_burst_uses_what_was_shrunk_and_prevents_growth() -> None:
    full = share("t", TRAIN, 0b1111_1100, cores=0b11 << 50)
    node = node_with(A, full, burst=True)
    node.pods.views[TRAIN] = replace(node.pods.views[TRAIN], memory_limits=(("main", 2048),))
    ask(node, "a", WEB, wants(mebibytes=100))
    await node.sampled(uses(a=100, t=1536))
    assert limits(node)["t"][1] == 1536 + 412
    await node.sampled(uses(a=100, t=1836))
    ask(node, "a", WEB, wants(mebibytes=300))
    await node.sampled(uses(a=100, t=1836))
    assert (
        "has 112 MiB left for it, and it needs 200 more; team/train (main) has 300 MiB above its request there" in told(node)[-1]
    )


async def test_a_limit_that_an_earlier_agent_may_not_have_lowered_delays_growth() -> None:
    """The agent was killed after it had saved the decision, and the container still has the limit from before."""
    first = node_with(A, T)
    ask(first, "a", WEB, wants(mebibytes=256))
    await first.sampled(uses(a=100, t=100))
    node = node_with(first.agent_state.ledger.allocations["a"], T)
    ask(node, "a", WEB, wants(mebibytes=256))
    ask(node, "t", TRAIN, wants(mebibytes=1792))
    for granted in (1024, 1792):
        await node.sampled(uses(a=100, t=100))
        assert limits(node)["t"] == (30, granted)


async def test_growth_is_refused_while_a_backend_can_not_lower_the_limit_of_the_other_container() -> None:
    node = node_with(A, T)
    ask(node, "a", WEB, wants(mebibytes=256))
    node.backends.obstacles = {"a": "its pages can't be used"}
    await node.sampled(uses(a=100, t=100))
    ask(node, "t", TRAIN, wants(mebibytes=1600))
    await node.sampled(uses(a=100, t=100))
    assert told(node)[1:] == [
        f"GpuResizeRefused: container main is not resized: the lower memory limit of team/web (main) on GPU {GPU} is not in force: its "
        "pages can't be used"
    ]
    node.backends.obstacles = {}
    await node.sampled(uses(a=100, t=100))
    ask(node, "t", TRAIN, wants(mebibytes=1600, at="again"))
    await node.sampled(uses(a=100, t=100))
    assert limits(node)["t"] == (30, 1600)


async def test_memory_of_a_suspended_container_serves_growth_and_its_resume_gets_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.runtime.suspensions.HOLD_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", inline)
    node = with_driver(node_with(A, share("t", TRAIN, 0b1111_1100, cores=0b11 << 50)))
    ask(node, "a", WEB, suspend=True)
    await sampled(node, uses(a=500, t=100), times=3)
    assert node.agent_state.suspensions["a"].state == "suspended"
    ask(node, "t", TRAIN, wants(mebibytes=2049))
    await sampled(node, uses(t=100))
    assert told(node)[-1].endswith("has 0 MiB left for it, and it needs 513 more")
    ask(node, "t", TRAIN, wants(mebibytes=2048))
    await sampled(node, uses(t=100))
    assert told(node)[-1].endswith(
        f"2048 MiB of GPU {GPU} (512 MiB only until suspended containers are resumed), before 2 cores and 1536 MiB"
    )
    assert (limits(node)["t"], offered(node)[1]) == ((2, 2048), 0)
    await sampled(node, uses(t=1800))
    assert (limits(node)["t"], node.memory_watcher.over) == ((2, 2048), frozenset())
    ask(node, "a", WEB, suspend=False)
    await sampled(node, uses(t=1800), times=3)
    assert limits(node)["t"] == (2, 1800), "the memory in use is never taken"
    assert node.agent_state.suspensions["a"].reason == f"it waits for 264 MiB of GPU {GPU}, used by team/train (main) (1800 MiB)"
    await sampled(node, uses(t=1500), times=3)
    assert (node.agent_state.suspensions, limits(node)["t"]) == ({}, (2, 1536))


async def test_growth_waits_for_a_container_that_is_being_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had 900 MiB, by a burst, and has none of it on the GPU yet."""
    monkeypatch.setattr(asyncio, "to_thread", inline)
    node = with_driver(node_with(A, T, burst=True))
    ask(node, "a", WEB, memory_limits=(("main", 900),))
    known = Suspension(state="resuming", processes=((PIDS["a"], 110),), memory_bytes={GPU: 900 * MIB}, asked_at=7.0)
    node.agent_state.suspensions, node.mover.answers = {"a": known}, [None]
    await node.sampled(uses(a=0, t=100), times=2)
    ask(node, "t", TRAIN, wants(mebibytes=1300))
    await node.sampled(uses(a=0, t=100))
    assert not told(node)
    node.mover.ends.set()
    await sampled(node, uses(a=900, t=100))
    assert "has 124 MiB left for it, and it needs 276 more; team/web (main) has 388 MiB above its request" in told(node)[-1]


async def test_a_start_waits_until_what_was_given_back_is_no_limit_in_force() -> None:
    """A container has grown, and gets what it requests again: the kubelet may assign the ids at once."""
    node = node_with(A, T)
    node.set_timeout(0.01)
    ask(node, "a", WEB, wants(mebibytes=1024))
    await node.sampled(uses(a=0, t=0))
    node.backends.ready.clear()
    ask(node, "a", WEB)
    await node.sampled(uses(a=0, t=0))
    new = share("b", ("team", "new"), 0b1100_0000, cores=1 << 90)
    node.holds(new)
    start = await node.start(new)
    await node.sampled(uses(a=0, t=0), times=2)
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=0, t=0), times=4)
    await start


async def test_a_client_of_mps_is_told_that_programs_that_run_keep_their_limits_and_is_lent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpumgr.runtime.suspensions.HOLD_SECONDS", 0.0)
    monkeypatch.setattr(asyncio, "to_thread", inline)
    node = with_driver(node_with(A, share("t", TRAIN, 0b0111_1100, "mps", cores=0b11 << 50)))
    ask(node, "a", WEB, suspend=True)
    await sampled(node, uses(a=500, t=100), times=3)
    ask(node, "t", TRAIN, wants(mebibytes=1536))
    await sampled(node, uses(t=100))
    assert told(node)[-1].endswith("before 2 cores and 1280 MiB; programs that run keep the limits with which they started (MPS)")
    ask(node, "t", TRAIN, wants(mebibytes=1537))
    await sampled(node, uses(t=100))
    assert told(node)[-1].endswith("has 0 MiB left for it, and it needs 1 more")
    answers = dict(_resize_answers(list(node.agent_state.ledger.allocations.values())))
    assert answers["main"]["newProgramsOnly"] is True


NEW = share("b", ("team", "new"), 0b1100_0000, cores=1 << 90)
#: All that A does not hold.
REST = replace(NEW, device_ids={**NEW.device_ids, "memory": {GPU: 0b1111_1100}}, gpus={GPU: Amounts(1, 1536)})
KEPT = "its process 11 keeps the limit with which it started"


async def starts_at_once(node: Node, new: Allocation = NEW) -> bool:
    """Whether this container, which is on free ids of GPU 0, starts without a further sample."""
    node.holds(new)
    start = await node.start(new)
    if not start.done():
        start.cancel()
        return False
    await start
    return True


async def test_a_start_does_not_wait_for_a_container_that_was_shrunk_and_whose_programs_keep_their_limits() -> None:
    """Its ids are still its own, and no container has got what it gave up."""
    node = node_with(A)
    ask(node, "a", WEB, wants(mebibytes=256))
    node.backends.obstacles = {"a": KEPT}
    await node.sampled(uses(a=200), times=3)
    assert limits(node)["a"] == (50, 256)
    assert await starts_at_once(node)


async def test_a_start_does_not_wait_for_a_container_whose_resize_was_refused() -> None:
    node = node_with(A)
    await node.sampled(uses(a=200), times=2)
    ask(node, "a", WEB, ResizeRequest(problem="it is no JSON"))
    node.backends.obstacles = {"a": "its pages can't be used"}
    await node.sampled(uses(a=200), times=2)
    assert told(node)[-1].endswith("it is no JSON")
    assert await starts_at_once(node)


async def test_a_start_waits_only_while_a_limit_above_the_ids_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program was started with 1024 MiB, and its container holds ids of 512 MiB."""
    node = node_with(A)
    ask(node, "a", WEB, wants(mebibytes=1024))
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node), "the ledger has what it may use"
    node.frees("b")
    node.backends.obstacles = {"a": KEPT}
    for mebibytes in (512, 256):
        ask(node, "a", WEB, wants(mebibytes=mebibytes))
        await node.sampled(uses(a=200), times=3)
        assert not await starts_at_once(node, REST)
        assert await starts_at_once(node), "there is room even if the program takes all that it may"
    node.holds(REST)
    monkeypatch.setattr("gpumgr.runtime.bursts._ROOM_SECONDS", 0.01)
    with pytest.raises(Refusal) as refusal:
        await node.memory_watcher.bursts.make_room(REST)
    assert str(refusal.value) == (
        f"the memory limits of other containers on GPU {GPU} were not lowered within 0.01 s: team/web (main): {KEPT}; "
        "the kubelet tries again by itself"
    )
    node.backends.obstacles = {}
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node, REST)
    node.backends.obstacles = {"a": KEPT}
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node, REST), "no limit above the ids is left"


@pytest.mark.parametrize("burst", [False, True])
@pytest.mark.parametrize("asked", [wants(mebibytes=256), ResizeRequest(problem="it is no JSON")])
async def test_after_a_restart_a_start_waits_only_until_the_limits_are_set_once(asked: ResizeRequest, *, burst: bool) -> None:
    first = node_with(A)
    ask(first, "a", WEB, asked)
    await first.sampled(uses(a=200))
    node = node_with(first.agent_state.ledger.allocations["a"], burst=burst)
    ask(node, "a", WEB, asked)
    node.backends.obstacles, node.backends.kept = {"a": KEPT}, {"a": 512 * MIB}
    assert not await starts_at_once(node), "a limit from before the resize may be in force"
    node.holds(NEW)
    start = await node.start(NEW)
    for done in (False, True):
        await node.sampled(uses(a=300))
        assert start.done() is done
    await start
    assert await starts_at_once(node)


async def test_after_a_restart_a_start_waits_for_programs_that_keep_a_limit_above_the_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The container gave 512 MiB back, and a program of it runs with 1024 MiB; the agent may have been restarted several times."""
    first = node_with(A)
    for asked in (wants(mebibytes=1024), NO_RESIZE):
        ask(first, "a", WEB, asked)
        await first.sampled(uses(a=200))
    node = node_with(first.agent_state.ledger.allocations["a"])
    node.backends.obstacles, node.backends.kept = {"a": KEPT}, {"a": 1024 * MIB}
    await node.sampled(uses(a=200), times=3)
    assert await starts_at_once(node), "there is room even if the program takes all that it may"
    node.frees("b")
    node.holds(REST)
    monkeypatch.setattr("gpumgr.runtime.bursts._ROOM_SECONDS", 0.01)
    with pytest.raises(Refusal, match=f"were not lowered within 0.01 s: team/web .main.: {KEPT}; the kubelet"):
        await node.memory_watcher.bursts.make_room(REST)
    node.backends.obstacles, node.backends.kept = {}, {}
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node, REST)


async def test_a_burst_can_not_take_the_memory_that_a_growing_container_gets() -> None:
    """It may take all that is free until its limit is lower, also after the sample by which the growth is decided."""
    node = node_with(A, share("t", TRAIN, 0b0011_1100, cores=0b11 << 50), burst=True)
    ask(node, "t", TRAIN, memory_limits=(("main", 2048),))
    await node.sampled(uses(a=100, t=100), times=2)
    assert limits(node)["t"][1] == 1536, "what is not granted to the other one"
    ask(node, "a", WEB, wants(mebibytes=1024))
    await node.sampled(uses(a=100, t=100))
    assert (limits(node)["a"][1], limits(node)["t"][1], told(node)) == (512, 1024, []), "first its limit goes down"
    await node.sampled(uses(a=100, t=1536))
    assert "has 0 MiB left for it, and it needs 512 more; team/train (main) has 512 MiB above its request" in told(node)[-1]
    ask(node, "a", WEB, wants(mebibytes=1024, at="again"))
    await node.sampled(uses(a=100, t=1000))
    assert limits(node)["a"][1] == 512
    await node.sampled(uses(a=100, t=1000), times=2)
    assert (limits(node)["a"][1], limits(node)["t"][1]) == (1024, 1024)


async def test_after_a_restart_a_start_waits_for_nothing_where_nobody_was_resized() -> None:
    assert await starts_at_once(node_with(A))
    assert await starts_at_once(node_with(share("a", WEB, 0b11, "vcuda", cores=0b1), burst=True)), "nor can it burst"
