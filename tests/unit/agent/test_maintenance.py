"""Cordon, drain, uncordon, reset, forget: what is refused, what is saved, and what is reported."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.agent.api import CORDONS_NOTE, Cordon, decode_cordons, to_json_data
from gpumgr.agent.gone_gpus import ADDRESSES_NOTE, GoneGpus
from gpumgr.agent.inventory import EMPTY, HardwareHealth
from gpumgr.agent.maintenance import Action, Maintenance, MaintenanceRequest, find_gpu
from gpumgr.agent.ports import Eviction
from gpumgr.common.errors import CheckpointError, InputError, NvmlError, Refusal
from gpumgr.common.units import BLOCK_BYTES
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import ClaimRequest
from gpumgr.ledger.node_use import AllocationOnGpu, NodeUse, UnattributedProcess
from gpumgr.placement.devices import GpuProcess, Topology
from gpumgr.placement.pods import ClaimUse, PodKey, PodView
from gpumgr.sim.kubelet_pods import SimPod
from tests.component.stage.stage import app, snapshot
from tests.unit.agent.world import Refused, World

FIRST = "GPU-00000000-1111-2222-3333-444444444444"
OTHER = "GPU-aaaaaaaa-1111-2222-3333-444444444444"


class Driver:
    """In place of the NVML monitor: publishes the cordoned GPUs on request, and resets."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.held: dict[str, str] = {}
        self.processes_of: dict[str, Sequence[GpuProcess] | None] = {}
        self.error: NvmlError | None = None
        self.resets: list[str] = []

    def cordon(self, uuid: str, message: str) -> None:
        self.held[uuid] = message

    def uncordon(self, uuid: str) -> None:
        self.held.pop(uuid, None)

    async def publish_health(self) -> None:
        await self._world.agent_state.set_health(HardwareHealth(failed={}, cordoned=self.held))

    async def processes(self, uuid: str) -> Sequence[GpuProcess] | None:
        return self.processes_of.get(uuid, ())

    async def reset(self, uuid: str) -> str:
        if self.error is not None:
            raise self.error
        self.resets.append(uuid)
        return "GPU 00000000:00:00.0 was successfully reset."


class MemoryEvictor:
    """Records the evictions of each requester."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Eviction]] = {}

    def evict(self, requester: str, evictions: Iterable[Eviction], *, immediately: bool = False) -> None:  # noqa: ARG002
        self.wanted[requester] = list(evictions)


class Bench:
    """A node of `gpus` GPUs with 16 blocks each, and the maintenance of it."""

    def __init__(self, world: World, *, api_server: bool = True) -> None:
        self.world, self.driver = world, Driver(world)
        self.publisher = MemoryEvictor()
        self.still_used_by: str | None = None
        self.use: NodeUse | None = NodeUse()
        self.over: set[AllocationOnGpu] = set()
        self._api_server = api_server
        self.now = 0.0
        self.gone_gpus = GoneGpus(world.agent_state, clock=lambda: self.now)
        self.gone_gpus.restore({})
        self.maintenance = self.again()

    @classmethod
    async def made(cls, gpus: int = 1, **options: bool) -> "Bench":
        return cls(await World.made(snapshot(gpus, 16)), **options)

    def again(self) -> Maintenance:
        """As after a restart, before `restore`."""
        world = self.world
        return Maintenance(
            agent_state=world.agent_state,
            health=self.driver,
            pods=world.pods,
            evictor=self.publisher if self._api_server else None,
            reset=self.driver.reset,
            gone_gpus=self.gone_gpus,
            still_used_by=lambda _uuid: self.still_used_by,
            usage=lambda: (self.use, self.over),
        )

    async def restart(self) -> None:
        """The agent is killed and starts again; the API server has answered."""
        self.publisher.wanted.clear()
        self.maintenance = self.again()
        self.maintenance.restore(self.world.checkpoint.notes)
        await self.maintenance.evict_again()

    @property
    def evicted(self) -> list[tuple[PodKey, str, str]]:
        return [(each.pod, each.uid, each.reason) for evictions in self.publisher.wanted.values() for each in evictions]

    async def maintain(self, action: Action, gpu: str = "0", **more: Any) -> dict[str, Any]:
        answer = await self.maintenance.execute(MaintenanceRequest(action=action, gpu=gpu, **more))
        return to_json_data(answer)

    async def refused(self, action: Action, **more: Any) -> str:
        with pytest.raises(Refusal) as refusal:
            await self.maintain(action, **more)
        return str(refusal.value)

    async def run(self, name: str, cores: int = 30, blocks: int = 4) -> SimPod:
        return await self.world.run(self.world.pod(name, app(cores, blocks)))

    def change(self, **fields: Any) -> None:
        """The only allocation gets these fields."""
        (allocation,) = self.world.ledger.allocations.values()
        self.world.agent_state.put(self.world.ledger.occupy(replace(allocation, **fields)))

    @property
    def told(self) -> list[tuple[str | None, str]]:
        """The history's entries of GPUs: code and reason."""
        return [(entry.code, entry.why) for entry in self.world.agent_state.history.entries() if entry.what == "gpu"]

    @property
    def unschedulable(self) -> list[str]:
        return list(self.world.agent_state.node().unschedulable.values())


