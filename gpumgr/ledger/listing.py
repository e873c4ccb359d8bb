"""Device ids by container, and ResourceClaims, as the kubelet's PodResources `List` has them.

The response has every id of the node (100 kB and more), while a decision needs the pods' names and the ids of one or two pods. The
client therefore decodes the names at once, and the rest on demand.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Self

#: (namespace, name). PodResources knows no UID, and names recur.
PodKey = tuple[str, str]
#: (namespace, name) of a ResourceClaim, again without a UID.
ClaimKey = tuple[str, str]
#: Device ids by container name and resource name.
Containers = Mapping[str, Mapping[str, tuple[str, ...]]]


class Listing:
    """The pods that the kubelet counts as active, in the order of the response, and the ids of their containers. Kubelets before 1.34
    also list ended and refused pods, without ids, until they are deleted.

    Ordinary init containers are not in it; sidecars are.
    """

    def __init__(
        self,
        pods: Sequence[PodKey],
        read: Callable[[PodKey], Containers],
        read_claims: Callable[[], Collection[ClaimKey]] = frozenset,
    ) -> None:
        """`read` is called at most once for each pod, and only for pods that `pods` names; `read_claims` at most once."""
        self.pods: tuple[PodKey, ...] = tuple(pods)
        self._read, self._read_claims = read, read_claims
        self._known: dict[PodKey, Containers] = {}

    @classmethod
    def of(
        cls, held: Mapping[PodKey, Mapping[str, Mapping[str, Sequence[str]]]], claims: Collection[ClaimKey] = frozenset()
    ) -> Self:
        """A listing from plain dicts: pod -> container -> resource -> device ids."""

        def read(pod: PodKey) -> Containers:
            return {
                container: {resource: tuple(ids) for resource, ids in resources.items()}
                for container, resources in held[pod].items()
            }

        return cls(tuple(held), read, lambda: claims)

    @cached_property
    def claims(self) -> Collection[ClaimKey]:
        """The claims of all listed containers, from kubelet 1.34 on by default."""
        return self._read_claims()

    def __contains__(self, pod: PodKey) -> bool:
        return pod in self.pods

    def containers(self, pod: PodKey) -> Containers:
        """The containers of `pod`, every one that the kubelet lists, also those without devices.

        Raises KeyError if the pod is not listed.
        """
        if pod not in self._known:
            if pod not in self.pods:
                raise KeyError(pod)
            self._known[pod] = self._read(pod)
        return self._known[pod]
