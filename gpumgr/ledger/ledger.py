"""The ledger records what each container holds of the node's GPUs (its allocation). It is an immutable value: every change makes a new one.

The ledger counts amounts per GPU. A container with `tencent.com` resources holds device ids from the kubelet, each for a fixed amount. A
container with `nvidia.com/gpu` holds replicas, which are ids without a fixed amount. An allocation of a ResourceClaim (DRA) has no ids.
Replicas and claims count with the amounts that the allocation records.

Invariants (checked by `Ledger.violations`):
1. Two pods never hold the same device id. Within one pod only containers that follow an init container may hold its ids again.
2. A GPU that is granted whole has no allocation of another pod, except one with admin access (`ClaimRequest.admin`).
3. Ids belong to registered GPUs and lie within their capacity.
4. An allocation was granted at least one GPU.
5. The amounts in force on a GPU never exceed 100 cores and the GPU's memory. Ids that several containers of one pod hold count once.
6. MIG devices that were created for two pods never have a memory slice of a GPU in common.

A resize changes how much a container may use; its grant stays. If the container may use more than its ids, free ids of the GPU turn
Unhealthy. If it may use less, resizes and bursts of other containers may use the difference, but no new container gets it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec.structs import replace

from gpumgr.common.units import ALL_RESOURCES, BLOCK_MEBIBYTES, CORES_PER_GPU, Amounts, GpuName, Resource
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import ALL_CORES, NO_IDS, GpuRegistry, Masks, RegisteredGpu, common, count, minus, union
from gpumgr.placement.pods import PodKey, ResizeRequest

#: Random; for a ResourceClaim a hash of its shares, so that it gets the same id again. The container's folders on the host have this name,
#: which is unique and does not reveal the pod.
AllocationId = str


class ClaimRef(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceClaim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ClaimRequest(ClaimRef, frozen=True, kw_only=True):
    """The request of a ResourceClaim that an allocation serves. `share_ids`: GPU -> the UUID of the claim's share (None: not a shared
    device). `admin`: with admin access (KEP-5018); the allocation then counts as nothing and is never limited."""

    request: str
    share_ids: Mapping[GpuName, str | None] = msgspec.field(default_factory=dict)
    admin: bool = False


class MigDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A MIG device that is created for one container. `memory_slices`: slice n as bit n; 0: not known. Until the device exists, the UUID is
    empty, and the ids of the GPU instance and compute instance are -1."""

    gpu: GpuName
    profile: str
    memory_slices: int
    uuid: str = ""
    gpu_instance: int = -1
    compute_instance: int = -1

    @property
    def start(self) -> int:
        return (self.memory_slices & -self.memory_slices).bit_length() - 1

    def __str__(self) -> str:
        place = f" at slice {self.start}" if self.memory_slices else ""
        return f"{self.profile}{place}" + (f" ({self.uuid})" if self.uuid else "")


