"""Device ids that name their GPU, and sets of them as bit masks.

A core id is `<gpu>-c<00..99>`, a memory id `<gpu>-m<block>`; `<gpu>` is the beginning of the GPU's UUID. A replica, an id of
`nvidia.com/gpu`, is `<UUID>-<number>`, as in HAMi. The id of a MIG device is its UUID.

`Masks` are a set of ids of one resource: GPU -> an integer, in which bit n is core, memory block, replica or MIG device n.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import BLOCK_MEBIBYTES, CORES_PER_GPU, GpuName, Resource
from gpumgr.placement.tree import indices, mask_of

Masks = Mapping[GpuName, int]

NO_IDS: Masks = {}
ALL_CORES = (1 << CORES_PER_GPU) - 1


def count(masks: Masks) -> int:
    return sum(map(int.bit_count, masks.values()))


def union(*sets: Masks) -> Masks:
    result: dict[GpuName, int] = {}
    for masks in sets:
        for gpu, mask in masks.items():
            result[gpu] = result.get(gpu, 0) | mask
    return result


def minus(left: Masks, right: Masks) -> Masks:
    return {gpu: rest for gpu, mask in left.items() if (rest := mask & ~right.get(gpu, 0))}


def common(left: Masks, right: Masks) -> Masks:
    return {gpu: both for gpu, mask in left.items() if (both := mask & right.get(gpu, 0))}


def lowest(mask: int, wanted: int) -> int:
    """The `wanted` lowest set bits of `mask`, or all if it has fewer."""
    return mask if mask.bit_count() <= wanted else mask_of(indices(mask)[:wanted])


def gpu_name(uuid: str, taken: Iterable[GpuName]) -> GpuName:
    """The first 8 hex digits of a new GPU's UUID, or more of them if another GPU has that name."""
    digits = uuid.removeprefix("GPU-").replace("-", "").lower()
    names = set(taken)
    for length in range(8, len(digits) + 1):
        if digits[:length] not in names:
            return digits[:length]
    return next(name for n in range(len(names) + 1) if (name := f"{digits}x{n}") not in names)


class RegisteredInstance(msgspec.Struct, frozen=True):
    """A MIG device that this node has offered. `memory_mebibytes`: its part of the memory of its GPU instance."""

    uuid: str
    profile: str
    memory_mebibytes: int


class RegisteredGpu(msgspec.Struct, frozen=True, dict=True):
    """A GPU that this node has offered. Its name, its UUID and the positions in `instances` never change; memory and replicas never
    decrease. If memory or a MIG device disappears, its ids turn Unhealthy; ids vanish only with the GPU."""

    name: GpuName
    uuid: str
    memory_mebibytes: int
    replicas: int = 0
    instances: tuple[RegisteredInstance, ...] = ()

    @property
    def memory_blocks(self) -> int:
        return self.memory_mebibytes // BLOCK_MEBIBYTES

    def all_ids(self, resource: Resource) -> int:
        if resource == "core":
            return ALL_CORES
        return (1 << {"memory": self.memory_blocks, "replica": self.replicas, "mig": len(self.instances)}[resource]) - 1

    def held_instances(self, mask: int) -> list[RegisteredInstance]:
        return [self.instances[n] for n in indices(mask)]


class _Table(msgspec.Struct, frozen=True, dict=True):
    """All ids of one resource in one sequence: id -> its position, and where each GPU's positions begin and end. A request can have
    thousands of ids, so they are marked in one array of digits, which is converted to a number for each GPU."""

    positions: Mapping[str, int]
    spans: tuple[tuple[GpuName, int, int], ...]
    size: int

    @classmethod
    def of(cls, by_gpu: Mapping[GpuName, Sequence[str]]) -> "_Table":
        positions: dict[str, int] = {}
        spans = []
        for gpu, texts in by_gpu.items():
            begin = len(positions)
            positions.update((text, begin + n) for n, text in enumerate(texts))
            spans.append((gpu, begin, len(positions)))
        return cls(positions, tuple(spans), len(positions))

    def masks(self, positions: Iterable[int]) -> Masks:
        digits = bytearray(b"0") * self.size
        for position in positions:
            digits[position] = 49  # "1"
        pieces = ((gpu, digits[begin:end]) for gpu, begin, end in self.spans)
        return {gpu: int(piece[::-1], 2) for gpu, piece in pieces if b"1" in piece}


