"""The pods of allocations: which they are, what proves that one has ended, and a kubelet that offers the ids of running pods again."""

import asyncio
from collections.abc import Collection

import pytest
from msgspec.structs import replace

from gpumgr.agent.pods import REPEAT_SECONDS, RUNTIME_SECONDS, PodEnds, find_pod, pod_of, pods_of
from gpumgr.ledger.ledger import Allocation, ClaimRequest
from gpumgr.placement.pods import ClaimUse, PodKey, PodSandbox, PodView
from gpumgr.sim.kubelet_pods import SimContainer, SimPod
from tests.component.stage.stage import Clock, MemoryPods, MemoryRuntime, snapshot
from tests.topology_manager import best_effort
from tests.unit.agent.world import World

WEB: PodKey = ("team", "web-0")
PROXY: PodKey = ("kube-system", "proxy-node-1")
HASH = "0123456789abcdef" * 2
NODE = "Node-1"
WHOLE = SimContainer(name="main", cores=100, memory_blocks=16)


def web(uid: str = "1", phase: str = "Running", runtime_uid: str | None = None) -> PodView:
    return PodView(namespace=WEB[0], name=WEB[1], uid=uid, phase=phase, runtime_uid=runtime_uid)


@pytest.fixture
def pods() -> MemoryPods:
    proxy = PodView(namespace=PROXY[0], name=PROXY[1], uid="mirror", runtime_uid="hash")
    return MemoryPods({view.key: view for view in (web("second"), proxy)})


@pytest.mark.parametrize(
    ("pod", "uid", "found"),
    [
        pytest.param(WEB, "second", WEB, id="both known"),
        pytest.param(WEB, None, WEB, id="name alone"),
        pytest.param(None, "second", WEB, id="UID alone"),
        pytest.param(WEB, "first", None, id="the name recurs"),
        pytest.param(("team", "guess"), "second", WEB, id="the UID decides where no pod has the name"),
        pytest.param(PROXY, "second", WEB, id="the UID decides where another pod has the name"),
        pytest.param(PROXY, "mirror", PROXY, id="static pod, UID of the mirror pod"),
        pytest.param(PROXY, "hash", PROXY, id="static pod, UID of the kubelet"),
        pytest.param(None, "hash", PROXY, id="static pod, UID of the kubelet alone"),
        pytest.param(("team", "gone"), "gone", None, id="no longer there"),
        pytest.param(None, None, None, id="nothing known"),
    ],
)
def test_finds_a_pod_by_name_and_uid(pods: MemoryPods, pod: PodKey | None, uid: str | None, found: PodKey | None) -> None:
    view = find_pod(pods, pod, uid)
    assert (view.key if view else None) == found


@pytest.mark.parametrize(
    ("pod", "uid", "expected"),
    [
        pytest.param(PROXY, "hash", (PROXY, "mirror"), id="a static pod is named by its mirror pod's UID"),
        pytest.param(WEB, "first", (WEB, "first"), id="the ledger's, if the API server has only a later pod of the name"),
        pytest.param(("team", "gone"), None, None, id="unknown without a UID"),
    ],
)
def test_names_the_pod_of_an_allocation(
    pods: MemoryPods, pod: PodKey | None, uid: str | None, expected: tuple[PodKey, str] | None
) -> None:
    assert pod_of(Allocation(id="a", pod=pod, uid=uid), pods) == expected


def using(name: str, claim: str, request: str | None = None, *, namespace: str = "team", phase: str = "Running") -> PodView:
    use = ClaimUse(container="main", claim=claim, request=request)
    return PodView(namespace=namespace, name=name, uid=f"uid-{name}", phase=phase, claims=(use,))


