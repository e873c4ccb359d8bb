"""The DRAPlugin service: passes the kubelet's claims to the agent and returns its decisions.

Invariants:
1. Every claim of a call has an entry in the answer; a failure is the error of its claim alone, which `kubectl describe pod` shows.
2. A decision is completed even if the kubelet cancels the call: decisions run shielded.
3. v1 and v1beta1 are the same service, except for the share ids that v1beta1 does not have.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, Protocol

import structlog
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr._pb.dra.v1 import (
    Claim,
    Device,
    NodePrepareResourceResponse,
    NodePrepareResourcesRequest,
    NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse,
    NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
)
from gpumgr.aio import run_shielded
from gpumgr.allocator.claims import ClaimRef, PreparedDevice
from gpumgr.errors import Refusal
from gpumgr.rpc import wire

_log = structlog.get_logger(__name__)

Version = Literal["v1", "v1beta1"]
VERSIONS: Final[tuple[Version, ...]] = ("v1", "v1beta1")
#: The gRPC packages of the versions. Source: k8s.io/kubelet v0.37.2, pkg/apis/dra.
PACKAGE: Final = "k8s.io.kubelet.pkg.apis.dra"

#: Called after each claim of a call with the name of the RPC, the outcome ("ok", a refusal's code) and the duration in seconds.
Observer = Callable[[str, str, float], None]


class Claims(Protocol):
    """Makes the decisions. Calls for different claims, and for the same claim, may run at the same time."""

    async def prepare(self, claim: ClaimRef) -> Sequence[PreparedDevice]:
        """The claim's devices on this node. A prepared claim gets the same answer again. Raises Refusal, the claim's error."""
        ...

    async def unprepare(self, claim: ClaimRef) -> None:
        """Frees the claim's devices. An unknown claim is no error. Raises Refusal, the claim's error."""
        ...


class DraPlugin:
    """The service object of the driver's socket."""

    def __init__(self, claims: Claims, observe: Observer = lambda *_: None) -> None:
        self._claims, self._observe = claims, observe

    def __mapping__(self) -> dict[str, Method]:
        """The methods in the form that grpclib requires. Messages stay bytes, so that unreadable ones get a sentence."""
        methods: dict[str, Method] = {}
        for version in VERSIONS:
            route = f"/{PACKAGE}.{version}.DRAPlugin/Node"
            methods[f"{route}PrepareResources"] = Method(self._prepare_of(version), Cardinality.UNARY_UNARY, bytes, bytes)
            methods[f"{route}UnprepareResources"] = Method(self._unprepare, Cardinality.UNARY_UNARY, bytes, bytes)
        return methods

    def _prepare_of(self, version: Version) -> Callable[[Any], Awaitable[None]]:
        async def prepare_one(claim: Claim) -> NodePrepareResourceResponse:
            answer, error = await self._decided("NodePrepareResources", claim, self._claims.prepare)
            devices = [_device(each, with_share_id=version == "v1") for each in answer or ()]
            return NodePrepareResourceResponse(devices=devices, error=error)

        async def prepare(stream: Any) -> None:
            claims = (await _receive(stream, NodePrepareResourcesRequest)).claims
            answers = await asyncio.gather(*map(prepare_one, claims))
            reply = {claim.uid: answer for claim, answer in zip(claims, answers, strict=True)}
            await stream.send_message(bytes(NodePrepareResourcesResponse(claims=reply)))

        return prepare

    async def _unprepare(self, stream: Any) -> None:
        claims = (await _receive(stream, NodeUnprepareResourcesRequest)).claims
        answers = await asyncio.gather(
            *(self._decided("NodeUnprepareResources", claim, self._claims.unprepare) for claim in claims)
        )
        reply = {claim.uid: NodeUnprepareResourceResponse(error=error) for claim, (_, error) in zip(claims, answers, strict=True)}
        await stream.send_message(bytes(NodeUnprepareResourcesResponse(claims=reply)))

    async def _decided(
        self, rpc: str, claim: Claim, decide: Callable[[ClaimRef], Any]
    ) -> tuple[Sequence[PreparedDevice] | None, str]:
        """The decision for one claim, and its error, empty if there is none."""
        ref = ClaimRef(namespace=claim.namespace, name=claim.name, uid=claim.uid)
        started, outcome = time.perf_counter(), "cancelled"
        try:
            answer = await run_shielded(decide(ref), name=rpc)
            outcome = "ok"
        except Refusal as refusal:
            outcome = refusal.code
            return None, str(refusal)
        except Exception as error:  # a bug with one claim must not fail the others; it is logged only here
            outcome = "internal"
            _log.exception("call_failed", rpc=rpc, claim=str(ref))
            return None, f"gpumgr failed inside {rpc} ({type(error).__name__}: {error}); its log has the details"
        finally:
            self._observe(rpc, outcome, time.perf_counter() - started)
        return answer, ""


def _device(prepared: PreparedDevice, *, with_share_id: bool) -> Device:
    return Device(
        request_names=list(prepared.requests),
        pool_name=prepared.pool,
        device_name=prepared.device,
        cdi_device_ids=list(prepared.cdi_ids),
        share_id=prepared.share_id if with_share_id else None,
    )


async def _receive(stream: Any, message: type[wire.M]) -> wire.M:
    """Raises GRPCError for a request that can't be read."""
    try:
        return wire.parse(message, await stream.recv_message() or b"")
    except NotImplementedError as error:
        raise GRPCError(Status.UNIMPLEMENTED, "gpumgr accepts no compressed messages") from error
    except (wire.WireError, AssertionError) as error:  # the latter: shorter than the length in its frame
        raise GRPCError(Status.INVALID_ARGUMENT, f"gpumgr can't read this {message.__name__}: {error}") from error
