"""A simulated kubelet with the parts that a device plugin uses, in one of the versions that `kubelet_pods` describes.

It serves `device-plugins/kubelet.sock` and `pod-resources/kubelet.sock` in a folder, writes the device manager's checkpoint, and admits one
pod at a time, with the real order of calls and choices.
"""

import asyncio
import contextlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Literal, Self

from gpumgr._pb.deviceplugin.v1beta1 import RegisterRequest
from gpumgr.common.aio import LatestValue
from gpumgr.common.rpc.server import DrainingServer
from gpumgr.kubelet.plugin import decode_container_response
from gpumgr.ledger.answer import ContainerResponse, merged
from gpumgr.sim.kubelet_devices import Align, DeviceManager, ResourceOrder, SimCall
from gpumgr.sim.kubelet_plugins import DeviceList, Endpoints, PluginClient, PodResourcesService, Registration
from gpumgr.sim.kubelet_pods import (
    V1_35,
    KubeletVersion,
    PodStatus,
    ResourceStatus,
    SimContainer,
    SimKubeletError,
    SimPod,
    load_checkpoint,
    write_checkpoint,
)

__all__ = ["PodStatus", "ResourceStatus", "SimCall", "SimContainer", "SimKubelet", "SimKubeletError", "SimPod"]


class SimKubelet:
    """A kubelet in this event loop. `async with SimKubelet(folder)` starts and kills it; `folder` must have a short path.

    `shape`: the simulated version. `register_error`: Register fails with this text. `register_hangs`: Register never answers.
    `notices_ends`: while not set, the end of a plugin's stream has no effect, as on a busy machine. `statuses`: by UID, without deleted
    pods. `calls`: recorded calls to plugins.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shape: KubeletVersion = V1_35,
        seed: int = 0,
        resource_order: ResourceOrder = "random",
        align: Align | None = None,
    ) -> None:
        self.plugin_folder = folder / "device-plugins"
        self.pod_resources_socket = folder / "pod-resources" / "kubelet.sock"
        self.registration_socket = self.plugin_folder / "kubelet.sock"
        self.checkpoint = self.plugin_folder / "kubelet_internal_checkpoint"
        self.shape = shape
        self.statuses: dict[str, PodStatus] = {}
        self.register_error: str | None = None
        self.register_hangs = False
        self.notices_ends = asyncio.Event()
        self.notices_ends.set()
        self.registrations: list[str] = []
        self._random = Random(seed)
        self._devices = DeviceManager(self._random, shape=shape, resource_order=resource_order, align=align)
        self._dial_timeout_seconds = 10.0
        self._pods: dict[str, SimPod] = {}
        self._admission = asyncio.Lock()
        self._sources_ready = True
        self._changes = LatestValue(0)
        self._servers: list[DrainingServer] = []
        self._watches: dict[asyncio.Task[None], PluginClient] = {}
        self.pod_resources: PodResourcesService | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def calls(self) -> list[SimCall]:
        return self._devices.calls

    # Life cycle

    async def start(self) -> None:
        self.plugin_folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        self.pod_resources_socket.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        for file in self.plugin_folder.iterdir():
            mode = file.lstat().st_mode
            if stat.S_ISSOCK(mode) or (self.shape.clears_folder and file != self.checkpoint and not stat.S_ISDIR(mode)):
                file.unlink()
        self._devices.forget(self.shape, *load_checkpoint(self.checkpoint))
        self._endpoints = Endpoints(self.shape, self._devices.clients, self._devices.disconnect)
        self.pod_resources = PodResourcesService(self.shape, self._devices, listed=self._listed, pods=self._pods)
        services = {self.pod_resources_socket: self.pod_resources, self.registration_socket: Registration(self._register)}
        for path, service in services.items():
            server = DrainingServer([service])
            await server.start(path=str(path))
            self._servers.append(server)
        self._notify()

    async def kill(self) -> None:
        """Ends the kubelet at once: connections are closed, socket files stay."""
        for watch, client in list(self._watches.items()):
            watch.cancel()
            client.close()
        if self._watches:
            await asyncio.wait(self._watches)
        self._watches.clear()
        for server in self._servers:
            await server.close_now()
        self._servers.clear()

    async def restart(self, *, sources_ready: bool = True, shape: KubeletVersion | None = None) -> None:
        """Restarts the kubelet while pods run. It forgets the plugins, but not the checkpoint and the pods. `shape`: the new version.

        `sources_ready` False: the kubelet has not received its pods from the API server yet. Until `finish_sources`, List shows no pod and
        no ids are freed.
        """
        await self.kill()
        self.shape = shape or self.shape
        self._sources_ready = sources_ready
        await self.start()

    def finish_sources(self) -> None:
        """The restarted kubelet has received its pods from the API server."""
        self._sources_ready = True

    async def stop_stream(self, resource: str) -> None:
        """Closes the kubelet's connection to the resource's plugin (of several, the oldest)."""
        for watch, client in list(self._watches.items()):
            if client.resource == resource:
                client.close()
                await asyncio.wait([watch])
                return

    # Pods

    async def admit(self, pod: SimPod) -> PodStatus:
        """Gives `pod` its devices, after all earlier pods. A refused pod is Failed and is not retried."""
        async with self._admission:
            self._pods[pod.uid] = pod
            self._set_status(pod.uid, PodStatus(phase="Pending"))
            try:
                for container in pod.admission_order:
                    if await self._devices.allocate(pod, container, self._free_ended):
                        self._write_checkpoint()
            except SimKubeletError as error:
                message = f"Allocate failed due to {error}, which is unexpected"
                self._set_status(pod.uid, PodStatus(phase="Failed", reason="UnexpectedAdmissionError", message=message))
        return self.statuses[pod.uid]

    async def start_container(self, pod: SimPod, name: str) -> ContainerResponse:
        """Calls PreStartContainer for each resource, and returns what the container runtime would get. If two answers to Allocate have the
        same key, the first answer counts. Raises SimKubeletError."""
        container = pod.container(name)
        await self._devices.pre_start(pod, container)
        holdings = self._devices.held.get(pod.uid, {}).get(name, {}).values()
        return merged(ContainerResponse(), *(decode_container_response(holding.answer) for holding in reversed(holdings)))

    async def run(self, pod: SimPod) -> PodStatus:
        status = await self.admit(pod)
        if status.phase == "Failed":
            return status
        for container in pod.admission_order:
            await self.start_container(pod, container.name)
        self._set_status(pod.uid, PodStatus(phase="Running"))
        return self.statuses[pod.uid]

    def end(self, uid: str, phase: Literal["Succeeded", "Failed"] = "Succeeded") -> None:
        """The pod ends by itself. The next admission or List frees its ids."""
        self._set_status(uid, PodStatus(phase=phase))

    def delete(self, uid: str) -> None:
        """The pod is removed from the API server. The next admission or List frees its ids."""
        self._pods.pop(uid, None)
        self.statuses.pop(uid, None)
        self._notify()

    def pods(self) -> list[SimPod]:
        return list(self._pods.values())

    # What the node shows

    def node_status(self) -> Mapping[str, ResourceStatus]:
        """Every resource that was ever registered; `allocatable` is 0 without a connected plugin."""
        return {
            resource: ResourceStatus(capacity=len(self._devices.devices.get(resource, ())), allocatable=len(healthy))
            for resource, healthy in self._devices.healthy.items()
        }

    def devices(self, resource: str) -> DeviceList:
        return dict(self._devices.devices.get(resource, {}))

    def held(self, uid: str, container: str, resource: str) -> frozenset[str]:
        holding = self._devices.holding(uid, container, resource)
        return holding.ids if holding is not None else frozenset()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns as soon as `condition` is true; checks it after each change of the node or a pod, and each Register."""
        with self._changes.subscribe() as changes:
            async for _ in changes:
                if condition():
                    return

    async def until_allocatable(self, resource: str, count: int = 1) -> None:
        await self.until(lambda: resource in (status := self.node_status()) and status[resource].allocatable >= count)

    # Registration, streams and state

    async def _register(self, request: RegisterRequest) -> None:
        """Connects to the plugin and starts ListAndWatch. Some versions answer Register before they connect."""
        self.registrations.append(request.resource_name)
        self._notify()
        if self.register_hangs:
            await asyncio.Event().wait()
        if self.register_error is not None:
            raise SimKubeletError(self.register_error)
        path = self.plugin_folder / request.endpoint.lstrip("/")
        client = PluginClient(self.shape, request.resource_name, path, request.options)
        if self.shape.connects_in_register:
            await self._endpoints.connect(client, self._dial_timeout_seconds)
            following = self._watch(client)
        else:
            following = self._connect_and_watch(client)
        watch = asyncio.create_task(following, name=f"sim_watch_{request.resource_name}")
        self._watches[watch] = client
        watch.add_done_callback(lambda done: self._watches.pop(done, None))

    async def _connect_and_watch(self, client: PluginClient) -> None:
        """For versions that answer Register first, and do not report a failed connection to the plugin."""
        with contextlib.suppress(SimKubeletError):
            await self._endpoints.connect(client, self._dial_timeout_seconds)
            await self._watch(client)

    async def _watch(self, client: PluginClient) -> None:

        def receive(devices: DeviceList) -> None:
            self._devices.update(client.resource, devices)
            self._write_checkpoint()
            self._notify()

        await client.watch(receive)
        await self.notices_ends.wait()
        self._endpoints.stream_ended(client)
        self._notify()

    def _free_ended(self) -> None:
        if self._sources_ready:
            self._devices.free_ended(self._active())

    def _active(self) -> list[str]:
        return [uid for uid in self._pods if self.statuses[uid].phase in ("Pending", "Running")]

    def _listed(self) -> list[SimPod]:
        """The pods for List, in random order. Frees the ids of ended pods, as the real List does."""
        self._free_ended()
        if not self._sources_ready:
            return []
        listed = list(self._pods) if self.shape.lists_ended else self._active()
        self._random.shuffle(listed)
        return [self._pods[uid] for uid in listed]

    def _write_checkpoint(self) -> None:
        registered = {resource: sorted(healthy) for resource, healthy in self._devices.healthy.items()}
        write_checkpoint(self.checkpoint, self._devices.held, registered)

    def _set_status(self, uid: str, status: PodStatus) -> None:
        self.statuses[uid] = status
        self._notify()

    def _notify(self) -> None:
        self._changes.set(self._changes.value + 1)
