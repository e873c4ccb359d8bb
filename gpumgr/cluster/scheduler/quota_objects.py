"""Decodes the objects with the quotas of namespaces: the ConfigMap and ResourceQuotas.

The ConfigMap has the key `gpu_quota` in gpu-admission's format and the key `quota.yaml` in gpumgr's (docs/scheduler.md). The limits of
both keys apply together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gpumgr.cluster.core.quota import Limit, NamespaceQuota
from gpumgr.common.foreign_text import convert, decode_json, decode_yaml
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.kube.pods import parse_quantity
from gpumgr.settings.hami_resources import ReplicaResources

GPU_ADMISSION_KEY: Final = "gpu_quota"
PLAIN_KEY: Final = "quota.yaml"
KEYS: Final = (GPU_ADMISSION_KEY, PLAIN_KEY)
#: The API server stores no larger ConfigMap.
_MAX_BYTES: Final = 1 << 20
_MEBIBYTE: Final = 1 << 20
_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, Meta(min_length=1, max_length=253)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedQuotas:
    """`problem`: why `limits` can't be used."""

    limits: Mapping[str, NamespaceQuota]
    problem: str | None = None


class _GpuAdmission(msgspec.Struct):
    """`quota`: model -> whole GPUs. Without `quota` no model is allowed; without `pool` every pool is."""

    quota: dict[str, Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]] | None = None
    pool: list[str] | None = None

    def limits(self) -> NamespaceQuota:
        models = self.quota or {}
        return NamespaceQuota(
            limits=tuple(Limit(label=model, cores=CORES_PER_GPU * count) for model, count in models.items()),
            labels=frozenset(models),
            pools=frozenset(self.pool) if self.pool else None,
        )


class _PlainLimit(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`memory` is a quantity of bytes."""

    cores: _Amount | None = None
    memory: str | int | None = None
    gpus: _Amount | None = None
    model: _Text | None = None
    pool: _Text | None = None

    def limit(self) -> Limit:
        """Raises ValueError."""
        if self.cores is self.memory is self.gpus is None:
            raise ValueError("a limit has none of cores, memory, gpus")
        memory = None if self.memory is None else parse_quantity(str(self.memory)) // _MEBIBYTE
        return Limit(cores=self.cores, memory_mebibytes=memory, gpus=self.gpus, model=self.model or "", pool=self.pool or "")


def parse_quotas(item: Mapping[str, Any]) -> WatchedQuotas:
    """Parses the ConfigMap."""
    data = item.get("data") or {}
    found: dict[str, NamespaceQuota] = {}
    key = ""
    try:
        if not data.keys() & {*KEYS}:
            raise ValueError(f"it has neither the key {GPU_ADMISSION_KEY} nor the key {PLAIN_KEY}")
        if (text := data.get(key := GPU_ADMISSION_KEY)) is not None:
            entries = decode_json(text, dict[str, _GpuAdmission | None])
            found = {namespace: (entry or _GpuAdmission()).limits() for namespace, entry in entries.items()}
        if (text := data.get(key := PLAIN_KEY)) is not None:
            documents = decode_yaml(text, max_bytes=_MAX_BYTES)
            plain = convert(documents[0] if documents else {}, dict[str, list[_PlainLimit]])
            for namespace, limits in plain.items():
                quota = found.get(namespace, NamespaceQuota())
                found[namespace] = replace(quota, limits=(*quota.limits, *(each.limit() for each in limits)))
    except (ValueError, TypeError) as error:
        where = f"key {key}: " if key in data else ""
        return WatchedQuotas(limits={}, problem=f"{where}{' '.join(str(error).split())}")
    return WatchedQuotas(limits=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedResourceQuota:
    """A ResourceQuota of Kubernetes with HAMi's keys: `limits.<memory resource>` and `limits.<core resource>` of all GPUs of a namespace.
    Each object applies by itself. Scopes and other keys are ignored. Source: HAMi 2.10, pkg/device/quota.go.

    `limit` None: the object has none of the keys.
    """

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