class Resize(msgspec.Struct, frozen=True, kw_only=True):
    """The last request to resize a container, and the decision. `amounts`: what the container may use on each of its GPUs now; empty: what
    it was granted. `refused`: the reason of a refusal. `lent_mebibytes`: the part of `amounts` that suspended containers lend until they
    are resumed."""

    asked: ResizeRequest
    amounts: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    refused: str = ""
    lent_mebibytes: Mapping[GpuName, int] = msgspec.field(default_factory=dict)


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """What one container holds. If `claim` is set: what all containers that use one request of a ResourceClaim hold together; `pod` and
    `container` then name one of them.

    `pod`, `uid` and `container` are None until known. `gpus` are the granted GPUs, with the amounts on each; a GPU that is granted whole
    counts with all it has. `device_ids` are the kubelet's. They may lie on more GPUs than were granted, if the container took over ids of
    an init container. `granted_at` is in unix seconds. `anonymous`: gpu-manager granted it; the pod's ids name no GPU, and `device_ids` are
    reserved in their place.

    `mechanisms` limit a share, as decided at the grant. `exemption`: the namespace or namespace/serviceaccount for which the operator set
    other mechanisms. `cdi`: the response names a CDI device. `limits`: what the container may use, where oversubscription makes that differ
    from `gpus`. `mig_devices` were created for the container; if there are any, nothing else limits it.
    """

    id: AllocationId
    pod: PodKey | None = None
    uid: str | None = None
    container: str | None = None
    init: bool = False
    gpus: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    device_ids: Mapping[Resource, Masks] = msgspec.field(default_factory=dict)
    granted_at: float = 0.0
    why: str = ""
    anonymous: bool = False
    mechanisms: tuple[str, ...] = ()
    exemption: str | None = None
    cdi: bool = False
    claim: ClaimRequest | None = None
    limits: Mapping[GpuName, Amounts] = msgspec.field(default_factory=dict)
    mig_devices: tuple[MigDevice, ...] = ()
    resize: Resize | None = None

    @property
    def by_ids(self) -> bool:
        """Whether it holds core or memory ids, which are its amounts."""
        return "core" in self.device_ids or "memory" in self.device_ids

    @property
    def by_mig(self) -> bool:
        return bool(self.mig_devices or self.held("mig"))

    @property
    def reserved(self) -> bool:
        """Whether its MIG devices are still being created, so that it is not granted yet."""
        return any(not device.uuid for device in self.mig_devices)

    @property
    def admin(self) -> bool:
        return self.claim is not None and self.claim.admin

    @property
    def cores(self) -> int:
        """In percent of one GPU."""
        return sum(amounts.cores for amounts in self.gpus.values())

    @property
    def memory_mebibytes(self) -> int:
        return sum(amounts.memory_mebibytes for amounts in self.gpus.values())

    @property
    def whole(self) -> bool:
        return bool(self.gpus) and all(amounts.whole for amounts in self.gpus.values())

    @property
    def places(self) -> Sequence[GpuName]:
        """The GPUs that it was granted, then the other GPUs on which it holds ids."""
        return tuple(dict.fromkeys((*self.gpus, *(gpu for masks in self.device_ids.values() for gpu in masks))))

    def amounts_on(self, gpu: GpuName) -> Amounts:
        """What the ledger counts for it on this GPU; more than `held_on` if it was resized to more."""
        held = self.held_on(gpu)
        return held.most(self.guaranteed_on(gpu)) if gpu in self.resized else held

    @property
    def resized(self) -> Mapping[GpuName, Amounts]:
        """GPU -> what it may use since it was resized; empty: what it was granted."""
        return self.resize.amounts if self.resize else {}

    def held_on(self, gpu: GpuName) -> Amounts:
        """Its ids on this GPU, as amounts; without ids of cores and memory, what it was granted. No resize changes it."""
        granted = self.gpus.get(gpu, Amounts())
        if granted.whole or not self.by_ids:
            return granted
        return Amounts(self.held("core").get(gpu, 0).bit_count(), self.held("memory").get(gpu, 0).bit_count() * BLOCK_MEBIBYTES)

    def limits_on(self, gpu: GpuName) -> Amounts:
        return self.resized.get(gpu) or self.limits.get(gpu) or self.gpus.get(gpu) or Amounts()

    def lent_on(self, gpu: GpuName) -> int:
        """The MiB that it may use while the containers that hold them are suspended."""
        return self.resize.lent_mebibytes.get(gpu, 0) if self.resize else 0

    def guaranteed_on(self, gpu: GpuName) -> Amounts:
        """What it may use, also after suspended containers are resumed."""
        return self.limits_on(gpu) - Amounts(0, self.lent_on(gpu))

    def grown_on(self, gpu: GpuName) -> Amounts:
        """What it may use beyond what it holds, without memory that suspended containers lend."""
        return self.guaranteed_on(gpu).beyond(self.held_on(gpu)) if gpu in self.resized else Amounts()

    def shrunk_on(self, gpu: GpuName) -> Amounts:
        """What it holds and may not use."""
        return self.held_on(gpu).beyond(self.guaranteed_on(gpu)) if gpu in self.resized else Amounts()

    def held(self, resource: Resource) -> Masks:
        return self.device_ids.get(resource, NO_IDS)

    def with_ids(self, gpu_registry: GpuRegistry, device_ids: Mapping[Resource, Masks], gpus: Iterable[GpuName]) -> "Allocation":
        cores, blocks = device_ids.get("core", NO_IDS), device_ids.get("memory", NO_IDS)
        names, granted = tuple(gpus), dict[GpuName, Amounts]()
        for name in names:
            if count(cores) >= CORES_PER_GPU * len(names):
                granted[name] = Amounts(CORES_PER_GPU, gpu_registry.by_name[name].memory_mebibytes)
            elif len(names) == 1:
                granted[name] = Amounts(count(cores), count(blocks) * BLOCK_MEBIBYTES)
            else:
                granted[name] = Amounts(cores.get(name, 0).bit_count(), blocks.get(name, 0).bit_count() * BLOCK_MEBIBYTES)
        return replace(self, gpus=granted, device_ids={resource: masks for resource, masks in device_ids.items() if masks})

    def of_pod(self, pod: PodKey | None, uid: str | None) -> bool:
        """Whether it is this pod's. If both UIDs are known, they decide, because names recur."""
        if self.uid and uid:
            return self.uid == uid
        return self.pod is not None and self.pod == pod

    def same_pod(self, other: "Allocation") -> bool:
        return self.of_pod(other.pod, other.uid)

    def describe(self) -> str:
        return describe_container(self.pod, self.uid, self.container, self.id)


