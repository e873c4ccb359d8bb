"""Frees allocations when the kubelet frees their ids, and corrects their names (the pod and the container of each allocation).

The kubelet frees an ended pod's ids at the next admission and offers them at once. An allocation is freed in two ways:
* `freed_by_offer`: GetPreferredAllocation offers its ids, `List` does not show these ids during that call, and its pod has ended.
* `sweep`: its pod has ended, or `patience` calls of `List` in a row do not show it (at most 2 if the API server has no such pod). One call
  proves nothing, because `List` is incomplete after a kubelet restart.

After the loss of its checkpoint the kubelet offers the ids of running pods, and lists these pods without ids. So the callers pass which
pods have ended.

`List` lacks ordinary init containers: their ids are held as long as the pod is listed. Kubelets before 1.34 list an ended pod without ids
until it is deleted: then an init container's ids are freed with the ids of the pod's other containers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import ALL_RESOURCES, RESOURCE_BY_NAME, RESOURCES, Resource
from gpumgr.ledger.callers import FindPod
from gpumgr.ledger.ids import GpuRegistry, Masks, common, minus
from gpumgr.ledger.ledger import Allocation, AllocationId, Ledger
from gpumgr.placement.pods import Listing, PodKey, PodView

#: (pod, container) -> the ids of gpumgr's resources that `List` shows for it.
Shown = Mapping[tuple[PodKey, str], Mapping[Resource, Masks]]


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """`renamed`: allocations that had a wrong name, not the ones without a name. `absent`: allocation -> how many times in a row it was
    missing."""

    ledger: Ledger
    freed: tuple[Allocation, ...] = ()
    renamed: tuple[Allocation, ...] = ()
    absent: Mapping[AllocationId, int] = msgspec.field(default_factory=dict)


def shown(gpu_registry: GpuRegistry, listing: Listing, pods: Iterable[PodKey] | None = None) -> Shown:
    """`List`'s device ids as masks, of all pods or of these; containers without ids of gpumgr are left out."""
    result: dict[tuple[PodKey, str], Mapping[Resource, Masks]] = {}
    for pod in listing.pods if pods is None else pods:
        for container, devices in listing.containers(pod).items():
            masks = {
                resource: held
                for name, ids in devices.items()
                if (resource := RESOURCE_BY_NAME.get(name)) and (held := gpu_registry.known(resource, ids))
            }
            if masks:
                result[pod, container] = masks
    return result


def not_shown(
    suspects: Iterable[Allocation], visible: Shown, listing: Listing, find_pod: FindPod
) -> Mapping[AllocationId, Allocation]:
    return {a.id: a for a in suspects if not _is_shown(a, visible, listing, find_pod)}


def freed_by_offer(ledger: Ledger, gone: Collection[Allocation], visible: Shown, listing: Listing, find_pod: FindPod) -> Ledger:
    """The ledger without `gone`, the allocations of ended pods, and without the other allocations that end with them."""
    order = list(ledger.allocations)

    def shares_the_end_of(g: Allocation, a: Allocation) -> bool:
        """Whether `a` ends with `g`: `List` does not show `a`, or never shows it (`unlisted`) and `a` was granted before `g`. A later
        allocation without a UID stays: it may belong to a later pod with the same name."""
        earlier = order.index(a.id) <= order.index(g.id)
        if a.uid is None and not earlier:
            return False
        return (earlier and a.uid == g.uid and unlisted(a)) or not _is_shown(a, visible, listing, find_pod)

    family = [
        a for a in ledger.allocations.values() if a.device_ids and any(a.same_pod(g) and shares_the_end_of(g, a) for g in gone)
    ]
    return ledger.free(a.id for a in (*gone, *family))


def sweep(
    ledger: Ledger,
    listing: Listing,
    find_pod: FindPod,
    find_uid: Callable[[str], PodView | None],
    *,
    absent: Mapping[AllocationId, int],
    patience: int,
    gone: Callable[[str], bool] = lambda _: False,
    kept: Collection[AllocationId] = (),
) -> Swept:
    """`absent`: from the previous sweep. `gone`: whether the API server no longer has a pod with this UID. `kept`: these stay, although
    `List` does not show them."""
    earlier, before, visible = ledger, ledger.allocations, shown(ledger.gpu_registry, listing)
    freed, still_absent = list[Allocation](), dict[AllocationId, int]()
    # Init containers are last: the container that took over their ids determines their pod.
    for allocation_id in sorted(before, key=lambda each: before[each].init):
        a = ledger.allocations.get(allocation_id)
        if a is None or not a.device_ids:
            continue  # freed by an earlier rename; or a ResourceClaim's, which has no ids
        named = _follower(before, ledger, _named(a, visible, find_pod, find_uid))
        if named != a:
            ledger = _with_name(ledger, named)
            a = named
        if _ended(a, find_pod) or _refuted(a, visible) or (a.anonymous and a.pod is None and a.uid is not None and gone(a.uid)):
            freed.append(a)
        elif not _is_shown(a, visible, listing, find_pod):
            times = absent.get(a.id, 0) + 1
            sure = a.uid is not None and gone(a.uid)
            if a.id not in kept and times >= (min(patience, 2) if sure else patience):
                freed.append(a)
            else:
                still_absent[a.id] = times
    freed += _freed_with(ledger, freed, visible)
    after = ledger.free(a.id for a in freed)
    return Swept(
        ledger=after,
        freed=tuple(ledger.allocations.get(a.id, a) for a in after.freed_since(earlier)),
        renamed=tuple(a for k, a in ledger.allocations.items() if _had_another_name(before[k], a)),
        absent=still_absent,
    )


