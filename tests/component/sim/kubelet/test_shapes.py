"""The stand-in as an older kubelet: what device plugins and PodResources' clients see of each version."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import RequestReceived
from msgspec.structs import replace

from gpumgr._pb.deviceplugin.v1beta1 import DevicePluginOptions
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.kubelet.records import parse_kubelet_checkpoint
from gpumgr.sim.kubelet import SimContainer, SimKubelet, SimKubeletError, SimPod
from gpumgr.sim.kubelet_plugins import PluginClient
from gpumgr.sim.kubelet_pods import SUPPORTED, V1_20, V1_24, V1_25, V1_35, V1_37, KubeletVersion
from tests.component.sim.kubelet.plugin import GooglePlugin
from tests.kubelet_api import deviceplugin as pb
from tests.kubelet_api import podresources

#: Two on NUMA node 1, two on none.
CORE: dict[str, int | None] = {"c0": 1, "c1": 1, "c2": None, "c3": None}
MEMORY: dict[str, int | None] = {"m0": None}
ALL = SUPPORTED.values()

MakeNode = Callable[..., Awaitable[tuple[SimKubelet, GooglePlugin]]]


def versions(*shapes: KubeletVersion) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("shape", shapes, ids=[shape.version for shape in shapes])


def pod(name: str, cores: int) -> SimPod:
    containers = (SimContainer(name="app", cores=cores),)
    return SimPod(namespace="default", name=name, uid=f"uid-{name}", containers=containers)


async def ask(kubelet: SimKubelet, call: str, request: bytes = b"") -> bytes:
    """A PodResources call by grpc's own client. Raises grpc.aio.AioRpcError."""
    async with grpc.aio.insecure_channel(f"unix:{kubelet.pod_resources_socket}") as channel:
        answer: bytes = await channel.unary_unary(f"/v1.PodResourcesLister/{call}")(request)
    return answer


async def listed(kubelet: SimKubelet) -> dict[str, list[tuple[frozenset[str], list[int]]]]:
    """Pod -> (ids, NUMA nodes) of each entry, in no particular order."""
    answer = podresources.ListPodResourcesResponse.FromString(await ask(kubelet, "List"))
    return {
        each.name: [
            (frozenset(devices.device_ids), [node.ID for node in devices.topology.nodes])
            for container in each.containers
            for devices in container.devices
        ]
        for each in answer.pod_resources
    }


# -- PodResources ------------------------------------------------------------------------------------------------------------


@versions(*ALL)
async def test_ended_and_refused_pods_are_listed_without_ids_before_1_34(make_node: MakeNode, shape: KubeletVersion) -> None:
    kubelet, _ = await make_node(CORE, MEMORY, shape=shape)
    await kubelet.run(pod("ended", 2))
    await kubelet.admit(pod("refused", 9))
    kubelet.end("uid-ended")
    assert await listed(kubelet) == ({} if shape in (V1_35, V1_37) else {"ended": [], "refused": []})
    assert kubelet.held("uid-ended", "app", CORE_RESOURCE) == frozenset()
    kubelet.delete("uid-ended")
    assert "ended" not in await listed(kubelet)


@pytest.mark.parametrize(
    ("shape", "call", "code", "text"),
    [
        (replace(V1_20, calls=frozenset()), "List", "UNIMPLEMENTED", "unknown service v1.PodResourcesLister"),
        (V1_25, "Get", "UNIMPLEMENTED", "unknown method Get for service v1.PodResourcesLister"),
        (V1_35, "Get", "UNKNOWN", "pod  in namespace  not found"),
    ],
)
async def test_calls_that_fail(make_node: MakeNode, shape: KubeletVersion, call: str, code: str, text: str) -> None:
    kubelet, _ = await make_node(CORE, MEMORY, shape=shape)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(kubelet, call)
    assert (caught.value.code().name, caught.value.details()) == (code, text)


# -- registration ------------------------------------------------------------------------------------------------------------


@versions(*(each for each in ALL if not each.knows_sockets))
async def test_which_options_count(make_node: MakeNode, shape: KubeletVersion) -> None:
    """The plugin's Register request has none, its GetDevicePluginOptions has both."""
    kubelet, plugin = await make_node(CORE, MEMORY, shape=shape)
    await kubelet.run(pod("a", 1))
    asked = [] if not shape.connects_in_register else ["GetPreferredAllocation", "PreStartContainer"]
    assert [call.rpc for call in kubelet.calls if call.rpc != "Allocate"] == asked
    options = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
    count = len(kubelet.calls)
    await plugin.register_one(kubelet.plugin_folder / "vcuda-core.sock", CORE_RESOURCE, options)
    # Answered before the kubelet has connected, where it connects later; its list shows when it has.
    plugin.core.sick = {"c3"}
    plugin.core.changed.set()
    await kubelet.until(lambda: kubelet.node_status()[CORE_RESOURCE].allocatable == 3)
    await kubelet.run(pod("b", 1))
    assert [call.rpc for call in kubelet.calls[count:]] == ["GetPreferredAllocation", "Allocate", "PreStartContainer"]


