"""Containers of nvidia.com/gpu on GPUs where MIG devices are created on demand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.agent.inventory import HardwareHealth
from gpumgr.agent.mig_devices import MIG_DEVICE_GONE
from gpumgr.agent.reconciler import GAP_SECONDS
from gpumgr.agent.state import AgentState, DeviceListPublisher
from gpumgr.common.units import CORE_RESOURCE, REPLICA_RESOURCE, Amounts
from gpumgr.placement.mig import amounts_of, place_named
from gpumgr.sim.kubelet import PodStatus, SimPod
from tests.mig_profiles import H100

from .mig import MemoryMig, with_mig
from .stage import WITHOUT_MIG, Stage, app, mig_mode, snapshot, stage
from .test_replicas import hami

FIRST, SECOND = "00000000", "00000001"


@asynccontextmanager
async def mig_stage(
    folder: Path, gpus: int = 1, *, enabled: bool = True, profiles: Sequence[str] = (), **options: object
) -> AsyncIterator[tuple[Stage, MemoryMig]]:
    mig = MemoryMig(snapshot=with_mig(snapshot(gpus), enabled=enabled))
    async with stage(folder, kinds=WITHOUT_MIG, mig=mig, mig_profiles=profiles, **options) as node:  # type: ignore[arg-type]
        yield node, mig


def uuid_of(node: Stage, gpu: str = FIRST) -> str:
    return node.ledger.gpu_registry.by_name[gpu].uuid


async def sample(node: Stage, mig: MemoryMig) -> None:
    """What the driver's next snapshot, and a second, bring about."""
    state = node.agent.agent_state
    await state.set_snapshot(mig.snapshot)
    await state.set_health(HardwareHealth(failed={}, cordoned=mig_mode(mig), in_mig_mode=mig_mode(mig)))
    await node.agent.mig_devices.tend()
    await state.set_snapshot(mig.snapshot)


async def end(node: Stage, pod: SimPod) -> None:
    node.delete(pod)
    while node.ledger.of(None, pod.uid):
        node.clock.now += GAP_SECONDS
        await node.agent.reconciler.sweep()


def place(node: Stage, pod: SimPod, gpu: str, profile: str, start: int, containers: Sequence[str] = ("main",)) -> None:
    """The scheduler's placement of these containers of the pod."""
    found = place_named(H100, profile, start)
    assert found is not None
    node.placed(pod, (uuid_of(node, gpu), amounts_of(found, H100)), containers=containers)


