"""The part of a pod that gpumgr needs: names, requests, annotations, and the order of containers."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec

from gpumgr.common.units import ALL_RESOURCES, CORES_PER_GPU, Amounts, Resource
from gpumgr.placement.requests import UNCONSTRAINED, Constraints, ContainerKind, ReplicaRequest

#: (namespace, name). Names recur (StatefulSets); only the UID distinguishes two pods with one name.
PodKey = tuple[str, str]

#: UUID of a GPU, and what a container gets of it.
NamedGpu = tuple[str, Amounts]

#: HAMi's priority of containers that request none.
USUAL_PRIORITY: Final = 1

TERMINAL_PHASES = frozenset({"Succeeded", "Failed"})

_FILE_HASH: Final = re.compile("[0-9a-f]{32}")


def is_static_uid(uid: str) -> bool:
    """Static pods have the hash of their file as UID. The mirror pod at the API server has another UID."""
    return _FILE_HASH.fullmatch(uid) is not None


class PodSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that runs in the container runtime, also while none of its containers runs."""

    pod: PodKey
    uid: str


class ContainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One container's request: `cores` in 1/100 GPU, `memory_blocks` of 256 MiB, `replicas` (HAMi's resources) or `instances` (MIG
    devices). `priority`: a lower number has precedence."""

    name: str
    kind: ContainerKind = "app"
    cores: int = 0
    memory_blocks: int = 0
    replicas: ReplicaRequest | None = None
    instances: int = 0
    priority: int = USUAL_PRIORITY

    def wants(self, resource: Resource) -> int:
        if resource == "replica":
            return self.replicas.count if self.replicas else 0
        return {"core": self.cores, "memory": self.memory_blocks, "mig": self.instances}[resource]

    @property
    def wants_gpu(self) -> bool:
        return any(self.wants(resource) for resource in ALL_RESOURCES)

    @property
    def whole(self) -> bool:
        return self.cores >= CORES_PER_GPU or (self.replicas is not None and self.replicas.whole)


class ClaimUse(msgspec.Struct, frozen=True, kw_only=True):
    """A container's use of a ResourceClaim. `request`: the request of the claim that the container names; None: all requests."""

    container: str
    claim: str
    request: str | None = None
    init: bool = False

    def uses(self, claim: str, request: str) -> bool:
        return self.claim == claim and self.request in (None, request)


class ResizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the annotation `gpumgr.io/resize` gives one container on each of its GPUs. `cores` or `memory_mebibytes` None: what the
    container requests. `requested_at` distinguishes equal requests. `problem`: why the annotation can't be used."""

    cores: int | None = None
    memory_mebibytes: int | None = None
    requested_at: str = ""
    problem: str = ""


NO_RESIZE: Final = ResizeRequest()


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of this node; times are in unix seconds. `containers` are in the order in which the kubelet allocates: init containers and
    sidecars, then app containers.

    From the status: `phase`, `reason`, `message` (a kubelet that refuses a pod sets them), and `started`: a container runs or has run, so
    the kubelet has prepared the pod's claims. `deleted`: the pod is being deleted, but its containers may still run; `ends_at`: when its
    grace period ends, by the API server's clock. `controlled`: a controller replaces the pod when it fails. `runtime_uid`: the UID of a
    static pod in the kubelet and the runtime; its `uid` is the mirror pod's.

    From annotations: `core_limit` (`tencent.com/vcuda-core-limit`) in percent, 100 at most; `memory_limits` (`gpumgr.io/memory-limit`):
    containers and MiB; `suspend_when_idle_seconds`: 0.0 = never; `placed` (`gpumgr.io/placement`): container -> its GPUs, if the scheduler
    chose them for this node; `constraints`: the GPUs that the pod demands. A field that ends in `_ignored` says why the annotation is not
    used. `unreadable`: why the annotations can't be read, so that the pod gets no GPU.

    `bound_by_hami`: HAMi's scheduler bound the pod to this node, and waits until its containers have their devices. `submitter` (SUBMITTER
    in the environment of the first app container) and `cluster` (annotation `clusterName`) are only shown in gpu-manager's /usage.
    """

    namespace: str
    name: str
    uid: str
    phase: str = "Pending"
    reason: str | None = None
    message: str | None = None
    controlled: bool = False
    deleted: bool = False
    ends_at: float | None = None
    grace_seconds: float | None = None
    created_at: float = 0.0
    containers: tuple[ContainerSpec, ...] = ()
    service_account: str | None = None
    core_limit: int | None = None
    memory_limits: tuple[tuple[str, int], ...] = ()
    memory_limits_ignored: str | None = None
    suspend: bool | None = None
    suspend_when_idle_seconds: float | None = None
    suspend_ignored: str | None = None
    resizes: tuple[tuple[str, ResizeRequest], ...] = ()
    runtime_uid: str | None = None
    submitter: str | None = None
    cluster: str | None = None
    placed: tuple[tuple[str, tuple[NamedGpu, ...]], ...] = ()
    placement_ignored: str | None = None
    claims: tuple[ClaimUse, ...] = ()
    bound_by_hami: bool = False
    constraints: Constraints = UNCONSTRAINED
    unreadable: str | None = None
    started: bool = False

    @property
    def key(self) -> PodKey:
        return (self.namespace, self.name)

    @property
    def account(self) -> str:
        """The service account as "namespace/name"."""
        return f"{self.namespace}/{self.service_account or 'default'}"

    @property
    def ended(self) -> bool:
        return self.phase in TERMINAL_PHASES

    @property
    def wants_gpu(self) -> bool:
        return any(c.wants_gpu for c in self.containers)

    def resize_of(self, container: str | None) -> ResizeRequest:
        return dict(self.resizes).get(container or "", NO_RESIZE) if self.resizes else NO_RESIZE

    def container(self, name: str | None) -> ContainerSpec | None:
        return next((c for c in self.containers if c.name == name), None)


#: (namespace, name) of a ResourceClaim: PodResources has no UIDs of claims or pods.
ClaimKey = tuple[str, str]
#: Device ids by container name and resource name.
Containers = Mapping[str, Mapping[str, tuple[str, ...]]]


class Listing:
    """The kubelet's response to PodResources `List`: its active pods in their order, and the ids of their containers, without ordinary init
    containers. Kubelets before 1.34 also list ended and refused pods, without ids, until they are deleted.

    The response has every id of the node (100 kB and more), but a decision needs the ids of one or two pods. So only the names are decoded
    at once.
    """

    def __init__(
        self,
        pods: Sequence[PodKey],
        read: Callable[[PodKey], Containers],
        read_claims: Callable[[], Collection[ClaimKey]] = frozenset,
    ) -> None:
        """Calls `read` at most once for each of `pods`, and `read_claims` at most once."""
        self.pods: tuple[PodKey, ...] = tuple(pods)
        self._read, self._read_claims = read, read_claims
        self._known: dict[PodKey, Containers] = {}

    @cached_property
    def claims(self) -> Collection[ClaimKey]:
        """The claims of all listed containers. Kubelets list claims by default from 1.34 on."""
        return self._read_claims()

    def containers(self, pod: PodKey) -> Containers:
        """All containers of `pod` that the kubelet lists, even without devices. Raises KeyError if the pod is not listed."""
        if pod not in self._known:
            if pod not in self.pods:
                raise KeyError(pod)
            self._known[pod] = self._read(pod)
        return self._known[pod]
