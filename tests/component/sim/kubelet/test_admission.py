"""The stand-in admits pods as kubelet 1.35 does: order of calls, reuse, preferences, refusals, late freeing."""

import asyncio
from contextlib import closing
from typing import Any

import grpc
import pytest

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kubelet.records import PodResourcesClient
from gpumgr.placement.pods import Listing
from gpumgr.sim.kubelet import SimContainer, SimKubelet, SimKubeletError, SimPod
from tests.topology_manager import best_effort

CORE: dict[str, int | None] = {f"a-c{number:02}": None for number in range(10)}
MEMORY: dict[str, int | None] = {f"a-m{number}": None for number in range(10)}


def pod(name: str, *containers: SimContainer) -> SimPod:
    return SimPod(namespace="default", name=name, uid=f"uid-{name}", containers=containers)


def app(cores: int = 0, memory_blocks: int = 0, name: str = "app") -> SimContainer:
    return SimContainer(name=name, cores=cores, memory_blocks=memory_blocks)


async def listed(kubelet: SimKubelet) -> Listing:
    with closing(PodResourcesClient(kubelet.pod_resources_socket, timeout_seconds=30)) as client:
        return await client.list()


async def test_calls_of_one_container(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY, resource_order="memory_first")
    assert (await kubelet.run(pod("a", app(2, 3)))).phase == "Running"
    assert [(call.rpc, call.resource, len(call.ids)) for call in kubelet.calls] == [
        ("GetPreferredAllocation", MEMORY_RESOURCE, 0),
        ("Allocate", MEMORY_RESOURCE, 3),
        ("GetPreferredAllocation", CORE_RESOURCE, 0),
        ("Allocate", CORE_RESOURCE, 2),
        ("PreStartContainer", MEMORY_RESOURCE, 3),
        ("PreStartContainer", CORE_RESOURCE, 2),
    ]
    assert kubelet.held("uid-a", "app", CORE_RESOURCE) == {"a-c00", "a-c01"}


