"""The rules that must hold between pods, the kubelet's list and the agent's ledger. Pure: values in, complaints out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .agent import Holding
from .manifests import CORE, MEMORY, Json
from .podresources import Held, Place

#: Place -> resource -> ids.
Listed = Mapping[Place, Mapping[str, frozenset[str]]]


def gpu_of(device_id: str) -> str:
    """The GPU that an id names."""
    return device_id.rpartition("-")[0]


def listed_by_place(listed: Iterable[Held]) -> Listed:
    """What the kubelet lists, by place and resource."""
    by_place: dict[Place, dict[str, frozenset[str]]] = defaultdict(dict)
    for held in listed:
        by_place[held.place][held.resource] = frozenset(held.ids)
    return by_place


def doubles(listed: Iterable[Held]) -> dict[tuple[Place, Place], list[str]]:
    """Pairs of places that hold the same ids."""
    holder: dict[tuple[str, str], Place] = {}
    shared: dict[tuple[Place, Place], list[str]] = defaultdict(list)
    for held in listed:
        for device_id in held.ids:
            first = holder.setdefault((held.resource, device_id), held.place)
            if first != held.place:
                one, other = sorted((first, held.place))
                shared[one, other].append(device_id)
    return dict(shared)


def _is_sidecar(container: Json) -> bool:
    return container.get("restartPolicy") == "Always"


def _wants(container: Json) -> tuple[int, int]:
    limits = container.get("resources", {}).get("limits", {})
    return int(limits.get(CORE, 0)), int(limits.get(MEMORY, 0))


def _containers(pod: Json) -> Iterator[tuple[Place, int, int]]:
    """The containers that hold ids while the pod runs: its app containers and its sidecars."""
    meta, spec = pod["metadata"], pod["spec"]
    for container in [*filter(_is_sidecar, spec.get("initContainers", [])), *spec["containers"]]:
        cores, memory = _wants(container)
        if cores or memory:
            yield (meta["namespace"], meta["name"], container["name"]), cores, memory


def _has_ordinary_init(pod: Json) -> bool:
    """Whether the pod has init containers that end: their ids stay with the pod, but the kubelet doesn't list them."""
    return any(not _is_sidecar(each) and any(_wants(each)) for each in pod["spec"].get("initContainers", []))


def complaints(pods: Iterable[Json], listed: Sequence[Held], ledger: Sequence[Holding]) -> list[str]:
    """Every rule that is broken, for running pods; empty when all is right."""
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    by_place = listed_by_place(listed)
    found = [f"{one} and {other} share {ids}" for (one, other), ids in doubles(listed).items()]
    for pod in running:
        for place, cores, memory in _containers(pod):
            found += _of_container(place, cores, memory, by_place.get(place, {}))
            if not _has_ordinary_init(pod):
                found += _of_placement(place, cores, by_place.get(place, {}))
    found += _of_gpus(by_place)
    found += _of_ledger(running, by_place, ledger)
    return found


def _of_container(place: Place, cores: int, memory: int, held: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """The container has as many ids as it asked for."""
    numbers = len(held.get(CORE, ())), len(held.get(MEMORY, ()))
    if numbers != (cores, memory):
        yield f"{place} asked for {cores} cores and {memory} blocks and holds {numbers[0]} and {numbers[1]}"


def _of_placement(place: Place, cores: int, held: Mapping[str, frozenset[str]]) -> Iterator[str]:
    """Its ids are a placement: one GPU, or whole ones. (Of an init container's ids the kubelet passes on any.)"""
    gpus = {gpu_of(each) for each in held.get(CORE, ())}
    wanted = max(1, cores // 100)
    if len(gpus) != wanted:
        yield f"{place} with {cores} cores sits on {len(gpus)} GPUs, not {wanted}"
    beside = {gpu_of(each) for each in held.get(MEMORY, ())} - gpus
    if beside:
        yield f"{place} holds memory of {sorted(beside)} and cores of {sorted(gpus)}"


def _of_gpus(by_place: Listed) -> Iterator[str]:
    """No GPU gives more than 100 cores, and one that is held whole has one holder."""
    cores: dict[str, int] = defaultdict(int)
    holders: dict[str, set[Place]] = defaultdict(set)
    whole: dict[str, Place] = {}
    for place, held in by_place.items():
        core_ids = held.get(CORE, frozenset())
        for device_id in core_ids:
            cores[gpu_of(device_id)] += 1
            if len(core_ids) >= 100:
                whole[gpu_of(device_id)] = place
        for device_id in core_ids | held.get(MEMORY, frozenset()):
            holders[gpu_of(device_id)].add(place)
    yield from (f"{gpu} gives {number} cores" for gpu, number in cores.items() if number > 100)
    yield from (
        f"{gpu} is whole for {place}, yet {holders[gpu]} hold it" for gpu, place in whole.items() if len(holders[gpu]) > 1
    )


def _of_ledger(running: Sequence[Json], by_place: Listed, ledger: Sequence[Holding]) -> Iterator[str]:
    """The ledger names the same pods and containers with the same ids, and a GPU field that fits them."""
    with_init = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in running if _has_ordinary_init(pod)}
    ours: dict[Place, tuple[frozenset[str], frozenset[str]]] = {}
    for holding in ledger:
        if holding.place in ours and holding.place[:2] not in with_init:
            yield f"{holding.place} is in the ledger twice"
        ours[holding.place] = (holding.core_ids, holding.memory_ids)
        named = {gpu_of(each) for each in holding.core_ids}
        if len(holding.gpus) != len(named) and holding.place[:2] not in with_init:
            yield f"{holding.place} is granted {holding.gpus}, its ids are of {sorted(named)}"
    theirs = {place: (held.get(CORE, frozenset()), held.get(MEMORY, frozenset())) for place, held in by_place.items()}
    for place in sorted(ours.keys() | theirs.keys()):
        if place[:2] not in with_init and ours.get(place) != theirs.get(place):
            yield f"{place}: the kubelet lists {_brief(theirs.get(place))}, the ledger has {_brief(ours.get(place))}"
    for owner in with_init:
        lacking = _ids_of(owner, theirs) - _ids_of(owner, ours)
        if lacking:
            yield f"{owner}: the kubelet lists {sorted(lacking)}, which the ledger lacks"


def _ids_of(pod: tuple[str, str], by_place: Mapping[Place, tuple[frozenset[str], frozenset[str]]]) -> frozenset[str]:
    return frozenset(each for place, both in by_place.items() if place[:2] == pod for ids in both for each in ids)


def _brief(both: tuple[frozenset[str], frozenset[str]] | None) -> str:
    if both is None:
        return "nothing"
    return " and ".join(f"{len(ids)} ids from {min(ids, default='-')} to {max(ids, default='-')}" for ids in both)
