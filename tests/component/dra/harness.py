"""The kubelet's side of a DRA driver, by grpcio and Google's protobuf."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from gpumgr.allocator.claims import ClaimRef, PreparedDevice
from gpumgr.errors import Refusal
from tests.protos import protos_and_services

dra, _ = protos_and_services("dra/v1/api.proto")
health, _ = protos_and_services("drahealth/v1/api.proto")
registration, _ = protos_and_services("pluginregistration/v1/api.proto")

DRIVER = "gpu.gpumgr.io"
PREPARED = PreparedDevice(requests=("gpu",), pool="node1", device="gpu-1", cdi_ids=("a/b=c", "a/b=d"), share_id="share-1")


@dataclass
class FakeClaims:
    """Prepares every claim; `errors` has the refusals and bugs, by UID."""

    errors: dict[str, Exception] = field(default_factory=dict)
    calls: list[tuple[str, ClaimRef]] = field(default_factory=list)

    async def prepare(self, claim: ClaimRef) -> Sequence[PreparedDevice]:
        self._called("prepare", claim)
        return [PREPARED]

    async def unprepare(self, claim: ClaimRef) -> None:
        self._called("unprepare", claim)

    def _called(self, what: str, claim: ClaimRef) -> None:
        self.calls.append((what, claim))
        if claim.uid in self.errors:
            raise self.errors[claim.uid]


REFUSAL = Refusal("conflict", "GPU0 has too little left")


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"unix://{path}", options=[("grpc.default_authority", "localhost")]) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, route: str, request: Any, reply: Any) -> Any:
    method = channel.unary_unary(
        route, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString
    )
    return await method(request, timeout=10)


async def get_info(registry_socket: Path) -> Any:
    async with connected(registry_socket) as channel:
        return await call(
            channel, "/pluginregistration.Registration/GetInfo", registration.InfoRequest(), registration.PluginInfo
        )


async def notify(registry_socket: Path, *, registered: bool, error: str = "") -> None:
    status = registration.RegistrationStatus(plugin_registered=registered, error=error)
    async with connected(registry_socket) as channel:
        route = "/pluginregistration.Registration/NotifyRegistrationStatus"
        await call(channel, route, status, registration.RegistrationStatusResponse)
