"""What the watches of `gpumgr claims` keep."""

from dataclasses import dataclass
from typing import Any, cast

from gpumgr.claims.objects import UnboundPod
from gpumgr.claims.watches import ClaimWatches
from gpumgr.settings.schema import SchedulerSettings


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def unbound(name: str, claim: str) -> UnboundPod:
    return UnboundPod(
        uid=f"uid-{name}",
        key=("team", name),
        created="",
        gate=None,
        templates=(),
        claims=(claim,),
        complete=True,
        model=None,
        pool=None,
    )


async def test_claims_of_bound_pods_are_forgotten_though_no_quota_is_decided() -> None:
    """Only the leader decides quotas, and only if a pod has the gate."""
    clock = Clock()
    watches = ClaimWatches(cast("Any", None), SchedulerSettings(), clock=clock)
    for number in range(100):
        clock.now = float(number)
        pods = [unbound(f"p{number}", f"c{number}"), unbound(f"q{number}", "shared")]
        for pod in pods:
            watches._pod_changed(None, pod)
            watches._pod_changed(pod, None)
    assert {name for _, name in watches._left} == {"shared", *(f"c{number}" for number in range(90, 100))}
    assert watches._left["team", "shared"][0].key[1] == "q99"
