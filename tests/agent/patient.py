"""The real agent with timeouts and pauses of a minute instead of seconds: `python -m tests.agent.patient run ...`.

The agent infers the order of pods at the kubelet, and whether kubelet and container runtime answer, from elapsed time. On a machine that
stalls for a second it may be wrong, logs this and corrects it; and on a slow one a sweep may meet a kubelet that the test restarts. Tests
of its log in the regular case must not depend on that.
"""

from functools import partial
from typing import Final

from gpumgr.agent import admission, pods, reconciler
from gpumgr.cli import main
from gpumgr.kubelet import plugin_registration
from gpumgr.kubelet.plugin_registration import LinkTiming
from gpumgr.kubelet.records import PodResourcesClient
from gpumgr.node import components, node_enforcement
from gpumgr.runtime import process_owners
from gpumgr.runtime.cri import CriClient

_SECONDS: Final = 60.0

if __name__ == "__main__":
    vars(admission)["FOLLOWS_SECONDS"] = _SECONDS
    vars(reconciler)["SWEEP_SECONDS"] = _SECONDS
    # A restarted kubelet is found by its new socket: an agent that registers before would meet the old one.
    vars(plugin_registration)["LinkTiming"] = partial(LinkTiming, unwatched_seconds=_SECONDS)
    vars(pods)["RUNTIME_SECONDS"] = _SECONDS
    vars(process_owners)["LONG_SECONDS"] = _SECONDS
    vars(node_enforcement)["CriClient"] = partial(CriClient, timeout_seconds=_SECONDS)
    vars(components)["PodResourcesClient"] = partial(
        PodResourcesClient, timeout_seconds=_SECONDS, rate_limit_budget_seconds=_SECONDS
    )
    main()
