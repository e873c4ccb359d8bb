"""Objects of the API server as the controller reads them."""

from typing import Any

import pytest

from gpumgr.cluster.claims.objects import parse_claim, parse_slice, parse_template, parse_unbound, waits
from gpumgr.cluster.core.request import ContainerRequest
from gpumgr.cluster.scheduler.objects import QuotaLabels
from gpumgr.common.units import Amounts
from gpumgr.placement.requests import ReplicaRequest

Json = dict[str, Any]
META = {"namespace": "team", "name": "x", "uid": "u"}
OURS = {"deviceClassName": "gpu.gpumgr.io"}


def share(cores: int, mebibytes: int) -> ContainerRequest:
    return ContainerRequest(cores_per_gpu=cores, memory_mebibytes=mebibytes)


WHOLE = ContainerRequest(cores_per_gpu=100)
ALL_MEMORY = ContainerRequest(cores_per_gpu=30, replica=ReplicaRequest(count=1, cores=30))


def claim(*requests: Json, allocation: Json | None = None, **meta: Any) -> Json:
    status = {} if allocation is None else {"allocation": allocation}
    return {"metadata": {**META, **meta}, "spec": {"devices": {"requests": list(requests)}}, "status": status}


def capacity(cores: object, memory: str) -> Json:
    return {"capacity": {"requests": {"cores": cores, "memory": memory}}}


@pytest.mark.parametrize(("request_", "containers"), [
    ({"exactly": {**OURS, **capacity("30", "5Gi")}}, (share(30, 5120),)),
    ({"exactly": {**OURS, **capacity("30", "5368709120"), "count": 2}}, (share(30, 5120),) * 2),
    ({"exactly": {**OURS, **capacity("30", "1")}}, (share(30, 256),)),
    ({"exactly": {**OURS, **capacity("9500m", "0.3Gi")}}, (share(10, 512),)),
    ({"exactly": {**OURS, **capacity("0.1", "100m")}}, (share(1, 256),)),
    ({"exactly": {**OURS, **capacity(0, "0")}}, (share(1, 256),)),
    ({"exactly": {**OURS, **capacity("99001m", "1Gi")}}, (WHOLE,)),
    ({"exactly": {**OURS, "count": 3}}, (WHOLE,) * 3),
    ({"exactly": OURS}, (WHOLE,)),
    ({"exactly": {**OURS, "count": 10**9}}, (WHOLE,) * 33),
    ({"exactly": {**OURS, **capacity("300", "1Gi")}}, (WHOLE,)),
    ({"exactly": {**OURS, "capacity": {"requests": {"cores": "30"}}}}, (ALL_MEMORY,)),
    ({"firstAvailable": [{**OURS, **capacity("30", "5Gi")}, {**OURS, "capacity": {"requests": {"cores": "30"}}}]}, (ALL_MEMORY,)),
    ({"exactly": {**OURS, "adminAccess": True}}, ()),
    ({"exactly": {"deviceClassName": "other"}}, ()),
    ({"firstAvailable": [{"name": "a", **OURS, **capacity("30", "5Gi")}, {"name": "b", **OURS, "count": 2}]}, (WHOLE,) * 2),
    ({"firstAvailable": [{"name": "a", "deviceClassName": "other"}]}, ()),
])  # fmt: skip
def test_what_a_claim_asks_for(request_: Json, containers: tuple[ContainerRequest, ...]) -> None:
    found = parse_claim(claim({"name": "r", **request_}))
    assert (found.containers, found.allocated, found.placed) == (containers, False, None)


def test_what_is_allocated_counts_on_its_node() -> None:
    result = {"driver": "gpu.gpumgr.io", "pool": "node-a", "request": "r"}
    results = [
        {**result, "device": "gpu-1", "consumedCapacity": {"cores": "30", "memory": "5Gi"}},
        {**result, "device": "gpu-2", "consumedCapacity": {"cores": "100", "memory": "40Gi"}},
        {**result, "device": "gpu-3", "adminAccess": True},
        {**result, "driver": "other", "device": "nic"},
    ]
    found = parse_claim(claim(allocation={"devices": {"results": results}}))
    assert found.placed is not None
    assert (found.placed.node, found.placed.namespace, found.placed.uid) == ("node-a", "team", "u")
    assert found.placed.request.containers == (share(30, 5120), WHOLE)
    assert found.placed.shares == ((("gpu-1", Amounts(30, 5120)),), (("gpu-2", Amounts(100)),))
    other = parse_claim(claim(allocation={"devices": {"results": results[3:]}}))
    assert (other.allocated, other.placed) == (True, None)


def test_a_claims_owner_and_template() -> None:
    owners = [{"kind": "Job", "uid": "j"}, {"kind": "Pod", "uid": "p"}]
    found = parse_claim(claim(ownerReferences=owners, annotations={"gpumgr.io/claim-template": "vcuda-c0-1-1"}))
    assert (found.owner, found.template) == ("p", "vcuda-c0-1-1")


def unbound(spec: Json, statuses: list[Json] | None = None) -> Any:
    item = {"metadata": {**META, "creationTimestamp": "2026-01-01T00:00:00Z"}, "spec": spec}
    item["status"] = {"resourceClaimStatuses": statuses} if statuses is not None else {}
    return parse_unbound(item, QuotaLabels("model", "pool")) if waits(item) else None


def test_a_pod_without_a_node() -> None:
    assert unbound({"containers": [], "schedulingGates": [{"name": "other"}]}) is None
    assert unbound({"schedulingGates": [{"name": "gpumgr.io/quota"}], "nodeName": "node"}) is None
    gate = unbound({"schedulingGates": [{"name": "other"}, {"name": "gpumgr.io/quota"}], "nodeSelector": {"model": "A100"}})
    assert (gate.gate, gate.complete, gate.model, gate.pool) == (1, True, "A100", None)
    named = [{"name": "a", "resourceClaimName": "own"}, {"name": "b", "resourceClaimTemplateName": "vcuda-c0-1-1"}]
    early = unbound({"resourceClaims": named})
    assert (early.gate, early.templates, early.claims, early.complete) == (None, ("vcuda-c0-1-1",), ("own",), False)
    late = unbound({"resourceClaims": named}, [{"name": "b", "resourceClaimName": "made"}])
    assert (late.claims, late.complete) == (("own", "made"), True)
    without = unbound({"resourceClaims": named}, [{"name": "b"}])
    assert (without.claims, without.complete) == (("own",), True)


def test_a_template_and_a_slice() -> None:
    assert not parse_template({"metadata": META}).managed
    assert parse_template({"metadata": {**META, "labels": {"app.kubernetes.io/managed-by": "gpumgr"}}}).managed
    device = {"name": "gpu-1", "attributes": {"productName": {"string": "A100"}}, "capacity": {"memory": {"value": "40Gi"}}}
    found = parse_slice(
        {"metadata": {"name": "s", "uid": "u"}, "spec": {"nodeName": "n", "devices": [device, {"name": "gpu-2"}]}}
    )
    assert [(gpu.uuid, gpu.model, gpu.memory_mebibytes) for gpu in found.gpus] == [("gpu-1", "A100", 40960), ("gpu-2", "", 0)]
