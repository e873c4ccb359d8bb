"""Temporary."""

from gpumgr.allocator.claims import AllocatedClaim, ClaimRef, ClaimShare
from gpumgr.errors import Refusal
from gpumgr.kubeapi.client import ApiServer
from gpumgr.kubeapi.pods import parse_quantity


class ClaimReader:
    def __init__(self, server: ApiServer, pool: str) -> None:
        self._server, self._pool = server, pool

    async def read(self, claim: ClaimRef) -> AllocatedClaim:
        found = await self._server.find(f"/apis/resource.k8s.io/v1/namespaces/{claim.namespace}/resourceclaims/{claim.name}")
        if found is None or found["metadata"]["uid"] != claim.uid:
            raise Refusal("unknown_device", "gone")
        status = found["status"]
        shares = []
        for each in status["allocation"]["devices"]["results"]:
            if each["pool"] == self._pool and each["driver"] == "gpu.gpumgr.io":
                consumed = each.get("consumedCapacity") or {}
                shares.append(
                    ClaimShare(
                        request=each["request"].split("/")[0],
                        device=each["device"],
                        share_id=each.get("shareID"),
                        cores=parse_quantity(consumed.get("cores", "100")),
                        memory_mebibytes=parse_quantity(consumed.get("memory", "0")) >> 20,
                        admin=bool(each.get("adminAccess")),
                    )
                )
        pods = tuple(((claim.namespace, each["name"]), each["uid"]) for each in status.get("reservedFor", ()))
        return AllocatedClaim(ref=claim, pods=pods, shares=tuple(shares))
