"""Reports a pod with a container that gets two sets of limits, because its claims were prepared for other pods before.

The kubelet makes no Prepare call for it, so nothing can refuse the pod: it gets the variables and files of one set. A module of its own,
since an agent in mode plugin does not import `claims`.
"""

from typing import Final

import structlog

from gpumgr.agent.state import AgentState
from gpumgr.common.errors import Refusal
from gpumgr.ledger.claims import refuse_two_limits
from gpumgr.ledger.history import HistoryEntry
from gpumgr.placement.pods import PodView

log = structlog.get_logger(__name__)

#: Reason of the pod's event.
TWO_LIMITS: Final = "GpuTwoLimits"


def report_two_limits(agent_state: AgentState, pod: PodView) -> None:
    """`pod` has appeared on the node. Does nothing if a Prepare call of one of its claims is still to come."""
    ledger, names = agent_state.ledger, {(pod.namespace, use.claim) for use in pod.claims if not pod.ended}
    for claim in ledger.claims.values():
        if (claim.namespace, claim.name) in names:
            try:
                refuse_two_limits(ledger, claim, [pod])
            except Refusal as refusal:
                why = f"the pod can't be refused, since its claims were prepared for other pods: {refusal}"
                log.warning("two_limits", pod="/".join(pod.key), pod_uid=pod.uid, reason=why)
                entry = HistoryEntry(what="event", code=TWO_LIMITS, pod=pod.key, pod_uid=pod.uid, why=why)
                agent_state.history.add_unless_repeated(entry)
                return