def describe_container(pod: PodKey | None, uid: str | None, container: str | None, allocation: AllocationId) -> str:
    """`namespace/name (container)`, or what is known instead."""
    name = "/".join(pod) if pod else (f"pod uid {uid}" if uid else f"allocation {allocation}")
    return f"{name} ({container})" if container else name


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between two ledgers, and history entries to store with it."""

    put: tuple[Allocation, ...] = ()
    drop: tuple[AllocationId, ...] = ()
    gpu_registry: GpuRegistry | None = None
    entries: tuple[HistoryEntry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.put or self.drop or self.gpu_registry is not None or self.entries)


class Ledger(msgspec.Struct, frozen=True, dict=True):
    gpu_registry: GpuRegistry = msgspec.field(default_factory=GpuRegistry)
    allocations: Mapping[AllocationId, Allocation] = msgspec.field(default_factory=dict)

    # -- queries -----------------------------------------------------------------------------------------------------------

    @cached_property
    def _held(self) -> Mapping[Resource, Masks]:
        return {resource: union(*(a.held(resource) for a in self.allocations.values())) for resource in ALL_RESOURCES}

    def held(self, resource: Resource) -> Masks:
        return self._held[resource]

    @cached_property
    def by_amount(self) -> Mapping[GpuName, Amounts]:
        """GPU -> the amounts that no core or memory ids represent: those of allocations without such ids, and what resized containers may
        use beyond what they hold. An init container ends before the pod's next container starts. So a pod counts with the most that its
        containers hold at one time; they start in the order of their grants."""
        running, most = dict[tuple[GpuName, object], Amounts](), dict[tuple[GpuName, object], Amounts]()
        for a in self.allocations.values():
            for gpu, amounts in a.gpus.items() if not a.by_ids else ():
                key = gpu, a.uid or a.pod or a.id
                now = running.get(key, Amounts()) + amounts
                most[key] = now.most(most.get(key, Amounts()))
                if not a.init or a.claim is not None:
                    running[key] = now
        sums: dict[GpuName, Amounts] = {}
        resized = ((gpu, a.grown_on(gpu)) for a in self.allocations.values() for gpu in a.resized)
        for gpu, amounts in (*((gpu, amounts) for (gpu, _), amounts in most.items()), *resized):
            sums[gpu] = sums.get(gpu, Amounts()) + amounts
        return sums

    def used(self, gpu: GpuName) -> Amounts:
        """The amounts of held ids, and `by_amount`. The sum can exceed the GPU: a container that was resized to more may use what a
        container that was resized to less still holds."""
        blocks = self.held("memory").get(gpu, 0).bit_count()
        held = Amounts(self.held("core").get(gpu, 0).bit_count(), blocks * BLOCK_MEBIBYTES)
        return held + self.by_amount.get(gpu, Amounts())

    def in_force(self, gpu: GpuName) -> Amounts:
        """What all containers together may use of this GPU. A resize to less does not count if the pod has an init container, which may run
        again and use all that the pod holds."""
        left = self.used(gpu)
        for a in self.on(gpu):
            if a.resized and not any(other.init and other.same_pod(a) for other in self.on(gpu)):
                left -= a.shrunk_on(gpu)
        return left

    def exceeded(self, gpu: GpuName, burst_mebibytes: int = 0) -> bool:
        """Whether `used` and `burst_mebibytes` together are more than the GPU has."""
        return self.excess(gpu, self.used(gpu) + Amounts(0, burst_mebibytes)) != Amounts()

    def excess(self, gpu: GpuName, amounts: Amounts) -> Amounts:
        registered = self.gpu_registry.by_name.get(gpu)
        return amounts.beyond(Amounts(CORES_PER_GPU, registered.memory_mebibytes if registered else 0))

    def available(self, gpu: GpuName) -> Amounts:
        """What is left for other pods: nothing of a GPU that is granted whole."""
        if gpu in self.exclusive:
            return Amounts()
        return Amounts(CORES_PER_GPU, self.gpu_registry.by_name[gpu].memory_mebibytes).beyond(self.used(gpu))

    def on(self, gpu: GpuName) -> list[Allocation]:
        """Oldest first."""
        return self._on.get(gpu, [])

    @cached_property
    def _on(self) -> Mapping[GpuName, list[Allocation]]:
        found: dict[GpuName, list[Allocation]] = {}
        for a in sorted(self.allocations.values(), key=lambda a: (a.granted_at, a.id)):
            for gpu in a.places:
                found.setdefault(gpu, []).append(a)
        return found

    @cached_property
    def occupied(self) -> frozenset[GpuName]:
        return frozenset(gpu for a in self.allocations.values() for gpu in a.places)

    def of(self, pod: PodKey | None, uid: str | None = None) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.of_pod(pod, uid)]

    @property
    def claims(self) -> Mapping[str, ClaimRequest]:
        """By UID; the value is one of the claim's requests."""
        return {a.claim.uid: a.claim for a in self.allocations.values() if a.claim is not None}

    def of_claim(self, uid: str) -> list[Allocation]:
        return [a for a in self.allocations.values() if a.claim is not None and a.claim.uid == uid]

    def holders(self, resource: Resource, masks: Masks) -> list[Allocation]:
        return [a for a in self.allocations.values() if common(a.held(resource), masks)]

    def reusable(self, resource: Resource, pod: PodKey | None, uid: str | None = None) -> Masks:
        """Ids of the pod's init containers that no sidecar or app container has taken over (kubelet: devicesToReuse)."""
        mine = self.of(pod, uid)
        return minus(union(*(a.held(resource) for a in mine if a.init)), union(*(a.held(resource) for a in mine if not a.init)))

    @cached_property
    def exclusive(self) -> Mapping[GpuName, Allocation]:
        """GPU -> the allocation that has it whole."""
        granted = {gpu: a for a in self.allocations.values() for gpu, amounts in a.gpus.items() if amounts.whole}
        by_ids = {gpu: a for a in self.allocations.values() if a.whole for gpu, m in a.held("core").items() if m == ALL_CORES}
        return granted | by_ids

    # -- changes -----------------------------------------------------------------------------------------------------------

    def occupy(self, allocation: Allocation) -> "Ledger":
        """The ledger with this allocation, which replaces the one with the same id."""
        return Ledger(self.gpu_registry, {**self.allocations, allocation.id: allocation})

    def free(self, ids: Iterable[AllocationId]) -> "Ledger":
        gone = set(ids)
        return Ledger(self.gpu_registry, {k: a for k, a in self.allocations.items() if k not in gone}) if gone else self

    def with_gpu_registry(self, gpu_registry: GpuRegistry) -> "Ledger":
        return self if gpu_registry == self.gpu_registry else Ledger(gpu_registry, self.allocations)

    def since(self, before: "Ledger") -> Change:
        return Change(
            put=tuple(a for k, a in self.allocations.items() if (old := before.allocations.get(k)) is not a and old != a),
            drop=tuple(k for k in before.allocations if k not in self.allocations),
            gpu_registry=None if self.gpu_registry == before.gpu_registry else self.gpu_registry,
        )

    def freed_since(self, before: "Ledger") -> list[Allocation]:
        """The allocations of `before` that have ended, unless their ids moved into another allocation of `before`."""
        grown = [(b, old) for k, b in self.allocations.items() if (old := before.allocations.get(k)) is not None and old is not b]
        return [
            a
            for k, a in before.allocations.items()
            if k not in self.allocations
            and not any(common(a.held(r), minus(b.held(r), old.held(r))) for b, old in grown for r in ALL_RESOURCES)
        ]

    # -- invariants --------------------------------------------------------------------------------------------------------------

    def violations(self, changed: Iterable[Allocation] | None = None) -> list[str]:
        """A sentence for each violated invariant. `changed`: only these allocations are checked (None: all)."""
        every = list(self.allocations.values())
        suspects = every if changed is None else list(changed)
        violated: list[str] = []
        for resource in ALL_RESOURCES:
            violated += _outside(suspects, self.gpu_registry, resource) + _shared_ids(suspects, every, resource)
        violated += [
            f"containers may use {self.in_force(gpu)} of GPU {gpu}, {excess} more than it has"
            for gpu in {g for a in suspects for g in a.places}
            if (excess := self.excess(gpu, self.in_force(gpu))) != Amounts()
        ]
        for a in suspects:
            for gpu, owner in ((gpu, self.exclusive[gpu]) for gpu in a.places if gpu in self.exclusive):
                others = self.on(gpu) if owner is a else [a]
                violated += [
                    f"{other.describe()} is on GPU {gpu}, which {owner.describe()} has whole"
                    for other in others
                    if other is not owner and not other.same_pod(owner) and not other.admin
                ]
        violated += [f"{a.describe()} was granted no GPU" for a in suspects if not a.gpus]
        violated += [
            f"{a.describe()} and {other.describe()} have MIG devices at the same place of GPU {gpu}"
            for a in suspects
            for gpu, amounts in a.gpus.items()
            if amounts.slices
            for other in self.on(gpu)
            if other is not a and not other.same_pod(a) and other.gpus.get(gpu, Amounts()).slices & amounts.slices
        ]
        return list(dict.fromkeys(violated))

    def check(self) -> "Ledger":
        """Raises ValueError with the violations, which are a bug."""
        if violated := self.violations():
            raise ValueError("the ledger is violated: " + "; ".join(violated))
        return self