@pytest.fixture
async def bench() -> Bench:
    return await Bench.made()


@pytest.mark.hami_bug("B23: a cordon is not seen")
async def test_a_cordoned_gpu_gets_no_new_container_and_keeps_the_running_ones(bench: Bench) -> None:
    await bench.run("first")
    answer = await bench.maintain("cordon", reason="broken\n fan ")
    assert answer["cordon"]["reason"] == "broken fan"
    assert [row["pod"] for row in answer["containers"]] == ["first"]
    assert (answer["changed"], answer["empty"]) == (True, False)
    assert bench.unschedulable == ["cordoned by the operator: broken fan"]
    with pytest.raises(Refused):
        await bench.run("second")
    assert [a.pod for a in bench.world.ledger.allocations.values()] == [("team", "first")]
    (entry,) = [entry for entry in bench.world.agent_state.history.entries() if entry.what == "gpu"]
    assert (entry.code, entry.why, entry.gpus) == ("cordoned", "broken fan", ("00000000",))
    await bench.world.agent_state.history.flush()
    saved = [each.code for each in bench.world.checkpoint.entries if each.what == "gpu"]
    assert saved == ["cordoned"], "saved with the cordon, once"


async def test_a_cordon_that_can_not_be_saved_is_not_made(bench: Bench) -> None:
    bench.world.checkpoint.full = True
    assert "nothing was changed: no space left" in await bench.refused("cordon")
    assert (bench.unschedulable, bench.told, bench.maintenance.cordons) == ([], [], {})


async def test_a_second_cordon_changes_the_reason_and_nothing_else(bench: Bench) -> None:
    first = await bench.maintain("cordon", reason="broken fan")
    again = await bench.maintain("cordon", reason="broken fan")
    wordless = await bench.maintain("cordon")
    other = await bench.maintain("cordon", reason="two broken fans")
    assert [answer["changed"] for answer in (first, again, wordless, other)] == [True, False, False, True]
    assert bench.unschedulable == ["cordoned by the operator: two broken fans"]
    assert bench.told == [("cordoned", "broken fan"), ("cordoned", "two broken fans")]


def test_no_note_is_no_cordon_and_a_damaged_one_is_an_error() -> None:
    assert decode_cordons({}) == {}
    old = '{"GPU-0": {"draining": true, "reason": "", "since": 1.0}}'
    assert decode_cordons({CORDONS_NOTE: old}) == {"GPU-0": Cordon(since=1.0, draining=True, evict=False)}
    for damaged in ('["GPU-0"]', '{"GPU-0": null}', "{", '{"GPU-0": {"reason": "", "since": null, "draining": false}}'):
        with pytest.raises(CheckpointError, match="cordon the GPUs again"):
            decode_cordons({CORDONS_NOTE: damaged})


async def test_a_missing_gpu_can_be_cordoned_and_uncordoned() -> None:
    bench = await Bench.made(2)
    both = bench.world.node
    await bench.world.agent_state.set_snapshot(snapshot(1, 16))
    answer = await bench.maintain("cordon", "GPU-00000001")
    assert answer["gpu"]["index"] is None
    await bench.world.agent_state.set_snapshot(both)
    assert bench.world.agent_state.node().unschedulable == {"00000001": "cordoned by the operator"}
    await bench.maintain("uncordon", "1")
    assert bench.unschedulable == []


