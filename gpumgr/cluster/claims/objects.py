"""Claims, their templates, pods without a node, and GPUs of ResourceSlices, as the controller needs them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from gpumgr.cluster.claims.shapes import DEVICE_CLASS, MANAGED_BY, MAX_DEVICES, TEMPLATE_ANNOTATION
from gpumgr.cluster.core.node import GpuState
from gpumgr.cluster.core.request import ContainerRequest, PlacedPod, PodRequest
from gpumgr.cluster.scheduler.objects import QuotaLabels
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, DRA_DRIVER, Amounts
from gpumgr.kube.pods import parse_rounded_up
from gpumgr.placement.requests import ReplicaRequest

GATE: Final = "gpumgr.io/quota"
_MEBIBYTE: Final = 1 << 20
#: Namespace and name.
Key = tuple[str, str]


class WatchedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """`containers`: what the claim requests. `placed`: what it holds; each device counts as a container of a pod. `owner`: the UID of the
    pod that it was made for. `template`: the name of its template."""

    uid: str
    key: Key
    owner: str | None = None
    template: str | None = None
    allocated: bool = False
    containers: tuple[ContainerRequest, ...] = ()
    placed: PlacedPod | None = None


class WatchedTemplate(msgspec.Struct, frozen=True, kw_only=True):
    uid: str
    key: Key
    managed: bool


class UnboundPod(msgspec.Struct, frozen=True, kw_only=True):
    """A pod without a node. `gate`: the index of the quota's gate in its schedulingGates. `complete`: `claims` has all claims that the pod
    needs. `model`, `pool`: the values of node labels that its nodeSelector demands; None: any."""

    uid: str
    key: Key
    created: str
    gate: int | None
    templates: tuple[str, ...]
    claims: tuple[str, ...]
    complete: bool
    model: str | None
    pool: str | None


class WatchedSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A node's only ResourceSlice. The `uuid` of a GPU is its device's name, as in claims. `key`: the node's name."""

    uid: str
    key: str
    gpus: tuple[GpuState, ...]


def waits(pod: Mapping[str, Any]) -> bool:
    """Whether the pod waits for the controller: it has no node, but claims or the quota's gate. Raises what `parse_unbound` raises."""
    spec = pod.get("spec") or {}
    return not spec.get("nodeName") and (bool(spec.get("resourceClaims")) or _gate(spec) is not None)


def parse_unbound(item: Mapping[str, Any], labels: QuotaLabels) -> UnboundPod:
    """Raises KeyError, TypeError or AttributeError for an object that is not a pod."""
    spec, metadata = item["spec"], item["metadata"]
    made = {each["name"]: each.get("resourceClaimName") for each in (item.get("status") or {}).get("resourceClaimStatuses") or ()}
    named = spec.get("resourceClaims") or ()
    # A status without a name means that the entry needs no claim.
    claims = [each.get("resourceClaimName") or made.get(each["name"]) for each in named]
    selector = spec.get("nodeSelector") or {}
    return UnboundPod(
        uid=metadata["uid"],
        key=_key(metadata),
        created=str(metadata.get("creationTimestamp") or ""),
        gate=_gate(spec),
        templates=tuple(str(each["resourceClaimTemplateName"]) for each in named if each.get("resourceClaimTemplateName")),
        claims=tuple(name for name in claims if name),
        complete=all(each.get("resourceClaimName") or each["name"] in made for each in named),
        model=selector.get(labels.model),
        pool=selector.get(labels.pool),
    )


def parse_template(item: Mapping[str, Any]) -> WatchedTemplate:
    """Raises what `parse_unbound` raises."""
    metadata = item["metadata"]
    label, value = MANAGED_BY
    return WatchedTemplate(uid=metadata["uid"], key=_key(metadata), managed=(metadata.get("labels") or {}).get(label) == value)


def parse_slice(item: Mapping[str, Any]) -> WatchedSlice:
    """Raises what `parse_unbound` raises, and ValueError."""
    spec = item["spec"]
    gpus = tuple(
        GpuState(
            uuid=each["name"],
            model=str(((each.get("attributes") or {}).get("productName") or {}).get("string") or ""),
            memory_mebibytes=_mebibytes(((each.get("capacity") or {}).get("memory") or {}).get("value")),
        )
        for each in spec.get("devices") or ()
    )
    return WatchedSlice(uid=item["metadata"]["uid"], key=str(spec.get("nodeName") or ""), gpus=gpus)


