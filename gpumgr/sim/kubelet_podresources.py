"""The simulated PodResources service: List, Get, and the rate limit (one for all clients together), each if the kubelet's version has
it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, get_args

from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr.common.rpc import wire
from gpumgr.sim.kubelet_devices import DeviceManager
from gpumgr.sim.kubelet_pods import Call, KubeletVersion, SimKubeletError, SimPod

_SERVICE: Final = "v1.PodResourcesLister"
_CALLS_PER_SECOND = 100.0
_BURST = 10.0


class PodResourcesService:
    """The service on pod-resources/kubelet.sock. Errors have the texts of grpc-go and the kubelet."""

    def __init__(
        self, shape: KubeletVersion, devices: DeviceManager, *, listed: Callable[[], Iterable[SimPod]], pods: Mapping[str, SimPod]
    ) -> None:
        """`listed` is called for each `List` and returns its pods; `pods` are all current pods by UID."""
        self._shape, self._devices, self._listed, self._pods = shape, devices, listed, pods
        self._answers: Mapping[Call, Callable[[bytes], bytes]] = {
            "List": self._list,
            "Get": self._get,
        }
        self._tokens = _BURST
        self._refilled = asyncio.get_running_loop().time()
        self.calls = 0
        self.refused = 0

    def __mapping__(self) -> dict[str, Method]:
        """The methods in grpclib's form. Methods that this version lacks are included, since they raise errors with the real texts."""
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

    # The answers are encoded by hand: generated messages with every id of a full node take half a second to build.

    def _list(self, _request: bytes) -> bytes:
        return b"".join([wire.field(1, self._encode_pod(pod)) for pod in self._listed()])

    def _get(self, request: bytes) -> bytes:
        """Answers Get. Unlike List (its callback `listed` frees them), it does not free the ids of ended pods, as in the kubelet."""
        asked: dict[int, list[str]] = {1: [""], 2: [""]}
        wire.scan(request, 0, len(request), asked)
        name, namespace = asked[1][-1], asked[2][-1]
        for pod in self._pods.values():
            if (pod.namespace, pod.name) == (namespace, name):
                return wire.field(1, self._encode_pod(pod))
        raise SimKubeletError(f"pod {name} in namespace {namespace} not found")

    def _encode_pod(self, pod: SimPod) -> bytes:
        """The message PodResources of the pod, with its sidecars and app containers."""
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
    """The messages ContainerDevices of one resource: one for each id and NUMA node, or with `grouped` one for each NUMA node."""
    name = wire.text_field(1, resource)
    entries = []
    for node, ids in ids_by_node:
        topology = b"" if node < 0 else wire.field(3, wire.field(1, b"\x08" + wire.varint(node) if node else b""))
        together = [ids] if grouped else [(device_id,) for device_id in ids]
        entries += [name + b"".join([wire.text_field(2, device_id) for device_id in each]) + topology for each in together]
    return tuple(entries)
