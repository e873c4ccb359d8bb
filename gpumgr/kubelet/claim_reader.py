"""Reads a ResourceClaim from the API server when the kubelet prepares it: the devices that kube-scheduler allocated on this node, and the
pods.

A GET reads the claim, because no watch selects the claims of one node. The kubelet waits for 45 s and retries a failed claim after more
than a minute, so transient faults are retried here.

The kubelet prepares a pod's claims again at once when the pod changes. So if a claim is still not prepared some seconds after its pod's
binding, `WaitingPods` annotates the pod, again and again with growing pauses. There are two causes. Either the driver was not registered,
or the API server hid the claim from the kubelet ("no relationship found between node and this object"), because the authorizer had not
processed the pod's binding yet (seen with 40 pods at once). A claim in the ledger is prepared, so a pod that still waits does not wait for
this claim.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn, get_args

import msgspec
import structlog

from gpumgr.common.errors import Refusal
from gpumgr.common.foreign_text import UnreadableText, convert
from gpumgr.common.units import CORES_PER_GPU, DRA_DRIVER
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, failure_text, items_of, unreadable_text
from gpumgr.kube.pods import parse_quantity
from gpumgr.ledger.claims import AllocatedClaim, ClaimShare, Share
from gpumgr.ledger.ledger import ClaimRef
from gpumgr.placement.pods import TERMINAL_PHASES, ClaimKey, PodKey, PodView
from gpumgr.settings.schema import BackendName

_MEBIBYTE: Final = 1 << 20
#: The most claims that are read at a time; each connection stays open.
_CONNECTIONS: Final = 8
#: The timeout of one try; the first and the longest pause between tries.
_TRY_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = (0.1, 2.0)
#: The statuses from 300 to 499 that are retried. All statuses outside that range are retried, even 200: then the body was not JSON.
_TRANSIENT: Final = (401, 408, 429)


class ShareConfig(msgspec.Struct, rename="camel", frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of a DeviceClass for this driver ("opaque" in Kubernetes' terms). `enforcement`: the mechanism that limits the
    shares of the class, if it is not the node's own."""

    api_version: Literal["gpumgr.io/v1"]
    kind: Literal["ShareConfig"]
    enforcement: BackendName | None = None


class ClaimReader:
    """`pool`: the node's pool of devices. Transient faults are retried until the deadline, in monotonic seconds."""

    def __init__(self, server: ApiServer, pool: str) -> None:
        self._server, self._pool = server, pool
        self._free = asyncio.Semaphore(_CONNECTIONS)

    async def read(self, claim: ClaimRef, *, deadline: float) -> AllocatedClaim:
        """Raises Refusal."""
        found = await self._find(claim_path(claim.namespace, claim.name), {}, f"claim {claim}", deadline)
        return allocated_claim(claim, self._pool, found)

    async def needs_claims(self, pod: PodKey, uid: str, *, deadline: float) -> bool:
        """Whether the pod with this UID exists, has not ended and is not being deleted. Raises Refusal. The
        request is a list, because the agent has the right to list pods, but not to get one."""
        query = {"fieldSelector": f"metadata.name={pod[1]}"}
        answer = await self._find(f"/api/v1/namespaces/{pod[0]}/pods", query, f"pod {pod[0]}/{pod[1]}", deadline)
        try:
            return any(
                (meta := each["metadata"])["uid"] == uid
                and not meta.get("deletionTimestamp")
                and (each.get("status") or {}).get("phase") not in TERMINAL_PHASES
                for each in items_of(answer)
            )
        except UNREADABLE as error:
            what = f"the API server's answer about pod {pod[0]}/{pod[1]} has another structure"
            raise Refusal("internal", f"{what}: {unreadable_text(error)}") from error

    async def _find(self, path: str, query: Mapping[str, str], what: str, deadline: float) -> dict[str, Any] | None:
        pause, why = _PAUSE_SECONDS[0], ""
        while (left := deadline - time.monotonic()) > 0:
            wanted = 0.0
            try:
                async with asyncio.timeout(min(left, _TRY_SECONDS)), self._free:
                    return await self._server.find(path, query=query)
            except AnswerError as error:
                why, wanted = str(error), error.retry_after_seconds
                if 300 <= error.status < 500 and error.status not in _TRANSIENT:
                    raise Refusal("internal", f"the API server refuses to show {what}: {error}") from error
            except API_FAILURES as error:
                why = failure_text(error)
            await asyncio.sleep(max(0.0, min(max(wanted, pause), deadline - time.monotonic())))
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        why = why or "no answer in time"
        raise Refusal("internal", f"{what} can't be read from the API server ({why}); the kubelet tries again in about a minute")


