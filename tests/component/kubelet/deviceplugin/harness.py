"""What the component tests share: a scripted allocator, a served plugin, and a client with the kubelet's dial options."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue
from gpumgr.common.units import Resource
from gpumgr.kubelet.plugin import DevicePlugin, PluginServer, encode_devices
from gpumgr.ledger.answer import ContainerResponse, Mount
from tests.component.kubelet.calls import Scripted, channel_to
from tests.kubelet_api import deviceplugin, deviceplugin_services

RESPONSE = ContainerResponse(
    envs={"NVIDIA_VISIBLE_DEVICES": "0"}, mounts=(Mount(container_path="/usr/local/nvidia", host_path="/run/x", read_only=True),)
)


@dataclass
class ScriptedAllocator(Scripted):
    """`failure` is raised instead of an answer."""

    failure: Exception | None = None

    async def prefer(self, kind: Resource, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        await self.turn("prefer", kind, tuple(must_include), failure=self.failure)
        rest = sorted(set(available) - set(must_include))
        return [*must_include, *rest][:size]

    async def allocate(self, kind: Resource, device_ids: Sequence[str]) -> ContainerResponse:
        await self.turn("allocate", kind, tuple(device_ids), failure=self.failure)
        return RESPONSE

    async def pre_start(self, kind: Resource, device_ids: Sequence[str]) -> None:
        await self.turn("pre_start", kind, tuple(device_ids), failure=self.failure)


@asynccontextmanager
async def kubelet_stub(path: Path) -> AsyncIterator[Any]:
    async with channel_to(path) as channel:
        yield deviceplugin_services.DevicePluginStub(channel)


def allocate_request(*ids: str) -> Any:
    return deviceplugin.AllocateRequest(container_requests=[deviceplugin.ContainerAllocateRequest(devices_ids=ids)])


def device_list(count: int, *, sick: int = 0) -> bytes:
    """`count` devices on NUMA node 0, the first `sick` of them unhealthy."""
    return encode_devices([(f"5f3a9c01-m{number}", number >= sick, 0) for number in range(count)])


@dataclass
class Served:
    """A plugin on its socket."""

    path: Path
    server: PluginServer
    allocator: ScriptedAllocator
    devices: LatestValue[bytes]
    outcomes: list[tuple[str, str]]


@asynccontextmanager
async def served_plugin(folder: Path) -> AsyncIterator[Served]:
    allocator = ScriptedAllocator()
    devices = LatestValue(device_list(4))
    outcomes: list[tuple[str, str]] = []
    plugin = DevicePlugin(
        "memory", cast("Agent", allocator), devices, lambda rpc, outcome, _seconds: outcomes.append((rpc, outcome))
    )
    server = PluginServer(folder / "plugin.sock", plugin)
    await server.listen()
    try:
        yield Served(server.path, server, allocator, devices, outcomes)
    finally:
        await server.drain(0)