def test_every_living_pod_that_uses_a_claim_is_one_of_its_allocation_and_its_own_is_the_first() -> None:
    views = [
        using("by-claim", "shared"),
        using("by-request", "shared", "gpu"),
        using("other-request", "shared", "other"),
        using("other-claim", "own"),
        using("elsewhere", "shared", namespace="other"),
        using("ended", "shared", phase="Succeeded"),
    ]
    pods = MemoryPods({view.key: view for view in views})
    claim = ClaimRequest(uid="c", namespace="team", name="shared", request="gpu")
    own, gone = (Allocation(id="a", pod=("team", name), uid=f"uid-{name}", claim=claim) for name in ("by-request", "ended"))
    assert pods_of(own, pods) == [(("team", name), f"uid-{name}") for name in ("by-request", "by-claim")]
    assert pod_of(gone, pods) == (("team", "by-claim"), "uid-by-claim")
    assert pods_of(gone, MemoryPods()) == [(("team", "ended"), "uid-ended")]


DELETED = replace(web(), deleted=True)

# -- ends --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("holder", "shown", "api_server", "sandbox", "ended"),
    [
        pytest.param("1", web(), "reachable", None, False, id="it runs, whatever the runtime has"),
        pytest.param("1", DELETED, "reachable", "1", False, id="it is being deleted, and its sandbox is ready"),
        pytest.param("1", DELETED, "reachable", None, True, id="it is being deleted, and has no ready sandbox"),
        pytest.param("1", DELETED, "reachable", "error", False, id="it is being deleted, and no runtime answers"),
        pytest.param("1", web(phase="Failed"), "reachable", "1", True, id="it has ended"),
        pytest.param("1", web(phase="Failed"), "down", "1", True, id="an end is final, also during an outage"),
        pytest.param("1", None, "reachable", "1", True, id="it is deleted"),
        pytest.param("1", web("2"), "reachable", "2", True, id="another pod has its name"),
        pytest.param("1", web(), "down", "1", False, id="outage: its sandbox is ready"),
        pytest.param("1", web(), "down", None, True, id="outage: it has no ready sandbox"),
        pytest.param("1", web(), "down", "2", True, id="outage: another pod of its name has one"),
        pytest.param("1", web(), "down", "error", None, id="outage: the runtime is down, too"),
        pytest.param("1", None, "down", "1", False, id="outage: a cache that never had it proves nothing"),
        pytest.param("1", None, "down", "error", None, id="outage: nothing is known"),
        pytest.param("mirror", web("mirror", runtime_uid=HASH), "reachable", None, False, id="a static pod"),
        pytest.param(HASH, web("mirror", runtime_uid=HASH), "reachable", None, False, id="a static pod by the kubelet's UID"),
        pytest.param("mirror", web("mirror", runtime_uid=HASH), "down", HASH, False, id="outage: the sandbox of a static pod"),
        pytest.param("mirror", None, "down", HASH, False, id="outage: the sandbox of an unknown static pod"),
        pytest.param("mirror", web("later", runtime_uid=HASH), "reachable", HASH, False, id="its mirror pod was created again"),
        pytest.param("mirror", web("later", runtime_uid=HASH), "reachable", None, True, id="it was replaced by a static pod"),
        pytest.param(HASH, None, "reachable", HASH, False, id="it has no mirror pod"),
        pytest.param(HASH, None, "reachable", "error", None, id="it has no mirror pod, and no runtime answers"),
        pytest.param(None, web(phase="Failed"), "reachable", "1", False, id="no UID: the ended pod may be an earlier one"),
        pytest.param(None, web("2"), "reachable", None, True, id="no UID: the pod of this name does not run yet"),
        pytest.param(None, web("2"), "reachable", "error", None, id="no UID and no runtime"),
    ],
)
async def test_what_proves_an_end(
    holder: str | None, shown: PodView | None, api_server: str, sandbox: str | None, ended: bool | None
) -> None:
    pods = MemoryPods({WEB: shown} if shown else {}, down=api_server == "down")
    found = await PodEnds(pods, runtime_with(WEB, sandbox), node=NODE, clock=Clock()).find(
        [Allocation(id="a", pod=WEB, uid=holder)]
    )
    assert found == {"a": ended}