def _had_another_name(before: Allocation, after: Allocation) -> bool:
    names = ((before.pod, after.pod), (before.uid, after.uid), (before.container, after.container))
    return any(earlier not in (None, later) for earlier, later in names)


def _freed_with(ledger: Ledger, freed: Iterable[Allocation], visible: Shown) -> list[Allocation]:
    """The allocations that `List` never shows, if a later allocation of their pod is among the `freed`. If the later allocation was freed
    because its pod was a wrong guess, that pod may still run: then only allocations that share ids with the later one are returned."""
    order = {each: number for number, each in enumerate(ledger.allocations)}
    ended = [a for a in freed if not unlisted(a)]
    gone = {a.id for a in freed}

    def goes_with(a: Allocation, g: Allocation) -> bool:
        if g.uid is not None and _refuted(g, visible):
            return any(common(a.held(resource), g.held(resource)) for resource in ALL_RESOURCES)
        return order[a.id] < order[g.id]

    return [
        a
        for a in ledger.allocations.values()
        if a.device_ids and unlisted(a) and a.id not in gone and any(a.same_pod(g) and goes_with(a, g) for g in ended)
    ]


def named_by(ledger: Ledger, listing: Listing, find_pod: FindPod, latest: AllocationId | None) -> Ledger:
    """The ledger with names from `List` for allocations without a name, and for `latest`, which may have a guessed one."""
    unsure = [a for a in ledger.allocations.values() if a.container is None or a.pod is None or a.id == latest]
    if len(unsure) == 1 and (there := unsure[0].pod) is not None and there in listing.pods:
        # Usually the entry of its pod is sufficient, so the rest of the long list is not decoded.
        alone = shown(ledger.gpu_registry, listing, (there,))
        if _owner(unsure[0], alone) is not None:
            return _renamed(ledger, unsure, alone, find_pod)
    # A wrong guess of one container's pod was also wrong for the other containers of that pod.
    family = [a for a in ledger.allocations.values() if any(a is b or a.same_pod(b) for b in unsure)]
    if not family:
        return ledger
    named = _renamed(ledger, family, shown(ledger.gpu_registry, listing), find_pod)
    return ledger if named.violations() else named  # `List` was incomplete: a later one corrects the names


def _renamed(ledger: Ledger, unsure: Iterable[Allocation], visible: Shown, find_pod: FindPod) -> Ledger:
    before = ledger.allocations
    for each in sorted(unsure, key=lambda a: a.init):
        a = ledger.allocations.get(each.id)
        named = _follower(before, ledger, _named(a, visible, find_pod, lambda _: None)) if a is not None else None
        ledger = ledger if named is None or named == a else _with_name(ledger, named)
    return ledger


def _follower(before: Mapping[AllocationId, Allocation], ledger: Ledger, a: Allocation) -> Allocation:
    """Returns the allocation. If it is an init container's and its pod was a wrong guess, it gets the pod to which `List` assigns the other
    containers with the same UID."""
    if not a.init or a.uid is None or a.pod != before[a.id].pod:
        return a
    siblings = [ledger.allocations[b.id] for b in before.values() if b.uid == a.uid and not b.init and b.id in ledger.allocations]
    pods = {(b.pod, b.uid) for b in siblings}
    if len(pods) != 1:
        return a
    ((pod, uid),) = pods
    return replace(a, pod=pod, uid=uid)


def _with_name(ledger: Ledger, named: Allocation) -> Ledger:
    """The ledger with the corrected allocation `named`.

    The kubelet lets two containers have the same ids only if they are of one pod, and one is an init container. So another allocation with
    these ids becomes an init container's of the corrected pod, if it is an init container's of the former pod, or if it has no UID and
    `List` never shows it. Otherwise it is wrong, and is freed.
    """
    before = ledger.allocations[named.id]
    for b in {b.id: b for resource in ALL_RESOURCES for b in ledger.holders(resource, named.held(resource))}.values():
        if b.id != named.id and not (b.same_pod(named) and (b.init or named.init)):
            follows = (b.init and b.same_pod(before)) or (b.uid is None and unlisted(b))
            moved = replace(b, pod=named.pod, uid=named.uid, init=True)
            ledger = ledger.occupy(moved) if follows else ledger.free((b.id,))
    return _joined(ledger.occupy(named), named)


