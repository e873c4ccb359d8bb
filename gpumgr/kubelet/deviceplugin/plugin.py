"""The DevicePlugin service of one resource: passes the kubelet's calls to the allocator and returns its decisions.

Invariants:
1. Every failure is returned to the kubelet as a gRPC status with a message, which `kubectl describe pod` shows.
2. A decision is completed even if the kubelet cancels the call: decisions run shielded.
3. ListAndWatch sends the newest list after each change. A slow reader delays no other reader, and misses only outdated lists.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.deviceplugin.v1beta1 import DevicePluginOptions
from gpumgr.common.aio import LatestValue, Subscription, run_shielded
from gpumgr.common.errors import KubeletError, Refusal
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.common.rpc.unix_server import UnixServer, receive, unary
from gpumgr.common.units import RESOURCE_NAMES, Resource
from gpumgr.kubelet.deviceplugin import codec
from gpumgr.ledger.answer import ContainerResponse

_log = structlog.get_logger(__name__)

SERVICE: Final = "/v1beta1.DevicePlugin/"
#: Both options are on. The Register request has the same options, since older kubelets read them there.
OPTIONS: Final = DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)

#: Called after each RPC with its name, the resource, the outcome ("ok", a refusal's code, "cancelled") and the duration in seconds.
Observer = Callable[[str, str, str, float], None]


class Allocator(Protocol):
    """Makes the decisions. Each method may raise errors.Refusal. Calls for different resources may run at the same time."""

    async def prefer(self, kind: Resource, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """The ids of `available` to allocate: `size` of them, with all of `must_include`. If fewer are returned, the kubelet chooses the
        rest."""

    async def allocate(self, kind: Resource, device_ids: Sequence[str]) -> ContainerResponse:
        """Grants `device_ids` (at least one, without duplicates) to one container, durably."""

    async def pre_start(self, kind: Resource, device_ids: Sequence[str]) -> None:
        """Prepares the start, or a restart, of the container that holds `device_ids`."""


class DevicePlugin:
    """The service object of one socket. `devices` holds an encoded ListAndWatchResponse."""

    def __init__(
        self,
        kind: Resource,
        allocator: Allocator,
        devices: LatestValue[bytes],
        observe: Observer = lambda *_: None,
    ) -> None:
        self._kind: Resource = kind
        self._allocator = allocator
        self._devices = devices
        self._observe = observe
        self._watches: set[Subscription[bytes]] = set()

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires. Messages stay bytes: this module calls the codec itself."""
        answers = {
            "GetDevicePluginOptions": self._options,
            "GetPreferredAllocation": self._prefer,
            "Allocate": self._allocate,
            "PreStartContainer": self._pre_start,
        }
        methods = {
            SERVICE + rpc: unary(rpc, answer, _log.bind(resource=RESOURCE_NAMES[self._kind]), self._called)
            for rpc, answer in answers.items()
        }
        methods[SERVICE + "ListAndWatch"] = Method(self._list_and_watch, Cardinality.UNARY_STREAM, bytes, bytes)
        return methods

    def end_streams(self) -> None:
        """Ends every ListAndWatch; the kubelet receives a clean end of stream."""
        for watch in self._watches:
            watch.close()

    def _called(self, rpc: str, outcome: str, seconds: float) -> None:
        self._observe(rpc, self._kind, outcome, seconds)

    async def _list_and_watch(self, stream: Any) -> None:
        await receive(stream)
        with self._devices.subscribe() as watch:
            self._watches.add(watch)
            try:
                async for devices in watch:
                    await stream.send_message(devices)
            finally:
                self._watches.discard(watch)

    async def _options(self, _request: bytes) -> bytes:
        return bytes(OPTIONS)

    async def _prefer(self, request: bytes) -> bytes:
        preferences = []
        for wanted in codec.decode_preferred(request):
            if wanted.size < 0:
                raise Refusal("invalid_request", f"the kubelet requested a preference for {wanted.size} devices")
            work = self._allocator.prefer(self._kind, wanted.available, wanted.must_include, wanted.size)
            preferences.append(await run_shielded(work, name=f"prefer_{self._kind}"))
        return codec.encode_preferred(preferences)

    async def _allocate(self, request: bytes) -> bytes:
        containers = codec.decode_allocate(request)
        self._check_ids([device_id for ids in containers for device_id in ids])
        if not all(containers):
            raise Refusal("invalid_request", f"the kubelet requested a container without any id of {RESOURCE_NAMES[self._kind]}")
        responses = []
        for ids in containers:
            work = self._allocator.allocate(self._kind, ids)
            responses.append(await run_shielded(work, name=f"allocate_{self._kind}"))
        return codec.encode_allocate(responses)

    async def _pre_start(self, request: bytes) -> bytes:
        ids = codec.decode_pre_start(request)
        self._check_ids(ids)
        await run_shielded(self._allocator.pre_start(self._kind, ids), name=f"pre_start_{self._kind}")
        return b""

    def _check_ids(self, ids: Sequence[str]) -> None:
        """Raises Refusal if the request names no id, or one id twice."""
        if len(set(ids)) < len(ids):
            twice = next(device_id for device_id, times in Counter(ids).items() if times > 1)
            raise Refusal("invalid_request", f"the kubelet's request names {twice} twice")
        if not ids:
            raise Refusal("invalid_request", f"the kubelet's request names no id of {RESOURCE_NAMES[self._kind]}")


_PROBE_TIMEOUT_SECONDS: Final = 5.0
#: How long the kubelet may take to close its connection after the end of its stream: at least, and at most.
_LEAST_DISCONNECT_SECONDS: Final = 0.5
_MOST_DISCONNECT_SECONDS: Final = 5.0


class PluginServer(UnixServer):
    """A DevicePlugin service on its socket. A server listens once; a new socket requires a new server. Its streams are the ListAndWatch
    calls."""

    def __init__(self, path: Path, plugin: DevicePlugin) -> None:
        super().__init__(path, [plugin], plugin.end_streams)

    async def probe(self) -> None:
        """Connects to this server's socket and requests the options, as the kubelet does during Register. Raises KubeletError."""
        async with UnixChannel(self.path) as channel:
            try:
                options = await channel.unary(
                    SERVICE + "GetDevicePluginOptions", b"", bytes, timeout_seconds=_PROBE_TIMEOUT_SECONDS
                )
            except CALL_FAILURES as error:
                raise kubelet_error("reach gpumgr's own device plugin", self.path, error) from error
        if options != bytes(OPTIONS):
            raise KubeletError(f"another program answers on {self.path}: stop it, or give gpumgr another folder")

    async def drain(self, grace_seconds: float) -> None:
        """Like the base class, but also waits until the kubelet has closed its connection: it does so once it has dropped this
        registration."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_seconds
        self.remove()
        await self.wait_idle(grace_seconds)
        if self.open_streams:
            self.end_streams()
            left = min(deadline - loop.time(), _MOST_DISCONNECT_SECONDS)
            await self.wait_disconnected(max(_LEAST_DISCONNECT_SECONDS, left))
        await super().drain(0.0)
