"""The table of the codes of refused requests, which are in metrics, in the log and in the history."""

from typing import Final, get_args

from gpumgr.common.errors import RefusalCode
from tools.docs.markdown import code, table

MEANINGS: Final = {
    "invalid_request": "No node can grant the request, for example cores without memory, or 150 cores.",
    "no_fit": "The node lacks the free capacity, or no single GPU has it.",
    "gpu_unhealthy": "A GPU that the kubelet chose is out of service.",
    "conflict": "The kubelet chose ids that another container holds, or of several GPUs, or of a GPU that the pod's annotations exclude. "
    "The next pod of the owner can run.",
    "unknown_device": "The kubelet requested an id that was never offered, or not to this pod.",
    "internal": "The request can't be carried out: the ledger can't be written, or the mechanism that enforces the limits does not work.",
}


def refusals_table() -> str:
    """All codes, in the order of their definition."""
    return table(("code", "meaning"), ((code(each), MEANINGS.get(each, "")) for each in get_args(RefusalCode)))