def _joined(ledger: Ledger, named: Allocation) -> Ledger:
    """Joins `named` with the allocation of the container's other resource. The result has the id of the allocation with the cores, because
    the container's folder is named after it. Without a UID the other allocation may be an earlier pod's, so nothing is joined."""
    mine = [a for a in ledger.of(named.pod, named.uid) if (a.uid, a.container, a.init) == (named.uid, named.container, False)]
    cores, blocks = ([a for a in mine if [*a.device_ids] == [resource]] for resource in RESOURCES)
    if named.uid is None or len(mine) != 2 or not cores or not blocks or not set(blocks[0].gpus) <= set(cores[0].gpus):
        return ledger
    whole = replace(cores[0], pod=named.pod, uid=named.uid)
    device_ids = {**cores[0].device_ids, **blocks[0].device_ids}
    return ledger.free((blocks[0].id,)).occupy(whole.with_ids(ledger.gpu_registry, device_ids, whole.gpus))


def _named(a: Allocation, visible: Shown, find_pod: FindPod, find_uid: Callable[[str], PodView | None]) -> Allocation:
    """The allocation with the pod and container that `List` has, or the pod's name if only its UID was known."""
    owner = _owner(a, visible)
    if owner is not None:
        view = find_pod(owner[0])
        uid = view.uid if view is not None and not view.ended else a.uid if owner[0] == a.pod else None
        return replace(a, pod=owner[0], container=owner[1], uid=uid)
    if a.init and (place := _place(a, visible)) is not None and place[0] != a.pod:
        if a.pod is None:
            # It was marked as an init container's while `List` was incomplete, or an app container has taken over its ids.
            return replace(a, pod=place[0], init=a.container != place[1])
        view = find_pod(place[0])
        return replace(a, pod=place[0], container=place[1], uid=view.uid if view else None, init=False)
    if a.pod is None and a.uid is not None and (known := find_uid(a.uid)) is not None:
        return replace(a, pod=known.key)
    return a


def _ended(a: Allocation, find_pod: FindPod) -> bool:
    """Whether the allocation's pod has ended: then the pod holds nothing, even if an older kubelet still lists it. Without a UID this is
    not known, because an earlier pod may have had the same name."""
    view = find_pod(a.pod) if a.pod else None
    return view is not None and view.ended and a.uid == view.uid


def _refuted(a: Allocation, visible: Shown) -> bool:
    """Whether `List` shows its container with other ids. The kubelet never changes a container's ids, so the allocation belongs to another
    container, or to an earlier pod with the same name."""
    if a.pod is None or a.container is None or a.init or a.anonymous:
        return False
    there = visible.get((a.pod, a.container), {})
    return any(each in there and not common(ids, there[each]) for each, ids in a.device_ids.items())


def _is_shown(a: Allocation, visible: Shown, listing: Listing, find_pod: FindPod) -> bool:
    """Whether `List` shows the allocation's ids or, for an `unlisted` one, its pod."""
    if a.anonymous and a.pod is None:
        return True
    if unlisted(a) and _owner(a, visible) is None:
        if (
            a.container is None
            and not a.init
            and not a.whole
            and a.by_ids
            and not all(a.held(resource) for resource in RESOURCES)
        ):
            return False  # a share with one of its two resources: its admission failed
        if a.pod is None or a.pod not in listing.pods:
            return False
        view = find_pod(a.pod)
        return view is None or a.uid is None or view.uid == a.uid
    return _owner(a, visible) is not None


def unlisted(a: Allocation) -> bool:
    """Whether `List` never shows it: it is an ordinary init container's, or has gpu-manager's ids or no container name."""
    return a.init or a.anonymous or a.container is None


def _owner(a: Allocation, visible: Shown) -> tuple[PodKey, str] | None:
    """The pod and the container for which `List` shows the allocation's ids: the allocation's own container if it has some of the ids, else
    the first container that has all of them."""
    if a.init or a.anonymous:
        return None
    if a.pod is not None and a.container is not None:
        there = visible.get((a.pod, a.container))
        if there is not None and any(common(a.held(resource), there.get(resource, {})) for resource in ALL_RESOURCES):
            return a.pod, a.container
    return _place(a, visible)


def _place(a: Allocation, visible: Shown) -> tuple[PodKey, str] | None:
    """The first container for which `List` shows all ids of the allocation."""
    held = a.device_ids.items()
    places = (place for place, masks in visible.items() if all(not minus(ids, masks.get(each, {})) for each, ids in held))
    return next(places, None) if held else None