async def test_a_refusal_names_what_no_gpu_has_a_place_for(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        await node.run_all(node.pod("a", hami(gpumem=1)))
        await node.refused(
            node.pod("b", hami(gpumem=50000, gpucores=60)), "has no place for a MIG device with 50000 MiB and 60 cores"
        )
        assert len(mig.places(uuid_of(node))) == 1
        await node.refused(node.pod("c", app(30, 4)))  # never shared by cores and blocks
        assert node.kubelet.node_status()[CORE_RESOURCE].allocatable == 0


@pytest.mark.hami_bug("B10: a terminating pod blocks dynamic MIG")
async def test_a_device_is_destroyed_with_its_pod_unless_it_has_processes(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        busy, idle = node.pod("busy", hami(gpumem=40000)), node.pod("idle", hami(gpumem=5000))
        await node.run_all(busy, idle)
        await sample(node, mig)
        uuids = {pod.uid: node.ledger.of(None, pod.uid)[0].mig_devices[0].uuid for pod in (busy, idle)}
        assert mig.destroyed == []
        mig.processes.add(uuids[busy.uid])
        for pod in (busy, idle):
            await end(node, pod)
        await sample(node, mig)
        await sample(node, mig)
        assert mig.destroyed == [uuids[idle.uid]]
        # Its place is not given to another container.
        status = await node.run(node.pod("next", hami(gpumem=40000)))
        assert (status.phase, mig.destroyed) == ("Running", [uuids[idle.uid]])
        assert mig.places(uuid_of(node)) == [("3g.40gb", 0), ("3g.40gb", 4)]
        mig.processes.clear()
        await sample(node, mig)
        assert mig.destroyed == [uuids[idle.uid], uuids[busy.uid]]


async def test_a_device_of_a_failed_admission_is_destroyed(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        node.checkpoint.full = True
        await node.refused(node.pod("a", hami(gpumem=5000)))
        assert mig.places(uuid_of(node)) == []
        node.checkpoint.full = False
        mig.broken = "nvmlDeviceCreateGpuInstanceWithPlacement: Unknown Error (NVML error 999)"
        await node.refused(
            node.pod("b", hami(gpumem=5000)),
            "the MIG device 1g.10gb at slice 6 can't be created: nvmlDeviceCreateGpuInstanceWithPlacement",
        )
        assert not node.ledger.allocations


async def test_what_a_crash_left_at_the_place_gives_way(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        await mig.create_mig_instance(uuid_of(node), H100[0], 0)
        await node.agent.agent_state.set_snapshot(mig.snapshot)
        await node.run_all(node.pod("a", hami(gpumem=5000)))
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]


async def test_the_schedulers_place_is_followed_or_refused(folder: Path) -> None:
    async with mig_stage(folder, gpus=2) as (node, mig):
        pod = node.pod("a", hami(gpumem=5000))
        place(node, pod, SECOND, "1g.10gb", 1)
        await node.run_all(pod)
        assert mig.places(uuid_of(node, SECOND)) == [("1g.10gb", 1)]
        rival = node.pod("b", hami(gpumem=15000))
        place(node, rival, SECOND, "2g.20gb", 0)
        await node.refused(rival, "has no free place for the MIG device")
        shared = node.pod("c", hami(gpumem=5000))
        node.placed(shared, (uuid_of(node, SECOND), Amounts(10, 5000)))
        await node.refused(shared, "names no MIG device that GPU1 (00000001) can have")
        assert mig.places(uuid_of(node, SECOND)) == [("1g.10gb", 1)]


async def test_mig_mode_is_turned_on_once_the_gpu_is_idle(folder: Path) -> None:
    async with mig_stage(folder, enabled=False) as (node, mig):
        await node.refused(node.pod("early", hami(gpumem=5000)))
        await sample(node, mig)
        await sample(node, mig)
        assert mig.gpu(uuid_of(node)).mig_enabled
        await node.kubelet.until(lambda: node.kubelet.node_status()[REPLICA_RESOURCE].allocatable == 7)
        await node.run_all(node.pod("a", hami(gpumem=5000)))


async def test_devices_are_kept_where_the_ledger_could_not_be_rebuilt(folder: Path) -> None:
    """Devices that the driver lists only later are kept, too. Their places are not used, and what this process has created is destroyed as
    usual."""
    async with mig_stage(folder) as (node, mig):
        with capture_logs() as lines:
            node.agent.mig_devices.keep()
            node.agent.mig_devices.keep()
        assert [line["event"] for line in lines] == ["mig_devices_kept"]
        await mig.create_mig_instance(uuid_of(node), H100[5], 6)
        await sample(node, mig)
        pod = node.pod("a", hami(gpumem=5000))
        await node.run_all(pod)
        assert mig.places(uuid_of(node)) == [("1g.10gb", 5), ("1g.10gb", 6)]
        await end(node, pod)
        await sample(node, mig)
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]


async def test_a_device_that_is_gone_is_reported_and_its_container_is_not_started(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        pod = node.pod("a", hami(gpumem=5000))
        await node.run_all(pod)
        mig.lose(uuid_of(node), node.ledger.of(None, pod.uid)[0].mig_devices[0].uuid)
        mig.generation = "-new"
        await sample(node, mig)
        await sample(node, mig)
        events = [entry.why for entry in node.agent.agent_state.history.entries() if entry.code == MIG_DEVICE_GONE]
        assert len(events) == 1
        assert "no longer exists, and team/a (main) holds it" in events[0]
        with pytest.raises(Exception, match="delete the pod and create it again"):
            await node.kubelet.start_container(pod, "main")


async def test_devices_are_never_at_one_place_whatever_the_order(folder: Path) -> None:
    random = Random(7)
    async with mig_stage(folder, gpus=2) as (node, mig):
        running: list[SimPod] = []
        for number in range(60):
            pod = node.pod(
                f"p{number}", hami(random.choice([1, 1, 1, 2]), gpumem=random.choice([100, 9000, 15000, 30000, 45000]))
            )
            if (await node.run(pod)).phase == "Running":
                running.append(pod)
            else:
                node.delete(pod)
            node.check_agreement(*running)
            if random.random() < 0.5 and running:
                await end(node, running.pop(random.randrange(len(running))))
            if random.random() < 0.5:
                await sample(node, mig)
            held = {device.uuid for a in node.ledger.allocations.values() for device in a.mig_devices}
            assert held <= {each.uuid for gpu in mig.snapshot.gpus for each in gpu.mig_instances}
        assert len(mig.destroyed) > 10


@pytest.mark.parametrize(
    ("first", "second", "place_of_both"),
    [
        ({"gpumem": 100}, {"gpumem": 5000}, ("1g.10gb", 6)),
        ({"gpumem": 100}, {"gpumem": 15000}, ("1g.20gb", 6)),
        ({"gpumem": 5000}, {"gpucores": 100, "gpumem": 80000}, ("7g.80gb", 0)),
        ({"gpucores": 100, "gpumem": 80000}, {"gpucores": 100, "gpumem": 80000}, ("7g.80gb", 0)),
    ],
)
@pytest.mark.parametrize("named", [False, True])
async def test_one_device_serves_an_init_container_and_the_container_that_takes_over(
    folder: Path, first: dict[str, int], second: dict[str, int], place_of_both: tuple[str, int], named: bool
) -> None:
    async with mig_stage(folder) as (node, mig):
        pod = node.pod("a", hami(1, "fetch", "init", **first), hami(1, "main", "app", **second))
        if named:
            place(node, pod, FIRST, *place_of_both, containers=("fetch", "main"))
        await node.run_all(pod)
        assert mig.places(uuid_of(node)) == [place_of_both]
        node.check_agreement(pod)
        await end(node, pod)
        await sample(node, mig)
        assert mig.places(uuid_of(node)) == []


async def test_a_container_that_takes_over_no_replica_does_not_count(folder: Path) -> None:
    async with mig_stage(folder, gpus=2) as (node, mig):
        small, whole = hami(gpumem=5000), hami(name="second", gpucores=100, gpumem=80000)
        pod = node.pod("a", hami(name="fetch", kind="init", gpumem=100), small, whole)
        await node.run_all(pod)
        assert sorted(mig.places(uuid_of(node, gpu)) for gpu in (FIRST, SECOND)) == [[("1g.10gb", 6)], [("7g.80gb", 0)]]


async def test_a_gpu_that_has_none_of_the_profiles_of_the_settings_says_so(folder: Path) -> None:
    async with mig_stage(folder, profiles=["1g.99gb"]) as (node, _):
        await node.refused(node.pod("a", hami(gpumem=5000)))
        (reason,) = node.agent.view().node.out_of_service.values()
        assert reason.startswith("hami.mig_profiles has none of its profiles, which are 7g.80gb, 4g.40gb")


async def test_only_gpus_that_the_pod_demands_get_its_devices(folder: Path) -> None:
    """The pods get the second of two GPUs in MIG mode. Without the annotations they would get the first."""
    async with mig_stage(folder, gpus=2) as (node, _):
        for name, annotations in (
            ("avoids", {"nvidia.com/nouse-gpuuuid": uuid_of(node)}),
            ("alone", {"hami.io/gpu-scheduler-policy": "mutex"}),
        ):
            pod = node.pod(name, hami(gpumem=4000), annotations=annotations)
            await node.run_all(pod)
            (held,) = node.ledger.of(None, pod.uid)
            assert [*held.gpus] == [SECOND if name == "avoids" else FIRST]
        pod = node.pod("x", hami(gpumem=4000), annotations={"nvidia.com/use-gputype": "T4"})
        await node.refused(pod, "and the pod demands a GPU of model T4")


async def test_a_place_is_free_again_at_once_and_one_that_fails_is_not_used_for_a_while(folder: Path) -> None:
    async with mig_stage(folder) as (node, mig):
        first = node.pod("first", hami(gpumem=5000))
        await node.run_all(first)
        await end(node, first)
        await node.run_all(node.pod("second", hami(gpumem=5000)))  # before the next snapshot of the driver
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]
        mig.broken = "Insufficient Resources"
        await node.refused(node.pod("third", hami(gpumem=5000)))
        mig.broken = ""
        await node.run_all(node.pod("fourth", hami(gpumem=5000)))  # before the next look at the MIG devices, and after it
        await sample(node, mig)
        await node.run_all(node.pod("fifth", hami(gpumem=5000)))
        assert mig.places(uuid_of(node)) == [("1g.10gb", 3), ("1g.10gb", 4), ("1g.10gb", 6)]


async def test_a_device_with_the_uuid_of_a_former_one_is_not_destroyed(folder: Path) -> None:
    """The pod comes while the former device at its place waits for its destruction."""
    async with mig_stage(folder) as (node, mig):
        first = node.pod("first", hami(gpumem=5000))
        await node.run_all(first)
        await sample(node, mig)
        await end(node, first)
        async with node.agent.agent_state.lock:
            tending = asyncio.create_task(node.agent.mig_devices.tend())
            second = asyncio.create_task(node.run(node.pod("second", hami(gpumem=5000))))
            await asyncio.sleep(0.05)
        await tending
        assert (await second).phase == "Running"
        await sample(node, mig)
        (allocation,) = node.ledger.allocations.values()
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]
        assert [each.uuid for each in await mig.mig_instances(uuid_of(node))] == [each.uuid for each in allocation.mig_devices]


async def test_a_container_has_mig_devices_or_shares_of_other_gpus(folder: Path) -> None:
    mig = MemoryMig(snapshot=with_mig(snapshot(4)))
    others = tuple(replace(gpu, mig_enabled=None, mig_profiles=()) for gpu in mig.snapshot.gpus[2:])
    mig.snapshot = replace(mig.snapshot, gpus=(*mig.snapshot.gpus[:2], *others))
    async with stage(folder, kinds=WITHOUT_MIG, mig=mig) as node:
        pairs = [node.pod(f"pair-{number}", hami(2, gpumem=30000)) for number in range(3)]
        await node.run_all(*pairs)
        for pod in pairs:
            (allocation,) = node.ledger.of(None, pod.uid)
            kinds = {gpu in node.agent.view().node.mig_profiles for gpu in allocation.gpus}
            assert len(kinds) == 1
            assert len(allocation.mig_devices) == (2 if kinds == {True} else 0)
        await node.refused(node.pod("three", hami(3, gpumem=10)))


async def test_after_a_reboot_devices_are_created_again_at_the_start_of_their_containers(folder: Path) -> None:
    """The driver makes the same UUIDs; the init container and the app share a device."""
    async with mig_stage(folder) as (node, mig):
        pod = node.pod("a", hami(name="fetch", kind="init", gpumem=100), hami(gpumem=5000))
        await node.run_all(pod)
        for instance in await mig.mig_instances(uuid_of(node)):
            mig.lose(uuid_of(node), instance.uuid)
        await mig.set_mode(uuid_of(node), enabled=False)
        with pytest.raises(Exception, match="can't be created: MIG mode is off"):
            await node.kubelet.start_container(pod, "fetch")
        await sample(node, mig)
        await sample(node, mig)
        assert mig.gpu(uuid_of(node)).mig_enabled, "though a pod holds the GPU"
        for container in ("fetch", "main"):
            await node.kubelet.start_container(pod, container)
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]


