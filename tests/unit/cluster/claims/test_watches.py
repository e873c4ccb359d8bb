"""What the watches of `gpumgr claims` keep."""

from typing import Any, cast

from msgspec.structs import replace

from gpumgr.cluster.claims.objects import UnboundPod, WatchedClaim, WatchedSlice
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.settings.schema import SchedulerSettings


def unbound(name: str, claim: str) -> UnboundPod:
    key = ("team", name)
    return UnboundPod(
        uid=name, key=key, created="", gate=None, templates=(), claims=(claim,), complete=True, model=None, pool=None
    )


async def test_claims_of_bound_pods_are_forgotten_though_no_quota_is_decided() -> None:
    """Only the leader decides quotas, and only if a pod has the gate."""
    now = 0
    watches = ClaimWatches(cast("Any", None), SchedulerSettings(), clock=lambda: now)
    for now in range(100):
        for pod in (unbound(f"p{now}", f"c{now}"), unbound(f"q{now}", "shared")):
            watches._pod_changed(None, pod)
            watches._pod_changed(pod, None)
    assert len(watches._left) == 20


async def test_a_deleted_object_is_removed_though_it_was_listed_again_and_not_if_it_has_a_successor() -> None:
    """A list makes equal objects anew, and reports no change."""
    watches = ClaimWatches(cast("Any", None), SchedulerSettings())
    claim, of_node = WatchedClaim(uid="1", key=("team", "a")), WatchedSlice(uid="1", key="node", gpus=())
    watches._claim_changed(None, claim)
    watches._slice_changed(None, of_node)
    watches._claim_changed(replace(claim), None)
    watches._slice_changed(replace(of_node), None)
    assert (watches._claims, watches._slices) == ({}, {})
    watches._claim_changed(None, claim)
    watches._claim_changed(None, replace(claim, uid="2"))
    watches._claim_changed(claim, None)
    assert [each.uid for each in watches._claims.values()] == ["2"]
