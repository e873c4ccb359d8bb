"""A client of the kubelet's PodResources API, which lists the device ids of each container. The agent calls it while the kubelet admits a
pod.

The kubelet limits `List` to 100 calls per second, in bursts of 10, for all clients of the node together; a refused call is retried for a
short time. The answer has every id of the node, so only the names of pods are decoded at once; the ids of a pod are decoded when they are
requested.
"""

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Final

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.channel import CALL_FAILURES, UnixChannel, kubelet_error
from gpumgr.common.units import inner_name
from gpumgr.placement.pods import ClaimKey, Containers, Listing, PodKey

_LIST: Final = "/v1.PodResourcesLister/List"
_RATE_LIMITED: Final = "rejected by rate limit"


def parse_listing(data: bytes, names: Mapping[str, str] = MappingProxyType({})) -> Listing:
    """A ListPodResourcesResponse as a Listing. Raises WireError if the pods can't be read; ids are checked when they are read. `names`: a
    resource's name in the kubelet -> its name in the Listing, if the two differ.

    Kubelets before 1.34 may list a terminated pod and a new pod of the same name: both count as one pod that holds the ids of both.
    """
    places: dict[PodKey, list[tuple[int, int]]] = {}
    for number, start, end in wire.spans(data, 0, len(data)):
        if number == 1:
            places.setdefault(_key(data, start, end, name=1, namespace=2), []).append((start, end))

    def read(pod: PodKey) -> Containers:
        held: dict[str, dict[str, tuple[str, ...]]] = {}
        for start, end in places[pod]:
            for number, container_start, container_end in wire.spans(data, start, end):
                if number == 3:
                    _read_container(data, container_start, container_end, held, names)
        return held

    def read_claims() -> Collection[ClaimKey]:
        spans: Iterable[tuple[int, int]] = chain(*places.values())
        for wanted in (3, 5):  # first the pods' containers, then the claims of the containers
            spans = [(start, end) for span in spans for number, start, end in wire.spans(data, *span) if number == wanted]
        return {_key(data, start, end, name=2, namespace=3) for start, end in spans}

    return Listing(tuple(places), read, read_claims)


def _key(data: bytes, start: int, end: int, *, name: int, namespace: int) -> tuple[str, str]:
    """(namespace, name) of a message with these texts in the given fields."""
    texts = {name: "", namespace: ""}
    for number, text_start, text_end in wire.spans(data, start, end):
        if number in texts:
            texts[number] = wire.text(data, text_start, text_end)
    return texts[namespace], texts[name]


def _read_container(
    data: bytes, start: int, end: int, held: dict[str, dict[str, tuple[str, ...]]], names: Mapping[str, str]
) -> None:
    """Adds one ContainerResources to `held`. Each id has one entry for each of its NUMA nodes; in kubelet 1.20 all ids of a NUMA node
    share one entry."""
    name = ""
    devices: dict[str, list[str]] = {}
    for number, entry_start, entry_end in wire.spans(data, start, end):
        if number == 1:
            name = wire.text(data, entry_start, entry_end)
        elif number == 2:
            resource = ""
            ids: list[str] = []
            for entry, text_start, text_end in wire.spans(data, entry_start, entry_end):
                if entry == 1:
                    resource = wire.text(data, text_start, text_end)
                elif entry == 2:
                    ids.append(wire.text(data, text_start, text_end))
            devices.setdefault(resource, []).extend(ids)
    container = held.setdefault(name, {})
    for resource, ids in devices.items():
        name = inner_name(resource, names)
        container[name] = tuple(dict.fromkeys((*container.get(name, ()), *ids)))


class PodResourcesClient:
    """A client that stays connected, and reconnects after a restart of the kubelet. Create it inside the event loop, and call `close` at
    the end."""

    def __init__(
        self,
        socket: Path,
        *,
        timeout_seconds: float = 1.0,
        rate_limit_budget_seconds: float = 0.3,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`names`: see `parse_listing`."""
        self._names = names
        self._socket = socket
        self._timeout_seconds = timeout_seconds
        self._rate_limit_budget_seconds = rate_limit_budget_seconds
        self._channel = UnixChannel(socket)
        self._last = b"", Listing((), lambda _: {})

    async def list(self) -> Listing:
        """The kubelet's current list; the same object as before if the answer is the same. The call has a side effect in the kubelet: it
        frees the ids of ended pods.

        Raises KubeletError if the kubelet is unavailable, slow, or limits the rate for longer than the budget.
        """
        deadline = asyncio.get_running_loop().time() + self._rate_limit_budget_seconds
        while True:
            try:
                answer = await self._channel.unary(_LIST, b"", bytes, timeout_seconds=self._timeout_seconds)
                if answer != self._last[0]:
                    self._last = answer, parse_listing(answer, self._names)
                return self._last[1]
            except wire.WireError as error:
                raise KubeletError(f"can't read the pod resources from {self._socket}: {error}") from error
            except CALL_FAILURES as error:
                if not _rate_limited(error) or asyncio.get_running_loop().time() >= deadline:
                    raise kubelet_error("list the pod resources", self._socket, error) from error
            await asyncio.sleep(random.uniform(0.010, 0.020))

    def close(self) -> None:
        self._channel.close()


def _rate_limited(error: Exception) -> bool:
    """Whether the kubelet's rate limit refused the call. The text decides, since a response that is too long for the client has the same
    gRPC status."""
    return isinstance(error, GRPCError) and error.status is Status.RESOURCE_EXHAUSTED and _RATE_LIMITED in (error.message or "")