def runtime_with(pod: PodKey, sandbox: str | None) -> MemoryRuntime:
    """`sandbox`: the UID of the pod's ready sandbox; "error": the runtime does not answer."""
    there = SimPod(namespace=pod[0], name=pod[1], uid=sandbox or "", containers=())
    return MemoryRuntime(lambda: [there] if sandbox else [], error="no socket" if sandbox == "error" else None)


@pytest.mark.parametrize(("sandbox", "ended"), [(HASH, False), (None, True), ("error", None)])
async def test_a_deleted_mirror_pod_that_is_not_created_again_yet_is_no_end(sandbox: str | None, ended: bool | None) -> None:
    """A static pod's containers run on while anybody deletes its mirror pod. Its name ends with the node's."""
    held = Allocation(id="a", pod=("kube-system", f"web-{NODE.lower()}"), uid="6a0c5f0e-mirror")
    assert held.pod is not None
    found = await PodEnds(MemoryPods(), runtime_with(held.pod, sandbox), node=NODE, clock=Clock()).find([held])
    assert found == {"a": ended}


async def test_of_a_holder_without_any_name_nothing_is_known() -> None:
    runtime = MemoryRuntime()
    found = await PodEnds(MemoryPods(), runtime, node=NODE, clock=Clock()).find([Allocation(id="a")])
    assert (found, runtime.asked) == ({"a": None}, 0)


async def test_a_runtime_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.agent.pods.RUNTIME_SECONDS", 0.01)
    assert RUNTIME_SECONDS <= 1  # the kubelet waits as long

    class Hung(MemoryRuntime):
        async def ready_sandboxes(self) -> list[PodSandbox]:
            return await asyncio.Future()

    found = await PodEnds(MemoryPods(synced=False), Hung(), node=NODE, clock=Clock()).find([Allocation(id="a", pod=WEB, uid="1")])
    assert found == {"a": None}


async def test_a_late_watch_is_waited_for_and_a_pod_that_runs_only_once() -> None:
    waits: list[Collection[str]] = []

    class Pods(MemoryPods):
        async def wait_ended(self, uids: Collection[str], timeout_seconds: float) -> None:  # noqa: ARG002
            waits.append(uids)
            self.views["team", "late"] = replace(self.views["team", "late"], phase="Succeeded")

    views = {(n, m): PodView(namespace=n, name=m, uid=m, phase="Running") for n, m in (("team", "late"), ("team", "runs"))}
    clock = Clock()
    ends = PodEnds(Pods(views), MemoryRuntime(), node=NODE, clock=clock)
    held = [Allocation(id=uid, pod=("team", uid), uid=uid) for uid in ("late", "runs")]
    assert await ends.find(held) == {"late": False, "runs": False}
    assert waits == []
    for _ in range(2):
        assert await ends.find(held, wait=True) == {"late": True, "runs": False}
    assert waits == [{"late", "runs"}]
    clock.now += REPEAT_SECONDS
    await ends.find(held, wait=True)
    assert waits[1:] == [{"runs"}]


# -- whole admissions ------------------------------------------------------------------------------------------------------


async def test_ids_that_the_kubelet_forgot_before_any_list_stay_until_no_listed_pod_lacks_ids() -> None:
    """Aligned ids come without a preference, and the cache has the pod after its admission: the allocation has no name."""
    world = await World.made(snapshot(2, 16, numa=True), known="late", align=best_effort)
    first = world.pod("first", WHOLE)
    await world.admit(first)
    assert [a.pod for a in world.ledger.allocations.values()] == [None]
    world.forget()
    for _ in range(40):
        await world.sweep()
        world.check_ids()
    world.end(first)
    await world.sweep(times=40)
    assert not world.ledger.allocations


async def test_the_ids_of_an_ended_pod_are_granted_during_an_outage_of_the_api_server() -> None:
    world = await World.made(snapshot(1, 16))
    first = await world.run(world.pod("first", WHOLE))
    world.pods.down = True
    world.end(first)
    await world.run(world.pod("second", WHOLE))
    assert {a.pod for a in world.ledger.allocations.values()} == {("team", "second")}
