"""The rules that must hold between pods, the kubelet's list and the agent's ledger. Pure: values in, complaints out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .agent import Holding
from .manifests import CORE, MEMORY, Json
from .podresources import Held, Place

#: Ids of cores, and of memory.
Ids = tuple[frozenset[str], frozenset[str]]
_NOTHING: Ids = (frozenset(), frozenset())


def gpu_of(device_id: str) -> str:
    """The GPU that an id names."""
    return device_id.rpartition("-")[0]


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


def _by_place(listed: Iterable[Held]) -> Mapping[Place, Ids]:
    ids: dict[Place, dict[str, frozenset[str]]] = defaultdict(dict)
    for held in listed:
        ids[held.place][held.resource] = frozenset(held.ids)
    return {place: (each.get(CORE, frozenset()), each.get(MEMORY, frozenset())) for place, each in ids.items()}


def _wants(container: Json) -> tuple[int, int]:
    limits = container.get("resources", {}).get("limits", {})
    return int(limits.get(CORE, 0)), int(limits.get(MEMORY, 0))


def _containers(pod: Json) -> Iterator[tuple[Place, tuple[int, int]]]:
    """The containers that hold ids while the pod runs: its app containers and its sidecars."""
    meta, spec = pod["metadata"], pod["spec"]
    sidecars = [each for each in spec.get("initContainers", []) if each.get("restartPolicy") == "Always"]
    for container in [*sidecars, *spec["containers"]]:
        if any(_wants(container)):
            yield (meta["namespace"], meta["name"], container["name"]), _wants(container)


def _has_ordinary_init(pod: Json) -> bool:
    """Whether the pod has init containers that end: their ids stay with the pod, but the kubelet doesn't list them."""
    init = pod["spec"].get("initContainers", [])
    return any(any(_wants(each)) and each.get("restartPolicy") != "Always" for each in init)


def complaints(pods: Iterable[Json], listed: Sequence[Held], ledger: Sequence[Holding]) -> list[str]:
    """Every rule that is broken, for running pods; empty when all is right."""
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    theirs = _by_place(listed)
    found = [f"{one} and {other} share {ids}" for (one, other), ids in doubles(listed).items()]
    for pod in running:
        for place, wanted in _containers(pod):
            cores, memory = theirs.get(place, _NOTHING)
            if (len(cores), len(memory)) != wanted:
                found.append(f"{place} asked for (cores, blocks) {wanted} and holds {len(cores)} and {len(memory)}")
            if not _has_ordinary_init(pod):
                found += _of_placement(place, wanted[0], cores, memory)
    found += _of_gpus(theirs)
    found += _of_ledger(running, theirs, ledger)
    return found


def _of_placement(place: Place, wanted: int, cores: frozenset[str], memory: frozenset[str]) -> Iterator[str]:
    """Its ids are a placement: one GPU, or whole ones. (Of an init container's ids the kubelet passes on any.)"""
    gpus = set(map(gpu_of, cores))
    if len(gpus) != max(1, wanted // 100):
        yield f"{place} with {wanted} cores sits on {len(gpus)} GPUs"
    if beside := set(map(gpu_of, memory)) - gpus:
        yield f"{place} holds memory of {sorted(beside)} and cores of {sorted(gpus)}"


def _of_gpus(theirs: Mapping[Place, Ids]) -> Iterator[str]:
    """No GPU gives more than 100 cores, and one that is held whole has one holder."""
    given: dict[str, int] = defaultdict(int)
    holders: dict[str, set[Place]] = defaultdict(set)
    whole: dict[str, Place] = {}
    for place, (cores, memory) in theirs.items():
        for device_id in cores:
            given[gpu_of(device_id)] += 1
            if len(cores) >= 100:
                whole[gpu_of(device_id)] = place
        for device_id in cores | memory:
            holders[gpu_of(device_id)].add(place)
    yield from (f"{gpu} gives {number} cores" for gpu, number in given.items() if number > 100)
    for gpu, place in whole.items():
        if len(holders[gpu]) > 1:
            yield f"{gpu} is whole for {place}, yet {holders[gpu]} hold it"


def _of_ledger(running: Sequence[Json], theirs: Mapping[Place, Ids], ledger: Sequence[Holding]) -> Iterator[str]:
    """The ledger names the same pods and containers with the same ids, and a GPU field that fits them."""
    with_init = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in running if _has_ordinary_init(pod)}
    ours: dict[Place, Ids] = {}
    for holding in ledger:
        if holding.place[:2] not in with_init:
            if holding.place in ours:
                yield f"{holding.place} is in the ledger twice"
            if len(holding.gpus) != len(named := set(map(gpu_of, holding.core_ids))):
                yield f"{holding.place} is granted {holding.gpus}, its ids are of {sorted(named)}"
        ours[holding.place] = (holding.core_ids, holding.memory_ids)
    for place in sorted(ours.keys() | theirs.keys()):
        if place[:2] not in with_init and ours.get(place) != theirs.get(place):
            yield f"{place}: the kubelet lists {_brief(theirs.get(place))}, the ledger has {_brief(ours.get(place))}"
    for owner in with_init:
        if lacking := _ids_of(owner, theirs) - _ids_of(owner, ours):
            yield f"{owner}: the kubelet lists {sorted(lacking)}, which the ledger lacks"


def _ids_of(pod: tuple[str, str], by_place: Mapping[Place, Ids]) -> frozenset[str]:
    return frozenset[str]().union(*(ids for place, both in by_place.items() if place[:2] == pod for ids in both))


def _brief(both: Ids | None) -> str:
    return (
        " and ".join(f"{len(ids)} ids from {min(ids, default='-')} to {max(ids, default='-')}" for ids in both or ()) or "nothing"
    )
