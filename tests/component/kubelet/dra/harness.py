"""What the component tests share: a scripted port, a kubelet that registers what appears in a folder, a link that runs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.common.units import Amounts
from gpumgr.common.unix_socket import is_served
from gpumgr.kubelet.dra_registration import DraLink, LinkTiming
from gpumgr.kubelet.dra_service import DraHealth, DraPlugin
from gpumgr.ledger.ledger import Allocation, ClaimRef, ClaimRequest
from tests.background import until
from tests.component.kubelet.calls import Scripted, channel_to
from tests.kubelet_api import dra as pb
from tests.kubelet_api import pluginregistration, pluginregistration_services

DRIVER = "gpu.gpumgr.io"
POOL = "node-1"
GPU = "0a1b2c30"
HELD = Allocation(
    id="a1",
    gpus={GPU: Amounts(30, 512)},
    claim=ClaimRequest(namespace="team-a", name="a", uid="uid-a", request="main", share_ids={GPU: "s-1"}),
)
QUICK = LinkTiming(poll_seconds=0.01, patience_seconds=60, unconnected_seconds=0.1)


def claim(name: str) -> ClaimRef:
    return ClaimRef(namespace="team-a", name=name, uid=f"uid-{name}")


@dataclass
class ScriptedClaims(Scripted):
    """`failures` are raised, by the claim's name."""

    failures: dict[str, Exception] = field(default_factory=dict)

    async def prepare(self, claim: ClaimRef, *, deadline: float) -> Sequence[Allocation]:  # noqa: ARG002
        await self.turn("prepare", claim, failure=self.failures.get(claim.name))
        return [HELD]

    async def unprepare(self, claim: ClaimRef) -> None:
        await self.turn("unprepare", claim, failure=self.failures.get(claim.name))


def plugin_of(claims: Any) -> DraPlugin:
    plugin = DraPlugin(POOL)
    plugin.decide_with(claims)
    return plugin


class Caller:
    """Calls one version of the DRA service. The messages of v1beta1 are those of v1 without a field."""

    def __init__(self, channel: Any, version: str = "v1") -> None:
        self._channel, self._service = channel, f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin/"

    def prepare(self, *claims: ClaimRef) -> Any:
        return self._call("Prepare", claims)

    def unprepare(self, *claims: ClaimRef) -> Any:
        return self._call("Unprepare", claims)

    def _call(self, verb: str, claims: Sequence[ClaimRef]) -> Any:
        wanted = [pb.Claim(namespace=each.namespace, name=each.name, uid=each.uid) for each in claims]
        request = getattr(pb, f"Node{verb}ResourcesRequest")(claims=wanted)
        response = getattr(pb, f"Node{verb}ResourcesResponse")
        return self._channel.unary_unary(
            f"{self._service}Node{verb}Resources", request.__class__.SerializeToString, response.FromString
        )(request)


class StubKubelet:
    """Registers the driver's sockets as a kubelet does: GetInfo, a lasting connection to the endpoint, then Notify."""

    def __init__(self, root: Path) -> None:
        self.plugins, self.registry = root / "plugins", root / "plugins_registry"
        for each in (self.plugins, self.registry):
            each.mkdir(exist_ok=True)
        self._channels: list[Any] = []

    def sockets(self) -> list[str]:
        return sorted(
            path.name for folder in (self.registry, self.plugins / DRIVER) if folder.is_dir() for path in folder.iterdir()
        )

    def served(self) -> list[str]:
        """The driver's registration sockets on which a process listens."""
        return [path.name for path in self.registry.glob(f"{DRIVER}-*reg.sock") if is_served(path)]

    async def info(self, name: str = f"{DRIVER}-reg.sock") -> Any:
        async with channel_to(self.registry / name) as channel:
            stub = pluginregistration_services.RegistrationStub(channel)
            return await stub.GetInfo(pluginregistration.InfoRequest(), wait_for_ready=True)

    async def register(self, name: str | None = None, *, hang_up: bool = False, error: str = "") -> Any:
        """Waits for the registration socket: of this name, or one that is served. Returns the connection to the endpoint; with `hang_up` it
        ends before Notify."""
        if name is None:
            await until(lambda: bool(self.served()))
            (name,) = self.served()
        await until((self.registry / name).exists)
        # One connection for both calls, as the kubelet's: a second one could get what gRPC has not closed yet.
        async with channel_to(self.registry / name) as channel:
            stub = pluginregistration_services.RegistrationStub(channel)
            info = await stub.GetInfo(pluginregistration.InfoRequest(), wait_for_ready=True)
            connection = grpc.aio.insecure_channel(f"unix:{info.endpoint}")
            self._channels.append(connection)
            connection.get_state(try_to_connect=True)
            await connection.channel_ready()
            if hang_up:
                await self.end()
            await stub.NotifyRegistrationStatus(pluginregistration.RegistrationStatus(plugin_registered=not error, error=error))
        return connection

    async def end(self) -> None:
        while self._channels:
            await self._channels.pop().close()


@dataclass
class Linked:
    """A running DraLink, and the states that it has reported."""

    link: DraLink
    kubelet: StubKubelet
    claims: ScriptedClaims
    states: list[LinkState]

    async def until(self, condition: Callable[[LinkState], bool]) -> None:
        await until(lambda: condition(self.states[-1]))


@asynccontextmanager
async def linked(
    root: Path,
    *,
    timing: LinkTiming = QUICK,
    instance: str | None = None,
    services: Callable[[ScriptedClaims], Sequence[DraPlugin | DraHealth]] = lambda claims: [plugin_of(claims)],
) -> AsyncIterator[Linked]:
    kubelet, claims, states = StubKubelet(root), ScriptedClaims(), [LinkState()]
    link = DraLink(kubelet.plugins, kubelet.registry, services(claims), instance=instance, timing=timing)
    link.on_state = states.append
    running = asyncio.create_task(link.run())
    try:
        yield Linked(link, kubelet, claims, states)
    finally:
        await link.stop(0.1)
        await running
        await kubelet.end()
