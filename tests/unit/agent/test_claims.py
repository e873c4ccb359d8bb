"""ResourceClaims on the agent's ledger: prepared once, answered the same ever after, refused when a GPU has too little."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr._pb.k8s.io.kubelet.pkg.apis.dra.v1 import Device
from gpumgr.agent.claims import NodeClaims
from gpumgr.agent.container_starts import report_two_limits
from gpumgr.common.errors import Refusal
from gpumgr.common.files import names_in
from gpumgr.common.units import Amounts, Resource
from gpumgr.enforcement.backend import Backend, BackendName
from gpumgr.enforcement.cdi import device_name as cdi_name
from gpumgr.enforcement.enforcer import Enforcer
from gpumgr.kubelet.dra_service import devices_of
from gpumgr.ledger.claims import AllocatedClaim, ClaimShare, Share, device_name
from gpumgr.ledger.gpu_share import GpuShare, Strength
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.placement.pods import ClaimUse, PodKey, PodView
from gpumgr.settings.schema import EnforcementSettings
from tests.component.stage.stage import snapshot, unlimited
from tests.listings import listing_from

from .world import World


@dataclass
class Reader:
    """The API server's claims. `before_answer` runs while a request for a claim is in progress. `away`: it does not answer. `pods`: those
    that need their claims."""

    claims: dict[str, AllocatedClaim] = field(default_factory=dict)
    pods: set[str] = field(default_factory=set)
    away: bool = False
    reads: int = 0
    deadline: float | None = None
    before_answer: Callable[[], object] | None = None

    async def read(self, claim: ClaimRef, *, deadline: float | None = None) -> AllocatedClaim:
        self.reads, self.deadline = self.reads + 1, deadline
        found = self.claims.get(claim.uid)
        if self.before_answer is not None:
            result = self.before_answer()
            if asyncio.iscoroutine(result):
                await result
        if self.away:
            raise Refusal("internal", "no answer in time")
        if found is None:
            raise Refusal("unknown_device", f"claim {claim} is gone")
        return found

    async def needs_claims(self, pod: PodKey, uid: str, *, deadline: float | None = None) -> bool:  # noqa: ARG002
        return uid in self.pods


@dataclass(kw_only=True)
class Node:
    """A world of claims. GPUs are named by their position."""

    world: World
    reader: Reader = field(default_factory=Reader)

    def __post_init__(self) -> None:
        self.start()

    def start(self, closed: str | None = None, *, share_mode: bool = True) -> None:
        agent = self.world.agent
        self.claims = NodeClaims(
            agent_state=self.world.agent_state,
            reader=self.reader,
            pods=self.world.pods,
            enforcement=self.world.limits,
            starts=agent.container_starts,
            share_mode=lambda: share_mode,
            closed=closed,
            wall_clock=lambda: self.world.wall,
        )

    def gpu(self, position: int) -> str:
        return self.world.agent_state.ledger.gpu_registry.gpus[position].name

    def share(
        self, gpu: int, cores: int, mebibytes: int, *, request: str = "gpu", number: int = 1, admin: bool = False
    ) -> ClaimShare:
        return ClaimShare(
            request=request,
            device=device_name(self.gpu(gpu)),
            share_id=f"share-{number}",
            cores=cores,
            memory_mebibytes=mebibytes,
            admin=admin,
        )

    def claim(self, name: str, *shares: ClaimShare, request: str | None = None) -> ClaimRef:
        """A claim that pod NAME uses in its container main."""
        ref = ClaimRef(namespace="team", name=name, uid=f"claim-{name}")
        uses = (ClaimUse(container="main", claim=name, request=request),)
        self.world.pods.views["team", name] = PodView(namespace="team", name=name, uid=f"pod-{name}", claims=uses)
        self.reader.claims[ref.uid] = AllocatedClaim(ref=ref, pods=((("team", name), f"pod-{name}"),), shares=shares)
        return ref

    def use_next(self, ref: ClaimRef) -> None:
        """The claim is reserved for one more pod, which waits for it."""
        found, uses = self.reader.claims[ref.uid], (ClaimUse(container="main", claim=ref.name),)
        self.world.pods.views["team", "next"] = PodView(namespace="team", name="next", uid="pod-next", claims=uses)
        self.reader.claims[ref.uid] = replace(found, pods=(*found.pods, (("team", "next"), "pod-next")))

    def allocate_anew(self, ref: ClaimRef, *shares: ClaimShare) -> None:
        """The API server gives the claim these shares, for the pod `next`."""
        self.reader.claims[ref.uid] = replace(self.reader.claims[ref.uid], shares=shares, pods=((("team", "next"), "pod-next"),))

    async def prepare(self, ref: ClaimRef) -> list[Device]:
        """What the kubelet is answered."""
        return devices_of(await self.claims.prepare(ref, deadline=math.inf), "node1")


@pytest.fixture
async def node(tmp_path: Path) -> Node:
    return Node(world=await World.made(snapshot(2, 80), limits=unlimited(tmp_path)))


async def test_a_share_is_an_allocation_of_the_pods_container(node: Node) -> None:
    ref = node.claim("a", node.share(1, 30, 5 * 1024))
    (device,) = await node.prepare(ref)
    (allocation,) = node.world.ledger.of_claim(ref.uid)
    assert device == Device(
        request_names=["gpu"],
        pool_name="node1",
        device_name=device_name(node.gpu(1)),
        cdi_device_ids=[cdi_name(allocation.id, node.gpu(1))],
        share_id="share-1",
    )
    assert allocation.gpus == {node.gpu(1): Amounts(30, 5 * 1024)}
    assert (allocation.pod, allocation.uid, allocation.container) == (("team", "a"), "pod-a", "main")
    assert allocation.cdi
    assert node.world.ledger.available(node.gpu(1)).cores == 70
    (entry,) = [each for each in node.world.agent_state.history.entries() if each.what == "granted"]
    assert (entry.call, entry.pod, entry.container) == ("prepare", ("team", "a"), "main")


async def test_a_claim_is_prepared_only_once_its_memory_is_free(node: Node) -> None:
    ref = node.claim("a", node.share(1, 30, 5 * 1024))
    node.world.no_room = Refusal("conflict", "another container holds its memory")
    with pytest.raises(Refusal, match="another container holds its memory"):
        await node.prepare(ref)
    (refused,) = [entry for entry in node.world.agent_state.history.entries() if entry.what == "refused"]
    assert (refused.why, refused.pod, refused.pod_uid) == ("another container holds its memory", ("team", "a"), "pod-a")
    node.world.no_room = None
    await node.prepare(ref)
    await node.claims.restore()
    (allocation,) = node.world.ledger.of_claim(ref.uid)
    assert node.world.room_for == [allocation.id] * 2, "restored limits need no memory"


async def test_the_answer_stays_the_same_without_the_api_server_and_over_a_restart(node: Node) -> None:
    ref = node.claim("a", node.share(0, 30, 512))
    first = await node.prepare(ref)
    node.reader.away = True
    assert await node.prepare(ref) == first
    await node.world.restart()
    node.start()
    assert await node.prepare(ref) == first
    node.world.pods.views.clear()
    with pytest.raises(Refusal, match="no answer"):
        await node.prepare(ref)
    node.world.pods.synced = False
    assert await node.prepare(ref) == first, "whether its pod is there is not known"


async def test_a_request_with_several_gpus_is_one_allocation(node: Node) -> None:
    ref = node.claim("a", node.share(0, 100, 1), node.share(1, 100, 1, number=2))
    devices = await node.prepare(ref)
    (allocation,) = node.world.ledger.of_claim(ref.uid)
    assert [device.share_id for device in devices] == ["share-1", "share-2"]
    assert allocation.whole
    assert node.world.ledger.available(node.gpu(0)) == Amounts()


async def test_without_share_mode_only_whole_gpus_are_granted(node: Node) -> None:
    node.start(share_mode=False)
    with pytest.raises(Refusal, match=r"placement\.share_mode is off"):
        await node.prepare(node.claim("a", node.share(0, 10, 256)))
    await node.prepare(node.claim("whole", node.share(0, 100, 0)))
    await node.prepare(node.claim("monitor", node.share(0, 0, 0, admin=True)))
    assert node.world.ledger.available(node.gpu(0)) == Amounts()


async def test_admin_access_counts_nothing_and_is_never_limited(node: Node) -> None:
    await node.prepare(node.claim("whole", node.share(0, 100, 1)))
    await node.prepare(node.claim("monitor", node.share(0, 0, 0, admin=True)))
    (monitor,) = node.world.ledger.of_claim("claim-monitor")
    assert monitor.mechanisms == ()
    assert node.world.ledger.used(node.gpu(0)).cores == 100
    await node.prepare(node.claim("other", node.share(1, 100, 1)))


@pytest.mark.parametrize("prepared_again", [False, True])
async def test_a_prepare_that_an_unprepare_overtakes_grants_nothing_and_a_later_one_does(
    node: Node, prepared_again: bool
) -> None:
    ref, reading = node.claim("a", node.share(0, 30, 512)), asyncio.Event()
    node.reader.before_answer = reading.wait
    overtaken = asyncio.ensure_future(node.prepare(ref))
    await asyncio.sleep(0)
    await node.claims.unprepare(ref)
    node.reader.before_answer = None
    if prepared_again:
        await node.prepare(ref)
    reading.set()
    with pytest.raises(Refusal, match="was unprepared while it was being prepared"):
        await overtaken
    assert len(node.world.ledger.allocations) == prepared_again
    await node.prepare(ref)


@pytest.mark.parametrize(
    "end",
    [
        "Running",
        "Succeeded",
        "deleted while Pending",
        "gone before",
        "gone before, and the cache begins anew",
        "gone after",
        "another pod of its name",
        "Pending",
    ],
)
async def test_a_late_prepare_for_a_pod_that_needs_the_claim_no_more_is_refused(node: Node, end: str) -> None:
    """`Pending`: the pod may be about to use it."""
    ref, key = node.claim("a", node.share(0, 30, 512)), ("team", "a")
    await node.prepare(ref)
    views = node.world.pods.views
    if end == "deleted while Pending":
        views[key] = replace(views[key], deleted=True)
    elif end.startswith("gone before"):
        del views[key]
    elif end in ("Running", "Succeeded", "Pending"):
        views[key] = replace(views[key], phase=end)
    await node.claims.unprepare(ref)
    node.world.pods.synced = not end.endswith("begins anew")
    if end == "gone after":
        del views[key]
    elif end == "another pod of its name":
        views[key] = PodView(namespace="team", name="a", uid="pod-a2")
    with nullcontext() if end == "Pending" else pytest.raises(Refusal, match="the pods that it is reserved for have ended"):
        await node.prepare(ref)
    assert len(node.world.ledger.allocations) == (end == "Pending")
    await node.claims.unprepare(ref)
    assert not node.world.ledger.allocations
    node.use_next(ref)
    await node.prepare(ref)


async def test_a_claim_whose_pods_have_all_ended_is_refused(node: Node) -> None:
    ref, key = node.claim("a", node.share(0, 30, 512)), ("team", "a")
    node.world.pods.views[key] = replace(node.world.pods.views[key], phase="Failed")
    with pytest.raises(Refusal, match="all pods that claim team/a is reserved for have ended: delete them"):
        await node.prepare(ref)
    node.use_next(ref)
    await node.prepare(ref)


async def test_the_next_pod_of_a_claim_that_the_watch_has_not_shown_yet_is_looked_up(node: Node) -> None:
    ref = node.claim("a", node.share(0, 30, 512))
    await node.prepare(ref)
    views = node.world.pods.views
    views["team", "a"] = replace(views["team", "a"], phase="Succeeded")
    await node.claims.unprepare(ref)
    found = node.reader.claims[ref.uid]
    node.reader.claims[ref.uid] = replace(found, pods=((("team", "a"), "pod-a2"),), shares=(node.share(0, 30, 512, number=2),))
    with pytest.raises(Refusal, match="the pods that it is reserved for have ended"):
        await node.prepare(ref)
    node.reader.pods = {"pod-a2"}
    await node.prepare(ref)
    (allocation,) = node.world.ledger.allocations.values()
    assert allocation.uid == "pod-a2"


@pytest.mark.parametrize("former", ["gone", "unknown", "still shown", "is deleted"])
async def test_a_claim_that_was_allocated_anew_after_a_missed_unprepare_gets_its_new_device(node: Node, former: str) -> None:
    ref = node.claim("a", node.share(0, 60, 512))
    await node.prepare(ref)
    moved = node.share(1, 60, 512, number=2)
    node.allocate_anew(ref, moved)
    view = replace(node.world.pods.views.pop(("team", "a")), phase="Running", deleted=former == "is deleted")
    if former in ("still shown", "is deleted"):
        node.world.pods.views["team", "a"] = view
    node.world.pods.synced = former != "unknown"
    (device,) = await node.prepare(ref)
    assert (device.device_name, device.share_id) == (moved.device, "share-2")
    assert [a.gpus for a in node.world.ledger.of_claim(ref.uid)] == [{node.gpu(1): Amounts(60, 512)}]
    assert node.world.ledger.used(node.gpu(0)) == Amounts()
    node.reader.claims.clear()
    with pytest.raises(Refusal):
        await node.prepare(ref)


async def test_the_former_gpu_of_a_claim_is_freed_though_its_new_one_is_refused(node: Node) -> None:
    ref = node.claim("a", node.share(0, 60, 512))
    await node.prepare(ref)
    await node.prepare(node.claim("b", node.share(1, 60, 512, number=9)))
    node.allocate_anew(ref, node.share(1, 60, 512, number=2))
    with pytest.raises(Refusal, match="60 cores"):
        await node.prepare(ref)
    assert node.world.ledger.used(node.gpu(0)) == Amounts()


async def test_the_deadline_of_the_call_holds_for_the_claim_and_its_pods(node: Node) -> None:
    ref, waits = node.claim("a", node.share(0, 30, 512)), list[float]()

    async def wait_for(pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:  # noqa: ARG001
        waits.append(timeout_seconds)
        return None

    node.world.pods.wait_for = wait_for  # type: ignore[method-assign]
    node.world.pods.views.clear()
    deadline = time.monotonic() + 0.5
    await node.claims.prepare(ref, deadline=deadline)
    assert node.reader.deadline == deadline
    assert waits
    assert max(waits) <= 0.5


async def test_a_node_that_is_closed_keeps_its_claims_and_takes_no_others(node: Node) -> None:
    ref = node.claim("a", node.share(0, 30, 512))
    before = await node.prepare(ref)
    node.start(closed="node.mode is plugin")
    assert await node.prepare(ref) == before
    with pytest.raises(Refusal, match=r"node\.mode is plugin"):
        await node.prepare(node.claim("b", node.share(0, 30, 512)))
    await node.claims.unprepare(ref)
    assert not node.world.ledger.allocations


async def test_only_so_many_unprepared_claims_are_kept(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumgr.agent.claims.MAX_UNPREPARED", 2)
    refs = [node.claim(name, node.share(0, 10, 256)) for name in ("a", "b", "c")]
    for key, view in node.world.pods.views.items():
        node.world.pods.views[key] = replace(view, phase="Running")
    for ref in refs:
        await node.prepare(ref)
        await node.claims.unprepare(ref)
    await node.prepare(refs[0])
    for ref in refs[1:]:
        with pytest.raises(Refusal, match="have ended"):
            await node.prepare(ref)


@pytest.mark.parametrize(("cores", "mebibytes"), [(0, 256), (10, 0)])
async def test_a_share_without_cores_or_memory_is_refused(node: Node, cores: int, mebibytes: int) -> None:
    with pytest.raises(Refusal, match="both must be more than 0"):
        await node.prepare(node.claim("a", node.share(0, cores, mebibytes)))


async def test_two_calls_at_the_same_time_grant_once(node: Node) -> None:
    ref = node.claim("a", node.share(0, 60, 512))
    first, second = await asyncio.gather(node.prepare(ref), node.prepare(ref))
    assert first == second
    assert node.world.ledger.used(node.gpu(0)).cores == 60


async def test_a_full_disk_refuses_both_calls_and_loses_nothing(node: Node) -> None:
    ref, other = node.claim("a", node.share(0, 30, 512)), node.claim("b", node.share(0, 30, 512))
    await node.prepare(ref)
    node.world.checkpoint.full = True
    with pytest.raises(Refusal, match="can't be saved"):
        await node.prepare(other)
    with pytest.raises(Refusal, match="can't be saved"):
        await node.claims.unprepare(ref)
    assert [a.claim.name for a in node.world.ledger.allocations.values() if a.claim] == ["a"]
    node.world.checkpoint.full = False
    await node.claims.unprepare(ref)
    await node.prepare(other)


class Found:
    """What the API server has: claim -> its UID and shares on this node. `asked`: the claims that were looked for."""

    def __init__(self, **claims: tuple[str, Collection[Share]]) -> None:
        self.claims, self.asked = claims, list[str]()

    async def __call__(self, ref: ClaimRef) -> tuple[str, Collection[Share]]:
        self.asked.append(ref.name)
        return self.claims.get(ref.name, ("", ()))


def held(node: Node) -> set[str]:
    return {a.claim.name for a in node.world.ledger.allocations.values() if a.claim}


async def test_claims_that_are_gone_everywhere_are_freed_at_the_second_look(node: Node) -> None:
    names = ("gone", "listed", "pod-listed", "known", "moved", "elsewhere")
    shares = {name: node.share(0, 10, 256, number=number) for number, name in enumerate(names)}
    for name in names:
        await node.prepare(node.claim(name, shares[name]))
    known = [(shares[name].device, shares[name].share_id) for name in names]
    find = Found(known=("claim-known", known), moved=("claim-moved", [(known[4][0], "other")]), elsewhere=("claim-elsewhere", ()))
    listing = listing_from({("team", "listed"): {}, ("team", "pod-listed"): {}}, {("team", "listed")})
    await node.claims.reclaim(find, listing)
    assert held(node) == set(names)
    await node.claims.reclaim(find, listing)
    assert held(node) == {"listed", "pod-listed", "known"}
    assert not {"listed", "pod-listed"}.intersection(find.asked), "no request for claims in ordinary use"


@pytest.mark.parametrize(("uid", "freed"), [("claim-new", True), ("claim-a", False), ("", False)])
async def test_a_listed_claim_may_be_another_one_of_the_same_name(node: Node, uid: str, freed: bool) -> None:
    """PodResources has no UIDs. The holder is one of several pods that may have used the claim."""
    await node.prepare(node.claim("a", node.share(0, 100, 256)))
    node.world.pods.views.clear()
    for _ in range(2):
        await node.claims.reclaim(Found(a=(uid, ())), listing_from({("team", "b"): {}}, {("team", "a")}))
    assert bool(node.world.ledger.allocations) is not freed


async def test_a_look_that_fails_frees_nothing_and_does_not_keep_others(node: Node) -> None:
    for name, number in (("a", 1), ("b", 2)):
        await node.prepare(node.claim(name, node.share(0, 10, 256, number=number)))

    async def fail(ref: ClaimRef) -> tuple[str, Collection[Share]] | None:
        return None if ref.name == "a" else ("", ())

    await node.claims.reclaim(Found(), listing_from({}))
    await node.claims.reclaim(fail, listing_from({}))
    assert held(node) == {"a"}


async def test_a_claim_that_is_allocated_anew_during_a_look_stays(node: Node) -> None:
    ref = node.claim("a", node.share(0, 30, 512))
    await node.prepare(ref)
    node.world.pods.views.clear()
    await node.claims.reclaim(Found(), listing_from({}))

    async def find(_ref: ClaimRef) -> tuple[str, Collection[Share]]:
        node.allocate_anew(ref, node.share(1, 30, 512, number=2))
        await node.prepare(ref)
        return "claim-a", ()

    await node.claims.reclaim(find, listing_from({}))
    assert node.world.ledger.used(node.gpu(1)).cores == 30


async def test_a_claim_that_is_being_prepared_during_a_look_stays(node: Node) -> None:
    ref, go_on = node.claim("a", node.share(0, 30, 512)), asyncio.Event()
    await node.prepare(ref)
    node.world.pods.views.clear()
    await node.claims.reclaim(Found(), listing_from({}))
    node.reader.before_answer = go_on.wait
    preparing = asyncio.ensure_future(node.prepare(ref))
    await asyncio.sleep(0)
    await node.claims.reclaim(Found(), listing_from({}))
    go_on.set()
    await preparing
    assert held(node) == {"a"}


async def test_the_exemption_of_a_claim_outlasts_the_pod_for_which_it_was_prepared(tmp_path: Path) -> None:
    limits = unlimited(tmp_path, overrides=("team/default=none",))
    node = Node(world=await World.made(snapshot(2, 80), limits=limits))
    ref = node.claim("a", node.share(0, 30, 512))
    await node.prepare(ref)
    (allocation,) = node.world.ledger.of_claim(ref.uid)
    assert allocation.exemption == "team/default"
    node.use_next(ref)
    del node.world.pods.views["team", "a"]
    (spec,) = names_in(tmp_path)
    (tmp_path / spec).unlink()
    await node.claims.restore()
    assert names_in(tmp_path) == [spec]


class Limits(Backend):
    """A mechanism that does nothing and records its starts. `on_start` runs in each."""

    name: BackendName = "vcuda"
    limits: Mapping[Resource, Strength] = {}

    def __init__(self) -> None:
        self.started: list[str] = []
        self.on_start: Callable[[], Awaitable[object]] | None = None

    async def put_limits(self, tenant: GpuShare) -> None:
        self.started.append(tenant.allocation)
        if self.on_start is not None:
            await self.on_start()

    def remains(self) -> Collection[str]:
        return self.started


@dataclass(kw_only=True)
class LimitedNode(Node):
    """`running`: the allocations with a running container. The CDI specs are in `folder`."""

    backend: Limits
    running: set[str]
    folder: Path

    def lose_specs(self) -> None:
        """There must be one."""
        (spec,) = self.folder.iterdir()
        spec.unlink()


@pytest.fixture
async def limited(tmp_path: Path) -> LimitedNode:
    backend, running = Limits(), set[str]()
    settings = EnforcementSettings(backend="vcuda", cdi_dir=tmp_path, injection="cdi", orphan_grace_seconds=1)
    limits = Enforcer([backend], settings, in_use=lambda names: set(names) & running, clock=lambda: 0.0)
    await limits.choose()
    world = await World.made(snapshot(2, 80), limits=limits)
    return LimitedNode(world=world, backend=backend, running=running, folder=tmp_path)


@pytest.mark.parametrize(("request_of_container", "refused"), [(None, True), ("c0", False)])
async def test_a_container_with_two_sets_of_limits_is_refused(
    request_of_container: str | None, refused: bool, limited: LimitedNode
) -> None:
    shares = limited.share(0, 10, 512, request="c0"), limited.share(1, 20, 256, request="c1", number=2)
    ref = limited.claim("a", *shares, request=request_of_container)
    why = r"container main of pod a uses 2 shares of GPUs with limits \(a/c0, a/c1\)"
    with pytest.raises(Refusal, match=why) if refused else nullcontext():
        await limited.prepare(ref)
    mechanisms = [a.mechanisms for a in limited.world.ledger.allocations.values()]
    assert mechanisms == ([] if refused else [("vcuda",)] * 2)


async def test_a_pod_with_two_sets_of_limits_affects_others_only_while_it_may_start_with_their_claim(
    limited: LimitedNode,
) -> None:
    views, claims = limited.world.pods.views, limited.reader.claims
    refs = {name: limited.claim(name, limited.share(0, 10, 512)) for name in ("one", "two", "shared")}
    views["team", "two"] = replace(views["team", "two"], claims=(*views["team", "two"].claims, *views["team", "shared"].claims))
    claims["claim-shared"] = replace(claims["claim-shared"], pods=claims["claim-shared"].pods + claims["claim-two"].pods)
    await limited.prepare(refs["two"])
    with pytest.raises(Refusal, match=r"container main of pod two uses 2 shares of GPUs with limits \(two/gpu, shared/gpu\)"):
        await limited.prepare(refs["shared"])
    views["team", "two"] = replace(views["team", "two"], phase="Failed")
    await limited.prepare(refs["shared"])
    views["team", "two"] = replace(views["team", "two"], phase="Pending")
    claims["claim-one"] = replace(claims["claim-one"], pods=claims["claim-one"].pods + claims["claim-two"].pods)
    await limited.prepare(refs["one"])


async def test_two_sets_of_limits_of_claims_that_other_pods_have_are_reported_once_when_a_pod_appears(
    limited: LimitedNode,
) -> None:
    """The kubelet makes no call for claims that it has prepared."""
    for gpu, name in enumerate(("one", "two")):
        await limited.prepare(limited.claim(name, limited.share(gpu, 10, 512)))
    uses = [use for name in ("one", "two") for use in limited.world.pods.views["team", name].claims]
    state, late = limited.world.agent_state, PodView(namespace="team", name="late", uid="pod-late", claims=tuple(uses))
    before = len(state.history.entries())
    for each in (
        replace(late, claims=late.claims[:1]),
        replace(late, phase="Failed"),
        replace(late, namespace="other"),
        replace(late, claims=(uses[0], replace(uses[1], container="second"))),
    ):
        report_two_limits(state, each)
    assert len(state.history.entries()) == before
    with capture_logs() as logs:
        report_two_limits(state, late)
        report_two_limits(state, late)
    assert [(each["event"], each["pod"]) for each in logs] == [("two_limits", "team/late")] * 2
    (entry,) = state.history.entries()[before:]
    assert (entry.what, entry.code, entry.pod, entry.pod_uid) == ("event", "GpuTwoLimits", ("team", "late"), "pod-late")
    assert "container main of pod late uses 2 shares of GPUs with limits (one/gpu, two/gpu)" in entry.why


async def test_limits_are_put_in_place_again_unless_a_container_runs_with_them(limited: LimitedNode) -> None:
    """A running container would keep the former files mounted; but a Prepare that was killed may have left half of them."""
    ref, started = limited.claim("a", limited.share(0, 10, 512)), limited.backend.started
    await limited.prepare(ref)
    (allocation,) = limited.world.ledger.allocations
    await limited.prepare(ref)
    assert started == [allocation] * 2
    limited.running.add(allocation)
    for again in (limited.prepare(ref), limited.claims.restore()):
        limited.lose_specs()
        await again
    limited.lose_specs()
    await limited.world.restart(lost=True)
    limited.start()
    await limited.prepare(ref)
    assert started == [allocation] * 2
    limited.running.clear()
    await limited.claims.restore()
    assert started == [allocation] * 3


@pytest.mark.parametrize("restored", [False, True])
async def test_nothing_is_put_in_place_for_a_claim_that_is_unprepared_meanwhile(restored: bool, limited: LimitedNode) -> None:
    shares = limited.share(0, 10, 512, request="c0"), limited.share(0, 20, 512, request="c1", number=2)
    ref = limited.claim("a", *shares, request="c0")
    if restored:
        await limited.prepare(ref)
    before = len(limited.backend.started)
    limited.backend.on_start = lambda: limited.claims.unprepare(ref)
    if restored:
        await limited.claims.restore()
    else:
        with pytest.raises(Refusal, match="was unprepared while"):
            await limited.prepare(ref)
    assert len(limited.backend.started) == before + 1


async def test_why_a_claim_is_not_restored_is_logged_once_until_it_changes(limited: LimitedNode) -> None:
    await limited.prepare(limited.claim("a", limited.share(0, 10, 512)))
    with capture_logs() as logs:
        for reason in ("full", "full", "gone", "", "gone"):
            limited.backend.on_start = AsyncMock(side_effect=Refusal("internal", reason) if reason else None)
            await limited.claims.restore()
    assert [each["reason"] for each in logs if each["event"] == "claim_not_restored"] == ["full", "gone", "gone"]


async def test_all_pods_of_a_claim_are_waited_for_at_the_same_time(node: Node) -> None:
    ref, all_wait = node.claim("a", node.share(0, 10, 256)), asyncio.Barrier(2)
    pods = tuple((("team", name), f"pod-{name}") for name in ("late", "later"))
    node.reader.claims[ref.uid] = replace(node.reader.claims[ref.uid], pods=pods)

    async def wait_for(pod: PodKey, timeout_seconds: float, *, uid: str | None = None) -> PodView | None:  # noqa: ARG001
        await all_wait.wait()
        return None

    node.world.pods.wait_for = wait_for  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await node.prepare(ref)
