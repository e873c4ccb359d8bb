"""Rebuilds a ledger from the kubelet's checkpoint, PodResources, and gpu-manager's own checkpoint.

gpumgr's ids name their GPU, so the kubelet's lists are sufficient. The kubelet's checkpoint has priority: only it has pod UIDs, ordinary
init containers, and the responses (with the allocation's id in a mount path).
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import ALL_RESOURCES, CORES_PER_GPU, REPLICA_RESOURCE, GpuName, Resource
from gpumgr.ledger.answer import Granted
from gpumgr.ledger.ids import ALL_CORES, GpuRegistry, Masks, count, lowest, union
from gpumgr.ledger.instances import instance_amounts
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger, describe_container
from gpumgr.ledger.replicas import charged_on, limits_on
from gpumgr.ledger.sweep import Shown, shown
from gpumgr.placement.pods import Listing, PodKey, PodView

#: A core or memory id of gpumgr (gpumgr.ledger.ids), even of a removed GPU.
_OURS: Final = re.compile(r"[0-9a-z]+-[cm][0-9]+")
#: A replica: UUID and number. Neither gpumgr nor, in practice, HAMi's plugin has more than 1000 replicas of a GPU.
_REPLICA: Final = re.compile("(.+)-(0|[1-9][0-9]{0,2})")

#: (pod UID, container) -> ids.
Holders = Mapping[tuple[str, str], frozenset[str]]


class KubeletEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One container's ids of one resource in the kubelet's checkpoint; the other fields are from the stored response."""

    uid: str
    container: str
    resource: Resource
    device_ids: tuple[str, ...]
    allocation_id: AllocationId | None = None
    mechanisms: tuple[str, ...] = ()
    cdi: bool = False
    granted: Granted = Granted()


class AnonymousRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One container in gpu-manager's checkpoint. `minors`: the device minor numbers of its GPUs."""

    uid: str
    container: str
    minors: tuple[int, ...]
    cores: int
    memory_blocks: int


class Rebuilt(msgspec.Struct, frozen=True, kw_only=True):
    ledger: Ledger
    added: tuple[Allocation, ...] = ()
    problems: tuple[str, ...] = ()
    #: Records with GPUs that `ledger` does not reserve for them yet.
    left: tuple[AnonymousRecord, ...] = ()