async def test_mig_mode_of_a_cordoned_gpu_stays_off(folder: Path) -> None:
    async with mig_stage(folder, enabled=False) as (node, mig):
        state = node.agent.agent_state
        await state.set_health(HardwareHealth(failed={}, cordoned={uuid_of(node): "cordoned by the operator"}))
        await node.agent.mig_devices.tend()
        assert not mig.gpu(uuid_of(node)).mig_enabled


@asynccontextmanager
async def creating(folder: Path) -> AsyncIterator[tuple[Stage, MemoryMig, "asyncio.Task[PodStatus]", SimPod]]:
    """While the driver creates the MIG device of a pod; the task is the pod's admission."""
    async with mig_stage(folder, 2) as (node, mig):
        mig.created.clear()
        pod = node.pod("a", hami(gpumem=5000))
        admission = asyncio.create_task(node.run(pod))
        await mig.creating.wait()
        yield node, mig, admission, pod


async def test_the_lock_is_free_while_the_driver_creates_a_device(folder: Path) -> None:
    async with creating(folder) as (node, mig, admission, pod):
        state = node.agent.agent_state
        await state.set_health(
            HardwareHealth(failed={uuid_of(node, SECOND): "lost"}, cordoned=mig_mode(mig), in_mig_mode=mig_mode(mig))
        )
        assert not await node.agent.reconciler.sweep(), "the kubelet does not list the pod yet, so a sweep would free it"
        assert [a.reserved for a in node.ledger.allocations.values()] == [True]
        assert node.ledger.used(FIRST).slices == 1 << 6, "no other container can be given the place"
        assert not admission.done()
        mig.created.set()
        assert (await admission).phase == "Running"
        node.check_agreement(pod)
        (allocation,) = node.ledger.allocations.values()
        assert [each.uuid for each in allocation.mig_devices] == ["MIG-0-1g.10gb-6"]
        await sample(node, mig)
        assert mig.places(uuid_of(node)) == [("1g.10gb", 6)]


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        ("the GPU fails", "went out of service while MIG devices were created: XID 79"),
        ("a bug", ""),
        ("it is freed", "offered the container's ids again while its MIG devices were created"),
    ],
)
async def test_a_container_that_is_refused_after_its_device_was_created_leaves_neither_device_nor_reservation(
    folder: Path, happens: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with creating(folder) as (node, mig, admission, _):
        state = node.agent.agent_state
        if happens == "the GPU fails":
            mode = mig_mode(mig)
            await state.set_health(HardwareHealth(failed={uuid_of(node): "XID 79"}, cordoned=mode, in_mig_mode=mode))
        elif happens == "a bug":
            monkeypatch.setattr(AgentState, "commit", AsyncMock(side_effect=KeyError("a bug")))
        else:
            async with state.lock:
                state.put(state.ledger.free([*state.ledger.allocations]))
        mig.created.set()
        status = await admission
        assert (status.phase, reason in (status.message or "")) == ("Failed", True), status.message
        assert mig.places(uuid_of(node)) == []
        assert not node.ledger.allocations
        told = {entry.what for entry in state.history.entries()} & {"granted", "freed"}
        assert told == ({"freed"} if happens == "it is freed" else set())


async def test_a_reservation_that_a_killed_agent_left_is_dropped(folder: Path) -> None:
    async with creating(folder) as (node, mig, admission, _):
        state = node.agent.agent_state
        async with state.lock:
            await state.commit(state.ledger)  # as with the grant of another container
        left = state.ledger
        assert node.checkpoint.allocations == left.allocations
        device_lists = DeviceListPublisher(lambda _: None, clock=node.clock)
        restarted = AgentState(
            left,
            checkpoint=node.checkpoint,
            device_lists=device_lists,
            runs=lambda _: False,
            clock=node.clock,
        )
        assert not restarted.ledger.allocations
        mig.created.set()
        await admission
