"""Publishes what HAMi's scheduler reads: the node's GPUs, and the result of the admission of its pods.

HAMi's scheduler knows only its own pods, so the amounts that other pods hold are subtracted. A GPU that other pods share has less than 100
cores, so that no pod gets it exclusively. A GPU that another pod has whole, or that accepts no new pods, is published as unhealthy.

HAMi's scheduler binds the next pod once its lock on the node is removed, or after 5 minutes. So the agent removes the lock when a pod has
all its devices, has ended, or is deleted. The agent does not read the lock, so it may remove a later pod's lock. The agent itself does not
rely on the lock. The lock stays if a pod is deleted while no agent runs.
"""

from collections.abc import Callable
from typing import Final

from gpumgr.agent.node_report import NodeReport
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.kube.cache import PodCache
from gpumgr.kube.hami_formats import LOCK, REGISTER, SCORES, RegisteredGpu, encode_register, encode_scores, registered_profiles
from gpumgr.kube.pod_annotations import HAMI_PHASE
from gpumgr.kube.publisher.publisher import Publisher
from gpumgr.ledger.callers import next_container
from gpumgr.ledger.ledger import Allocation, Ledger
from gpumgr.placement.devices import score_matrix
from gpumgr.placement.mig import most_devices, without_places
from gpumgr.placement.pods import PodView
from gpumgr.placement.requests import device_type

_FINAL: Final = ("success", "failed")


def register(annotate: Callable[[str, str], None], pods: Pods, report: NodeReport) -> None:
    """Publishes the node's GPUs, once its GPUs and pods are known."""
    snapshot = report.view.inventory.snapshot
    if not snapshot.gpus or not pods.synced:
        return
    annotate(REGISTER, encode_register(_registered(report, pods)))
    if len(snapshot.gpus) > 1:
        annotate(SCORES, encode_scores([gpu.uuid for gpu in snapshot.gpus], score_matrix(snapshot.topology)))


def _registered(report: NodeReport, pods: Pods) -> list[RegisteredGpu]:
    view, registry = report.view, report.view.ledger.gpu_registry
    closed, on_demand = view.node.out_of_service, view.node.mig_profiles
    others = {key: each for key, each in view.ledger.allocations.items() if not _is_counted(each, pods)}
    foreign = Ledger(gpu_registry=registry, allocations=others)
    made = []
    for name, gpu in view.inventory.gpus(registry).items():
        # HAMi's scheduler counts what its pods request, without what resizes have added.
        growth = (each.grown_on(name) for each in view.ledger.on(name) if each.id not in others)
        held = sum(growth, foreign.used(name))
        memory = max(0, gpu.memory_mebibytes - held.memory_mebibytes)
        cores = max(0, CORES_PER_GPU - held.cores)
        taken = sum(name in each.held("replica") for each in others.values())
        profiles = [without_places(each, held.slices) for each in on_demand.get(name, ())]
        offered = name not in closed and not (gpu.mig_enabled and not profiles)
        replicas = view.inventory.replicas
        count = min(replicas, most_devices(profiles)) if profiles else max(0, replicas - taken)
        # Scaling has no meaning for MIG devices.
        memory_scaling, core_scaling = (1.0, 1.0) if profiles else view.inventory.scaling
        # HAMi's scheduler gives a GPU exclusively (100 cores) if 100 cores are left. The agent refuses that while another pod is on the
        # GPU.
        scaled = int(cores * core_scaling)
        if any(not each.admin for each in foreign.on(name)):
            scaled = min(scaled, CORES_PER_GPU - 1)
        made.append(
            RegisteredGpu(
                uuid=gpu.uuid,
                index=gpu.index,
                count=count,
                memory_mebibytes=int(memory * memory_scaling),
                cores=scaled,
                model=device_type(gpu.model),
                numa=max(0, gpu.numa_node or 0),
                mode="mig" if profiles else "hami-core",
                mig_profiles=registered_profiles(profiles),
                healthy=offered and memory > 0 and cores > 0 and count > 0,
            )
        )
    return made


def _is_counted(allocation: Allocation, pods: Pods) -> bool:
    """Whether HAMi's scheduler counts the allocation, because it bound the pod."""
    pod = find_pod(pods, allocation.pod, allocation.uid)
    return pod is not None and pod.bound_by_hami


class HamiBindings:
    """Removes the scheduler's lock on the node, and publishes the failure of pods. (`pod_annotations` publishes the success.)"""

    def __init__(self, publisher: Publisher, *, agent_state: AgentState, pods: PodCache) -> None:
        self._publisher, self._agent_state, self._pods = publisher, agent_state, pods
        #: UIDs of the pods with a published result.
        self._decided: set[str] = set()

    def follow(self) -> None:
        """Call it after each change of the ledger, and once a second for changes of pods."""
        for view in self._pods.all():
            if not view.bound_by_hami or view.uid in self._decided:
                continue
            if self._pods.annotations(view.uid).get(HAMI_PHASE) in _FINAL:  # an earlier process has published it
                self._decided.add(view.uid)
            elif view.ended or next_container(self._agent_state.ledger, view) is None:
                self._decided.add(view.uid)
                if view.phase == "Failed":
                    self._publisher.annotate_pod(view.key, view.uid, {HAMI_PHASE: "failed"})
                self._publisher.remove_annotation(LOCK)

    def gone(self, view: PodView) -> None:
        if view.bound_by_hami and view.uid not in self._decided:
            self._publisher.remove_annotation(LOCK)
        self._decided.discard(view.uid)