async def test_a_maintenance_request_completes_after_its_caller_is_cancelled(bench: Bench) -> None:
    async with bench.world.agent_state.lock:
        waiting = asyncio.create_task(bench.maintain("cordon"))
        while not bench.maintenance.cordons:  # noqa: ASYNC110 (the order waits for the lock that we hold)
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    second = await bench.maintain("cordon", reason="broken fan")
    assert second["changed"]
    assert [code for code, _ in bench.told] == ["cordoned", "cordoned"]


async def test_a_long_reason_is_refused(bench: Bench) -> None:
    with pytest.raises(InputError, match="257 characters; 256 at most"):
        await bench.maintain("cordon", reason="x" * 257)


# -- drain -----------------------------------------------------------------------------------------------------------------


async def test_a_drain_lists_the_remaining_containers_until_none_is_left(bench: Bench) -> None:
    pod = await bench.run("first")
    answer = await bench.maintain("drain", reason="broken fan")
    (row,) = answer["containers"]
    assert (row["namespace"], row["pod"], row["uid"], row["container"]) == ("team", "first", pod.uid, "main")
    assert (row["cores"], row["memory_bytes"], row["granted_at"]) == (30, 4 * BLOCK_BYTES, bench.world.wall)
    assert (answer["empty"], answer["cordon"]["draining"], bench.evicted) == (False, True, [])
    bench.world.end(pod)
    await bench.world.sweep(2, times=2)
    assert (await bench.maintain("drain"))["empty"]
    assert bench.told == [("draining", "broken fan")]


async def test_a_repeated_drain_changes_nothing_and_does_not_cordon_again(bench: Bench) -> None:
    await bench.maintain("drain", reason="new fan")
    answer = await bench.maintain("drain", again=True)
    assert (answer["changed"], answer["cordon"]["reason"]) == (False, "new fan")
    await bench.maintain("uncordon")
    assert "was uncordoned by another request: it is no longer drained" in await bench.refused("drain", again=True)
    assert bench.maintenance.cordons == {}


async def test_processes_without_an_allocation_block_a_drain() -> None:
    bench = await Bench.made(2)
    unattributed = [
        UnattributedProcess(gpu="00000000", uuid=FIRST, pid=7, memory_bytes=5),
        UnattributedProcess(gpu="00000001", uuid="GPU-00000001-1111-2222-3333-444444444444", pid=8),
    ]
    bench.use = NodeUse(unattributed={(each.gpu, each.pid): each for each in unattributed})
    answer = await bench.maintain("drain")
    assert (answer["empty"], answer["unattributed"]) == (False, [to_json_data(unattributed[0])])


async def test_a_gpu_is_not_empty_while_the_container_of_a_process_is_not_known() -> None:
    """After a restart of the agent the container runtime may not answer yet."""
    bench = await Bench.made(2)
    bench.use = NodeUse(unknown=frozenset({("00000000", 7)}))
    assert not (await bench.maintain("drain", "0"))["empty"]
    assert (await bench.maintain("drain", "1"))["empty"]


async def test_each_pod_is_evicted_once_and_the_history_has_the_reason(bench: Bench) -> None:
    two = bench.world.pod("two", *(replace(app(10, 1), name=name) for name in ("a", "b")))
    await bench.world.run(two)
    other = await bench.run("other")
    answer = await bench.maintain("drain", evict=True, reason="broken fan")
    why = "GPU0 (00000000) is drained: broken fan"
    assert bench.evicted == [(("team", "two"), two.uid, why), (("team", "other"), other.uid, why)]
    assert (answer["evicting"], answer["not_evicted"]) == (["team/two", "team/other"], [])
    events = [entry for entry in bench.world.agent_state.history.entries() if entry.what == "event"]
    assert [(entry.pod, entry.code, entry.why) for entry in events] == [
        (("team", name), "GpuDrained", f"the pod is evicted: {why}") for name in ("two", "other")
    ]
    assert {entry.id for entry in events} <= bench.world.ledger.allocations.keys()


async def test_all_pods_of_a_claim_are_evicted(bench: Bench) -> None:
    await bench.run("first")
    bench.change(claim=ClaimRequest(uid="c", namespace="team", name="shared", request="gpu"))
    use = ClaimUse(container="main", claim="shared")
    for name in ("first", "second"):
        bench.world.pods.views["team", name] = PodView(
            namespace="team", name=name, uid=f"pod-{name}", phase="Running", claims=(use,)
        )
    assert sorted((await bench.maintain("drain", evict=True))["evicting"]) == ["team/first", "team/second"]


