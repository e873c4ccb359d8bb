"""Grants a ResourceClaim (DRA): kube-scheduler has chosen GPUs and amounts, and the claim's status names them.

Each request of a claim gets one allocation, because a container's limits apply to all GPUs of a request together. The amounts are checked
again: a bug in kube-scheduler granted a device to two claims (kubernetes PR 136269), and a claim's status can be forged.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from gpumgr.common.errors import Refusal
from gpumgr.common.units import Amounts, GpuName
from gpumgr.ledger.gpu_share import EnforcementTerms
from gpumgr.ledger.ids import GpuRegistry
from gpumgr.ledger.ledger import Allocation, AllocationId, ClaimRef, ClaimRequest, Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.pods import ClaimUse, PodKey, PodView

#: A device's name, and the UUID of the claim's share (None: not a shared device).
Share = tuple[str, str | None]
#: A pod that a claim is reserved for: name, UID, and view (None: not known).
ClaimPod = tuple[PodKey, str, PodView | None]

_DEVICE_PREFIX = "gpu-"


class ClaimShare(msgspec.Struct, frozen=True, kw_only=True):
    """One device that a claim was allocated, with kube-scheduler's amounts. `request`: the main request's name; `device`: see
    `device_name`; `share_id` None: not a shared device; `admin`: with admin access."""

    request: str
    device: str
    share_id: str | None
    cores: int
    memory_mebibytes: int
    admin: bool = False


class AllocatedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an allocated claim that concerns this node and gpumgr's driver. `pods`: name and UID of the pods that it is reserved for.
    `enforcement`: the mechanism that the DeviceClass names."""

    ref: ClaimRef
    pods: tuple[tuple[PodKey, str], ...]
    shares: tuple[ClaimShare, ...]
    enforcement: str | None = None


def device_name(gpu: GpuName) -> str:
    """The device's name in the ResourceSlice; permanent, because the UUID determines it."""
    return _DEVICE_PREFIX + gpu


def shares_of(allocations: Iterable[Allocation]) -> set[Share]:
    return {(device_name(gpu), share) for a in allocations if a.claim for gpu, share in a.claim.share_ids.items()}


def allocation_id(claim_uid: str, shares: Sequence[ClaimShare]) -> AllocationId:
    """The kubelet remembers CDI names with this id, so it stays the same for these shares. Other shares of the claim get another id,
    because a CDI name may have only one content."""
    key = (claim_uid, *(f"{share.request} {share.device} {share.share_id}" for share in shares))
    return blake2b("\n".join(key).encode(), digest_size=8).hexdigest()


def grant_claim(
    node: NodeView,
    ledger: Ledger,
    claim: AllocatedClaim,
    *,
    pods: Sequence[ClaimPod],
    terms: Callable[[PodView | None, bool], EnforcementTerms],
    now: float,
) -> Sequence[Allocation]:
    """The claim's allocations, for `ledger.occupy`. `terms` returns how the users of a request are limited. Its arguments: a pod that uses
    the request (None: not known), and whether the request is a share. Raises Refusal."""
    after, granted = ledger, list[Allocation]()
    for request in dict.fromkeys(share.request for share in claim.shares):
        shares = [share for share in claim.shares if share.request == request]
        gpus = {(gpu := _gpu(node, ledger, share)): _amounts(ledger.gpu_registry, gpu, share) for share in shares}
        if len(gpus) < len(shares):
            raise Refusal("conflict", f"request {request} of the claim names one GPU twice: delete the pod and its claim")
        ((pod, uid, view), use), admin = _user(claim.ref.name, request, pods), all(share.admin for share in shares)
        chosen = terms(view, not admin and not all(amounts.whole for amounts in gpus.values()))
        allocation = Allocation(
            id=allocation_id(claim.ref.uid, shares),
            pod=pod,
            uid=uid,
            container=use.container if use else None,
            init=use is not None and use.init,
            gpus=gpus,
            granted_at=now,
            why="kube-scheduler chose the GPUs",
            mechanisms=chosen.mechanisms,
            exemption=chosen.exemption,
            cdi=True,
            claim=ClaimRequest(
                uid=claim.ref.uid,
                namespace=claim.ref.namespace,
                name=claim.ref.name,
                request=request,
                share_ids={gpu: share.share_id for gpu, share in zip(gpus, shares, strict=True)},
                admin=admin,
            ),
        )
        after = after.occupy(allocation)
        _refuse_excess(node, ledger, after, allocation)
        granted.append(allocation)
    return granted


