"""The pod that an allocation belongs to."""

from gpumgr.agent.ports import Pods
from gpumgr.allocator.ledger import Allocation
from gpumgr.allocator.pods import PodKey, PodView


def find_pod(pods: Pods, pod: PodKey | None, uid: str | None) -> PodView | None:
    """The pod with this name and UID as the API server has it; None if it does not have it, or if both are None.

    Names recur: a pod of this name with another UID is another pod. A static pod is found by both of its UIDs, that of its mirror pod
    and that by which the kubelet and the container runtime identify it.
    """
    view = (pods.by_uid(uid) if uid else None) or (pods.get(pod) if pod else None)
    if view is None and uid:
        view = next((each for each in pods.all() if each.runtime_uid == uid), None)
    return view if view is not None and uid in (None, view.uid, view.runtime_uid) else None


def pod_of(holder: Allocation, pods: Pods) -> tuple[PodKey, str] | None:
    """Name and UID of the allocation's pod, from the API server, else from the ledger. The UID of a static pod is its mirror pod's."""
    view = find_pod(pods, holder.pod, holder.uid)
    if view is not None:
        return view.key, view.uid
    return (holder.pod, holder.uid) if holder.pod and holder.uid else None
