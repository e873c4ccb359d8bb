"""Why a request is refused: the codes that stand in metrics, in the log and in the history."""

from typing import Final, get_args

from gpumgr.errors import RefusalCode
from tests.docs.markdown import code, table

MEANINGS: Final = {
    "invalid_request": "no node could grant it: cores without memory, 150 cores and the like",
    "no_fit": "this node has not the room, or not on a single GPU",
    "gpu_unhealthy": "a GPU that the kubelet chose is out of service",
    "conflict": "the kubelet handed out ids that somebody holds, or that lie on several GPUs; the owner's next pod runs",
    "unknown_device": "the kubelet asked for an id that was never offered, or not to this pod",
    "internal": "it can't be carried out: the ledger can't be written, or the mechanism that keeps the share does not work",
}


def refusals_table() -> str:
    """All, in the order in which the code has them."""
    return table(("code", "meaning"), ((code(each), MEANINGS.get(each, "")) for each in get_args(RefusalCode)))
