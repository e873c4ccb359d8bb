"""The DRAResourceHealth service, v1 and v1alpha1: streams the health of the devices, which the kubelet shows in the status of pods."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.drahealth.v1 import DeviceHealth as DeviceHealthMessage
from gpumgr._pb.drahealth.v1 import DeviceIdentifier, HealthStatus, NodeWatchResourcesResponse
from gpumgr.aio import LatestValue
from gpumgr.rpc.calls import receive

#: The kubelet shows a device as Unknown 30 s after its last update.
_REPEAT_SECONDS: Final = 10.0
#: The kubelet cuts longer ones, perhaps inside a character.
_MESSAGE_BYTES: Final = 1024
_STATUS: Final = {None: HealthStatus.UNKNOWN, True: HealthStatus.HEALTHY, False: HealthStatus.UNHEALTHY}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHealth:
    """`healthy` is None if it can't be determined; `message` is a sentence about the state."""

    pool: str
    device: str
    healthy: bool | None
    message: str = ""


class DraHealth:
    """The service object. `devices` has every device of the driver, and no other readers."""

    #: For the registration.
    versions: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

    def __init__(
        self,
        devices: LatestValue[tuple[DeviceHealth, ...]],
        *,
        repeat_seconds: float = _REPEAT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is Unix time in seconds."""
        self._devices = devices
        self._repeat_seconds, self._clock = repeat_seconds, clock

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires."""
        method = Method(self._watch, Cardinality.UNARY_STREAM, bytes, NodeWatchResourcesResponse)
        return {f"/{version}/NodeWatchResources": method for version in self.versions}

    def end_streams(self) -> None:
        """Ends every stream; the kubelet receives a clean end."""
        self._devices.end_readers()

    async def _watch(self, stream: Any) -> None:
        """Sends the whole list at once, on each change, and when nothing has changed for `repeat_seconds`."""
        await receive(stream)
        with self._devices.subscribe() as watch:
            while True:
                try:
                    async with asyncio.timeout(self._repeat_seconds):
                        devices = await anext(watch)
                except TimeoutError:
                    devices = self._devices.value
                except StopAsyncIteration:  # end_streams
                    return
                await stream.send_message(health_message(devices, self._clock()))


def health_message(devices: Sequence[DeviceHealth], now: float) -> NodeWatchResourcesResponse:
    """The health of `devices` as determined at `now`, Unix time in seconds."""
    return NodeWatchResourcesResponse(
        devices=[
            DeviceHealthMessage(
                device=DeviceIdentifier(pool_name=each.pool, device_name=each.device),
                health=HealthStatus(_STATUS[each.healthy]),
                last_updated_time=int(now),
                message=each.message.encode(errors="replace")[:_MESSAGE_BYTES].decode(errors="ignore"),
            )
            for each in devices
        ]
    )
