"""What decides in mode dra which GPUs are offered, whether the node may change its mode, and what follows after a lost ledger."""

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.inventory import EMPTY, HardwareHealth, Inventory
from gpumgr.agent.pods import holders_of_other_mode
from gpumgr.common.errors import KubeletError, Refusal
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import DRA_DRIVER, Amounts
from gpumgr.kube.client import AnswerError, ApiServer
from gpumgr.kubelet import dra_side
from gpumgr.kubelet.claim_reader import find_shares
from gpumgr.kubelet.dra_registration import DraDriver
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.kubelet.dra_side import CORDONED_TAINT, UNHEALTHY_TAINT, ClaimParts, DraSide, gpu_taints
from gpumgr.kubelet.records import CheckpointEntry, of_existing_pods
from gpumgr.kubelet.slices import LOST_TAINT, Taint, slice_name
from gpumgr.ledger.claims import device_name
from gpumgr.ledger.ledger import Allocation, ClaimRef, ClaimRequest, Ledger
from gpumgr.placement.pods import ClaimUse, Listing, PodKey, PodView
from gpumgr.settings import Settings
from gpumgr.settings.schema import KubeletSettings, NodeSettings, PlacementSettings
from tests.background import background, until
from tests.component.kubelet.dra.harness import StubKubelet
from tests.component.stage.stage import MemoryPods, snapshot, unlimited
from tests.listings import listing_from
from tests.unit.agent.world import World

CLAIM = ClaimRequest(uid="u", namespace="team", name="c", request="gpu")


def ledger(*holders: tuple[str, ClaimRequest | None]) -> Ledger:
    result = Ledger()
    for name, claim in holders:
        pod: PodKey = ("team", name)
        result = result.occupy(Allocation(id=name, pod=pod, container="main", claim=claim))
    return result


def test_a_node_waits_for_the_pods_of_the_other_mode() -> None:
    mixed = ledger(("by-plugin", None), ("by-claim", CLAIM))
    for mode, holder, other in (("dra", "by-plugin", "by-claim"), ("plugin", "by-claim", "by-plugin")):
        reason = holders_of_other_mode(mixed, mode) or ""
        assert f"team/{holder} (main)" in reason
        assert other not in reason
        assert f"node.mode is {mode}" in reason
    assert holders_of_other_mode(ledger(("by-claim", CLAIM)), "dra") is None
    assert holders_of_other_mode(Ledger(), "plugin") is None
    many = holders_of_other_mode(ledger(*((f"p{n}", None) for n in range(9))), "dra") or ""
    assert ("and 4 more" in many, "p5" in many) == (True, False)


def test_what_the_kubelet_remembers_of_deleted_pods_is_not_taken_over() -> None:
    static = "0123456789abcdef" * 2
    pods = MemoryPods({("team", "runs"): PodView(namespace="team", name="runs", uid="runs")})
    pods.views["team", "mirror"] = PodView(namespace="team", name="mirror", uid="mirror", runtime_uid="of-the-kubelet")
    entries = [
        CheckpointEntry(pod_uid=uid, container="main", resource="tencent.com/vcuda-core", listed=["a-c00"])
        for uid in ("runs", "deleted", "of-the-kubelet", static)
    ]
    assert [each.pod_uid for each in of_existing_pods(entries, pods)] == ["runs", "of-the-kubelet", static]
    pods.down = True
    assert of_existing_pods(entries, pods) == entries


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
def test_a_failed_gpu_has_the_taint_of_the_settings_and_a_cordoned_one_its_own(
    effect: Literal["NoSchedule", "NoExecute"],
) -> None:
    node = snapshot(3)
    uuids = [gpu.uuid for gpu in node.gpus]
    health = HardwareHealth(failed={uuids[0]: "XID 79"}, cordoned={uuids[0]: "maintenance", uuids[1]: "maintenance"})
    inventory = Inventory(snapshot=node, health=health)
    registry = inventory.register(Ledger().gpu_registry)
    names = [gpu.name for gpu in registry.gpus]
    found = gpu_taints(registry, inventory, effect)
    assert {gpu: [(taint.key, taint.effect) for taint in taints] for gpu, taints in found.items()} == {
        names[0]: [(UNHEALTHY_TAINT, effect)],
        names[1]: [(CORDONED_TAINT, "NoSchedule")],
    }
    assert Taint(key=CORDONED_TAINT) in found[names[1]]


