"""The response to a container's calls: a function of the allocation, the node's GPUs and the enforcement."""

from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.state import AgentState
from gpumgr.agent.tenants import tenant_of
from gpumgr.common.units import Resource
from gpumgr.ledger.answer import HostPaths, core_answer, instance_answer, memory_answer, replica_answer
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.response import ContainerResponse


class Answers:
    def __init__(self, *, agent_state: AgentState, pods: Pods, enforcement: Enforcement, host: HostPaths) -> None:
        self._agent_state, self._pods, self._enforcement, self._host = agent_state, pods, enforcement, host

    def whole(self, allocation: Allocation, resource: Resource) -> ContainerResponse:
        """The answer to one of the container's calls. Raises Refusal."""
        return self._enforcement.answer(self.base(allocation, resource), resource, allocation, self.tenant(allocation))

    def base(self, allocation: Allocation, resource: Resource) -> ContainerResponse:
        """Devices, folder and annotations, which do not depend on the enforcement. Raises Refusal."""
        if resource == "memory":
            return memory_answer(allocation)
        gpu_registry = self._agent_state.ledger.gpu_registry
        granted = self._agent_state.inventory.granted(gpu_registry)
        if resource == "mig":
            return instance_answer(allocation, granted, gpu_registry.format("mig", allocation.held("mig")), self._host)
        answer = core_answer if resource == "core" else replica_answer
        return answer(allocation, granted, self._host)

    def tenant(self, allocation: Allocation) -> GpuShare | None:
        """None: the allocation has no limits to enforce."""
        if not allocation.mechanisms:
            return None
        gpu_registry = self._agent_state.ledger.gpu_registry
        return tenant_of(
            allocation,
            gpu_registry,
            self._agent_state.inventory.gpus(gpu_registry),
            find_pod(self._pods, allocation.pod, allocation.uid),
        )
