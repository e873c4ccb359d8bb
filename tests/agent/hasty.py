"""The real agent with short pauses and deadlines in place of those of ten to forty seconds: `python -m tests.agent.hasty run ...`.

For tests of what happens after such a pause. Unit and component tests check how long the pauses are.
"""

from functools import partial
from typing import Final

from gpumgr.agent import reconciler, state
from gpumgr.cli import main
from gpumgr.compat.gpu_manager import running_pods
from gpumgr.driver.monitor import Monitor
from gpumgr.kube.publisher import node_reporter, objects
from gpumgr.kubelet import dra_registration, dra_side
from gpumgr.kubelet.dra_service import DraPlugin
from gpumgr.node import components, lifecycle

_SECONDS: Final = 0.5
#: For what the driver or the API server does in time also on a busy machine, if it does it at all.
_ANSWER_SECONDS: Final = 3.0

if __name__ == "__main__":
    vars(reconciler)["INCOMPLETE_SECONDS"] = _SECONDS
    vars(running_pods)["INCOMPLETE_SECONDS"] = _SECONDS
    vars(state)["EXPECTED_SECONDS"] = _SECONDS
    vars(objects)["_CONDITION_SECONDS"] = _SECONDS
    vars(node_reporter)["PATIENCE_SECONDS"] = _SECONDS
    vars(lifecycle)["FIRST_SNAPSHOT_SECONDS"] = _ANSWER_SECONDS
    vars(dra_side)["RECLAIM_SECONDS"] = _ANSWER_SECONDS
    vars(dra_registration)["DraPlugin"] = partial(DraPlugin, wait_seconds=_ANSWER_SECONDS)
    vars(components)["Monitor"] = partial(Monitor, retry_seconds=(_SECONDS, _SECONDS))
    main()