@pytest.mark.parametrize(
    ("status", "here"),
    [
        (None, False),
        ({}, False),
        ({"allocation": None}, False),
        ({"allocation": {"devices": {"results": [{"driver": "gpu.gpumgr.io", "pool": "n1"}]}}}, True),
        ({"allocation": {"devices": {"results": [{"driver": "gpu.gpumgr.io", "pool": "n2"}]}}}, False),
        ({"allocation": {"devices": {"results": [{"driver": "nic.example.com", "pool": "n1"}]}}}, False),
    ],
)
async def test_claims_of_this_node(status: object, here: bool) -> None:
    server = ClaimServer()
    server.claims["a"] = {"metadata": {"uid": "u"}, "status": status}
    uid, shares = await find_shares(cast("ApiServer", server), "n1", "team", "a")
    assert (uid, bool(shares)) == ("u", here)


class ClaimServer:
    """The claims of namespace team. `failures` are raised first, one for each request of this claim."""

    def __init__(self) -> None:
        self.claims: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, list[Exception]] = {}
        #: Method and path of each write, and the answers to the next ones.
        self.sent: list[str] = []
        self.refusals: list[Exception] = []

    async def find(self, path: str, *, query: Mapping[str, str] = {}) -> dict[str, Any] | None:  # noqa: ARG002
        name = path.rpartition("/")[2]
        if self.failures.get(name):
            raise self.failures[name].pop(0)
        return self.claims.get(name)

    def request(self, *_: object) -> NoReturn:
        """For watches."""
        raise OSError("no route to host")

    async def send(self, method: str, path: str, body: object, *, but: Sequence[int] = ()) -> bool:  # noqa: ARG002
        self.sent.append(f"{method} {path}")
        if self.refusals:
            raise self.refusals.pop(0)
        return True


