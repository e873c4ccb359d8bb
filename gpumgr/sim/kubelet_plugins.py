"""The simulated kubelet's connections: the Registration service, a client for each registered device plugin, and the PodResources service.

Source: pkg/kubelet/cm/devicemanager: plugin/v1beta1 of kubelets 1.35 and 1.37, and endpoint.go before 1.25. Errors have the texts of
grpc-go.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr._pb.deviceplugin.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    DevicePluginOptions,
    Empty,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    RegisterRequest,
    RegistrationBase,
)
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel
from gpumgr.sim.kubelet_pods import Call, KubeletVersion, SimKubeletError, SimPod

_PLUGIN: Final = "/v1beta1.DevicePlugin/"
_PRE_START_TIMEOUT_SECONDS: Final = 30.0

#: id -> (healthy, NUMA nodes)
DeviceList = dict[str, tuple[bool, frozenset[int]]]


if TYPE_CHECKING:
    from gpumgr.sim.kubelet_devices import DeviceManager


class _PathChannel(UnixChannel):
    """Sends the dialled path as authority, as grpc-go does if the client sets none."""

    def __init__(self, path: Path) -> None:
        self._dialled = path
        super().__init__(path)

    @property
    def authority(self) -> str:
        return str(self._dialled)


class PluginClient:
    """One registered plugin. `connect` may replace its `options`."""

    def __init__(self, shape: KubeletVersion, resource: str, path: Path, options: DevicePluginOptions) -> None:
        self._shape = shape
        self.resource = resource
        self.path = path
        self.options = options
        self._channel = _PathChannel(path) if shape.authority_is_path else UnixChannel(path)
        self._stopped = False

    async def connect(self, timeout_seconds: float) -> None:
        """Dials until the socket answers, then calls GetDevicePluginOptions without a deadline (since 1.25). Raises SimKubeletError."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._dial()
        except TimeoutError as error:
            raise SimKubeletError("failed to dial device plugin: context deadline exceeded") from error
        if not self._shape.connects_in_register:
            return
        try:
            self.options = await self._unary("GetDevicePluginOptions", Empty(), DevicePluginOptions)
        except SimKubeletError as error:
            raise SimKubeletError(f"failed to get device plugin options: {error}") from error

    async def watch(self, receive: Callable[[DeviceList], None]) -> None:
        """Passes each list of ListAndWatch to `receive`; returns when the stream ends, for any reason."""
        with contextlib.suppress(*CALL_FAILURES):
            async with self._channel.request(_PLUGIN + "ListAndWatch", Cardinality.UNARY_STREAM, bytes, bytes) as stream:
                await stream.send_message(b"", end=True)
                async for message in stream:
                    receive(parse_devices(message))

    async def prefer(self, available: Sequence[str], must_include: Sequence[str], size: int) -> set[str]:
        request = PreferredAllocationRequest(
            container_requests=[
                ContainerPreferredAllocationRequest(
                    available_device_i_ds=list(available), must_include_device_i_ds=list(must_include), allocation_size=size
                )
            ]
        )
        try:
            answer = await self._unary("GetPreferredAllocation", request, PreferredAllocationResponse)
        except SimKubeletError as error:
            raise SimKubeletError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from error
        return {device_id for container in answer.container_responses[:1] for device_id in container.device_i_ds}

    async def allocate(self, ids: Sequence[str]) -> bytes:
        request = AllocateRequest(container_requests=[ContainerAllocateRequest(devices_ids=list(ids))])
        answer: bytes = await self._unary("Allocate", request, bytes)
        for number, start, end in wire.spans(answer, 0, len(answer)):
            if number == 1:
                return answer[start:end]
        raise SimKubeletError("no containers return in allocation response &AllocateResponse{ContainerResponses:[],}")

    async def pre_start(self, ids: Sequence[str]) -> None:
        request = PreStartContainerRequest(devices_ids=list(ids))
        try:
            await self._unary("PreStartContainer", request, bytes, _PRE_START_TIMEOUT_SECONDS)
        except SimKubeletError as error:
            raise SimKubeletError(f"device plugin PreStartContainer rpc failed with err: {error}") from error

    def close(self) -> None:
        self._stopped = True
        self._channel.close()

    async def _dial(self) -> None:
        while True:
            try:
                await self._channel.__connect__()
                return
            except OSError:
                await asyncio.sleep(0.05)

    async def _unary(self, rpc: str, request: Any, reply_type: Any, timeout_seconds: float | None = None) -> Any:
        if self._stopped:
            raise SimKubeletError(f"endpoint {self.resource} has been stopped")
        try:
            return await self._channel.unary(_PLUGIN + rpc, request, reply_type, timeout_seconds=timeout_seconds)
        except CALL_FAILURES as error:
            raise SimKubeletError(_go_text(error)) from error


