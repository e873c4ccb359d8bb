"""The real agent, which gives a minute to what it gives a second otherwise: `python -m tests.agent.patient run ...`.

Who follows whom at the kubelet, and whether the kubelet answers at all, it tells by the time that passes. Where a machine stalls for a
second it may be wrong, says so and puts it right; tests of what it says when all goes well must not depend on that.
"""

from functools import partial
from typing import Final

from gpumgr.agent import admission
from gpumgr.app import station
from gpumgr.cli import main
from gpumgr.deviceplugin.podresources import PodResourcesClient

_SECONDS: Final = 60.0

if __name__ == "__main__":
    vars(admission)["FOLLOWS_SECONDS"] = _SECONDS
    vars(station)["PodResourcesClient"] = partial(
        PodResourcesClient, timeout_seconds=_SECONDS, rate_limit_budget_seconds=_SECONDS
    )
    main()
