"""Prepares an allocation for the start of its container: its folder, its limits, its CDI spec."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpumgr.agent.answers import Answers
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Enforcement, Pods
from gpumgr.agent.state import AgentState
from gpumgr.agent.tenants import is_share
from gpumgr.common.errors import Refusal
from gpumgr.common.units import ALL_RESOURCES, RESOURCES
from gpumgr.ledger.answer import HostPaths
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.response import merged

#: The mechanisms of a share without enforcement.
NO_MECHANISM = ("none",)


class ContainerStarts:
    """`make_dir` creates a container's folder below `host.allocation_dir`."""

    def __init__(
        self,
        *,
        agent_state: AgentState,
        pods: Pods,
        enforcement: Enforcement,
        host: HostPaths,
        make_dir: Callable[[str], None],
    ) -> None:
        self.pods, self.enforcement = pods, enforcement
        self.answers = Answers(agent_state=agent_state, pods=pods, enforcement=enforcement, host=host)
        self._agent_state, self._allocation_dir, self._make_dir = agent_state, host.allocation_dir, make_dir

    def make_folders(self, allocations: Sequence[Allocation]) -> None:
        """Creates the host folders that the containers mount. Raises Refusal."""
        for allocation in allocations:
            folder = f"{self._allocation_dir}/{allocation.id}"
            try:
                self._make_dir(folder)
            except OSError as error:
                raise Refusal("internal", f"the container's folder {folder} can't be made: {error.strerror or error}") from error

    async def start(self, allocation: Allocation) -> None:
        """Puts the limits in place, and writes the CDI spec if the allocation has one. Raises Refusal."""
        gpu_registry = self._agent_state.ledger.gpu_registry
        if allocation.whole:
            await self.enforcement.vacate([gpu_registry.by_name[gpu].uuid for gpu in allocation.gpus])
        self._check_exemption(allocation)
        allocation = self._with_known_terms(allocation)
        held = [each for each in ALL_RESOURCES if allocation.held(each)] or RESOURCES
        base = merged(*(self.answers.base(allocation, each) for each in held))
        await self.enforcement.start(base, allocation, self.answers.tenant(allocation))

    def _with_known_terms(self, allocation: Allocation) -> Allocation:
        """Refuses a share that was adopted without its response (the checkpoint was lost), since its limits are not known."""
        if not is_share(allocation) or allocation.mechanisms:
            return allocation
        mechanisms = self.enforcement.terms(find_pod(self.pods, allocation.pod, allocation.uid), share=True).mechanisms
        if mechanisms != NO_MECHANISM:
            raise Refusal(
                "internal",
                "which limits this container was admitted with is not known any more (the ledger was lost); delete the pod and create it "
                "again",
            )
        return replace(allocation, mechanisms=mechanisms)

    def _check_exemption(self, allocation: Allocation) -> None:
        """The operator's exemption applies only to the pods that it names; a later `List` call may have corrected the pod of a grant."""
        exemption = allocation.exemption
        if exemption is None:
            return
        view = find_pod(self.pods, allocation.pod, allocation.uid)
        if allocation.pod is None or ("/" in exemption and view is None):
            raise Refusal(
                "internal", f"whether the pod is one of {exemption} is not known yet; the kubelet tries again by itself"
            )
        if exemption not in (allocation.pod[0], view.account if view else None):
            raise Refusal(
                "conflict",
                f"the container was admitted as one of {exemption}, which the operator excepts from the node's limits, and is none; delete "
                f"the pod and create it again",
            )