def parse_devices(message: bytes) -> DeviceList:
    """Decodes a ListAndWatchResponse by hand: with 2,560 blocks generated code would hold the event loop for 0.25 s."""
    devices: DeviceList = {}
    for number, start, end in wire.spans(message, 0, len(message)):
        if number != 1:
            continue
        ids: list[str] = [""]
        health: list[str] = [""]
        wire.scan(message, start, end, {1: ids, 2: health})
        nodes = frozenset(
            wire.scan(message, node_start, node_end, {}).get(1, 0)
            for field, topology_start, topology_end in wire.spans(message, start, end)
            if field == 3
            for _, node_start, node_end in wire.spans(message, topology_start, topology_end)
        )
        devices[ids[-1]] = (health[-1] == "Healthy", nodes)
    return devices


class Endpoints:
    """The connected plugins. The rules depend on the version of the kubelet. `current`: resource -> the plugin that gets the calls."""

    def __init__(self, shape: KubeletVersion, current: dict[str, PluginClient], devices_gone: Callable[[str], None]) -> None:
        """`devices_gone` gets a resource when its last plugin was disconnected."""
        self._shape, self._current, self._devices_gone = shape, current, devices_gone
        #: The kubelet's `clients` and `endpointStore`, used with `knows_sockets`.
        self._clients: list[PluginClient] = []
        self._stored: dict[str, dict[Path, PluginClient]] = {}

    async def connect(self, client: PluginClient, timeout_seconds: float) -> None:
        self._clients.append(client)
        try:
            await client.connect(timeout_seconds)
            stored = self._stored.setdefault(client.resource, {})
            if self._shape.knows_sockets and client.path in stored:
                raise SimKubeletError(f"device plugin already connected: {client.path}")
        except BaseException:
            self._forget(client)
            client.close()
            raise
        stored[client.path] = self._current[client.resource] = client

    def stream_ended(self, client: PluginClient) -> None:
        """Disconnects `client`, or the plugin that this version disconnects by mistake."""
        if self._shape.knows_sockets:
            self._disconnect_at_socket(client)
            return
        client.close()
        current = self._current.get(client.resource)
        if current is client or (current is not None and self._shape.stream_end_hits_successor):
            current.close()
            self._devices_gone(client.resource)

    def _disconnect_at_socket(self, client: PluginClient) -> None:
        """Source: runClient, disconnectClient and PluginDisconnected of 1.37."""
        found = next((each for each in self._clients if self._same(each, client)), None)
        if found is None:
            client.close()  # the kubelet leaks the connection
            return
        self._forget(found)
        found.close()
        stored = self._stored[client.resource]
        if stored.pop(client.path, None) is None:
            return
        if stored:
            self._current[client.resource] = next(iter(stored.values()))
        else:
            self._devices_gone(client.resource)

    def _forget(self, client: PluginClient) -> None:
        """Removes all clients with this resource and socket, as the kubelet does."""
        self._clients = [each for each in self._clients if not self._same(each, client)]

    @staticmethod
    def _same(one: PluginClient, other: PluginClient) -> bool:
        return (one.resource, one.path) == (other.resource, other.path)


class Registration(RegistrationBase):
    """The service on kubelet.sock. `accept` returns when the answer may be sent."""

    def __init__(self, accept: Callable[[RegisterRequest], Any]) -> None:
        self._accept = accept

    async def register(self, register_request: RegisterRequest) -> Empty:
        """Answers errors as grpc-go answers plain Go errors: status UNKNOWN and the text."""
        try:
            if register_request.version != "v1beta1":
                raise SimKubeletError(
                    f'requested API version "{register_request.version}" is not supported by kubelet. '
                    'Supported version is ["v1beta1"]'
                )
            if "/" not in register_request.resource_name or "kubernetes.io/" in register_request.resource_name:
                raise SimKubeletError(f'the ResourceName "{register_request.resource_name}" is invalid')
            await self._accept(register_request)
        except SimKubeletError as error:
            raise GRPCError(Status.UNKNOWN, str(error)) from error
        return Empty()


_GO_NAMES: Final = {Status.OK: "OK", Status.CANCELLED: "Canceled"}


def _go_text(error: Exception) -> str:
    match error:
        case GRPCError():
            code = _GO_NAMES.get(error.status, error.status.name.title().replace("_", ""))
            return f"rpc error: code = {code} desc = {error.message or ''}"
        case TimeoutError():
            return "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
        case _:
            return "rpc error: code = Unavailable desc = error reading from server: EOF"