class Node:
    """Two GPUs, a server with claims, and a kubelet. CDI specs are in `cdi`."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world, self.server, self.kubelet = folder, world, ClaimServer(), StubKubelet(folder)
        self.cdi = folder / "cdi"

    @property
    def held(self) -> set[str]:
        """The claims in the ledger."""
        return {a.claim.name for a in self.world.ledger.allocations.values() if a.claim is not None}

    def add(self, name: str, gpu: int = 0, *, node: str = "node-1", results: Sequence[Any] | None = None) -> None:
        """A claim and its pod, which runs."""
        device = device_name(self.world.ledger.gpu_registry.gpus[gpu].name)
        amounts = {"shareID": "s", "consumedCapacity": {"cores": "30", "memory": "256Mi"}}
        given = [{"request": "gpu", "driver": DRA_DRIVER, "pool": node, "device": device, **amounts}]
        status = {
            "allocation": {"devices": {"results": given if results is None else results}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": f"pod-{name}"}],
        }
        self.server.claims[name] = {"metadata": {"uid": f"claim-{name}"}, "status": status}
        use = ClaimUse(container="main", claim=name)
        view = PodView(namespace="team", name=name, uid=f"pod-{name}", phase="Running", claims=(use,))
        self.world.pods.views["team", name] = view

    def side(self, *, lost: bool = True, mode: Literal["plugin", "dra"] = "dra") -> DraSide:
        kubelet = KubeletSettings(plugins_dir=self.kubelet.plugins, plugins_registry_dir=self.kubelet.registry)
        settings = Settings(node=NodeSettings(name="node-1", mode=mode), kubelet=kubelet)
        return DraSide(
            settings,
            DraDriver(settings),
            cast("ApiServer", self.server),
            ClaimParts(
                agent_state=self.world.agent_state,
                starts=self.world.agent.container_starts,
                pods=self.world.pods,
                enforcement=self.world.limits,
                pod_resources=cast("Any", None),
            ),
            lost=lost,
        )

    async def prepared(self) -> Path:
        """A claim is prepared by an earlier process; the path of its CDI spec."""
        self.add("a")
        await prepare(self.side(), "a")
        self.server.claims.clear()
        (spec,) = self.cdi.iterdir()
        return spec


async def prepare(side: DraSide, name: str) -> None:
    await side.claims.prepare(ClaimRef(namespace="team", name=name, uid=f"claim-{name}"), deadline=math.inf)


@pytest.fixture
async def node(folder: Path) -> Node:
    return Node(folder, await World.made(snapshot(2, 80), limits=unlimited(folder / "cdi")))


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADOPT_SECONDS", "RECLAIM_SECONDS", "CDI_CHECK_SECONDS"):
        monkeypatch.setattr(dra_side, name, 0.01)
    monkeypatch.setattr(dra_side, "WITHDRAWAL_PAUSES", (0.01, 0.02))


@asynccontextmanager
async def after_a_lost_ledger(node: Node) -> AsyncIterator[DraSide]:
    side = node.side()
    async with background(side._adopt()) as task:
        yield side
        await task


async def test_after_a_lost_ledger_each_running_claim_is_adopted_before_anything_is_decided(node: Node) -> None:
    node.add("a")
    node.add("b")
    node.add("elsewhere", 1, node="node-2")
    node.add("odd", 1, results=[{}])
    node.server.failures = {"a": [AnswerError("HTTP 503: no leader", status=503), TimeoutError()], "b": [OSError("reset")]}
    uuid = node.world.node.gpus[0].uuid
    await node.world.agent_state.set_health(HardwareHealth(failed={uuid: "XID 79"}, cordoned={}))
    with capture_logs() as logs:
        async with after_a_lost_ledger(node):
            pass
    assert node.held == {"a", "b"}
    assert [each["claim"] for each in logs if each["event"] == "claim_not_adopted"] == ["team/odd"]


@pytest.mark.parametrize(
    ("failure", "shown"),
    [
        (AnswerError("HTTP 403: forbidden", status=403), "claim team/a: HTTP 403"),
        # It is a ValueError, too, as faults of an object are, which are skipped.
        (ssl.SSLCertVerificationError("expired"), "claim team/a: SSLCertVerificationError: "),
    ],
)
async def test_while_claims_can_not_be_adopted_the_reason_is_shown(failure: Exception, shown: str, node: Node) -> None:
    node.world.pods.synced = False
    async with after_a_lost_ledger(node) as side:
        await until(lambda: "has not listed the pods" in (side.states[DRA_DRIVER].error or ""))
        node.add("a")
        node.server.failures["a"] = [failure] * 5
        node.world.pods.synced = True
        await until(lambda: shown in (side.states[DRA_DRIVER].error or ""))
    assert node.held == {"a"}


async def test_running_claims_are_adopted_once_a_driver_that_is_up_late_lists_the_gpus(node: Node, tmp_path: Path) -> None:
    late = Node(tmp_path, World(snapshot(2, 80), limits=unlimited(tmp_path / "cdi")))
    node.add("a")
    late.world.pods.views.update(node.world.pods.views)
    late.server = node.server
    async with after_a_lost_ledger(late) as side:
        await until(lambda: "the driver has not listed the GPUs" in (side.states[DRA_DRIVER].error or ""))
        await late.world.agent_state.set_snapshot(late.world.node)
    assert late.held == {"a"}


@asynccontextmanager
async def ending_side(node: Node, *, lost: bool) -> AsyncIterator[DraSide]:
    """In mode plugin."""
    side = node.side(lost=lost, mode="plugin")
    async with ended(node, side), background(side.run_out()):
        yield side


@asynccontextmanager
async def running_side(node: Node, *, lost: bool = False) -> AsyncIterator[DraSide]:
    """A former part of the process has registered its driver."""
    side = node.side(lost=lost)
    async with ended(node, side):
        async with background(side.link.run()):
            await node.kubelet.register()
        async with background(side.run()):
            yield side


@asynccontextmanager
async def ended(node: Node, side: DraSide) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await side.link.stop(0)
        await node.kubelet.end()


async def test_mode_plugin_adopts_the_claims_of_a_lost_ledger_before_anything_is_registered(node: Node) -> None:
    node.add("a")
    node.server.failures["a"] = [AnswerError("HTTP 503: no leader", status=503)] * 3
    node.world.pods.synced = False
    (node.kubelet.plugins / DRA_DRIVER).mkdir()
    async with ending_side(node, lost=True) as side:
        assert side.held_back
        await until(lambda: "has not listed the pods" in (side.held_back or ""))
        node.world.pods.synced = True
        await until(lambda: "HTTP 503" in (side.held_back or ""))
        await until(lambda: side.held_back is None)
        assert node.held == {"a"}
        await node.kubelet.register()
        with pytest.raises(Refusal, match="serves no new claims"):
            await prepare(side, "b")


@pytest.mark.parametrize("fault", ["no pods", "no right"])
async def test_a_node_that_was_never_in_mode_dra_does_not_wait_for_claims(fault: str, node: Node) -> None:
    node.add("nic", results=[])
    node.server.failures["nic"] = [AnswerError("HTTP 403: forbidden", status=403)] * (fault == "no right")
    node.world.pods.synced = fault != "no pods"
    async with ending_side(node, lost=True) as side:
        await until(lambda: side.held_back is None)
    assert not node.world.ledger.allocations


async def test_mode_plugin_restores_claims_at_once_and_deletes_the_slice_with_retries(node: Node) -> None:
    spec = await node.prepared()
    spec.unlink()
    node.server.refusals = [OSError("no route to host")] * 10 + [AnswerError("HTTP 403: forbidden", status=403)] * 2
    with capture_logs() as logs:
        async with ending_side(node, lost=False):
            await node.kubelet.register()
            assert spec.exists()
            await until(lambda: len(node.server.sent) == 13)
            await asyncio.sleep(0.1)
    assert set(node.server.sent) == {f"DELETE /apis/resource.k8s.io/v1/resourceslices/{slice_name('node-1')}"}
    assert len(node.server.sent) == 13
    assert [each["log_level"] for each in logs if each["event"] == "slice_not_withdrawn"] == ["warning", "info"]


@pytest.mark.parametrize("was_in_mode_dra", [False, True])
async def test_mode_plugin_deletes_no_slice_where_the_node_never_had_one(node: Node, was_in_mode_dra: bool) -> None:
    if was_in_mode_dra:
        (node.kubelet.plugins / DRA_DRIVER).mkdir()
    async with ending_side(node, lost=False) as side:
        await until(lambda: side.held_back is None and len(node.server.sent) == was_in_mode_dra)
        await asyncio.sleep(0.1)
    assert [text.partition(" ")[0] for text in node.server.sent] == ["DELETE"] * was_in_mode_dra


async def test_one_claim_that_can_not_be_looked_up_keeps_no_other_one(node: Node) -> None:
    side = node.side()
    for name in ("a", "b", "c"):
        node.add(name)
        await prepare(side, name)
    node.world.pods.views.clear()
    listings: list[Listing | Exception] = [KubeletError("no socket"), KeyError("pod")]

    class PodResources:
        async def list(self) -> Listing:
            found = listings.pop(0) if listings else listing_from({})
            if isinstance(found, Exception):
                raise found
            return found

    side._pod_resources = PodResources()
    node.server.claims = {"b": {"metadata": {}}}
    node.server.failures["a"] = [AnswerError("HTTP 403: forbidden", status=403)] * 1000
    with capture_logs() as logs:
        task = asyncio.create_task(side._reclaim())
        await until(lambda: node.held == {"a", "b"})
        await asyncio.sleep(0.1)
        task.cancel()
    told = [each for each in logs if each["event"] == "leaked_claims_not_examined"]
    assert [[*each["errors"]] for each in told] == [["the kubelet's list"], ["the kubelet's list"], ["team/a", "team/b"]]
    assert {each["consequence"] for each in told} == {
        f"these claims keep their GPUs; the agent examines them again after {dra_side.RECLAIM_SECONDS:g} s"
    }


async def test_a_changed_share_mode_changes_the_slice_and_the_next_decision(node: Node) -> None:
    side = node.side()
    side.update()
    assert [each.shared for each in side.publisher.devices or ()] == [True, True]
    side.apply(Settings(node=NodeSettings(name="node-1", mode="dra"), placement=PlacementSettings(share_mode=False)))
    assert [each.shared for each in side.publisher.devices or ()] == [False, False]
    node.add("a")
    with pytest.raises(Refusal, match=r"placement\.share_mode is off"):
        await prepare(side, "a")


async def test_only_a_registration_makes_all_waiting_pods_due(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that the kubelet connects again."""
    side = node.side()
    due: list[int] = []
    monkeypatch.setattr(side._waiting_pods, "retry_now", lambda: due.append(side.publisher.registration.registrations))
    for registered, registrations in ((True, 1), (False, 1), (True, 1), (False, 1), (True, 2)):
        side._link_changed(LinkState(registered=registered, registrations=registrations))
        assert side.publisher.registration.registered == registered
    assert due == [0, 1]


