"""Parses the JSON of a pod into a PodView."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from math import ceil
from typing import Annotated, Any, Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import (
    CORE_LIMIT_ANNOTATION,
    CORE_RESOURCE,
    MEMORY_LIMIT_ANNOTATION,
    MEMORY_RESOURCE,
    RESIZE_ANNOTATION,
    SUSPEND_ANNOTATION,
    SUSPEND_WHEN_IDLE_ANNOTATION,
)
from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION, decode_placement
from gpumgr.kube.hami_formats import HAMI_ALLOCATED, HAMI_NODE, MIG_ALLOCATIONS, placed_by_hami, replica_request, slices_in
from gpumgr.kube.selection import constraints_of
from gpumgr.placement.pods import USUAL_PRIORITY, ClaimUse, ContainerSpec, NamedGpu, PodView, ResizeRequest
from gpumgr.placement.requests import ContainerKind
from gpumgr.settings.hami_resources import ReplicaResources

#: Source: Kubernetes' resource.Quantity.
_FACTORS: Final = {
    **{suffix: Decimal(1000) ** power for power, suffix in ((-3, "n"), (-2, "u"), (-1, "m"))},
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTPE", start=1)},
    **{suffix + "i": Decimal(1024) ** power for power, suffix in enumerate("KMGTPE", start=1)},
}
_MAX_QUANTITY: Final = 1 << 63
#: Annotation of a static pod's mirror pod, which only the kubelet can create: the UID that it gave the static pod.
MIRROR_ANNOTATION: Final = "kubernetes.io/config.mirror"
#: The annotation and the environment variable that gpu-manager's /usage shows.
CLUSTER_ANNOTATION: Final = "clusterName"
SUBMITTER_VARIABLE: Final = "SUBMITTER"
_DURATION: Final = re.compile("([1-9][0-9]{0,5})([smh])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
#: The most characters kept of a user's text, and of a kubelet's message.
_MAX_WORD: Final = 253
_MAX_SENTENCE: Final = 1024
_RESIZE_EXAMPLE: Final = '{"main": {"cores": 40, "memoryMiB": 4096}}'
#: A placement without any GPU. The agent refuses its containers, because HAMi's scheduler would not count GPUs that the agent chooses.
_NO_GPUS: Final = (("", ()),)


def parse_pod(pod: Mapping[str, Any], resources: ReplicaResources | None = None, mig_resource: str | None = None) -> PodView:
    """Parses a pod. The view of a pod that requests no GPU has no containers, to save memory.

    `resources`: HAMi's resources, if pods may request them. `mig_resource`: the resource of MIG devices, or a prefix that ends in "-".

    Raises ValueError, KeyError, TypeError or AttributeError for an object that is not a pod.
    """
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations = metadata.get("annotations") or {}
    containers = tuple(_containers(spec, resources, mig_resource))
    wants_gpu = any(c.wants_gpu for c in containers)
    placed = _placed(annotations, str(spec.get("nodeName") or ""), containers)
    if placed.get("bound_by_hami"):
        containers = tuple(_with_memory(container, dict(placed["placed"])) for container in containers)
    return PodView(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        phase=str(status.get("phase") or "Pending"),
        reason=_word(status.get("reason")),
        message=_word(status.get("message"), _MAX_SENTENCE),
        controlled=any(owner.get("controller") for owner in metadata.get("ownerReferences") or ()),
        **_deletion(metadata),
        created_at=_unix_seconds(metadata.get("creationTimestamp")),
        containers=containers if wants_gpu else (),
        service_account=str(spec["serviceAccountName"]) if spec.get("serviceAccountName") else None,
        core_limit=_core_limit(annotations.get(CORE_LIMIT_ANNOTATION)),
        **_memory_limits(annotations.get(MEMORY_LIMIT_ANNOTATION), {container.name for container in containers}),
        **_suspension(annotations),
        resizes=_resizes(annotations.get(RESIZE_ANNOTATION), [container.name for container in containers]),
        runtime_uid=str(annotations[MIRROR_ANNOTATION]) if MIRROR_ANNOTATION in annotations else None,
        submitter=_submitter(spec),
        cluster=_word(annotations.get(CLUSTER_ANNOTATION)),
        claims=tuple(_claim_uses(spec, status)),
        started=_started(status),
        **placed,
        **(selected(annotations) if wants_gpu else {}),
    )


def _deletion(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `deleted`, `ends_at` and `grace_seconds`."""
    if not (timestamp := metadata.get("deletionTimestamp")):
        return {}
    grace = metadata.get("deletionGracePeriodSeconds")
    return {"deleted": True, "ends_at": _unix_seconds(timestamp), "grace_seconds": None if grace is None else float(grace)}