async def test_a_container_without_a_known_pod_is_not_evicted_and_reported(bench: Bench) -> None:
    pod = await bench.run("first")
    bench.change(pod=None)
    assert (await bench.maintain("drain", evict=True))["evicting"] == ["team/first"]
    bench.world.end(pod, None)
    answer = await bench.maintain("drain", evict=True)
    assert (answer["evicting"], answer["not_evicted"]) == ([], [f"pod uid {pod.uid} (main): its pod is not known"])
    bench.world.tell(pod, "Running")
    await bench.maintenance.evict_again()
    assert [name for name, _, _ in bench.evicted] == [("team", "first")]


@pytest.mark.parametrize(
    "known", [{}, {"uid": "of-the-file"}, {"pod": None}], ids=["the mirror's UID", "the kubelet's UID", "no name"]
)
async def test_a_static_pod_is_not_evicted(bench: Bench, known: dict[str, Any]) -> None:
    pod = await bench.run("first")
    view = bench.world.pods.views["team", "first"]
    bench.world.pods.views["team", "first"] = replace(view, runtime_uid="of-the-file")
    bench.change(**known)
    answer = await bench.maintain("drain", evict=True)
    assert (answer["evicting"], bench.evicted) == ([], [])
    (who,) = answer["not_evicted"]
    assert who.endswith("(main): it is a static pod, which ends only when its manifest is removed from the node")
    assert [row["uid"] for row in answer["containers"]] == [pod.uid]


async def test_an_uncordon_cancels_outstanding_evictions() -> None:
    bench = await Bench.made(2)
    await bench.run("both", 200, 0)
    await bench.maintain("drain", "0", evict=True)
    await bench.maintain("drain", "0", evict=True, reason="broken fan")
    await bench.maintain("drain", "1", evict=True)
    assert len(bench.evicted) == 2
    await bench.maintain("uncordon", "0")
    assert [reason for _, _, reason in bench.evicted] == ["GPU1 (00000001) is drained"]
    await bench.maintain("uncordon", "1")
    assert bench.evicted == []


async def test_cordons_and_evictions_continue_after_a_restart_until_an_uncordon() -> None:
    bench = await Bench.made(2)
    pod = await bench.run("first")
    await bench.maintain("drain", "0", reason="broken fan")
    kept = bench.maintenance.cordons
    bench.driver.held.clear()
    await bench.restart()
    assert bench.maintenance.cordons == kept
    assert [(cordon.reason, cordon.draining) for cordon in kept.values()] == [("broken fan", True)]
    assert list(bench.driver.held.values()) == ["cordoned by the operator: broken fan"]
    assert bench.evicted == []
    await bench.maintain("drain", "0", evict=True)
    await bench.maintain("drain", "0")
    await bench.maintain("cordon", "0")
    told = [entry.code for entry in bench.world.agent_state.history.entries()]
    await bench.restart()
    assert bench.evicted == [(("team", "first"), pod.uid, "GPU0 (00000000) is drained: broken fan")]
    assert [entry.code for entry in bench.world.agent_state.history.entries()] == told
    await bench.maintain("uncordon", "0")
    assert bench.evicted == []
    await bench.restart()
    assert bench.evicted == []


async def test_without_an_api_server_no_pod_is_evicted_and_nothing_is_changed() -> None:
    bench = await Bench.made(api_server=False)
    assert "no API server" in await bench.refused("drain", evict=True)
    assert (bench.unschedulable, bench.told) == ([], [])
    assert (await bench.maintain("drain"))["empty"]


# -- reset -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [False, True], ids=["empty", "lost, so that its processes are not known"])
async def test_a_gpu_that_is_cordoned_and_empty_is_reset(bench: Bench, lost: bool) -> None:
    assert "not cordoned" in await bench.refused("reset")
    await bench.maintain("cordon", reason="broken fan")
    bench.driver.processes_of = {FIRST: None} if lost else {}
    bench.driver.error = NvmlError("nvidia-smi says (exit code 255): In use by another client")
    assert await bench.refused("reset") == f"GPU0 (00000000) was not reset: {bench.driver.error}"
    bench.driver.error = None
    answer = await bench.maintain("reset")
    assert (answer["said"], answer["cordon"]["reason"]) == ("GPU 00000000:00:00.0 was successfully reset.", "broken fan")
    assert bench.driver.resets == [FIRST]
    assert bench.told == [("cordoned", "broken fan"), ("reset", "broken fan")]