async def test_gpus_that_the_driver_does_not_list_are_not_offered(node: Node) -> None:
    """After a start without the driver the former slice would offer them."""
    await node.world.agent_state.set_snapshot(EMPTY)
    side = node.side()

    def offer() -> list[list[str]] | None:
        """The taints of each device."""
        side.update()
        devices = side.publisher.devices
        return None if devices is None else [[taint.key for taint in each.taints] for each in devices]

    assert offer() == []
    await node.world.agent_state.set_snapshot(node.world.node)
    assert offer() == [[], []]
    await node.world.agent_state.set_snapshot(EMPTY)
    assert offer() == [[LOST_TAINT], [LOST_TAINT]]


@pytest.mark.parametrize("reason", ["holder", "lost"])
async def test_a_driver_that_may_not_be_registered_yet_is_registered_anew_later(reason: str, node: Node) -> None:
    world = node.world
    if reason == "holder":
        gpu = world.ledger.gpu_registry.gpus[0].name
        holder = Allocation(id="a", pod=("team", "by-plugin"), container="main", gpus={gpu: Amounts(10, 256)})
        world.agent_state.ledger = world.ledger.occupy(holder)
    else:
        world.pods.synced = False
    async with running_side(node, lost=reason == "lost") as side:
        await until(lambda: f"{DRA_DRIVER}-reg.sock" not in node.kubelet.sockets())
        assert not side.states[DRA_DRIVER].registered
        assert side.states[DRA_DRIVER].error
        world.agent_state.ledger, world.pods.synced = world.ledger.free(["a"]), True
        await node.kubelet.register()
        await until(lambda: side.states[DRA_DRIVER].registered)
        assert side.states[DRA_DRIVER].error is None


