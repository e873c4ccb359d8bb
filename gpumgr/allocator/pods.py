"""The part of a pod that the allocator needs: names, requests and order of its containers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gpumgr.units import Resource

#: (namespace, name). Names recur (StatefulSets): where it is known, the UID distinguishes two incarnations.
PodKey = tuple[str, str]

#: "init" ends before the next container starts and leaves its ids to later containers; "sidecar" is an init container with
#: restartPolicy Always, which keeps running; "app" is everything in spec.containers.
ContainerKind = Literal["init", "sidecar", "app"]

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerSpec:
    """One container's request: `cores` in 1/100 GPU, `memory_blocks` of 256 MiB."""

    name: str
    kind: ContainerKind = "app"
    cores: int = 0
    memory_blocks: int = 0

    def wants(self, resource: Resource) -> int:
        return self.cores if resource == "core" else self.memory_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """One pod of this node. `containers` are in the order in which the kubelet allocates: init (and sidecars), then app.

    `created_at` is in unix seconds; `phase`, `reason` and `message` are the API's values (a kubelet that refuses a pod sets them).
    `controlled`: a controller would replace the pod.
    `core_limit` is the annotation `tencent.com/vcuda-core-limit`, in percent, 100 at most. `runtime_uid` is the UID of a static pod in
    the kubelet and the runtime; its `uid` is that of its mirror pod. `submitter` (SUBMITTER in the environment of the first app
    container) and `cluster` (the annotation `clusterName`) are only shown in gpu-manager's /usage.
    """

    namespace: str
    name: str
    uid: str
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    controlled: bool = False
    created_at: float = 0.0
    containers: tuple[ContainerSpec, ...] = ()
    service_account: str | None = None
    core_limit: int | None = None
    runtime_uid: str | None = None
    submitter: str | None = None
    cluster: str | None = None

    @property
    def key(self) -> PodKey:
        return (self.namespace, self.name)

    @property
    def account(self) -> str:
        """Its service account as "namespace/name"."""
        return f"{self.namespace}/{self.service_account or 'default'}"

    @property
    def ended(self) -> bool:
        return self.phase in TERMINAL_PHASES

    @property
    def wants_gpu(self) -> bool:
        return any(c.cores or c.memory_blocks for c in self.containers)

    def container(self, name: str | None) -> ContainerSpec | None:
        return next((c for c in self.containers if c.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainNeeds:
    """What must fit on the GPUs of the first container of a chain: ids of both resources in all, and the most cores that one container
    of the chain requests."""

    cores: int = 0
    memory_blocks: int = 0
    most_cores: int = 0


def chain_needs(containers: Iterable[ContainerSpec]) -> ChainNeeds:
    """Needs of the first of `containers` and of the later ones that must use the same GPUs.

    The kubelet gives an init container's ids to the containers after it before it takes new ones, and ids of a sidecar or an app
    container leave that pool (devicemanager: devicesToReuse). A container that takes over ids of either resource must use their GPU.
    """
    needs = ChainNeeds()
    pool_cores = pool_blocks = 0
    for position, container in enumerate(containers):
        cores, blocks = min(pool_cores, container.cores), min(pool_blocks, container.memory_blocks)
        if position and not (pool_cores or pool_blocks):
            break
        if position and not (cores or blocks):
            continue
        fresh_cores, fresh_blocks = container.cores - cores, container.memory_blocks - blocks
        needs = ChainNeeds(
            cores=needs.cores + fresh_cores,
            memory_blocks=needs.memory_blocks + fresh_blocks,
            most_cores=max(needs.most_cores, container.cores),
        )
        if container.kind == "init":
            pool_cores, pool_blocks = pool_cores + fresh_cores, pool_blocks + fresh_blocks
        else:
            pool_cores, pool_blocks = pool_cores - cores, pool_blocks - blocks
    return needs