async def test_a_gpu_in_use_is_not_reset(bench: Bench) -> None:
    for name in ("first", "second"):
        await bench.run(name, 10, 1)
    await bench.maintain("cordon")
    assert "team/first (main), team/second (main) are still on it" in await bench.refused("reset")
    bench.world.agent_state.put(bench.world.ledger.free(bench.world.ledger.allocations))
    bench.still_used_by = "its MPS daemon ends a minute after the last container"
    assert "can't be reset: its MPS daemon ends" in await bench.refused("reset")
    bench.still_used_by = None
    bench.driver.processes_of[FIRST] = [GpuProcess(pid=pid, memory_bytes=3 << 20) for pid in range(1, 11)]
    text = await bench.refused("reset")
    assert "pid 1 (3 MiB), " in text
    assert text.endswith("pid 8 (3 MiB) and 2 more are still on it, in no allocation; end them first")
    assert (bench.driver.resets, [code for code, _ in bench.told]) == ([], ["cordoned"])


# -- GPUs that are gone ------------------------------------------------------------------------------------------------------


BOTH = [FIRST, "GPU-00000001-1111-2222-3333-444444444444"]


async def show(bench: Bench, *gpus: int, replaced: bool = False) -> None:
    """The driver lists these GPUs of the node; `replaced`: OTHER is in the place of the last one."""
    node = bench.world.node
    listed = [node.gpus[index] for index in gpus]
    if replaced:
        listed[-1] = replace(listed[-1], uuid=OTHER)
    levels = tuple(tuple(node.topology.levels[a][b] for b in gpus) for a in gpus)
    links = tuple((0,) * len(gpus) for _ in gpus)
    await bench.world.agent_state.set_snapshot(replace(node, gpus=tuple(listed), topology=Topology(levels, links)))


def registered(bench: Bench) -> list[str]:
    return [gpu.uuid for gpu in bench.world.checkpoint.gpu_registry.gpus]


async def test_a_gpu_that_is_gone_and_holds_nothing_is_forgotten_on_request() -> None:
    bench = await Bench.made(2)
    pod = await bench.run("train")
    why = "the driver lists it; `gpumgr gpu cordon` takes it out of service"
    assert await bench.refused("forget") == f"GPU0 (00000000) can't be forgotten: {why}"
    await show(bench, 1)
    assert "train" in await bench.refused("forget", gpu=FIRST)
    assert registered(bench) == BOTH
    bench.world.end(pod)
    await bench.world.sweep()
    answer = await bench.maintain("forget", FIRST, reason="sent back")
    assert (answer["gpu"]["name"], answer["containers"]) == ("00000000", [])
    assert registered(bench) == [BOTH[1]]
    state = bench.world.agent_state
    assert [gpu.gpu.name for gpu in state.inventory.node_devices(state.ledger, ())] == ["00000001"]
    assert bench.told == [("forgotten", "sent back")]
    with pytest.raises(InputError, match="no GPU of this node is called"):
        await bench.maintain("forget", FIRST)
    await show(bench, 0, 1)
    assert registered(bench) == [BOTH[1], FIRST], "it is registered again when it comes back"


async def test_nothing_is_forgotten_before_the_driver_answers_or_if_it_can_not_be_saved() -> None:
    bench = await Bench.made(2)
    bench.world.agent_state.inventory = replace(bench.world.agent_state.inventory, snapshot=EMPTY)
    assert "the driver has not listed the node's GPUs yet" in await bench.refused("forget", gpu=FIRST)
    await show(bench, 1)
    bench.world.checkpoint.full = True
    assert "nothing was changed" in await bench.refused("forget", gpu=FIRST)
    assert FIRST in bench.world.agent_state.ledger.gpu_registry.by_uuid


async def test_a_gpu_is_forgotten_by_itself_some_seconds_after_another_one_is_at_its_address() -> None:
    bench = await Bench.made(2)
    await bench.gone_gpus.look()
    await show(bench, 0)
    bench.now = 100.0
    await bench.gone_gpus.look()
    assert registered(bench) == BOTH, "nothing is at its address"
    await show(bench, 0, 1, replaced=True)
    for bench.now in (200.0, 209.0):
        await bench.gone_gpus.look()
        assert len(registered(bench)) == 3
    bench.now = 210.0
    await bench.gone_gpus.look()
    assert registered(bench) == [FIRST, OTHER]
    assert bench.told == [("forgotten", f"{OTHER} is at its PCI address {bench.world.node.gpus[1].bus_id}")]


