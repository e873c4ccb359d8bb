"""A device plugin that shares no code with gpumgr: grpcio and Google's protobuf. The stand-in kubelet is proven against it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.sim.kubelet import SimKubelet
from tests.kubelet_api import deviceplugin as pb
from tests.kubelet_api import deviceplugin_services

Prefer = Callable[[Sequence[str], Sequence[str], int], Sequence[str]]


class _Resource:
    """One resource's servicer. Ids map to their NUMA node."""

    def __init__(self, name: str, devices: dict[str, int | None]) -> None:
        self.name = name
        self.devices = devices
        self.sick: set[str] = set()
        self.changed = asyncio.Event()
        self.prefer: Prefer = lambda available, must, size: [*must, *sorted(set(available) - set(must))][:size]
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.cdi_device: str | None = None
        self.hold: asyncio.Event | None = None
        self.allocating = asyncio.Event()

    async def GetDevicePluginOptions(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

    async def ListAndWatch(self, _request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802
        while True:
            message = pb.ListAndWatchResponse()
            for device_id, node in self.devices.items():
                device = message.devices.add(ID=device_id, health="Unhealthy" if device_id in self.sick else "Healthy")
                if node is not None:
                    device.topology.nodes.add(ID=node)
            yield message
            await self.changed.wait()
            self.changed.clear()

    async def GetPreferredAllocation(self, request: Any, _context: Any) -> Any:  # noqa: N802
        [wanted] = request.container_requests
        ids = self.prefer(list(wanted.available_deviceIDs), list(wanted.must_include_deviceIDs), wanted.allocation_size)
        return pb.PreferredAllocationResponse(container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=ids)])

    async def Allocate(self, request: Any, context: Any) -> Any:  # noqa: N802
        [wanted] = request.container_requests
        self.allocating.set()
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal is not None:
            await context.abort(*self.refusal)
        envs = {self.name: ",".join(sorted(wanted.devices_ids)), "SHARED": self.name}
        cdi_devices = [pb.CDIDevice(name=self.cdi_device)] if self.cdi_device is not None else []
        return pb.AllocateResponse(container_responses=[pb.ContainerAllocateResponse(envs=envs, cdi_devices=cdi_devices)])

    async def PreStartContainer(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return pb.PreStartContainerResponse()


class GooglePlugin:
    """Both resources, served and registered while the context lasts."""

    def __init__(self, kubelet: SimKubelet, core: dict[str, int | None], memory: dict[str, int | None]) -> None:
        self._kubelet = kubelet
        self.core = _Resource(CORE_RESOURCE, core)
        self.memory = _Resource(MEMORY_RESOURCE, memory)
        self._servers: list[Any] = []

    async def __aenter__(self) -> Self:
        await self.register()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    async def stop(self) -> None:
        for server in self._servers:
            await server.stop(None)
        self._servers.clear()

    async def register(self) -> None:
        """Serves anew and registers; returns when the kubelet has both lists."""
        await self.stop()
        for resource in (self.core, self.memory):
            path = self._kubelet.plugin_folder / f"{resource.name.rpartition('/')[2]}.sock"
            path.unlink(missing_ok=True)
            server = grpc.aio.server()
            deviceplugin_services.add_DevicePluginServicer_to_server(resource, server)
            server.add_insecure_port(f"unix:{path}")
            await server.start()
            self._servers.append(server)
            await self.register_one(path, resource.name)
        for resource in (self.core, self.memory):
            await self._kubelet.until_allocatable(resource.name, len(resource.devices) - len(resource.sick))

    async def register_one(self, path: Path, name: str, options: Any = None) -> None:
        """One Register call, with DevicePluginOptions or without; raises grpc.aio.AioRpcError."""
        request = pb.RegisterRequest(version="v1beta1", endpoint=path.name, resource_name=name, options=options)
        async with grpc.aio.insecure_channel(f"unix:{self._kubelet.registration_socket}") as channel:
            await deviceplugin_services.RegistrationStub(channel).Register(request)