def selected(annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The field `constraints` or `unreadable`."""
    try:
        return {"constraints": constraints_of(annotations)}
    except Refusal as refusal:
        return {"unreadable": str(refusal)}


def _placed(annotations: Mapping[str, Any], node: str, containers: Sequence[ContainerSpec]) -> dict[str, Any]:
    """The fields `placed`, `placement_ignored` and `bound_by_hami`. Users may write the annotations, so a wrong one must not make the pod
    unreadable."""
    text = annotations.get(PLACEMENT_ANNOTATION)
    if text is not None or annotations.get(HAMI_NODE) != node or not any(each.replicas for each in containers):
        return _placement(text, node)
    key = MIG_ALLOCATIONS
    try:
        slices, key = slices_in(str(annotations.get(key, ""))), HAMI_ALLOCATED
        return {"bound_by_hami": True, "placed": placed_by_hami(str(annotations.get(key)), containers, slices)}
    except ValueError as error:
        why = f"the annotation {key} can't be read: {str(error)[:_MAX_WORD]}"
        return {"bound_by_hami": True, "placed": _NO_GPUS, "placement_ignored": why}


def _with_memory(container: ContainerSpec, placed: Mapping[str, Sequence[NamedGpu]]) -> ContainerSpec:
    """Adds the memory that HAMi's scheduler wrote for a request in percent. The agent can't compute it, because it depends on the memory
    that was registered at the placement."""
    if (wanted := container.replicas) is None or wanted.memory_mebibytes is not None:
        return container
    memory = tuple((uuid, amounts.memory_mebibytes) for uuid, amounts in placed.get(container.name, ()))
    return replace(container, replicas=replace(wanted, memory_on=memory))


def _placement(text: object, node: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        placement = decode_placement(str(text))
        if placement.node != node:
            raise ValueError(f"it is about node {placement.node}, and the pod is bound to {node or 'none'}")
    except ValueError as error:
        return {"placement_ignored": f"the annotation {PLACEMENT_ANNOTATION} is ignored: {str(error)[:_MAX_WORD]}"}
    return {"placed": tuple(placement.named.items())}


def parse_quantity(text: str) -> int:
    """Parses a quantity that is a whole number: "10", "1k", "2Ki", "1e3", "3000m". Raises ValueError for fractions, negative numbers and
    other texts."""
    if len(text) <= 18 and text.isascii() and text.isdecimal():  # as the API server writes these resources
        return int(text)
    value = _decimal(text)
    if value != int(value):
        raise ValueError(f"quantity {text!r} is not a whole number of 0 or more")
    return int(value)


def quantity_or_0(text: str) -> int:
    """As `parse_quantity`, but 0 for a text that it refuses."""
    try:
        return parse_quantity(text)
    except ValueError:
        return 0


def parse_rounded_up(text: str) -> int:
    """Rounds a quantity up, as Kubernetes' Quantity.Value does: 10 for "9500m". Raises ValueError."""
    return ceil(_decimal(text))


def parse_milli(text: str) -> int:
    """A quantity in thousandths, rounded up: 500 for "500m" and "0.5". Raises ValueError."""
    return ceil(_decimal(text) * 1000)


def _decimal(text: str) -> Decimal:
    suffix = next((suffix for suffix in (text[-2:], text[-1:]) if suffix in _FACTORS), "")
    try:
        value = Decimal(text.removesuffix(suffix)) * _FACTORS.get(suffix, 1)
        if not 0 <= value < _MAX_QUANTITY:
            raise ValueError(f"quantity {text!r} is negative or too large")
    except ArithmeticError as error:
        raise ValueError(f"quantity {text!r} can't be read") from error
    return value


def _containers(spec: Mapping[str, Any], resources: ReplicaResources | None, mig: str | None) -> Iterator[ContainerSpec]:
    """In the order in which the kubelet allocates."""
    for container in spec.get("initContainers") or ():
        yield _container(container, "sidecar" if container.get("restartPolicy") == "Always" else "init", resources, mig)
    for container in spec.get("containers") or ():
        yield _container(container, "app", resources, mig)


def _container(
    container: Mapping[str, Any], kind: ContainerKind, hami: ReplicaResources | None, mig: str | None
) -> ContainerSpec:
    resources = container.get("resources") or {}
    # The API server refuses an extended resource without a limit, and a request that differs from it.
    wanted = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return ContainerSpec(
        name=str(container["name"]),
        kind=kind,
        cores=parse_quantity(str(wanted.get(CORE_RESOURCE, "0"))),
        memory_blocks=parse_quantity(str(wanted.get(MEMORY_RESOURCE, "0"))),
        replicas=replica_request(wanted, hami, parse_quantity) if hami else None,
        priority=parse_quantity(str(wanted.get(hami.priority_resource, USUAL_PRIORITY))) if hami else USUAL_PRIORITY,
        instances=sum(parse_quantity(str(wanted[name])) for name in wanted if mig and _is_mig(name, mig)),
    )


def _is_mig(name: str, mig: str) -> bool:
    return name.startswith(mig) if mig.endswith("-") else name == mig


def _claim_uses(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[ClaimUse]:
    """Which container uses which claim. The status has the names of claims made from templates."""
    pod_claims = spec.get("resourceClaims") or ()
    if not pod_claims:
        return
    made = {each["name"]: each.get("resourceClaimName") for each in status.get("resourceClaimStatuses") or ()}
    names = {each["name"]: each.get("resourceClaimName") or made.get(each["name"]) for each in pod_claims}
    for kind in ("initContainers", "containers"):
        for container in spec.get(kind) or ():
            for used in (container.get("resources") or {}).get("claims") or ():
                if (claim := names.get(used["name"])) is not None:
                    ordinary_init = kind == "initContainers" and container.get("restartPolicy") != "Always"
                    request = used.get("request")
                    yield ClaimUse(container=container["name"], claim=claim, request=request, init=ordinary_init)


def _started(status: Mapping[str, Any]) -> bool:
    every = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return any({"running", "terminated"} & (each.get("state") or {}).keys() for each in every)


def _core_limit(text: object) -> int | None:
    """A number from 0 to 100; larger numbers count as 100. Another text counts as no limit, so that the pod stays readable."""
    whole = isinstance(text, str) and re.fullmatch("[0-9]{1,18}", text)
    return min(int(whole[0]), 100) if whole else None


def _memory_limits(text: object, containers: Collection[str]) -> dict[str, Any]:
    """The field `memory_limits` or `memory_limits_ignored`."""
    if text is None:
        return {}
    try:
        limits = decode_json(str(text), dict[str, int])
    except UnreadableText as error:
        return {"memory_limits_ignored": f'it must be a JSON object such as {{"main": 8192}}: {str(error)[:_MAX_WORD]}'}
    if unknown := sorted(limits.keys() - set(containers)):
        return {"memory_limits_ignored": f"it names container {unknown[0][:_MAX_WORD]}, which the pod does not have"}
    return {"memory_limits": tuple(limits.items())}


def _suspension(annotations: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `suspend` and `suspend_when_idle_seconds`, or `suspend_ignored`."""
    demand, idle = annotations.get(SUSPEND_ANNOTATION), annotations.get(SUSPEND_WHEN_IDLE_ANNOTATION)
    if demand not in (None, "true", "false"):
        return {"suspend_ignored": f'the annotation {SUSPEND_ANNOTATION} must be "true" or "false"'}
    found = None if idle in (None, "never") else _DURATION.fullmatch(str(idle))
    if idle is not None and idle != "never" and not found:
        return {
            "suspend_ignored": f'the annotation {SUSPEND_WHEN_IDLE_ANNOTATION} must be a time such as "90s", "10m" or "2h", or "never"'
        }
    seconds = float(found[1]) * _SECONDS[found[2]] if found else None if idle is None else 0.0
    return {"suspend": None if demand is None else demand == "true", "suspend_when_idle_seconds": seconds}


class _Resize(
    msgspec.Struct, rename={"memory_mebibytes": "memoryMiB", "requested_at": "requestedAt"}, forbid_unknown_fields=True
):
    cores: int | None = None
    memory_mebibytes: int | None = None
    requested_at: Annotated[str, msgspec.Meta(max_length=64)] = ""


def _resizes(text: object, containers: Collection[str]) -> tuple[tuple[str, ResizeRequest], ...]:
    """Container -> its resize request. If the annotation is invalid, each container's request contains the problem."""
    if text is None:
        return ()
    try:
        found = decode_json(str(text), dict[str, _Resize])
        if unknown := sorted(found.keys() - set(containers)):
            raise UnreadableText(f"it names container {unknown[0][:_MAX_WORD]}, which the pod does not have")
    except UnreadableText as error:
        problem = f"annotation {RESIZE_ANNOTATION}, such as {_RESIZE_EXAMPLE}: {str(error)[:_MAX_WORD]}"
        return tuple((name, ResizeRequest(problem=problem)) for name in containers)
    return tuple((name, ResizeRequest(**msgspec.structs.asdict(each))) for name, each in found.items())


def _submitter(spec: Mapping[str, Any]) -> str | None:
    """The submitter as gpu-manager reads it: a literal value in the first app container."""
    for container in (spec.get("containers") or ())[:1]:
        for variable in container.get("env") or ():
            if variable.get("name") == SUBMITTER_VARIABLE:
                return _word(variable.get("value"))
    return None


def _word(text: object, most: int = _MAX_WORD) -> str | None:
    return text[:most] if isinstance(text, str) and text else None


def _unix_seconds(timestamp: str | None) -> float:
    if not timestamp:
        return 0.0
    return datetime.fromisoformat(timestamp).timestamp()