class GpuRegistry(msgspec.Struct, frozen=True, dict=True):
    """The GPUs that this node has offered and not forgotten, in a fixed order."""

    gpus: tuple[RegisteredGpu, ...] = ()

    @cached_property
    def by_name(self) -> Mapping[GpuName, RegisteredGpu]:
        return {gpu.name: gpu for gpu in self.gpus}

    @cached_property
    def by_uuid(self) -> Mapping[str, RegisteredGpu]:
        return {gpu.uuid: gpu for gpu in self.gpus}

    @cached_property
    def ids(self) -> Mapping[Resource, Mapping[GpuName, tuple[str, ...]]]:
        """An id's position is the number of its core, block, replica or MIG device."""
        return {
            "core": {gpu.name: tuple(f"{gpu.name}-c{n:02d}" for n in range(CORES_PER_GPU)) for gpu in self.gpus},
            "memory": {gpu.name: tuple(f"{gpu.name}-m{n}" for n in range(gpu.memory_blocks)) for gpu in self.gpus},
            "replica": {gpu.name: tuple(f"{gpu.uuid}-{n}" for n in range(gpu.replicas)) for gpu in self.gpus},
            "mig": {gpu.name: tuple(each.uuid for each in gpu.instances) for gpu in self.gpus},
        }

    @cached_property
    def _tables(self) -> Mapping[Resource, "_Table"]:
        return {resource: _Table.of(by_gpu) for resource, by_gpu in self.ids.items()}

    def parse(self, resource: Resource, device_ids: Collection[str]) -> Masks:
        """Ids -> masks. Raises Refusal for an id that no registered GPU has, or that occurs twice."""
        table = self._tables[resource]
        try:
            found = [table.positions[text] for text in device_ids]
        except KeyError as error:
            raise Refusal("unknown_device", f"device id {error.args[0]!r} is none of this node's {resource} ids") from None
        masks = table.masks(found)
        if count(masks) < len(found):
            twice = Counter(device_ids).most_common(1)[0][0]
            raise Refusal("invalid_request", f"device id {twice!r} occurs twice in one request")
        return masks

    def known(self, resource: Resource, device_ids: Iterable[str]) -> Masks:
        """Like `parse`, but skips unknown ids, for lists of other programs."""
        table = self._tables[resource]
        return table.masks([found for text in device_ids if (found := table.positions.get(text)) is not None])

    def format(self, resource: Resource, masks: Masks) -> list[str]:
        """Masks -> ids, in the order of the registry, lowest numbers first."""
        texts = self.ids[resource]
        return [texts[gpu.name][n] for gpu in self.gpus if gpu.name in masks for n in indices(masks[gpu.name])]

    def without(self, name: GpuName) -> "GpuRegistry":
        return GpuRegistry(tuple(gpu for gpu in self.gpus if gpu.name != name))

    def register(
        self, uuid: str, memory_mebibytes: int, replicas: int = 0, instances: Iterable[RegisteredInstance] = ()
    ) -> "GpuRegistry":
        """The registry with this GPU. Memory and replicas of a known GPU never decrease, and it keeps its MIG devices. The driver derives a
        MIG device's UUID from its place, so a later device with another profile can have the same UUID."""
        known = self.by_uuid.get(uuid)
        if known is None:
            new = RegisteredGpu(gpu_name(uuid, self.by_name), uuid, memory_mebibytes, replicas, tuple(instances))
            return GpuRegistry((*self.gpus, new))
        all_instances = {each.uuid: each for each in (*known.instances, *instances)}
        grown = replace(
            known,
            memory_mebibytes=max(memory_mebibytes, known.memory_mebibytes),
            replicas=max(replicas, known.replicas),
            instances=tuple(all_instances.values()),
        )
        if grown == known:
            return self
        return GpuRegistry(tuple(grown if gpu is known else gpu for gpu in self.gpus))