def claim_path(namespace: str, name: str) -> str:
    return f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}"


async def find_shares(server: ApiServer, pool: str, namespace: str, name: str) -> tuple[str, set[Share]]:
    """The UID of the present claim of this name ("" if there is none), and the claim's shares in this pool: (device, share id or None).
    Raises UNREADABLE, and what requests raise."""
    if (claim := await server.find(claim_path(namespace, name))) is None:
        return "", set()
    devices = ((claim.get("status") or {}).get("allocation") or {}).get("devices", {})
    return str(claim["metadata"]["uid"]), {(str(each.get("device")), each.get("shareID")) for each in _own_results(devices, pool)}


def _own_results(devices: Mapping[str, Any], pool: str) -> Sequence[Mapping[str, Any]]:
    return [each for each in devices.get("results") or () if (each["driver"], each["pool"]) == (DRA_DRIVER, pool)]


def allocated_claim(ref: ClaimRef, pool: str, item: Mapping[str, Any] | None) -> AllocatedClaim:
    """What the claim allocates on this node. `item`: the claim in the API server; None if there is none. Raises Refusal if `ref` can't be
    prepared."""
    try:
        return _decoded(ref, pool, item)
    except _Unusable as error:
        raise Refusal("invalid_request", f"claim {ref} {error}; delete the pod, so that it is scheduled again") from error
    except UNREADABLE as error:
        text = f"claim {ref} has a structure that can't be read ({unreadable_text(error)}); report this with the claim's YAML"
        raise Refusal("invalid_request", text) from error


class _Unusable(Exception):
    """The claim can't be prepared. The text continues a sentence that begins with "claim NAMESPACE/NAME"."""


def _decoded(ref: ClaimRef, pool: str, item: Mapping[str, Any] | None) -> AllocatedClaim:
    """Raises _Unusable, and UNREADABLE for another structure."""
    if item is None:
        raise _Unusable("no longer exists")
    if item["metadata"]["uid"] != ref.uid:
        raise _Unusable(f"with UID {ref.uid} no longer exists: the present claim of this name has another UID")
    status = item.get("status") or {}
    if not (allocation := status.get("allocation")):
        raise _Unusable("is not allocated")
    consumers = [each for each in status.get("reservedFor") or () if each["resource"] == "pods" and not each.get("apiGroup")]
    if not consumers:
        raise _Unusable("is not reserved for any pod")
    devices = allocation["devices"]
    if not (own := _own_results(devices, pool)):
        raise _Unusable(f"has no device of {DRA_DRIVER} on node {pool}")
    return AllocatedClaim(
        ref=ref,
        pods=tuple(((ref.namespace, str(each["name"])), str(each["uid"])) for each in consumers),
        shares=tuple(_share(each) for each in own),
        enforcement=_enforcement(own, devices.get("config") or ()),
    )


def _share(result: Mapping[str, Any]) -> ClaimShare:
    device, admin = str(result["device"]), result.get("adminAccess") is True
    consumed = {"cores": "0", "memory": "0"} if admin else result.get("consumedCapacity") or {}
    if not (consumed or result.get("shareID")):  # the device is not shared, so the claim has all of it
        # `grant_claim` replaces the memory of a whole GPU.
        consumed = {"cores": str(CORES_PER_GPU), "memory": "0"}
    if missing := {"cores", "memory"} - consumed.keys():
        raise _Unusable(
            f"does not say how much {' and '.join(sorted(missing))} it has of {device}: the feature gate DRAConsumableCapacity must be on "
            "in kube-apiserver and kube-scheduler"
        )
    try:
        cores, memory = parse_quantity(str(consumed["cores"])), parse_quantity(str(consumed["memory"]))
    except ValueError as error:
        raise _Unusable(f"has amounts of {device} that can't be used: {error}") from error
    if memory % _MEBIBYTE:
        raise _Unusable(f"has {memory} bytes of {device}, which is not a whole number of MiB")
    return ClaimShare(
        request=str(result["request"]).partition("/")[0],
        device=device,
        share_id=str(result["shareID"]) if result.get("shareID") else None,
        cores=cores,
        memory_mebibytes=memory // _MEBIBYTE,
        admin=admin,
    )


