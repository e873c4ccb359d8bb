"""The DRAPlugin service, v1 and v1beta1: passes each claim of the kubelet's calls to a port, and returns its answers.

Invariants:
1. Every requested claim has an entry in the response. A failure is the `error` of its claim alone; `kubectl describe pod` shows it.
2. A call that has begun is completed even if the kubelet cancels it. The claims of a call are decided at the same time.
3. Only malformed requests are returned as a gRPC status.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import structlog
from grpclib.const import Cardinality
from grpclib.const import Handler as Method

from gpumgr._pb.k8s.io.kubelet.pkg.apis.dra.v1 import (
    Device,
    NodePrepareResourceResponse,
    NodeUnprepareResourceResponse,
)
from gpumgr.aio import run_shielded
from gpumgr.allocator.claims import PreparedDevice
from gpumgr.allocator.ledger import ClaimRef
from gpumgr.errors import Refusal
from gpumgr.rpc import wire
from gpumgr.rpc.calls import Observe, answering, failed_inside, receive

_log = structlog.get_logger(__name__)

#: The response for one claim, encoded.
_Decision = Callable[[ClaimRef], Awaitable[bytes]]


class Claims(Protocol):
    """Makes the decisions. Each method may raise errors.Refusal; calls for any claims may run at the same time."""

    async def prepare(self, claim: ClaimRef) -> Sequence[PreparedDevice]:
        """Makes the devices of an allocated claim available; again the same ones for a claim that is prepared."""

    async def unprepare(self, claim: ClaimRef) -> None:
        """Reverts `prepare`; does nothing for an unknown claim."""


class DraPlugin:
    """The service object of the DRA socket."""

    #: For the registration. The kubelet uses the first one that it has. The messages are the same, but in v1beta1 the kubelet does not know
    #: the field with the share's id, and skips it.
    versions: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")

    def __init__(self, pool: str, claims: Claims, observe: Observe = lambda *_: None) -> None:
        """`pool`: the name of the node's pool of devices. `observe` gets the RefusalCode of the first claim that failed as the outcome of
        its call."""
        self._pool, self._claims, self._observe = pool, claims, observe

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires. Messages stay bytes: this module decodes requests itself."""
        methods = {}
        for version in self.versions:
            service = f"/k8s.io.kubelet.pkg.apis.dra.{version}/"
            for rpc, decide, response in (
                ("NodePrepareResources", self._prepare, NodePrepareResourceResponse),
                ("NodeUnprepareResources", self._unprepare, NodeUnprepareResourceResponse),
            ):
                serve = self._serving(rpc, decide, response)
                methods[service + rpc] = Method(serve, Cardinality.UNARY_UNARY, bytes, bytes)
        return methods

    def _serving(
        self, rpc: str, decide: _Decision, response: type[NodePrepareResourceResponse | NodeUnprepareResourceResponse]
    ) -> Callable[[Any], Awaitable[None]]:
        async def answer(claim: ClaimRef) -> tuple[str, bytes]:
            """The outcome and the response for one claim."""
            try:
                return "ok", await decide(claim)
            except Refusal as refusal:
                outcome, text = str(refusal.code), str(refusal)
            except Exception as error:  # a bug must not fail the other claims; it is logged only here
                _log.exception("claim_failed", rpc=rpc, claim=f"{claim.namespace}/{claim.name}", uid=claim.uid)
                outcome, text = "internal", failed_inside(rpc, error)
            # An empty error would be a success, and one that is not UTF-8 would fail the call.
            return outcome, bytes(response(error=text.encode(errors="replace").decode() or "no reason given"))

        async def answer_all(claims: Sequence[ClaimRef]) -> list[tuple[str, bytes]]:
            return await asyncio.gather(*map(answer, claims))

        async def serve(stream: Any) -> None:
            with answering(rpc, _log, self._observe) as call:
                claims = decode_claims(await receive(stream))
                answers = await run_shielded(answer_all(claims), name=rpc)
                call.outcome = next((outcome for outcome, _ in answers if outcome != "ok"), "ok")
            entries = [(claim.uid, response) for claim, (_, response) in zip(claims, answers, strict=True)]
            await stream.send_message(
                b"".join(wire.field(1, wire.text_field(1, uid) + wire.field(2, each)) for uid, each in entries)
            )

        return serve

    async def _prepare(self, claim: ClaimRef) -> bytes:
        prepared = await self._claims.prepare(claim)
        devices = [
            Device(
                request_names=list(each.requests),
                pool_name=self._pool,
                device_name=each.device,
                cdi_device_ids=list(each.cdi_ids),
                share_id=each.share_id,
            )
            for each in prepared
        ]
        return bytes(NodePrepareResourceResponse(devices=devices))

    async def _unprepare(self, claim: ClaimRef) -> bytes:
        await self._claims.unprepare(claim)
        return bytes(NodeUnprepareResourceResponse())


def decode_claims(request: bytes) -> list[ClaimRef]:
    """Node{Prepare,Unprepare}ResourcesRequest -> its claims. Raises WireError, or Refusal for claims that are incomplete or there twice."""
    claims = [_claim(request, start, end) for number, start, end in wire.spans(request, 0, len(request)) if number == 1]
    for claim in claims:
        if not (claim.namespace and claim.name and claim.uid):
            raise Refusal("invalid_request", f"the kubelet's request has a claim without namespace, name or uid: {claim}")
    for uid, times in Counter(claim.uid for claim in claims).items():
        if times > 1:
            raise Refusal("invalid_request", f"the kubelet's request names the claim with uid {uid} {times} times")
    return claims


def _claim(request: bytes, start: int, end: int) -> ClaimRef:
    texts: dict[int, list[str]] = {1: [], 2: [], 3: []}
    wire.scan(request, start, end, texts)
    namespace, uid, name = ((found or [""])[-1] for found in texts.values())
    return ClaimRef(namespace=namespace, name=name, uid=uid)
