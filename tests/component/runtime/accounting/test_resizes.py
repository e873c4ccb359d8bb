"""Resizes on a node of two GPUs with 2 GiB each: decisions, the limits that reach the mechanisms, and what is left for others."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.units import Amounts
from gpumgr.kube.pod_annotations import _resize_answers
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node import node_devices
from gpumgr.ledger.suspension import Suspension
from gpumgr.placement.pods import ResizeRequest
from tests.unit.ledger.samples import MIB

from .node import GPU, PIDS, TRAIN, WEB, Node, breathe, node_of, share, uses
from .test_suspensions import sampled

#: 50 cores and 512 MiB; 30 cores and 1024 MiB.
A, T = share("a", 0b11, cores=(1 << 50) - 1), share("t", 0b111100, cores=((1 << 30) - 1) << 50)


def node_with(*allocations: Allocation, cores: int = 100, mebibytes: int = 2048, burst: bool = False) -> Node:
    """A pod may grow by these amounts."""
    return node_of(*allocations, memory_burst=burst, max_growth_cores=cores, max_growth_memory_mebibytes=mebibytes)


def wants(cores: int | None = None, mebibytes: int | None = None, at: str = "") -> ResizeRequest:
    return ResizeRequest(cores=cores, memory_mebibytes=mebibytes, requested_at=at)


def offered(node: Node) -> tuple[int, int]:
    """How many cores and blocks of GPU 0 the kubelet may still assign."""
    state = node.agent_state
    first, _ = node_devices(state.ledger, state.inventory.view(state.ledger.gpu_registry), failed=())
    cores, blocks = state.ledger.held("core").get(GPU, 0), state.ledger.held("memory").get(GPU, 0)
    return (first.healthy_cores & ~cores).bit_count(), (first.healthy_blocks & ~blocks).bit_count()


async def test_growth_closes_free_ids_and_they_go_back_at_the_end() -> None:
    node = node_with(A, T)
    await node.sampled(uses(a=100, t=0))
    assert (node.amounts, offered(node)) == ({"a": (50, 512), "t": (30, 1024)}, (20, 2))
    node.demands("a", resize=wants(60, 700))
    await node.sampled(uses(a=100, t=0))
    assert (node.amounts["a"], offered(node)) == ((60, 700), (10, 1)), "188 MiB close one block"
    (entry,) = node.events("GpuResized")
    assert entry == f"container main may use 60 cores and 700 MiB of GPU {GPU}, before 50 cores and 512 MiB"
    await node.sampled(uses(a=700, t=0))
    assert not node.memory_watcher.over
    node.demands("a")
    await node.sampled(uses(a=100, t=0))
    assert (node.amounts["a"], offered(node)) == ((50, 512), (20, 2)), "without the annotation it has what it requests"
    node.demands("a", resize=wants(60))
    await node.sampled(uses(a=100, t=0))
    node.frees("a")
    assert offered(node) == (70, 4)


async def test_what_was_shrunk_serves_others_and_never_the_kubelet() -> None:
    node = node_with(A, T)
    node.demands("a", resize=wants(10, 256))
    await node.sampled(uses(a=256, t=0))
    assert (node.amounts["a"], offered(node)) == ((10, 256), (20, 2))
    node.demands("t", resize=wants(90, 1792))
    await node.sampled(uses(a=256, t=0), times=3)
    assert (node.amounts, offered(node)) == ({"a": (10, 256), "t": (90, 1792)}, (0, 0))
    node.demands("a", resize=wants(50, 256))
    await node.sampled(uses(a=256, t=0))
    assert node.events("GpuResizeRefused") == [
        "container main is not resized: GPU 00000000 has 0 cores left for it, and it needs 40 more; "
        "team/train (main) has 60 cores above its request there"
    ]
    assert node.amounts["a"] == (10, 256)
    node.frees("t")
    node.demands("a", resize=wants(50, 512, at="again"))
    await node.sampled(uses(a=256))
    assert node.amounts["a"] == (50, 512)


async def test_growth_waits_until_a_lower_limit_of_memory_is_in_force() -> None:
    node = node_with(A, T)
    node.set_timeout(0.01)
    await node.sampled(uses(a=0, t=1024))
    node.backends.ready.clear()
    node.demands("t", resize=wants(mebibytes=1024 + 256))
    node.demands("a", resize=wants(mebibytes=256))

    def granted() -> int:
        return node.agent_state.ledger.allocations["t"].limits_on(GPU).memory_mebibytes

    await node.sampled(uses(a=0, t=1024))
    before = granted()
    node.demands("t", resize=wants(mebibytes=1792))
    await node.sampled(uses(a=0, t=1024), times=3)
    assert granted() == before, "the mechanism has not lowered the limit of the other yet"
    node.backends.ready.set()
    await breathe()
    await node.sampled(uses(a=0, t=1024), times=4)
    assert granted() == 1792


async def test_growth_waits_for_a_runtime_that_answers_late_after_a_restart() -> None:
    before = node_with(A, T)
    before.demands("a", resize=wants(mebibytes=256))
    await before.sampled(uses(a=100, t=0))
    node = node_with(*before.agent_state.ledger.allocations.values())
    node.set_timeout(0.01)
    node.runtime.answers.clear()
    node.demands("a", resize=wants(mebibytes=256))
    node.demands("t", resize=wants(mebibytes=1792))
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
    assert node.amounts == {"a": (50, 256), "t": (30, 1792)}


async def test_less_memory_waits_for_it_too_since_what_is_in_use_is_not_known() -> None:
    node = node_with(A)
    node.set_timeout(0.01)
    node.runtime.answers.clear()
    containers, node.runtime.containers = node.runtime.containers, []
    node.demands("a", resize=wants(mebibytes=256))
    await node.sampled(uses(a=100), times=3)
    assert node.agent_state.ledger.allocations["a"].resize is None
    assert [entry.code for entry in node.told] == ["GpuResizeWaits"]
    node.runtime.containers = containers
    node.runtime.answers.set()
    await node.sampled(uses(a=100), times=4)
    assert node.amounts == {"a": (50, 256)}


async def test_a_request_is_decided_once() -> None:
    node = node_with(A, T)
    node.demands("a", resize=wants(99))
    await node.sampled(uses(a=1, t=0), times=3)
    assert len(node.told) == 1
    node.frees("t")
    await node.sampled(uses(a=1))
    assert node.amounts["a"] == (50, 512), "the refusal stays, although the GPU has the cores now"
    node.demands("a", resize=wants(99, at="now"))
    await node.sampled(uses(a=1))
    assert node.amounts["a"] == (99, 512)
    assert len(node.told) == 2


async def test_after_the_ledger_was_lost_the_annotation_is_decided_again_before_a_limit_changes() -> None:
    node = node_with(A)
    node.demands("a", resize=wants(60, 1024))
    await node.sampled(uses(a=1000))
    node.agent_state.ledger = node.agent_state.ledger.occupy(A)
    await node.sampled(uses(a=1000))
    assert node.amounts["a"] == (60, 1024)
    assert not node.memory_watcher.over


async def test_a_decision_that_is_not_saved_changes_no_limit() -> None:
    node = node_with(A)
    node.agent_state.checkpoint.full = True
    node.demands("a", resize=wants(20))
    with capture_logs() as logs:
        await node.sampled(uses(a=1), times=3)
    assert (node.amounts, node.told) == ({"a": (50, 512)}, [])
    assert [each["event"] for each in logs] == ["resize_not_saved"]
    node.agent_state.checkpoint.full = False
    await node.sampled(uses(a=1))
    assert node.amounts == {"a": (20, 512)}


@pytest.mark.parametrize(
    ("made", "asked", "why"),
    [
        (lambda: node_with(A), ResizeRequest(problem="it is no JSON"), "it is no JSON"),
        (
            lambda: node_with(share("a", 0b11, cores=(1 << 100) - 1)),
            wants(50),
            "only a container with a share of a GPU can be resized",
        ),
        (lambda: node_with(A), wants(mebibytes=299), "it uses 300 MiB of GPU 00000000, more than 299 MiB"),
        (lambda: node_with(A), wants(mebibytes=2049), "GPU 00000000 has 1536 MiB left for it, and it needs 1537 more"),
        (lambda: node_with(A, cores=0), wants(51), "would have 1 cores above its requests, and this node allows 0"),
        (lambda: node_with(A, mebibytes=99), wants(mebibytes=612), "100 MiB above its requests, and this node allows 99"),
        (lambda: node_with(share("a", 0b11, mechanism="vcuda")), wants(mebibytes=300), "the backend vcuda can't"),
        (lambda: node_with(share("a", 0b11, mechanism="nvml-memory")), wants(2), "no backend limits the container's cores"),
    ],
)
async def test_refusals_have_the_reason_and_change_nothing(made: Callable[[], Node], asked: ResizeRequest, why: str) -> None:
    """The rules are tested in tests/unit/ledger/test_resize.py."""
    node = made()
    await node.sampled(uses(a=300))
    before = node.amounts
    node.demands("a", resize=asked)
    await node.sampled(uses(a=300))
    assert node.amounts == before
    (entry,) = node.told
    assert (entry.code, why in entry.why) == ("GpuResizeRefused", True), entry.why
    (a,) = node.agent_state.ledger.allocations.values()
    assert a.resize is not None
    assert entry.why == f"container main is not resized: {a.resize.refused}"


async def test_the_most_counts_for_all_containers_of_a_pod_together() -> None:
    node = node_with(A, replace(T, pod=WEB, uid="uid-a", container="side"), cores=10)
    node.demands("a", resizes=(("main", wants(56)), ("side", wants(35))))
    await node.sampled(uses(a=1, t=1))
    assert len(node.events("GpuResized")) == 1
    assert "the pod would have 11 cores above its requests" in node.events("GpuResizeRefused")[0]


async def test_a_burst_uses_what_was_shrunk_and_prevents_growth() -> None:
    full = share("t", 0b1111_1100, cores=0b11 << 50)
    node = node_with(A, full, burst=True)
    node.demands("t", limit=2048)
    node.demands("a", resize=wants(mebibytes=100))
    await node.sampled(uses(a=100, t=1536))
    assert node.limits["t"] == 1536 + 412
    await node.sampled(uses(a=100, t=1836))
    node.demands("a", resize=wants(mebibytes=300))
    await node.sampled(uses(a=100, t=1836))
    assert (
        "has 112 MiB left for it, and it needs 200 more; team/train (main) has 300 MiB above its request there"
        in node.told[-1].why
    )


async def test_a_limit_that_an_earlier_agent_may_not_have_lowered_delays_growth() -> None:
    """The agent was killed after it had saved the decision, and the container still has the limit from before."""
    first = node_with(A, T)
    first.demands("a", resize=wants(mebibytes=256))
    await first.sampled(uses(a=100, t=100))
    node = node_with(first.agent_state.ledger.allocations["a"], T)
    node.demands("a", resize=wants(mebibytes=256))
    node.demands("t", resize=wants(mebibytes=1792))
    for granted in (1024, 1792):
        await node.sampled(uses(a=100, t=100))
        assert node.amounts["t"] == (30, granted)


async def test_growth_is_refused_while_a_backend_can_not_lower_the_limit_of_the_other_container() -> None:
    node = node_with(A, T)
    node.demands("a", resize=wants(mebibytes=256))
    node.backends.obstacles = {"a": "its pages can't be used"}
    await node.sampled(uses(a=100, t=100))
    node.demands("t", resize=wants(mebibytes=1600))
    await node.sampled(uses(a=100, t=100))
    assert node.events("GpuResizeRefused") == [
        f"container main is not resized: the lower memory limit of team/web (main) on GPU {GPU} is not in force: its "
        "pages can't be used"
    ]
    node.backends.obstacles = {}
    await node.sampled(uses(a=100, t=100))
    node.demands("t", resize=wants(mebibytes=1600, at="again"))
    await node.sampled(uses(a=100, t=100))
    assert node.amounts["t"] == (30, 1600)


async def test_memory_of_a_suspended_container_serves_growth_and_its_resume_gets_it_back() -> None:
    node = node_with(A, share("t", 0b1111_1100, cores=0b11 << 50))
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=100), times=3)
    assert node.agent_state.suspensions["a"].state == "suspended"
    node.demands("t", resize=wants(mebibytes=2049))
    await sampled(node, uses(t=100))
    assert node.told[-1].why.endswith("has 0 MiB left for it, and it needs 513 more")
    node.demands("t", resize=wants(mebibytes=2048))
    await sampled(node, uses(t=100))
    assert node.told[-1].why.endswith(
        f"2048 MiB of GPU {GPU} (512 MiB only until suspended containers are resumed), before 2 cores and 1536 MiB"
    )
    assert (node.amounts["t"], offered(node)[1]) == ((2, 2048), 0)
    await sampled(node, uses(t=1800))
    assert (node.amounts["t"], node.memory_watcher.over) == ((2, 2048), frozenset())
    node.demands("a", suspend=False)
    await sampled(node, uses(t=1800), times=3)
    assert node.amounts["t"] == (2, 1800), "the memory in use is never taken"
    assert node.agent_state.suspensions["a"].reason == f"it waits for 264 MiB of GPU {GPU}, used by team/train (main) (1800 MiB)"
    await sampled(node, uses(t=1500), times=3)
    assert (node.agent_state.suspensions, node.amounts["t"]) == ({}, (2, 1536))


async def test_growth_waits_for_a_container_that_is_being_resumed() -> None:
    """It had 900 MiB, by a burst, and has none of it on the GPU yet."""
    node = node_with(A, T, burst=True)
    node.demands("a", limit=900)
    known = Suspension(state="resuming", processes=((PIDS["a"], 110),), memory_bytes={GPU: 900 * MIB}, asked_at=7.0)
    node.agent_state.suspensions, node.mover.answers = {"a": known}, [None]
    await node.sampled(uses(a=0, t=100), times=2)
    node.demands("t", resize=wants(mebibytes=1300))
    await node.sampled(uses(a=0, t=100))
    assert not node.told
    node.mover.ends.set()
    await sampled(node, uses(a=900, t=100))
    assert "has 124 MiB left for it, and it needs 276 more; team/web (main) has 388 MiB above its request" in node.told[-1].why


async def test_a_start_waits_until_what_was_given_back_is_no_limit_in_force() -> None:
    """A container has grown, and gets what it requests again: the kubelet may assign the ids at once."""
    node = node_with(A, T)
    node.set_timeout(0.01)
    node.demands("a", resize=wants(mebibytes=1024))
    await node.sampled(uses(a=0, t=0))
    node.backends.ready.clear()
    node.demands("a")
    await node.sampled(uses(a=0, t=0))
    new = share("b", 0b1100_0000, cores=1 << 90)
    node.holds(new)
    start = await node.start(new)
    await node.sampled(uses(a=0, t=0), times=2)
    assert not start.done()
    node.backends.ready.set()
    await node.sampled(uses(a=0, t=0), times=4)
    await start


async def test_a_client_of_mps_is_told_that_programs_that_run_keep_their_limits_and_is_lent_nothing() -> None:
    node = node_with(A, share("t", 0b0111_1100, mechanism="mps", cores=0b11 << 50))
    node.demands("a", suspend=True)
    await sampled(node, uses(a=500, t=100), times=3)
    node.demands("t", resize=wants(mebibytes=1536))
    await sampled(node, uses(t=100))
    assert node.told[-1].why.endswith(
        "before 2 cores and 1280 MiB; programs that run keep the limits with which they started (MPS)"
    )
    node.demands("t", resize=wants(mebibytes=1537))
    await sampled(node, uses(t=100))
    assert node.told[-1].why.endswith("has 0 MiB left for it, and it needs 1 more")
    answers = dict(_resize_answers(list(node.agent_state.ledger.allocations.values())))
    assert answers["main"]["newProgramsOnly"] is True


NEW = share("b", 0b1100_0000, cores=1 << 90)
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
    node.demands("a", resize=wants(mebibytes=256))
    node.backends.obstacles = {"a": KEPT}
    await node.sampled(uses(a=200), times=3)
    assert node.amounts["a"] == (50, 256)
    assert await starts_at_once(node)


async def test_a_start_does_not_wait_for_a_container_whose_resize_was_refused() -> None:
    node = node_with(A)
    await node.sampled(uses(a=200), times=2)
    node.demands("a", resize=ResizeRequest(problem="it is no JSON"))
    node.backends.obstacles = {"a": "its pages can't be used"}
    await node.sampled(uses(a=200), times=2)
    assert node.told[-1].why.endswith("it is no JSON")
    assert await starts_at_once(node)


async def test_a_start_waits_only_while_a_limit_above_the_ids_is_in_force() -> None:
    """The program was started with 1024 MiB, and its container holds ids of 512 MiB."""
    node = node_with(A)
    node.demands("a", resize=wants(mebibytes=1024))
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node), "the ledger has what it may use"
    node.frees("b")
    node.backends.obstacles = {"a": KEPT}
    for mebibytes in (512, 256):
        node.demands("a", resize=wants(mebibytes=mebibytes))
        await node.sampled(uses(a=200), times=3)
        assert not await starts_at_once(node, REST)
        assert await starts_at_once(node), "there is room even if the program takes all that it may"
    node.holds(REST)
    assert f"were not lowered within 0.01 s: team/web (main): {KEPT}; the kubelet" in await node.refusal(REST)
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
    first.demands("a", resize=asked)
    await first.sampled(uses(a=200))
    node = node_with(first.agent_state.ledger.allocations["a"], burst=burst)
    node.demands("a", resize=asked)
    node.backends.obstacles, node.backends.kept = {"a": KEPT}, {"a": 512 * MIB}
    node.holds(NEW)
    await node.starts_with_sample(2, NEW, uses(a=300))  # a limit from before the resize may be in force
    await node.make_room(NEW)


async def test_after_a_restart_a_start_waits_for_programs_that_keep_a_limit_above_the_ids() -> None:
    """The container gave 512 MiB back, and a program of it runs with 1024 MiB; the agent may have been restarted several times."""
    first = node_with(A)
    for asked in (wants(mebibytes=1024), None):
        first.demands("a", resize=asked)
        await first.sampled(uses(a=200))
    node = node_with(first.agent_state.ledger.allocations["a"])
    node.backends.obstacles, node.backends.kept = {"a": KEPT}, {"a": 1024 * MIB}
    await node.sampled(uses(a=200), times=3)
    assert await starts_at_once(node), "there is room even if the program takes all that it may"
    node.frees("b")
    node.holds(REST)
    assert f"were not lowered within 0.01 s: team/web (main): {KEPT}; the kubelet" in await node.refusal(REST)
    node.backends.obstacles, node.backends.kept = {}, {}
    await node.sampled(uses(a=200), times=2)
    assert await starts_at_once(node, REST)


async def test_a_burst_can_not_take_the_memory_that_a_growing_container_gets() -> None:
    """It may take all that is free until its limit is lower, also after the sample by which the growth is decided."""
    node = node_with(A, share("t", 0b0011_1100, cores=0b11 << 50), burst=True)
    node.demands("t", limit=2048)
    await node.sampled(uses(a=100, t=100), times=2)
    assert node.limits["t"] == 1536, "what is not granted to the other one"
    node.demands("a", resize=wants(mebibytes=1024))
    await node.sampled(uses(a=100, t=100))
    assert (node.limits["a"], node.limits["t"], node.told) == (512, 1024, []), "first its limit goes down"
    await node.sampled(uses(a=100, t=1536))
    assert "has 0 MiB left for it, and it needs 512 more; team/train (main) has 512 MiB above its request" in node.told[-1].why
    node.demands("a", resize=wants(mebibytes=1024, at="again"))
    await node.sampled(uses(a=100, t=1000))
    assert node.limits["a"] == 512
    await node.sampled(uses(a=100, t=1000), times=2)
    assert (node.limits["a"], node.limits["t"]) == (1024, 1024)
