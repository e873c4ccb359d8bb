"""Kubernetes' ResourceQuotas with HAMi's keys: `limits.<memory resource>` and `limits.<core resource>` of all GPUs of a namespace.

Each object holds by itself. Scopes and further keys have no influence. Source: HAMi 2.10, pkg/device/quota.go.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumgr.cluster.core.quota import Limit
from gpumgr.kube.pods import parse_quantity
from gpumgr.settings.hami_resources import ReplicaResources


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedResourceQuota:
    """`limit` None: it has none of the keys."""

    uid: str
    namespace: str
    limit: Limit | None


def parse_resource_quota(item: Mapping[str, Any], hami: ReplicaResources) -> WatchedResourceQuota:
    """Raises KeyError, TypeError or ValueError for an object that is no ResourceQuota."""
    metadata, hard = item["metadata"], (item.get("spec") or {}).get("hard") or {}
    memory, cores = (
        parse_quantity(str(hard[key])) if (key := f"limits.{name}") in hard else None
        for name in (hami.memory_resource, hami.core_resource)
    )
    limit = Limit(cores=cores, memory_mebibytes=None if memory is None else memory * hami.memory_factor)
    return WatchedResourceQuota(
        uid=str(metadata["uid"]), namespace=str(metadata["namespace"]), limit=None if cores is memory is None else limit
    )
