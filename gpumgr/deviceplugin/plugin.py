"""The DevicePlugin service of one resource: the kubelet's calls in, the allocator's decisions out.

Law 1. Every failure reaches the kubelet as a status with a sentence: it ends up in `kubectl describe pod`.
Law 2. A kubelet that hangs up never cuts a decision in half: decisions run shielded.
Law 3. ListAndWatch sends the newest list on each change; a slow reader delays nobody and misses only lists that are outdated.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import structlog
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError

from gpumgr.aio import Latest, Subscription, run_shielded
from gpumgr.allocator.response import ContainerResponse
from gpumgr.deviceplugin import codec
from gpumgr.errors import Refusal, RefusalCode
from gpumgr.rpc.wire import WireError
from gpumgr.units import RESOURCE_OF, Kind

_log = structlog.get_logger(__name__)

SERVICE: Final = "/v1beta1.DevicePlugin/"
#: DevicePluginOptions with both options on; the same stands in the Register request, where older kubelets read them.
OPTIONS: Final = b"\x08\x01\x10\x01"

_STATUS: Final[dict[RefusalCode, Status]] = {
    "invalid_request": Status.INVALID_ARGUMENT,
    "no_fit": Status.RESOURCE_EXHAUSTED,
    "gpu_unhealthy": Status.FAILED_PRECONDITION,
    "conflict": Status.ABORTED,
    "unknown_device": Status.NOT_FOUND,
    "internal": Status.INTERNAL,
}

#: Told after each call: RPC name, resource, outcome ("ok", a refusal's code, "cancelled") and seconds.
Observer = Callable[[str, Kind, str, float], None]


class Allocator(Protocol):
    """Who decides. Each method may raise errors.Refusal; calls of both resources may run at the same time."""

    async def prefer(self, kind: Kind, available: Sequence[str], must_include: Sequence[str], size: int) -> Sequence[str]:
        """The ids to hand out, of `available`: `size` in all, `must_include` among them. Fewer leave the rest to the kubelet."""

    async def allocate(self, kind: Kind, device_ids: Sequence[str]) -> ContainerResponse:
        """Commits exactly `device_ids` (at least one, none twice) for one container."""

    async def pre_start(self, kind: Kind, device_ids: Sequence[str]) -> None:
        """A container that holds `device_ids` is about to start, perhaps not for the first time."""


class DevicePlugin:
    """The service object of one socket. `devices` holds an encoded ListAndWatchResponse."""

    def __init__(
        self,
        kind: Kind,
        allocator: Allocator,
        devices: Latest[bytes],
        observe: Observer = lambda *_: None,
    ) -> None:
        self._kind: Kind = kind
        self._allocator = allocator
        self._devices = devices
        self._observe = observe
        self._watches: set[Subscription[bytes]] = set()

    def __mapping__(self) -> dict[str, Method]:
        """The methods, as grpclib wants them. Messages stay bytes: this module calls the codec itself."""
        unary = {
            "GetDevicePluginOptions": self._options,
            "GetPreferredAllocation": self._prefer,
            "Allocate": self._allocate,
            "PreStartContainer": self._pre_start,
        }
        methods = {
            SERVICE + rpc: Method(self._serving(rpc, answer), Cardinality.UNARY_UNARY, bytes, bytes)
            for rpc, answer in unary.items()
        }
        methods[SERVICE + "ListAndWatch"] = Method(self._list_and_watch, Cardinality.UNARY_STREAM, bytes, bytes)
        return methods

    def end_streams(self) -> None:
        """Lets every ListAndWatch return; the kubelet sees a clean end of stream."""
        for watch in self._watches:
            watch.close()

    def _serving(self, rpc: str, answer: Callable[[bytes], Awaitable[bytes]]) -> Callable[[Any], Awaitable[None]]:
        async def serve(stream: Any) -> None:
            started = time.perf_counter()
            outcome = "cancelled"
            try:
                reply = await answer(await _receive(stream))
                outcome = "ok"
            except Refusal as refusal:
                outcome = refusal.code
                raise GRPCError(_STATUS[refusal.code], str(refusal)) from refusal
            except WireError as error:
                outcome = "invalid_request"
                raise GRPCError(Status.INVALID_ARGUMENT, f"gpumgr can't read this {rpc} request: {error}") from error
            except GRPCError:
                outcome = "invalid_request"
                raise
            except Exception as error:  # a bug must not take the node's admission down; it is told here and nowhere else
                outcome = "internal"
                _log.exception("call_failed", rpc=rpc, resource=RESOURCE_OF[self._kind])
                text = f"gpumgr failed inside {rpc} ({type(error).__name__}: {error}); its log tells more"
                raise GRPCError(Status.INTERNAL, text) from error
            finally:
                self._observe(rpc, self._kind, outcome, time.perf_counter() - started)
            await stream.send_message(reply)

        return serve

    async def _list_and_watch(self, stream: Any) -> None:
        await _receive(stream)
        with self._devices.subscribe() as watch:
            self._watches.add(watch)
            try:
                async for devices in watch:
                    await stream.send_message(devices)
            finally:
                self._watches.discard(watch)

    async def _options(self, _request: bytes) -> bytes:
        return OPTIONS

    async def _prefer(self, request: bytes) -> bytes:
        preferences = []
        for wanted in codec.decode_preferred(request):
            if wanted.size < 0:
                raise Refusal("invalid_request", f"a preference for {wanted.size} devices makes no sense")
            work = self._allocator.prefer(self._kind, wanted.available, wanted.must_include, wanted.size)
            preferences.append(await run_shielded(work, name=f"prefer_{self._kind}"))
        return codec.encode_preferred(preferences)

    async def _allocate(self, request: bytes) -> bytes:
        containers = codec.decode_allocate(request)
        self._check_ids([device_id for ids in containers for device_id in ids])
        if not all(containers):
            raise Refusal("invalid_request", f"the kubelet asked for a container without any id of {RESOURCE_OF[self._kind]}")
        responses = []
        for ids in containers:
            work = self._allocator.allocate(self._kind, ids)
            responses.append(await run_shielded(work, name=f"allocate_{self._kind}"))
        return codec.encode_allocate(responses)

    async def _pre_start(self, request: bytes) -> bytes:
        ids = codec.decode_pre_start(request)
        self._check_ids(ids)
        await run_shielded(self._allocator.pre_start(self._kind, ids), name=f"pre_start_{self._kind}")
        return b""

    def _check_ids(self, ids: Sequence[str]) -> None:
        """Raises Refusal if there is no id, or if one stands there twice."""
        if len(set(ids)) < len(ids):
            twice = next(device_id for device_id, times in Counter(ids).items() if times > 1)
            raise Refusal("invalid_request", f"the kubelet's request names {twice} twice")
        if not ids:
            raise Refusal("invalid_request", f"the kubelet's request names no id of {RESOURCE_OF[self._kind]}")


async def _receive(stream: Any) -> bytes:
    """The one request of a call; a client that closes its side at once sends the empty message in effect.

    Raises GRPCError for what grpclib can't take in: compressed messages, and frames shorter than they say.
    """
    try:
        request: bytes | None = await stream.recv_message()
    except NotImplementedError as error:
        raise GRPCError(Status.UNIMPLEMENTED, "gpumgr takes no compressed messages") from error
    except AssertionError as error:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request is shorter than its frame says") from error
    return request or b""
