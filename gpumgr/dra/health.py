"""The health of the devices for the kubelet, which shows it in the pods' status (KEP-4680). It evicts nothing; taints of the slice do.

Every message has all devices. A device that is not repeated within 30 s counts as unknown, so the list is repeated before.
Source: Kubernetes 1.37.2, pkg/kubelet/cm/dra/healthinfo.go and k8s.io/kubelet/pkg/apis/dra-health.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.drahealth.v1 import DeviceHealth as DeviceHealthMessage
from gpumgr._pb.drahealth.v1 import DeviceIdentifier, HealthStatus, NodeWatchResourcesResponse
from gpumgr.aio import LatestValue, Subscription

ROUTES: Final = tuple(f"/{version}.DRAResourceHealth/NodeWatchResources" for version in ("v1", "v1alpha1"))
_REPEAT_SECONDS: Final = 10.0
_MAX_MESSAGE: Final = 1024
#: HEALTHY, UNHEALTHY and UNKNOWN.
_STATUS: Final[dict[bool | None, HealthStatus]] = {
    True: HealthStatus(1),
    False: HealthStatus(2),
    None: HealthStatus(0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """`healthy` None: it is not known. `message` says why a device is not healthy."""

    pool: str
    device: str
    healthy: bool | None
    message: str = ""


class DraHealth:
    """The service object. `devices` holds the newest health of all devices."""

    def __init__(
        self,
        devices: LatestValue[tuple[DeviceHealth, ...]],
        *,
        repeat_seconds: float = _REPEAT_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._devices, self._repeat_seconds, self._wall_clock = devices, repeat_seconds, wall_clock
        self._watches: set[Subscription[tuple[DeviceHealth, ...]]] = set()

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires."""
        return {route: Method(self._watch, Cardinality.UNARY_STREAM, bytes, bytes) for route in ROUTES}

    def end_streams(self) -> None:
        """Ends every stream; the kubelet receives a clean end."""
        for watch in self._watches:
            watch.close()

    async def _watch(self, stream: Any) -> None:
        await stream.recv_message()
        with self._devices.subscribe() as watch:
            self._watches.add(watch)
            devices: tuple[DeviceHealth, ...] = ()
            try:
                while True:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._repeat_seconds):
                            devices = await anext(watch)
                    await stream.send_message(bytes(self._encoded(devices)))
            except StopAsyncIteration:
                pass
            finally:
                self._watches.discard(watch)

    def _encoded(self, devices: tuple[DeviceHealth, ...]) -> NodeWatchResourcesResponse:
        return NodeWatchResourcesResponse(
            devices=[
                DeviceHealthMessage(
                    device=DeviceIdentifier(pool_name=each.pool, device_name=each.device),
                    health=_STATUS[each.healthy],
                    last_updated_time=int(self._wall_clock()),
                    message=each.message[:_MAX_MESSAGE],
                )
                for each in devices
            ]
        )