def _outside(allocations: Iterable[Allocation], gpu_registry: GpuRegistry, resource: Resource) -> list[str]:
    every = {gpu.name: gpu.all_ids(resource) for gpu in gpu_registry.gpus}
    return [
        f"{a.describe()} holds {resource} ids that GPU {gpu} does not have"
        for a in allocations
        for gpu, mask in a.held(resource).items()
        if mask & ~every.get(gpu, 0)
    ]


def _shared_ids(suspects: Sequence[Allocation], every: Sequence[Allocation], resource: Resource) -> list[str]:
    position = {a.id: n for n, a in enumerate(every)}
    pairs = {
        (position[a.id], n)
        for a in suspects
        if a.held(resource)
        for n, b in enumerate(every)
        if b is not a and common(a.held(resource), b.held(resource))
    }
    return [
        f"{every[later].describe()} and {every[earlier].describe()} hold the same {resource} ids"
        for earlier, later in sorted({(min(pair), max(pair)) for pair in pairs})
        if not (every[later].same_pod(every[earlier]) and (every[later].init or every[earlier].init))
    ]


def granted_mebibytes(ledger: Ledger) -> dict[GpuName, int]:
    """GPU -> the memory that containers hold; all of a GPU that a container has whole."""
    return {gpu.name: gpu.memory_mebibytes - ledger.available(gpu.name).memory_mebibytes for gpu in ledger.gpu_registry.gpus}


def current_shares(ledger: Ledger) -> list[Allocation]:
    """The allocations of parts of GPUs. An init container's allocation is left out once another container of its pod has one."""
    return [
        a
        for a in ledger.allocations.values()
        if not a.whole and not (a.init and any(other.same_pod(a) and not other.init for other in ledger.allocations.values()))
    ]


def holdings(allocation: Allocation, gpu_registry: GpuRegistry) -> Iterator[tuple[RegisteredGpu, int, int]]:
    """GPU, cores and MiB of each part of the allocation; all memory of a GPU that it has whole."""
    for name in allocation.places:
        amounts = allocation.amounts_on(name)
        yield gpu_registry.by_name[name], amounts.cores, amounts.memory_mebibytes