def adopt(
    ledger: Ledger,
    entries: Iterable[KubeletEntry],
    listing: Listing | None,
    find_uid: Callable[[str], PodView | None],
    *,
    new_id: Callable[[], AllocationId],
    now: float,
) -> Rebuilt:
    """Adds the allocations that only the kubelet has. Allocations that contradict the ledger, and replicas of unknown GPUs, are skipped and
    reported in `problems`."""
    entries = tuple(entries)
    ledger = ledger.with_gpu_registry(_with_replicas(ledger.gpu_registry, entries, listing))
    added, problems = list[Allocation](), list[str]()
    holdings = _holdings(ledger.gpu_registry, entries, listing, find_uid, problems)
    for holding in sorted(holdings.values(), key=lambda holding: _place_in_pod(holding, find_uid)):
        parts = _parts(ledger, holding)
        if all(any(a.held(resource) == masks for a in parts) for resource, masks in holding.device_ids.items()):
            continue
        order = [gpu.name for gpu in ledger.gpu_registry.gpus]
        gpus = sorted(holding.held("core") or holding.held("memory"), key=order.index)
        whole = max(1, count(holding.held("core")) // CORES_PER_GPU)
        if holding.by_ids:
            base = (parts[0] if parts else holding).with_ids(ledger.gpu_registry, holding.device_ids, gpus[:whole])
        else:
            base = _with_amounts(ledger, holding, find_uid(holding.uid) if holding.uid else None)
        candidate = replace(base, id=base.id or new_id(), granted_at=base.granted_at or now, why="as the kubelet remembers")
        broken = ledger.occupy(candidate).violations()
        if broken:
            problems.append(f"{candidate.describe()}: {broken[0]}")
            continue
        ledger = ledger.occupy(candidate)
        added.append(candidate)
    return Rebuilt(ledger=ledger, added=tuple(added), problems=tuple(problems))


def _place_in_pod(holding: Allocation, find_uid: Callable[[str], PodView | None]) -> int:
    """The container's place in its pod's grants, which `Ledger.by_amount` needs; the kubelet's checkpoint is in random order. An init
    container of an unknown pod is first."""
    view = find_uid(holding.uid) if holding.uid else None
    names = [spec.name for spec in view.containers] if view else []
    return names.index(holding.container) if holding.container in names else int(not holding.init)


def _with_replicas(gpu_registry: GpuRegistry, entries: Iterable[KubeletEntry], listing: Listing | None) -> GpuRegistry:
    """Registers more replicas if containers hold higher numbers, which HAMi's plugin offered with another setting. On a GPU that offers no
    replicas, only replicas that gpumgr granted count: others may be another plugin's."""
    entries = [entry for entry in entries if entry.resource == "replica"]
    own = {text for entry in entries if entry.granted.gpus for text in entry.device_ids}
    ids = [text for entry in entries for text in entry.device_ids]
    for container in (each for pod in listing.pods for each in listing.containers(pod).values()) if listing else ():
        ids += container.get(REPLICA_RESOURCE, ())
    for match in filter(None, map(_REPLICA.fullmatch, ids)):
        gpu, number = gpu_registry.by_uuid.get(match[1]), int(match[2])
        if gpu is not None and gpu.replicas <= number and (gpu.replicas or match[0] in own):
            gpu_registry = gpu_registry.register(gpu.uuid, gpu.memory_mebibytes, number + 1)
    return gpu_registry


def _holdings(
    gpu_registry: GpuRegistry,
    entries: Iterable[KubeletEntry],
    listing: Listing | None,
    find_uid: Callable[[str], PodView | None],
    problems: list[str],
) -> Mapping[tuple[str, str], Allocation]:
    """(UID or namespace/name, container) -> an allocation with the container's ids. Ended pods are left out. Adds to `problems`."""
    shared = any(gpu.replicas for gpu in gpu_registry.gpus)
    holdings: dict[tuple[str, str], Allocation] = {}
    uids: dict[PodKey, str] = {}
    for entry in entries:
        masks, view = gpu_registry.known(entry.resource, entry.device_ids), find_uid(entry.uid)
        if view is not None and view.ended:
            continue
        unknown = {*entry.device_ids} - {*gpu_registry.format("replica", masks)} if entry.resource == "replica" and shared else ()
        if unknown:
            holder = describe_container(view.key if view else None, entry.uid, entry.container, "")
            problems.append(f"{holder}: it holds {', '.join(sorted(unknown))}, which is no replica of this node's GPUs")
        if not masks:
            continue
        if view is not None:
            uids[view.key] = entry.uid
        key = (entry.uid, entry.container)
        holdings[key] = _with_entry(holdings.get(key) or _new_holding(entry, view), entry, masks, gpu_registry)
    return _with_listed(holdings, shown(gpu_registry, listing), uids) if listing else holdings


def _new_holding(entry: KubeletEntry, view: PodView | None) -> Allocation:
    spec = view.container(entry.container) if view else None
    return Allocation(
        id="",
        pod=view.key if view else None,
        uid=view.uid if view else entry.uid,  # the ledger has the UID of a static pod's mirror pod
        container=entry.container,
        init=spec is not None and spec.kind == "init",
    )


def _with_entry(holding: Allocation, entry: KubeletEntry, masks: Masks, gpu_registry: GpuRegistry) -> Allocation:
    return replace(
        holding,
        device_ids={**holding.device_ids, entry.resource: union(holding.held(entry.resource), masks)},
        id=holding.id or entry.allocation_id or "",
        mechanisms=holding.mechanisms or entry.mechanisms,
        cdi=holding.cdi or entry.cdi,
        gpus=holding.gpus or {gpu: amounts for gpu, amounts in entry.granted.gpus.items() if gpu in masks},
        limits=holding.limits or entry.granted.limits,
        mig_devices=holding.mig_devices or tuple(each for each in entry.granted.mig_devices if each.gpu in gpu_registry.by_name),
    )


def _with_listed(
    holdings: dict[tuple[str, str], Allocation], visible: Shown, uids: Mapping[PodKey, str]
) -> dict[tuple[str, str], Allocation]:
    """Adds the pods that `List` names, and the containers that only `List` has. `uids`: known pod -> its UID."""
    for (pod, container), held in visible.items():
        if (uids.get(pod, ""), container) in holdings:
            continue
        same = (
            key
            for key, holding in holdings.items()
            if holding.pod is None
            and key[1] == container
            and all(holding.held(each) == held.get(each, {}) for each in ALL_RESOURCES)
        )
        if (key := next(same, None)) is not None:
            holdings[key] = replace(holdings[key], pod=pod)
        else:
            holdings["/".join(pod), container] = Allocation(id="", pod=pod, container=container, device_ids=held)
    siblings = {holding.uid: holding.pod for holding in holdings.values() if holding.uid is not None and holding.pod is not None}
    for key, holding in holdings.items():
        if holding.pod is None:
            # This is an init container's holding, because `List` shows all other containers (except those of pods that just ended).
            holdings[key] = replace(holding, pod=siblings.get(holding.uid or ""), init=True)
    return holdings


def _with_amounts(ledger: Ledger, holding: Allocation, view: PodView | None) -> Allocation:
    """The amounts of replicas are read from the stored response, else from the pod; without both there are none."""
    if holding.held("mig"):
        return replace(holding, gpus=instance_amounts(ledger.gpu_registry, holding.held("mig")))
    spec = view.container(holding.container) if view else None
    if holding.gpus or spec is None or spec.replicas is None:
        return holding
    registry = ledger.gpu_registry
    # HAMi's plugin gave the container the GPUs that its scheduler chose, even if the kubelet's ids name other GPUs.
    named = dict(view.placed).get(spec.name, ()) if view is not None and view.bound_by_hami else ()
    chosen = [registry.by_uuid[uuid].name for uuid, _ in named if uuid in registry.by_uuid]
    gpus = chosen if len(chosen) == spec.replicas.count else [*holding.held("replica")]
    return replace(holding, gpus=charged_on(registry, spec.replicas, gpus), limits=limits_on(registry, spec.replicas, gpus))


def _parts(ledger: Ledger, holding: Allocation) -> list[Allocation]:
    """The container's allocations that have the same ids of a resource; one may lack the ids of the other resource."""
    held = holding.device_ids.items()
    return [a for a in ledger.allocations.values() if _may_be(a, holding) and any(a.held(each) == masks for each, masks in held)]


def _may_be(a: Allocation, holding: Allocation) -> bool:
    """Whether both may belong to the same container."""
    if a.container is not None and holding.container is not None and a.container != holding.container:
        return False
    if a.anonymous or (a.uid and holding.uid and a.uid != holding.uid):
        return False
    return a.same_pod(holding) or a.pod is None or holding.pod is None


def migrate(
    ledger: Ledger,
    records: Iterable[AnonymousRecord],
    gpu_of_minor: Mapping[int, GpuName],
    *,
    new_id: Callable[[], AllocationId],
    now: float,
) -> Rebuilt:
    """Adds gpu-manager's records. Their ids name no GPU, so the ledger reserves gpumgr's ids on the recorded GPUs until the pods end. A
    container that `ledger` has already gets only the GPUs that were missing before."""
    known = {(a.uid, a.container): a for a in ledger.allocations.values()}
    added, problems, left = list[Allocation](), list[str](), list[AnonymousRecord]()
    for record in records:
        old = known.get((record.uid, record.container))
        if old is not None and not old.anonymous:
            continue
        gpus = tuple(gpu_of_minor[m] for m in record.minors if m in gpu_of_minor)
        missing = [m for m in record.minors if m not in gpu_of_minor]
        if missing:
            left.append(record)
        if old is not None and set(gpus) <= set(old.gpus):
            continue
        if missing or not gpus:
            problems.append(
                f"pod uid {record.uid} ({record.container}): /dev/nvidia{missing[0] if missing else '?'} is none of this node's GPUs"
            )
        if not gpus:
            continue
        device_ids = _ids_for(ledger.free((old.id,)) if old else ledger, gpus, record)
        base = old or Allocation(
            id=new_id(),
            uid=record.uid,
            container=record.container,
            granted_at=now,
            anonymous=True,
            why="taken over from gpu-manager",
        )
        allocation = base.with_ids(ledger.gpu_registry, device_ids, gpus)
        broken = ledger.occupy(allocation).violations()
        if broken or count(allocation.held("core")) < min(record.cores, CORES_PER_GPU * len(gpus)):
            problems.append(
                f"pod uid {record.uid} ({record.container}): {broken[0] if broken else 'its GPU has too few free cores'}"
            )
            left += () if missing else (record,)
            continue
        ledger = ledger.occupy(allocation)
        added.append(allocation)
    return Rebuilt(ledger=ledger, added=tuple(added), problems=tuple(problems), left=tuple(left))


def foreign(entries: Iterable[tuple[str, str, Iterable[str]]], known: Collection[tuple[str, str]]) -> Holders:
    """(UID, container) -> the ids that name no GPU. `entries`: (UID, container, ids). Containers in `known` are left out."""
    found: dict[tuple[str, str], frozenset[str]] = {}
    for uid, container, ids in entries:
        unnamed = frozenset(each for each in ids if not _OURS.fullmatch(each))
        if unnamed and (uid, container) not in known:
            found[uid, container] = found.get((uid, container), frozenset()) | unnamed
    return found


def names_of(entries: Iterable[tuple[str, str, frozenset[str]]], listing: Listing) -> Mapping[str, PodKey]:
    """Pod UID -> pod. An entry (UID, container, ids) of the kubelet's checkpoint belongs to the pod of `listing` with the same container
    and ids."""
    listed = {
        (container, frozenset(ids)): pod
        for pod in listing.pods
        for container, devices in listing.containers(pod).items()
        for ids in devices.values()
        if ids
    }
    return {uid: listed[container, ids] for uid, container, ids in entries if (container, ids) in listed}


def _ids_for(ledger: Ledger, gpus: tuple[GpuName, ...], record: AnonymousRecord) -> Mapping[Resource, Masks]:
    if record.cores >= CORES_PER_GPU:
        return {"core": dict.fromkeys(gpus, ALL_CORES)}
    gpu = gpus[0]
    cores = lowest(ALL_CORES & ~ledger.held("core").get(gpu, 0), record.cores)
    blocks = lowest(ledger.gpu_registry.by_name[gpu].all_ids("memory") & ~ledger.held("memory").get(gpu, 0), record.memory_blocks)
    return {"core": {gpu: cores} if cores else {}, "memory": {gpu: blocks} if blocks else {}}
