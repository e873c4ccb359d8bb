"""The real agent with timeouts of a minute instead of a second: `python -m tests.agent.patient run ...`.

The agent infers the order of pods at the kubelet, and whether the kubelet answers, from elapsed time. On a machine that stalls for a
second it may be wrong, logs this and corrects it; tests of its log in the regular case must not depend on that.
"""

from functools import partial
from typing import Final

from gpumgr.agent import admission
from gpumgr.app import components
from gpumgr.cli import main
from gpumgr.deviceplugin.podresources import PodResourcesClient

_SECONDS: Final = 60.0

if __name__ == "__main__":
    vars(admission)["FOLLOWS_SECONDS"] = _SECONDS
    vars(components)["PodResourcesClient"] = partial(
        PodResourcesClient, timeout_seconds=_SECONDS, rate_limit_budget_seconds=_SECONDS
    )
    main()
