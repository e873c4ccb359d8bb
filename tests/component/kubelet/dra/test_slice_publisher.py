"""The publisher in front of the simulated API server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.kube.client import ApiServer
from gpumgr.kube.reflector import WatchTimes
from gpumgr.kubelet.slice_publisher import PublishTimes, SlicePublisher
from gpumgr.kubelet.slices import SliceDevice, Taint, resource_slice, slice_name
from gpumgr.placement.devices import Gpu
from gpumgr.sim.apiserver import SimApiServer
from gpumgr.sim.apiserver_objects import failure
from tests.background import background, until

from .resources import Resources

NODE, NAME = "node-1", slice_name("node-1")
WATCH = WatchTimes(pause_seconds=(0.005, 0.02), watch_seconds=(60, 60))
#: Nothing waits, except where a test says so.
AT_ONCE = PublishTimes(change_seconds=0.0, retry_seconds=(0.01, 0.02), probe_seconds=0.05)
LONG = 3600.0
SICK = Taint(key="gpu.gpumgr.io/xid")


def device(number: int, **more: Any) -> SliceDevice:
    gpu = Gpu(index=number, uuid=f"GPU-{number:08x}", minor=None, bus_id=None, model=None, memory_bytes=80 << 30)
    return SliceDevice(name=f"gpu-{number:08x}", gpu=gpu, island="i", pair="p", enforcement="mps", **more)


DEVICES = (device(0), device(1))


class Stage:
    def __init__(self, sim: SimApiServer, resources: Resources, server: ApiServer, times: PublishTimes) -> None:
        self.sim, self.resources = sim, resources
        self.publisher = SlicePublisher(server, NODE, times=times, watch_times=WATCH)
        self.publisher.offer(DEVICES)

    def register(self, registrations: int) -> None:
        """0: the registration is over."""
        self.publisher.follow(LinkState(registered=bool(registrations), registrations=registrations))

    @property
    def slice(self) -> Any:
        return self.resources.named(NAME)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.resources.writes]

    def published(self) -> list[str]:
        return [each["name"] for each in self.slice["spec"]["devices"]] if self.slice is not None else []

    async def settled(self, *devices: SliceDevice) -> None:
        await until(lambda: self.publisher.state.published and self.published() == [each.name for each in devices])


@asynccontextmanager
async def staged(
    folder: Path, times: PublishTimes = AT_ONCE, *, prepare: Callable[[Resources], object] = id
) -> AsyncIterator[Stage]:
    sim = SimApiServer(NODE)
    resources = Resources(sim)
    prepare(resources)
    async with sim:
        server = await ApiServer.connect(sim.kubeconfig(folder / "kubeconfig"))
        stage = Stage(sim, resources, server, times)
        async with background(stage.publisher.run()) as task:
            yield stage
            assert not task.done(), task
        await server.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as made:
        yield made


@pytest.fixture
async def published(stage: Stage) -> Stage:
    """The devices are in the slice."""
    stage.register(1)
    await stage.settled(*DEVICES)
    return stage


async def test_it_publishes_once_after_the_registration(stage: Stage) -> None:
    stage.publisher.offer((*DEVICES, device(2)))
    await until(stage.publisher._reflector.synced.is_set)
    assert (stage.methods, stage.publisher.state.published) == ([], False)
    stage.register(1)
    await stage.settled(*DEVICES, device(2))
    (owner,) = stage.slice["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("Node", "uid-node-1")
    assert stage.publisher.state.devices == 3
    stage.register(2)
    stage.publisher.offer((device(3),))
    await stage.settled(device(3))
    assert stage.methods == ["POST", "PUT"], "neither what the server spells anew nor a registration is a change"


async def test_a_slice_of_an_earlier_process_is_replaced_once(tmp_path: Path) -> None:
    def before(resources: Resources) -> None:
        resources.put(resource_slice(NODE, "uid-node-1", DEVICES[:1], generation=7))

    async with staged(tmp_path, prepare=before) as stage:
        stage.register(1)
        await stage.settled(*DEVICES)
        assert stage.slice["spec"]["pool"]["generation"] == 7
        stage.register(2)
        stage.publisher.offer((*DEVICES, device(2)))
        await stage.settled(*DEVICES, device(2))
        assert stage.methods == ["PUT", "PUT"]


# -- deletions and changes by others -----------------------------------------------------------------------------------------


async def test_a_slice_that_others_delete_is_back_at_once(published: Stage) -> None:
    """A starting kubelet deletes it, before or after it registers the driver."""
    for registrations in (1, 2):
        published.register(registrations)
        published.resources.remove(NAME)
        await published.settled(*DEVICES)
    assert published.methods == ["POST", "POST", "POST"]


async def test_while_the_driver_is_not_registered_nothing_is_written(published: Stage) -> None:
    published.register(0)
    published.resources.remove(NAME)
    await until(lambda: not published.publisher._reflector._objects)
    assert published.methods == ["POST"]
    published.register(2)
    await published.settled(*DEVICES)


async def test_a_registration_that_ends_while_the_api_server_is_asked_ends_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()

    async def read(self: ApiServer, method: Any, path: str, *arguments: Any, **options: Any) -> dict[str, Any]:
        asked.append(path)
        stage.register(0)
        return await found(self, method, path, *arguments, **options)

    async with staged(tmp_path) as stage:
        found = ApiServer.read
        monkeypatch.setattr(ApiServer, "read", read)
        stage.register(1)
        await until(lambda: f"/api/v1/nodes/{NODE}" in asked and not stage.publisher._writing.locked())
        assert stage.methods == []
        monkeypatch.undo()
        stage.register(2)
        await stage.settled(*DEVICES)


async def test_what_others_change_is_changed_back(published: Stage) -> None:
    published.resources.put({**published.slice, "spec": {**published.slice["spec"], "devices": []}})
    await published.settled(*DEVICES)
    assert published.methods == ["POST", "PUT"]


async def test_labels_of_others_stay(published: Stage) -> None:
    """A controller that sets a label again would be answered with a write each time, without end."""
    published.resources.put({**published.slice, "metadata": {**published.slice["metadata"], "labels": {"team": "ml"}}})
    await until(lambda: published.methods == ["POST", "PUT"])
    published.publisher.offer(DEVICES[:1])
    await published.settled(*DEVICES[:1])
    assert published.slice["metadata"]["labels"] == {"team": "ml"}


async def test_a_slice_that_changes_during_a_write_is_read_again(published: Stage) -> None:
    published.resources.answers += [failure(409, "Conflict", "modified"), failure(404, "NotFound", "gone")]
    published.publisher.offer(DEVICES[:1])
    await published.settled(*DEVICES[:1])
    assert (published.methods, published.publisher.state.error) == (["POST", "PUT", "PUT", "PUT"], None)


async def test_a_deletion_is_found_even_if_the_watch_never_had_the_slice(stage: Stage) -> None:
    """The connection breaks between the answer to the write and its event, and the history is lost."""
    await until(stage.publisher._reflector.synced.is_set)
    stage.resources.send_events(False)
    stage.register(1)
    await stage.settled(*DEVICES)
    assert not stage.publisher._reflector._objects
    await stage.sim.stop()
    stage.resources.send_events(True)
    stage.resources.remove(NAME)
    stage.resources.forget()
    await stage.sim.start()
    await until(lambda: stage.slice is not None)
    await stage.settled(*DEVICES)
    assert stage.methods == ["POST", "POST"]


async def test_a_slice_that_is_withdrawn_after_a_write_is_not_published(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, permitted = asyncio.Event(), asyncio.Event()

    async def write(*_: object) -> None:
        entered.set()
        await permitted.wait()

    monkeypatch.setattr(stage.publisher, "_write", write)
    stage.register(1)
    await entered.wait()
    withdrawal = asyncio.create_task(stage.publisher.withdraw(timeout_seconds=30))
    await asyncio.sleep(0)
    permitted.set()
    assert await withdrawal
    assert stage.publisher.state.published is False


# -- pace and failures -------------------------------------------------------------------------------------------------------


async def test_changes_are_written_together_and_the_last_one_counts(tmp_path: Path) -> None:
    """The clock does not move, so the second change is due when the test says so."""
    now = [100.0]
    async with staged(tmp_path, replace(AT_ONCE, change_seconds=2.0)) as stage:
        stage.publisher._clock = lambda: now[0]
        stage.register(1)
        await stage.settled(*DEVICES)
        for number in range(5):
            stage.publisher.offer((device(number + 5),))
            await asyncio.sleep(0.01)
        assert stage.methods == ["POST"]
        now[0] += 2.0
        stage.publisher._wake.set()
        await stage.settled(device(9))
        assert stage.methods == ["POST", "PUT"]
        now[0] += 2.0
        stage.publisher.offer(DEVICES)
        await stage.settled(*DEVICES)


async def test_a_refused_slice_is_logged_once_and_tried_again(tmp_path: Path) -> None:
    sentence = 'ResourceSlice "x" is invalid: spec.devices[0].name: Invalid value'
    with capture_logs() as logs:
        async with staged(tmp_path) as stage:
            stage.resources.answers += [failure(422, "Invalid", sentence) for _ in range(3)]
            stage.register(1)
            await until(lambda: len(stage.methods) == 3)
            assert stage.publisher.state.error == f"HTTP 422: {sentence}"
            await stage.settled(*DEVICES)
            assert stage.publisher.state.error is None
    (line,) = [each for each in logs if each["event"] == "slice_not_published"]
    assert (line["error"], line["consequence"]) == (
        f"HTTP 422: {sentence}",
        "kube-scheduler places pods by the last published slice, and without a slice new pods with claims wait; running pods keep "
        f"their GPUs; the agent tries again within {stage.publisher._times.retry_seconds[1]:g} s",
    )


async def test_an_api_server_that_is_away_is_named_and_gets_the_slice_when_it_is_back(stage: Stage) -> None:
    await stage.sim.stop()
    stage.register(1)
    await until(lambda: stage.publisher.state.error)
    await stage.sim.start()
    await stage.settled(*DEVICES)


async def test_a_server_without_the_api_is_named(tmp_path: Path) -> None:
    async with staged(tmp_path, prepare=lambda resources: resources.without.add("resource.k8s.io/v1")) as stage:
        stage.register(1)
        await until(lambda: stage.publisher.state.error)
        assert "use Kubernetes 1.36 or later" in str(stage.publisher.state.error)


# -- feature gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gate", "left"), [("DRAConsumableCapacity", ()), ("DRADeviceTaints", DEVICES[:1])])
async def test_without_a_gate_nothing_wrong_is_ever_offered(tmp_path: Path, gate: str, left: tuple[SliceDevice, ...]) -> None:
    def off(resources: Resources) -> None:
        resources.without = {gate}

    with capture_logs() as logs:
        async with staged(tmp_path, prepare=off) as stage:
            wanted = (DEVICES[0], device(1, taints=(SICK,)))
            stage.publisher.offer(wanted)
            stage.register(1)
            await stage.settled(*left)
            assert gate in str(stage.publisher.state.dropped)
            assert all(
                [each.name for each in left] == [each["name"] for each in sent["spec"]["devices"]]
                for _, sent in stage.resources.writes
            )
            probes = stage.resources.probes
            await until(lambda: stage.resources.probes > probes)
            stage.resources.without = set()
            await stage.settled(*wanted)
            await until(lambda: stage.publisher.state.dropped is None)
    assert len([each for each in logs if each["event"] == "slice_fields_dropped"]) == 1


async def test_a_gate_that_is_switched_off_later_is_noticed_at_the_next_write(tmp_path: Path) -> None:
    async with staged(tmp_path, replace(AT_ONCE, probe_seconds=LONG)) as stage:
        stage.register(1)
        await stage.settled(*DEVICES)
        stage.resources.without = {"DRAConsumableCapacity"}
        stage.publisher.offer(DEVICES[:1])
        await stage.settled()
        await until(lambda: stage.publisher.state.dropped is not None)


# -- the end -----------------------------------------------------------------------------------------------------------------


async def test_a_withdrawn_slice_stays_away(published: Stage) -> None:
    assert await published.publisher.withdraw(timeout_seconds=5.0) is True
    published.publisher.offer(())
    published.register(2)
    await until(lambda: not published.publisher._reflector._objects)
    assert (published.slice, published.publisher.state.published) == (None, False)
    assert await published.publisher.withdraw(timeout_seconds=5.0) is True
    assert published.resources.writes[1:] == [("DELETE", NAME), ("DELETE", NAME)]
    await published.sim.stop()
    assert await published.publisher.withdraw(timeout_seconds=5.0) is False
