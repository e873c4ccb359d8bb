"""The pods that an allocation belongs to: several if they use one ResourceClaim."""

from collections.abc import Sequence

from gpumgr.agent.ports import Pods
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.pods import PodKey, PodView


def find_pod(pods: Pods, pod: PodKey | None, uid: str | None) -> PodView | None:
    """The pod with this name and UID as the API server has it; None if it does not have it, or if both are None.

    Names recur: a pod of this name with another UID is another pod. A static pod is found by both of its UIDs, that of its mirror pod
    and that by which the kubelet and the container runtime identify it.
    """
    view = (pods.by_uid(uid) if uid else None) or (pods.get(pod) if pod else None)
    if view is None and uid:
        view = next((each for each in pods.all() if each.runtime_uid == uid), None)
    return view if view is not None and uid in (None, view.uid, view.runtime_uid) else None


def pods_of(holder: Allocation, pods: Pods) -> Sequence[tuple[PodKey, str]]:
    """Names and UIDs of the pods that use the allocation, from the API server, else from the ledger; empty if none is known. The UID of
    a static pod is its mirror pod's."""
    claim = holder.claim
    if claim is not None:
        in_namespace = (pod for pod in pods.all() if pod.namespace == claim.namespace and not pod.ended)
        found = [pod for pod in in_namespace if any(use.uses(claim.name, claim.request) for use in pod.claims)]
        found.sort(key=lambda pod: pod.uid != holder.uid)
    else:
        view = find_pod(pods, holder.pod, holder.uid)
        found = [view] if view is not None else []
    return [(pod.key, pod.uid) for pod in found] or ([(holder.pod, holder.uid)] if holder.pod and holder.uid else [])


def pod_of(holder: Allocation, pods: Pods) -> tuple[PodKey, str] | None:
    """The first of `pods_of`."""
    return next(iter(pods_of(holder, pods)), None)
