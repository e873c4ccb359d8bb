"""What the component tests share: a scripted allocator, a served plugin, and a client with the kubelet's dial options."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc

from gpumgr.agent.writer import Agent
from gpumgr.common.aio import LatestValue
from gpumgr.common.units import Resource
from gpumgr.kubelet.plugin import DevicePlugin, PluginServer, encode_devices
from gpumgr.ledger.answer import ContainerResponse, Mount
from tests.kubelet_api import deviceplugin, deviceplugin_services

RESPONSE = ContainerResponse(
    envs={"NVIDIA_VISIBLE_DEVICES": "0"}, mounts=(Mount(container_path="/usr/local/nvidia", host_path="/run/x", read_only=True),)
)


@dataclass
class ScriptedAllocator:
    """Answers at once, unless `hold` is set (then when it is cleared); `failure` is raised instead of an answer."""

    failure: Exception | None = None
    hold: asyncio.Event | None = None
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[str, Resource, tuple[str, ...]]] = field(default_factory=list)

    async def prefer(self, kind: Resource, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        await self._turn("prefer", kind, must_include)
        rest = sorted(set(available) - set(must_include))
        return [*must_include, *rest][:size]

    async def allocate(self, kind: Resource, device_ids: Sequence[str]) -> ContainerResponse:
        await self._turn("allocate", kind, device_ids)
        return RESPONSE

    async def pre_start(self, kind: Resource, device_ids: Sequence[str]) -> None:
        await self._turn("pre_start", kind, device_ids)

    async def _turn(self, name: str, kind: Resource, ids: Sequence[str]) -> None:
        self.calls.append((name, kind, tuple(ids)))
        self.began.set()
        if self.hold is not None:
            await self.hold.wait()
        self.ended.set()
        if self.failure is not None:
            raise self.failure


@asynccontextmanager
async def kubelet_stub(path: Path) -> AsyncIterator[Any]:
    """A DevicePlugin client as the kubelet makes it: unix socket, no TLS, authority "localhost", 4 MiB limit (the default)."""
    options = [("grpc.default_authority", "localhost")]
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
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
