"""The DRAPlugin service, v1 and v1beta1: passes the kubelet's claims to NodeClaims, and returns its answers.

Invariants:
1. Every requested claim has an entry in the response. A failure is the `error` of its claim alone; `kubectl describe pod` shows it.
2. A call is completed even if the kubelet cancels it. The claims of a call are decided concurrently.
3. Only a malformed request is answered with a gRPC status.

The service DRAResourceHealth, v1 and v1alpha1, streams the health of the devices to the kubelet, which shows it in the status of pods.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.drahealth.v1 import DeviceHealth, DeviceIdentifier, HealthStatus, NodeWatchResourcesResponse
from gpumgr._pb.k8s.io.kubelet.pkg.apis.dra import v1
from gpumgr.agent.claims import NodeClaims
from gpumgr.common.aio import LatestValue, run_shielded
from gpumgr.common.errors import Refusal
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.unix_server import Observe, answering, failed_inside, receive
from gpumgr.enforcement import cdi
from gpumgr.ledger.claims import device_name
from gpumgr.ledger.ledger import Allocation, ClaimRef

#: An unchanged list is repeated, because the kubelet shows a device as Unknown 30 s after its last update.
_REPEAT_SECONDS: Final = 10.0
#: The kubelet truncates longer messages, perhaps inside a character.
_MESSAGE_BYTES: Final = 1024

#: Device -> why it does not work; None if it works.
Faults = Mapping[str, str | None]


class DraHealth:
    """The service object. `faults` has every device of the node's `pool`."""

    versions: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")

    def __init__(
        self,
        pool: str,
        faults: LatestValue[Faults],
        *,
        repeat_seconds: float = _REPEAT_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` returns unix seconds."""
        self._pool, self._faults, self._repeat_seconds, self._clock = pool, faults, repeat_seconds, clock

    def __mapping__(self) -> dict[str, Method]:
        method = Method(self._watch, Cardinality.UNARY_STREAM, bytes, NodeWatchResourcesResponse)
        return {f"/{version}/NodeWatchResources": method for version in self.versions}

    async def _watch(self, stream: Any) -> None:
        """Sends the whole list at the start, on each change, and every `repeat_seconds`. Ends when `faults` ends its readers."""
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
    """The health of the pool's devices at `now` (unix seconds)."""
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


_log = structlog.get_logger(__name__)

#: The kubelet ends a call after 45 s without a reason in the pod's events, so the agent ends it earlier.
WAIT_SECONDS: Final = 40.0
#: How much longer than WAIT_SECONDS a call may take, so that the limits of a granted claim can still be put in place.
START_SECONDS: Final = 3.0

_Decision = Callable[[ClaimRef], Awaitable[bytes]]


class DraPlugin:
    """The service object of the DRA socket. Calls wait until `decide_with` was called."""

    #: The kubelet uses the first version that it knows. The messages are the same, but with v1beta1 it ignores the share's id.
    versions: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")

    def __init__(self, pool: str, *, wait_seconds: float = WAIT_SECONDS) -> None:
        """Must be called inside a running event loop. `pool`: the node's pool of devices."""
        self._pool, self._wait_seconds = pool, wait_seconds
        self._claims: asyncio.Future[NodeClaims] = asyncio.get_running_loop().create_future()
        #: Why the agent can't decide yet.
        self.waits_for = "the agent starts"
        #: The outcome of a call is the RefusalCode of the first claim that failed.
        self.observe: Observe = lambda *_: None

    def decide_with(self, claims: NodeClaims) -> None:
        self._claims.set_result(claims)

    def __mapping__(self) -> dict[str, Method]:
        """The form that grpclib requires. Messages stay bytes, because this module decodes requests itself."""
        methods = {}
        for version in self.versions:
            service = f"/k8s.io.kubelet.pkg.apis.dra.{version}/"
            for rpc, decide, response in (
                ("NodePrepareResources", self._prepare, v1.NodePrepareResourceResponse),
                ("NodeUnprepareResources", self._unprepare, v1.NodeUnprepareResourceResponse),
            ):
                serve = self._serving(rpc, decide, response)
                methods[service + rpc] = Method(serve, Cardinality.UNARY_UNARY, bytes, bytes)
        return methods

    def _serving(
        self, rpc: str, decide: _Decision, response: type[v1.NodePrepareResourceResponse | v1.NodeUnprepareResourceResponse]
    ) -> Callable[[Any], Awaitable[None]]:
        async def answer(claim: ClaimRef) -> tuple[str, bytes]:
            try:
                return "ok", await decide(claim)
            except Refusal as refusal:
                outcome, text = str(refusal.code), str(refusal)
            except Exception as error:  # a bug in one claim's decision must not fail other claims; only this line logs it
                _log.exception("claim_failed", rpc=rpc, claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)
                outcome, text = "internal", failed_inside(rpc, error)
            # The kubelet takes an empty error as success. An error that is not UTF-8 would fail the whole call.
            return outcome, bytes(response(error=text.encode(errors="replace").decode() or "no reason given"))

        async def answer_all(claims: Sequence[ClaimRef]) -> list[tuple[str, bytes]]:
            return await asyncio.gather(*map(answer, claims))

        async def serve(stream: Any) -> None:
            with answering(rpc, _log, lambda *called: self.observe(*called)) as call:
                claims = decode_claims(await receive(stream))
                answers = await run_shielded(answer_all(claims), name=rpc)
                call.outcome = next((outcome for outcome, _ in answers if outcome != "ok"), "ok")
            entries = [(claim.uid, response) for claim, (_, response) in zip(claims, answers, strict=True)]
            await stream.send_message(
                b"".join(wire.field(1, wire.text_field(1, uid) + wire.field(2, each)) for uid, each in entries)
            )

        return serve

    async def _prepare(self, claim: ClaimRef) -> bytes:
        deadline = time.monotonic() + self._wait_seconds
        claims = await self._decider(deadline)
        try:
            async with asyncio.timeout(deadline - time.monotonic() + START_SECONDS):
                prepared = await run_shielded(claims.prepare(claim, deadline=deadline), name="prepare")
        except TimeoutError:
            text = f"not prepared within {self._wait_seconds + START_SECONDS:g} s; the preparation continues, and the kubelet tries again"
            raise Refusal("internal", text) from None
        return bytes(v1.NodePrepareResourceResponse(devices=devices_of(prepared, self._pool)))

    async def _unprepare(self, claim: ClaimRef) -> bytes:
        await (await self._decider(time.monotonic() + self._wait_seconds)).unprepare(claim)
        return bytes(v1.NodeUnprepareResourceResponse())

    async def _decider(self, deadline: float) -> NodeClaims:
        """Raises Refusal."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await asyncio.shield(self._claims)
        except TimeoutError:
            raise Refusal("internal", f"no decision within {self._wait_seconds:g} s: {self.waits_for}") from None


def devices_of(prepared: Sequence[Allocation], pool: str) -> list[v1.Device]:
    """The devices of a claim's allocations, in the kubelet's form."""
    return [
        v1.Device(
            request_names=[claim.request],
            pool_name=pool,
            device_name=device_name(gpu),
            cdi_device_ids=[cdi.device_name(allocation.id, gpu)],
            share_id=claim.share_ids.get(gpu),
        )
        for allocation in prepared
        if (claim := allocation.claim) is not None
        for gpu in allocation.gpus
    ]


def decode_claims(request: bytes) -> list[ClaimRef]:
    """The claims of a Node{Prepare,Unprepare}ResourcesRequest. Raises WireError."""
    return [_claim(request, start, end) for number, start, end in wire.spans(request, 0, len(request)) if number == 1]


def _claim(request: bytes, start: int, end: int) -> ClaimRef:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: []}
    wire.scan(request, start, end, texts)
    namespace, uid, name = ((found or [""])[-1] for found in texts.values())
    return ClaimRef(namespace=namespace, name=name, uid=uid)
