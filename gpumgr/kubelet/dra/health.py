"""The DRAResourceHealth service, v1 and v1alpha1: streams the health of the devices, which the kubelet shows in the status of pods."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.drahealth.v1 import DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesResponse
from gpumgr.common.aio import LatestValue
from gpumgr.common.rpc.calls import receive

#: The kubelet shows a device as Unknown 30 s after its last update.
_REPEAT_SECONDS: Final = 10.0
#: The kubelet truncates longer messages, perhaps inside a character.
_MESSAGE_BYTES: Final = 1024

#: Maps a device to the reason why it does not work, or to None if it works.
Faults = Mapping[str, str | None]


class DraHealth:
    """The service object. `faults` has every device of the driver, in the node's `pool`. Each stream is a reader of `faults`."""

    #: The services that the registration names.
    versions: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

    def __init__(
        self,
        pool: str,
        faults: LatestValue[Faults],
        *,
        repeat_seconds: float = _REPEAT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` is Unix time in seconds."""
        self._pool, self._faults, self._repeat_seconds, self._clock = pool, faults, repeat_seconds, clock

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires."""
        method = Method(self._watch, Cardinality.UNARY_STREAM, bytes, NodeWatchResourcesResponse)
        return {f"/{version}/NodeWatchResources": method for version in self.versions}

    async def _watch(self, stream: Any) -> None:
        """Sends the whole list at the start, on each change, and when nothing has changed for `repeat_seconds`. When `faults` ends its
        readers, the kubelet receives a clean end of stream."""
        await receive(stream)
        with self._faults.subscribe() as watch:
            while True:
                try:
                    async with asyncio.timeout(self._repeat_seconds):
                        faults = await anext(watch)
                except TimeoutError:
                    faults = self._faults.value
                except StopAsyncIteration:
                    return
                await stream.send_message(health_message(self._pool, faults, self._clock()))


def health_message(pool: str, faults: Faults, now: float) -> NodeWatchResourcesResponse:
    """The health of the pool's devices as determined at `now`, Unix time in seconds."""
    return NodeWatchResourcesResponse(
        devices=[
            DeviceHealth(
                device=DeviceIdentifier(pool_name=pool, device_name=device),
                health=HealthStatus(HealthStatus.HEALTHY if fault is None else HealthStatus.UNHEALTHY),
                last_updated_time=int(now),
                message=(fault or "").encode(errors="replace")[:_MESSAGE_BYTES].decode(errors="ignore"),
            )
            for device, fault in faults.items()
        ]
    )