async def test_a_gpu_that_is_not_listed_at_a_restart_is_forgotten_when_another_one_comes_to_its_address() -> None:
    """The first samples come before the note is restored."""
    bench = await Bench.made(2)
    await bench.gone_gpus.look()
    await show(bench, 0)
    noted = dict(bench.world.checkpoint.notes)
    bench.gone_gpus = GoneGpus(bench.world.agent_state, clock=lambda: bench.now)
    await bench.gone_gpus.look()
    assert bench.world.checkpoint.notes == noted
    bench.gone_gpus.restore(noted)
    await bench.gone_gpus.look()
    await show(bench, 0, 1, replaced=True)
    for bench.now in (100.0, 110.0):
        await bench.gone_gpus.look()
    assert registered(bench) == [FIRST, OTHER]


@pytest.mark.parametrize("note", ["{", "[]", '{"GPU-1": 2}'])
async def test_a_note_of_addresses_that_can_not_be_read_is_begun_anew(note: str) -> None:
    bench = await Bench.made(2)
    bench.gone_gpus.restore({ADDRESSES_NOTE: note})
    await bench.gone_gpus.look()
    assert FIRST in bench.world.checkpoint.notes[ADDRESSES_NOTE]


async def test_a_gpu_that_was_replaced_before_a_restart_is_forgotten_unless_it_holds_something() -> None:
    bench = await Bench.made(2)
    pod = await bench.run("train", 100)
    (name,) = next(iter(bench.world.agent_state.ledger.allocations.values())).gpus
    index = int(name, 16)
    await bench.gone_gpus.look()
    await show(bench, 1 - index, index, replaced=True)
    await bench.gone_gpus.look()
    bench.gone_gpus = GoneGpus(bench.world.agent_state, clock=lambda: bench.now)
    bench.gone_gpus.restore(bench.world.checkpoint.notes)
    for bench.now in (100.0, 110.0):
        await bench.gone_gpus.look()
        assert len(registered(bench)) == 3, "it holds a container"
    bench.world.end(pod)
    await bench.world.sweep()
    await bench.gone_gpus.look()
    assert registered(bench) == [BOTH[1 - index], OTHER]


# -- names of GPUs in requests ----------------------------------------------------------------------------------------------

NAMED = GpuRegistry()
for _uuid in ("79f4a7f4-aaaa", "0fe1c342-bbbb", "0fe1d000-cccc", "12345678-dddd"):
    NAMED = NAMED.register(f"GPU-{_uuid}-0000-0000-000000000000", 1024)
INDICES = {"79f4a7f4": 4, "0fe1c342": 0, "0fe1d000": 1}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4", "79f4a7f4"),
        (" GPU4 ", "79f4a7f4"),
        ("gpu0", "0fe1c342"),
        ("79f4", "79f4a7f4"),
        ("GPU-79F4A7F4-AAAA-0000-0000-000000000000", "79f4a7f4"),
        ("0fe1c", "0fe1c342"),
        ("gpu-0fe1d000-c", "0fe1d000"),
        ("12345678", "12345678"),
        ("GPU-1234", "12345678"),
    ],
)
def test_a_gpu_goes_by_index_name_and_the_beginning_of_its_uuid(text: str, name: str) -> None:
    assert find_gpu(text, NAMED.gpus, INDICES).name == name


@pytest.mark.parametrize(
    ("text", "what"),
    [
        *((text, "no GPU of this node is called") for text in ("79", "1234", "04", "-1", "", "GPU", "GPU-", "gpu79f4", "GPU 4")),
        *((text, "no GPU of this node is called") for text in ("ffff", "79f4a7f4-aaab", "79f")),
        ("GPU-0fe1", "several GPUs of this node match"),
    ],
)
def test_a_name_that_is_unknown_short_or_not_one_gpus_is_refused_with_all_names(text: str, what: str) -> None:
    with pytest.raises(
        InputError,
        match=rf"^{what} '.*' \(give .* 4 digits or more of a UUID\); the GPUs of this node are: .*GPU4 = GPU-79f4a7f4-.*",
    ):
        find_gpu(text, NAMED.gpus, INDICES)


def test_without_gpus_there_are_none() -> None:
    with pytest.raises(InputError, match=r"no GPU of this node is called '0' .*; the GPUs of this node are: none"):
        find_gpu("0", (), {})