async def test_cdi_specs_are_there_before_anything_is_decided(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, found = await node.prepared(), list[bool]()
    spec.unlink()
    monkeypatch.setattr(DraPlugin, "decide_with", lambda *_: found.append(spec.exists()))
    async with running_side(node):
        await until(lambda: bool(found))
    assert found == [True]


async def test_a_cdi_spec_that_others_change_is_written_again_and_one_that_is_intact_is_left_alone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = await node.prepared()
    content, starts = spec.read_text(), list[str]()
    start = node.world.agent.container_starts.start

    async def counted(allocation: Allocation) -> None:
        await start(allocation)
        starts.append(allocation.id)

    monkeypatch.setattr(node.world.agent.container_starts, "start", counted)
    async with running_side(node):
        await until(lambda: len(starts) == 1)
        for garbage in ("", "garbage" * 9, content.swapcase()):
            await asyncio.sleep(0.1)
            assert len(starts) == 1
            starts.clear()
            spec.write_text(garbage)
            await until(lambda: len(starts) == 1)
            assert spec.read_text() == content
        spec.unlink()
        await until(lambda: len(starts) == 2)
        assert spec.exists()


async def test_a_cdi_spec_has_the_gpus_device_node_if_the_driver_is_late_or_numbers_its_gpus_anew(node: Node) -> None:
    spec, state, known = await node.prepared(), node.world.agent_state, node.world.node
    content = spec.read_text()
    assert "/dev/nvidia0" in content
    await state.set_snapshot(EMPTY)
    node.add("a")
    async with running_side(node) as side:
        with pytest.raises(Refusal, match="the driver does not list the container's GPU"):
            await prepare(side, "a")
        assert spec.read_text() == content
        spec.unlink()
        await asyncio.sleep(0.1)
        assert not spec.exists()
        await state.set_snapshot(known)
        await until(lambda: spec.exists() and spec.read_text() == content)
        await state.set_snapshot(replace(known, gpus=tuple(replace(gpu, minor=7 + gpu.index) for gpu in known.gpus)))
        await until(lambda: "/dev/nvidia7" in spec.read_text())


async def test_a_stop_does_not_spend_its_time_on_an_api_server_that_does_not_answer(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = node.side()
    given = list[float]()

    async def withdraw(*, timeout_seconds: float) -> bool:
        given.append(timeout_seconds)
        return False

    monkeypatch.setattr(side.publisher, "withdraw", withdraw)
    side._publishing = asyncio.create_task(asyncio.sleep(0))
    await side.stop(3.0)
    assert given == [1.0]