def refuse_two_limits(ledger: Ledger, claim: ClaimRef, pods: Iterable[PodView]) -> None:
    """Raises Refusal if the claim would give a container two limited allocations: the variables and files of one would replace the other's.
    `pods`: the pods that may start with the claim."""
    limited = [a.claim for a in ledger.allocations.values() if a.claim is not None and a.mechanisms not in ((), ("none",))]
    for pod in pods:
        uses = [
            (use.container, each)
            for use in pod.claims
            for each in limited
            if each.namespace == pod.namespace and use.uses(each.name, each.request)
        ]
        for container in {container for container, each in uses if each.uid == claim.uid}:
            names = list(dict.fromkeys(f"{each.name}/{each.request}" for name, each in uses if name == container))
            if len(names) > 1:
                raise Refusal(
                    "invalid_request",
                    f"container {container} of pod {pod.name} uses {len(names)} shares of GPUs with limits "
                    f"({', '.join(names)}), and the limits of a container come from one request: use one request with "
                    "a count, whole GPUs, or a container for each share",
                )


def _user(claim: str, request: str, pods: Sequence[ClaimPod]) -> tuple[ClaimPod, ClaimUse | None]:
    """The first pod with a container that uses the request, and that use (preferably an app container's); else the first pod and None."""
    for pod in pods:
        uses = [use for use in (pod[2].claims if pod[2] else ()) if use.uses(claim, request)]
        if uses:
            return pod, min(uses, key=lambda use: use.init)
    return pods[0], None


def _gpu(node: NodeView, ledger: Ledger, share: ClaimShare) -> GpuName:
    gpu = share.device.removeprefix(_DEVICE_PREFIX)
    if not share.device.startswith(_DEVICE_PREFIX) or gpu not in ledger.gpu_registry.by_name:
        raise Refusal(
            "unknown_device", f"the claim names device {share.device}, which this node never had: delete the pod and its claim"
        )
    if share.admin:
        return gpu
    why = node.unschedulable.get(gpu) or (None if gpu in node.rows else "the driver does not list it")
    if why is not None:
        remedy = "delete the pod, so that kube-scheduler chooses another GPU"
        raise Refusal("gpu_unhealthy", f"{node.label(gpu)} can't be granted: {why}; {remedy}")
    return gpu


def _amounts(gpu_registry: GpuRegistry, gpu: GpuName, share: ClaimShare) -> Amounts:
    """A whole GPU is granted with all of its memory, even if the claim names less."""
    asked = Amounts(share.cores, share.memory_mebibytes)
    if share.admin:
        return Amounts()
    return Amounts(share.cores, gpu_registry.by_name[gpu].memory_mebibytes) if asked.whole else asked


def _refuse_excess(node: NodeView, before: Ledger, after: Ledger, allocation: Allocation) -> None:
    if allocation.admin:
        return
    for gpu, amounts in allocation.gpus.items():
        if min(amounts.cores, amounts.memory_mebibytes) < 1 and not amounts.whole:
            raise Refusal("invalid_request", f"the claim has {amounts} of {node.label(gpu)}: both must be more than 0")
        others = [a for a in before.on(gpu) if not a.admin]
        if after.exceeded(gpu) or (others and amounts.whole):
            holders = ", ".join(a.describe() for a in others[:3]) or "other requests of this claim"
            raise Refusal(
                "conflict",
                f"the claim has {amounts} of {node.label(gpu)}, and {before.available(gpu)} are left there beside {holders}: "
                "kube-scheduler has counted these amounts differently; nothing was granted twice; delete the pod, so that it is "
                "scheduled again",
            )