def _enforcement(own: Sequence[Mapping[str, Any]], configs: Sequence[Mapping[str, Any]]) -> str | None:
    """The mechanism that the DeviceClass names; None if it names none. All requests of a claim must have the same mechanism."""
    found: dict[str, set[str]] = {str(each["request"]): set() for each in own if each.get("adminAccess") is not True}
    for config in configs:
        opaque = config.get("opaque") or {}
        if opaque.get("driver") != DRA_DRIVER or (mechanism := _share_config(opaque.get("parameters")).enforcement) is None:
            continue
        if config["source"] != "FromClass":
            raise _Unusable(
                f"requests enforcement {mechanism} itself, which only a DeviceClass may do: remove the configuration from the claim or its "
                "template, or ask the cluster's administrator for a DeviceClass with it"
            )
        for request, mechanisms in found.items():
            if not (names := config.get("requests")) or {request, request.partition("/")[0]}.intersection(names):
                mechanisms.add(mechanism)
    chosen = {name for mechanisms in found.values() for name in mechanisms or {""}}
    if len(chosen) > 1:
        names = ", ".join(sorted(name or "the node's own" for name in chosen))
        raise _Unusable(f"has requests with different enforcement ({names}): use one DeviceClass for all, with one configuration")
    return "".join(chosen) or None


def _share_config(parameters: object) -> ShareConfig:
    try:
        return convert(parameters, ShareConfig)
    except UnreadableText as error:
        raise _Unusable(
            f"has a configuration for {DRA_DRIVER} that can't be used ({error}); correct it in the DeviceClass or in the claim: apiVersion "
            f"gpumgr.io/v1, kind ShareConfig, enforcement {', '.join(get_args(BackendName))}"
        ) from error


_log = structlog.get_logger(__name__)

RETRY_ANNOTATION: Final = "gpumgr.io/claims-retried"
_FIRST_SECONDS: Final = 2.0
_LONGEST_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.5


class WaitingPods:
    """`run` it as a daemon. `pods` returns the pods of this node. `held` returns (namespace, name) of the claims in the ledger."""

    def __init__(
        self,
        server: ApiServer,
        pods: Callable[[], Iterable[PodView]],
        pool: str,
        held: Callable[[], Collection[ClaimKey]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._pods, self._pool, self._held, self._clock = server, pods, pool, held, clock
        #: UID of a waiting pod -> when it is due, and the pause after that.
        self._waiting: dict[str, tuple[float, float]] = {}
        self._error = ""

    def retry_now(self) -> None:
        """Call it when the kubelet has registered the driver. All waiting pods become due."""
        self._waiting = dict.fromkeys(self._waiting, (self._clock(), _FIRST_SECONDS))

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            try:
                await self.step()
                self._error = ""
            except (*API_FAILURES, *UNREADABLE) as error:
                if (text := failure_text(error)) != self._error:
                    _log.warning("claiming_pods_not_retried", error=text, consequence="the kubelet retries them within 90 s")
                self._error = text

    async def step(self) -> None:
        """Raises what requests raise."""
        held, now, missing = self._held(), self._clock(), dict[str, set[str]]()
        pods = {pod.uid: pod for pod in self._pods() if pod.phase == "Pending" and not pod.started}
        for pod in pods.values():
            if names := {use.claim for use in pod.claims if (pod.namespace, use.claim) not in held}:
                missing[pod.uid] = names
        self._waiting = {uid: self._waiting.get(uid, (now + _FIRST_SECONDS, _FIRST_SECONDS)) for uid in missing}
        for uid, pause in [(uid, pause) for uid, (due_at, pause) in self._waiting.items() if due_at <= now]:
            self._waiting[uid] = begun = now + _FIRST_SECONDS, pause  # if a request fails, this stays
            async with asyncio.timeout(_TRY_SECONDS):
                await self._retry(pods[uid], missing[uid])
            if self._waiting[uid] is begun:  # `retry_now` was not called in the meantime
                self._waiting[uid] = now + pause, min(2 * pause, _LONGEST_SECONDS)

    async def _retry(self, pod: PodView, missing: Collection[str]) -> None:
        """Annotates the pod if one of the missing claims is for this driver."""
        for name in sorted(missing):
            _, shares = await find_shares(self._server, self._pool, pod.namespace, name)
            if shares:
                break
        else:
            return
        body = {"metadata": {"uid": pod.uid, "annotations": {RETRY_ANNOTATION: f"{time.time():.0f}"}}}
        if await self._server.send("PATCH", f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", body, but=(404, 409)):
            _log.info("claiming_pod_retried", pod="/".join(pod.key), pod_uid=pod.uid)