_SERVICE: Final = "v1.PodResourcesLister"
_CALLS_PER_SECOND = 100.0
_BURST = 10.0


class PodResourcesService:
    def __init__(
        self,
        shape: KubeletVersion,
        devices: "DeviceManager",
        *,
        listed: Callable[[], Iterable[SimPod]],
        pods: Mapping[str, SimPod],
    ) -> None:
        """`listed` returns the pods for a `List`; `pods`: all current pods by UID."""
        self._shape, self._devices, self._listed, self._pods = shape, devices, listed, pods
        self._answers: Mapping[Call, Callable[[bytes], bytes]] = {"List": self._list, "Get": self._get}
        self._tokens = _BURST
        self._refilled = asyncio.get_running_loop().time()
        self.calls = 0
        self.refused = 0

    def __mapping__(self) -> dict[str, Method]:
        """Includes the methods that this version of the kubelet lacks: they answer with the kubelet's error."""
        return {
            f"/{_SERVICE}/{call}": Method(self._serving(call), Cardinality.UNARY_UNARY, bytes, bytes) for call in get_args(Call)
        }

    def _serving(self, call: Call) -> Callable[[Any], Awaitable[None]]:
        async def serve(stream: Any) -> None:
            request = await stream.recv_message()
            self._check(call)
            try:
                answer = self._answers[call](request or b"")
            except SimKubeletError as error:
                raise GRPCError(Status.UNKNOWN, str(error)) from error
            await stream.send_message(answer)

        return serve

    def _check(self, call: Call) -> None:
        if not self._shape.calls:
            raise GRPCError(Status.UNIMPLEMENTED, f"unknown service {_SERVICE}")
        if call not in self._shape.calls:
            raise GRPCError(Status.UNIMPLEMENTED, f"unknown method {call} for service {_SERVICE}")
        self.calls += 1
        if self._shape.limits_rate:
            self._take_token()

    def _take_token(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tokens = min(_BURST, self._tokens + (now - self._refilled) * _CALLS_PER_SECOND)
        self._refilled = now
        if self._tokens < 1.0:
            self.refused += 1
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "rejected by rate limit")
        self._tokens -= 1.0

    # The answers are encoded by hand, because generated messages with all ids of a full node take 0.5 s.

    def _list(self, _request: bytes) -> bytes:
        return b"".join([wire.field(1, self._encode_pod(pod)) for pod in self._listed()])

    def _get(self, request: bytes) -> bytes:
        """As in the kubelet, Get does not free the ids of ended pods, and List does."""
        asked: dict[int, list[str]] = {1: [""], 2: [""]}
        wire.scan(request, 0, len(request), asked)
        name, namespace = asked[1][-1], asked[2][-1]
        for pod in self._pods.values():
            if (pod.namespace, pod.name) == (namespace, name):
                return wire.field(1, self._encode_pod(pod))
        raise SimKubeletError(f"pod {name} in namespace {namespace} not found")

    def _encode_pod(self, pod: SimPod) -> bytes:
        held = self._devices.held.get(pod.uid, {})
        containers = [
            wire.text_field(1, container.name)
            + b"".join(
                [
                    wire.field(2, entry)
                    for resource, holding in held.get(container.name, {}).items()
                    for entry in self._encode_ids(resource, holding.ids_by_node)
                ]
            )
            for container in pod.admission_order
            if container.kind != "init"
        ]
        names = wire.text_field(1, pod.name) + wire.text_field(2, pod.namespace)
        return names + b"".join([wire.field(3, container) for container in containers])

    def _encode_ids(self, resource: str, ids_by_node: Mapping[int, tuple[str, ...]]) -> tuple[bytes, ...]:
        return _encode_devices(resource, tuple(ids_by_node.items()), grouped=self._shape.groups_ids)


@lru_cache(maxsize=1024)
def _encode_devices(resource: str, ids_by_node: tuple[tuple[int, tuple[str, ...]], ...], *, grouped: bool) -> tuple[bytes, ...]:
    """ContainerDevices of one resource: one message for each id and NUMA node, or with `grouped` one for each NUMA node."""
    name = wire.text_field(1, resource)
    entries = []
    for node, ids in ids_by_node:
        topology = b"" if node < 0 else wire.field(3, wire.field(1, b"\x08" + wire.varint(node) if node else b""))
        together = [ids] if grouped else [(device_id,) for device_id in ids]
        entries += [name + b"".join([wire.text_field(2, device_id) for device_id in each]) + topology for each in together]
    return tuple(entries)