async def test_a_short_preference_is_filled_up_and_a_foreign_id_ignored(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    plugin.core.prefer = lambda _available, _must, _size: ["a-c07", "b-c00"]
    await kubelet.admit(pod("a", app(3)))
    held = kubelet.held("uid-a", "app", CORE_RESOURCE)
    assert len(held) == 3
    assert "a-c07" in held
    assert held <= CORE.keys()


async def test_app_containers_reuse_devices_of_init_containers_without_a_call(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY)
    init = SimContainer(name="init", cores=4, kind="init")
    await kubelet.admit(pod("a", app(3), init))
    assert [(call.rpc, call.container) for call in kubelet.calls] == [
        ("GetPreferredAllocation", "init"),
        ("Allocate", "init"),
        ("Allocate", "app"),
    ]
    assert kubelet.held("uid-a", "app", CORE_RESOURCE) < kubelet.held("uid-a", "init", CORE_RESOURCE)


async def test_reused_ids_must_be_included_when_more_are_needed(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY)
    await kubelet.admit(pod("a", SimContainer(name="init", cores=2, kind="init"), app(5)))
    asked = kubelet.calls[2]
    assert (asked.rpc, asked.container, asked.available) == ("GetPreferredAllocation", "app", 10)
    assert asked.ids == kubelet.held("uid-a", "init", CORE_RESOURCE)
    assert asked.ids < kubelet.held("uid-a", "app", CORE_RESOURCE)


async def test_sidecars_keep_their_ids_and_two_apps_share_none(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY)
    containers = (SimContainer(name="init", cores=4, kind="init"), SimContainer(name="side", cores=1, kind="sidecar"))
    await kubelet.admit(pod("a", *containers, app(2), app(2, name="second")))
    side, first, second = (kubelet.held("uid-a", name, CORE_RESOURCE) for name in ("side", "app", "second"))
    init = kubelet.held("uid-a", "init", CORE_RESOURCE)
    assert side < init
    assert first < init
    assert not side & first
    assert not (side | first) & second


async def test_a_plugins_refusal_is_the_pods_failure(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    plugin.core.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no GPU has that much free")
    status = await kubelet.admit(pod("a", app(2)))
    assert (status.phase, status.reason) == ("Failed", "UnexpectedAdmissionError")
    assert status.message == (
        "Allocate failed due to rpc error: code = ResourceExhausted desc = no GPU has that much free, which is unexpected"
    )
    plugin.core.refusal = None
    assert (await kubelet.admit(pod("b", app(10)))).phase == "Pending"


async def test_the_kubelet_itself_refuses_what_is_not_there(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    status = await kubelet.admit(pod("a", app(11)))
    assert status.message == (
        "Allocate failed due to requested number of devices unavailable for tencent.com/vcuda-core. "
        "Requested: 11, Available: 10, which is unexpected"
    )
    assert kubelet.calls == []
    await plugin.stop()
    await kubelet.until(lambda: kubelet.node_status()[CORE_RESOURCE].allocatable == 0)
    assert kubelet.node_status()[CORE_RESOURCE].capacity == 10


async def test_ended_pods_are_freed_at_the_next_admission(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY)
    await kubelet.run(pod("a", app(10)))
    kubelet.end("uid-a")
    assert len(kubelet.held("uid-a", "app", CORE_RESOURCE)) == 10
    assert (await kubelet.admit(pod("b", app(1)))).phase == "Pending"
    assert kubelet.held("uid-a", "app", CORE_RESOURCE) == frozenset()


async def test_list_shows_the_pod_under_admission_but_no_init_container(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY, resource_order="core_first")
    plugin.memory.hold = asyncio.Event()
    containers = (SimContainer(name="init", cores=1, kind="init"), SimContainer(name="side", cores=1, kind="sidecar"))
    admission = asyncio.create_task(kubelet.admit(pod("a", *containers, app(1, 1))))
    await plugin.memory.allocating.wait()
    listing = await listed(kubelet)
    assert listing.pods == (("default", "a"),)
    seen = listing.containers(("default", "a"))
    assert list(seen) == ["side", "app"]
    assert set(seen["app"]) == {CORE_RESOURCE}
    plugin.memory.hold.set()
    await admission


async def test_the_double_hand_out(make_node: Any) -> None:
    """A List in the middle of an Allocate, when a pod has just ended: the ids in flight are offered again."""
    kubelet, plugin = await make_node(CORE, MEMORY)
    await kubelet.run(pod("short", app(2)))
    plugin.core.hold = asyncio.Event()
    plugin.core.allocating.clear()
    slow = asyncio.create_task(kubelet.admit(pod("slow", app(3))))
    await plugin.core.allocating.wait()
    kubelet.end("uid-short")
    await listed(kubelet)
    plugin.core.hold.set()
    await slow
    await kubelet.admit(pod("next", app(3)))
    assert kubelet.held("uid-slow", "app", CORE_RESOURCE) & kubelet.held("uid-next", "app", CORE_RESOURCE)


async def test_a_container_start_calls_the_plugins_and_merges_their_answers(make_node: Any) -> None:
    kubelet, _ = await make_node(CORE, MEMORY)
    first = pod("a", app(1, 1))
    await kubelet.run(first)
    again = await kubelet.start_container(first, "app")
    assert again.envs[CORE_RESOURCE] == "a-c00"
    assert again.envs[MEMORY_RESOURCE] == "a-m0"
    assert again.envs["SHARED"] in (CORE_RESOURCE, MEMORY_RESOURCE)
    assert [call.rpc for call in kubelet.calls].count("PreStartContainer") == 4
    with pytest.raises(SimKubeletError, match="no devices found allocated in local cache"):
        await kubelet.start_container(pod("never-admitted", app(1)), "app")


async def test_a_restart_keeps_pods_and_drops_plugins(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    running = pod("a", app(4, 2))
    await kubelet.run(running)
    held = kubelet.held("uid-a", "app", CORE_RESOURCE)
    await kubelet.restart()
    assert kubelet.node_status()[CORE_RESOURCE].allocatable == 0
    assert not list(kubelet.plugin_folder.glob("vcuda-*.sock"))
    status = await kubelet.admit(pod("early", app(1)))
    assert "no healthy devices present" in status.message
    await plugin.register()
    assert kubelet.held("uid-a", "app", CORE_RESOURCE) == held
    await kubelet.start_container(running, "app")
    await kubelet.admit(pod("b", app(6)))
    assert not held & kubelet.held("uid-b", "app", CORE_RESOURCE)


async def test_a_restarted_kubelet_has_no_pods_until_its_sources_are_ready(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    await kubelet.run(pod("a", app(4)))
    await kubelet.restart(sources_ready=False)
    await plugin.register()
    assert (await listed(kubelet)).pods == ()
    assert len(kubelet.held("uid-a", "app", CORE_RESOURCE)) == 4
    kubelet.finish_sources()
    assert (await listed(kubelet)).pods == (("default", "a"),)


async def test_registration_checks(make_node: Any) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY)
    kubelet._dial_timeout_seconds = 0.1  # from now on
    for path, name, text in [
        (kubelet.plugin_folder / "vcuda-core.sock", "no-domain", 'the ResourceName "no-domain" is invalid'),
        (kubelet.plugin_folder / "nobody.sock", CORE_RESOURCE, "failed to dial device plugin: context deadline exceeded"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register_one(path, name)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNKNOWN, text)


NUMA_CORE: dict[str, int | None] = {f"a-c{number:02}": number // 5 for number in range(10)}
NUMA_MEMORY: dict[str, int | None] = {f"a-m{number}": number // 5 for number in range(10)}


async def test_numa_aligned_ids_are_all_that_is_offered(make_node: Any) -> None:
    kubelet, plugin = await make_node(NUMA_CORE, NUMA_MEMORY, align=best_effort)
    plugin.core.prefer = lambda available, _must, size: sorted(available, reverse=True)[:size]
    await kubelet.admit(pod("a", app(3, 3)))
    assert {call.available for call in kubelet.calls if call.rpc == "GetPreferredAllocation"} == {5}
    nodes = {NUMA_CORE[device_id] for device_id in kubelet.held("uid-a", "app", CORE_RESOURCE)}
    nodes |= {NUMA_MEMORY[device_id] for device_id in kubelet.held("uid-a", "app", MEMORY_RESOURCE)}
    assert len(nodes) == 1


async def test_aligned_ids_must_be_included_when_they_are_too_few(make_node: Any) -> None:
    """Core fits one node, memory needs both: the merged hint is one node, and memory takes that node's blocks first."""
    kubelet, _ = await make_node(NUMA_CORE, NUMA_MEMORY, align=best_effort)
    await kubelet.admit(pod("a", app(3, 7)))
    asked = next(call for call in kubelet.calls if call.rpc == "GetPreferredAllocation" and call.resource == MEMORY_RESOURCE)
    assert len(asked.ids) == 5
    assert asked.available == 10
    assert len({NUMA_MEMORY[device_id] for device_id in asked.ids}) == 1