def parse_claim(item: Mapping[str, Any]) -> WatchedClaim:
    """Raises what `parse_slice` raises."""
    metadata, allocation = item["metadata"], (item.get("status") or {}).get("allocation")
    owners = (each["uid"] for each in metadata.get("ownerReferences") or () if each.get("kind") == "Pod")
    key, uid = _key(metadata), metadata["uid"]
    results = ((allocation or {}).get("devices") or {}).get("results") or ()
    counted = [each for each in results if each["driver"] == DRA_DRIVER and not each.get("adminAccess")]
    return WatchedClaim(
        uid=uid,
        key=key,
        owner=next(owners, None),
        template=(metadata.get("annotations") or {}).get(TEMPLATE_ANNOTATION),
        allocated=allocation is not None,
        containers=tuple(_requested(((item["spec"].get("devices")) or {}).get("requests") or ())),
        placed=_placed(uid, key[0], counted) if counted else None,
    )


def _placed(uid: str, namespace: str, results: Sequence[Mapping[str, Any]]) -> PlacedPod:
    """The claim as a pod on its node, with a container for each device. A device without amounts is used as a whole. The name of a device's
    pool is the name of the node."""
    containers = [_container(each.get("consumedCapacity") or {}) for each in results]
    amounts = [Amounts(each.cores_per_gpu, each.memory_mebibytes) for each in containers]
    shares = tuple(((str(each["device"]), amount),) for each, amount in zip(results, amounts, strict=True))
    node = str(results[0]["pool"])
    return PlacedPod(uid=uid, node=node, request=PodRequest(tuple(containers)), shares=shares, namespace=namespace)


def _requested(requests: Iterable[Mapping[str, Any]]) -> Iterator[ContainerRequest]:
    """The claim's requests as containers. A request with alternatives counts as its largest alternative. A count above MAX_DEVICES is
    lowered to MAX_DEVICES + 1, because kube-scheduler never allocates such a claim."""
    for request in requests:
        alternatives = request.get("firstAvailable") or [request.get("exactly") or {}]
        sets = [
            (_consumed((each.get("capacity") or {}).get("requests") or {}),) * min(int(each.get("count") or 1), MAX_DEVICES + 1)
            for each in alternatives
            if each.get("deviceClassName") == DEVICE_CLASS and not each.get("adminAccess")
        ]
        yield from max(
            sets,
            key=lambda each: (
                sum(one.cores for one in each),
                sum(one.replica is not None for one in each),  # all memory of a GPU
                sum(one.memory_mebibytes for one in each),
            ),
            default=(),
        )


def _consumed(requests: Mapping[str, Any]) -> ContainerRequest:
    """What kube-scheduler gives: it rounds amounts up to the steps of the devices' requestPolicy (`kubelet.slices`). Without an amount of
    memory it gives all memory of the GPU."""
    asked = _container(requests)
    asked = replace(asked, cores_per_gpu=max(1, asked.cores_per_gpu))
    if asked.whole:
        return asked
    if "memory" not in requests:
        return replace(asked, replica=ReplicaRequest(count=1, cores=asked.cores_per_gpu))
    return replace(asked, memory_mebibytes=max(1, asked.memory_blocks) * BLOCK_MEBIBYTES)


def _container(amounts: Mapping[str, Any]) -> ContainerRequest:
    """Amounts on one GPU. Missing cores count as all cores. Memory is 0 if it is missing, or if all cores are requested."""
    cores = min(parse_rounded_up(str(amounts.get("cores", CORES_PER_GPU))), CORES_PER_GPU)
    return ContainerRequest(
        cores_per_gpu=cores, memory_mebibytes=0 if cores == CORES_PER_GPU else _mebibytes(amounts.get("memory"))
    )


def _mebibytes(quantity: object) -> int:
    return -(-parse_rounded_up(str(quantity or "0")) // _MEBIBYTE)


def _gate(spec: Mapping[str, Any]) -> int | None:
    gates = [each.get("name") for each in spec.get("schedulingGates") or ()]
    return gates.index(GATE) if GATE in gates else None


def _key(metadata: Mapping[str, Any]) -> Key:
    return str(metadata["namespace"]), str(metadata["name"])