@versions(V1_20, V1_24, V1_35)
async def test_a_late_end_of_an_old_stream_spares_its_successor_before_1_25(make_node: MakeNode, shape: KubeletVersion) -> None:
    """Newer kubelets look the client up by resource name when a stream ends, and disconnect the successor."""
    kubelet, plugin = await make_node(CORE, MEMORY, shape=shape)
    await plugin.register_one(kubelet.plugin_folder / "vcuda-core.sock", CORE_RESOURCE)
    await kubelet.stop_stream(CORE_RESOURCE)
    plugin.core.sick = {"c3"}
    plugin.core.changed.set()
    left = 0 if shape in (V1_35, V1_37) else 3
    await kubelet.until(lambda: kubelet.node_status()[CORE_RESOURCE].allocatable == left)


async def test_a_socket_that_registers_too_early_is_refused_for_good_since_1_36(make_node: MakeNode) -> None:
    """The failed registration removes the former client, which then disconnects nothing. tests/e2e/test_restarts has a real kubelet."""
    kubelet, plugin = await make_node(CORE, MEMORY, shape=V1_37)
    kubelet.notices_ends.clear()
    await plugin.stop()
    with pytest.raises(grpc.aio.AioRpcError, match=r"device plugin already connected: .*/vcuda-core\.sock"):
        await plugin.register()
    kubelet.notices_ends.set()
    with pytest.raises(grpc.aio.AioRpcError, match="already connected"):
        await plugin.register()
    assert kubelet.node_status()[CORE_RESOURCE].allocatable == len(CORE)
    await kubelet.restart()
    await plugin.register()


@versions(*ALL)
async def test_what_a_start_deletes(make_node: MakeNode, shape: KubeletVersion) -> None:
    kubelet, _ = await make_node(CORE, MEMORY, shape=shape)
    (kubelet.plugin_folder / "notes.txt").write_text("mine")
    (kubelet.plugin_folder / "folder").mkdir()
    await kubelet.restart()
    left = {path.name for path in kubelet.plugin_folder.iterdir()}
    assert left == {"kubelet.sock", "kubelet_internal_checkpoint", "folder"} | (
        {"notes.txt"} if shape in (V1_35, V1_37) else set()
    )


@versions(V1_25, V1_35)
async def test_calls_to_plugins_name_the_socket_before_1_26(shape: KubeletVersion, tmp_path: Path) -> None:
    authority: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        while not authority.done():
            for event in connection.receive_data(await reader.read(1 << 16)):
                if isinstance(event, RequestReceived):
                    authority.set_result(dict(event.headers)[b":authority"])
        writer.close()

    path = tmp_path / "plugin.sock"
    async with await asyncio.start_unix_server(listen, path):
        client = PluginClient(shape, CORE_RESOURCE, path, DevicePluginOptions())
        with pytest.raises(SimKubeletError):
            await client.connect(30.0)
        client.close()
        assert (await authority).decode() == (str(path) if shape is V1_25 else "localhost")


# -- allocation and the checkpoint -------------------------------------------------------------------------------------------


@versions(*ALL)
async def test_a_pod_that_comes_while_the_plugin_is_away(make_node: MakeNode, shape: KubeletVersion) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY, shape=shape)
    await plugin.stop()
    await kubelet.until(lambda: kubelet.node_status()[CORE_RESOURCE].allocatable == 0)
    message = (await kubelet.admit(pod("a", 2))).message or ""
    if shape in (V1_25, V1_35, V1_37):
        assert "no healthy devices present; cannot allocate unhealthy devices" in message
    else:
        assert f"requested number of devices unavailable for {CORE_RESOURCE}. Requested: 2, Available: 0" in message


@versions(*ALL)
async def test_cdi_devices_are_dropped_before_1_28(make_node: MakeNode, shape: KubeletVersion) -> None:
    kubelet, plugin = await make_node(CORE, MEMORY, shape=shape)
    plugin.core.cdi_device = "vendor/class=name"
    started = pod("a", 1)
    await kubelet.run(started)
    answer = await kubelet.start_container(started, "app")
    assert answer.envs[CORE_RESOURCE]
    assert answer.cdi_devices == (("vendor/class=name",) if shape in (V1_35, V1_37) else ())
    (entry,) = parse_kubelet_checkpoint(kubelet.checkpoint.read_bytes())
    assert entry.response() == answer


@versions(*ALL)
async def test_checkpoint_and_list_have_every_id_and_its_node(make_node: MakeNode, shape: KubeletVersion) -> None:
    kubelet, _ = await make_node(CORE, MEMORY, shape=shape)
    await kubelet.admit(pod("a", 4))
    (entry,) = json.loads(kubelet.checkpoint.read_text())["Data"]["PodDeviceEntries"]
    assert entry["DeviceIDs"] == {"1": ["c0", "c1"], str(shape.no_node): ["c2", "c3"]}
    (ours,) = parse_kubelet_checkpoint(kubelet.checkpoint.read_bytes())
    assert set(ours.device_ids) == {"c0", "c1", "c2", "c3"}
    nowhere = [] if shape.no_node < 0 else [0]
    if shape is V1_20:
        expected = [(frozenset({"c0", "c1"}), [1]), (frozenset({"c2", "c3"}), nowhere)]
    else:
        nodes = {"c0": [1], "c1": [1], "c2": nowhere, "c3": nowhere}
        expected = [(frozenset({device_id}), on) for device_id, on in nodes.items()]
    assert sorted((await listed(kubelet))["a"], key=str) == sorted(expected, key=str)
