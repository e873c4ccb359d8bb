"""Collects the limits of namespaces from ResourceQuotas and a ConfigMap. All limits apply together.

The ConfigMap (scheduler.quota_configmap) has one or both of two keys: `gpu_quota`, in the format of tkestack's gpu-admission, and
`quota.yaml`, in gpumgr's own format (docs/scheduler.md).
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
import structlog
from msgspec import Meta
from msgspec.structs import replace

from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.common.foreign_text import convert, decode_json, decode_yaml
from gpumgr.common.units import CORES_PER_GPU
from gpumgr.kube.pods import parse_quantity
from gpumgr.settings.hami_resources import ReplicaResources

_log = structlog.get_logger(__name__)

GPU_ADMISSION_KEY: Final = "gpu_quota"
PLAIN_KEY: Final = "quota.yaml"
#: The API server stores no larger ConfigMap.
_MAX_BYTES: Final = 1 << 20
_MEBIBYTE: Final = 1 << 20
_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, Meta(min_length=1, max_length=253)]


class WatchedQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """The ConfigMap's limits. `problem`: why they can't be used."""

    uid: str
    limits: Mapping[str, NamespaceQuota] = {}
    problem: str | None = None


class _GpuAdmission(msgspec.Struct):
    """The quota of one namespace in gpu-admission's format. `quota`: model -> whole GPUs. Without `quota` no model is allowed; without
    `pool` every pool is allowed."""

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
    """A limit in gpumgr's own format. `memory` is a Kubernetes quantity of bytes."""

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
    """Raises KeyError, TypeError or AttributeError for an object that is no ConfigMap."""
    uid, data = str(item["metadata"]["uid"]), item.get("data") or {}
    found: dict[str, NamespaceQuota] = {}
    key = ""
    try:
        if not data.keys() & {GPU_ADMISSION_KEY, PLAIN_KEY}:
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
        return WatchedQuotas(uid=uid, problem=f"{where}{' '.join(str(error).split())}")
    return WatchedQuotas(uid=uid, limits=found)


class WatchedResourceQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A ResourceQuota with HAMi's keys: `limits.<memory resource>` and `limits.<core resource>` of all GPUs of a namespace. Scopes and
    other keys are ignored. `limit` None: it has none of the keys. Source: HAMi 2.10, pkg/device/quota.go."""

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


class QuotaSources:
    """Sets the limits of `quotas` from both sources. `configmap` is NAMESPACE/NAME, for messages."""

    def __init__(self, quotas: Quotas, configmap: str) -> None:
        self._quotas, self._configmap = quotas, configmap
        self._limits = quotas.limits = dict[str, NamespaceQuota]()
        #: None: no ConfigMap is in use.
        self._configured: Mapping[str, NamespaceQuota] | None = None
        #: Namespace -> UID of a ResourceQuota -> its limit.
        self._hard: defaultdict[str, dict[str, Limit]] = defaultdict(dict)

    def configmap_changed(self, _before: WatchedQuotas | None, after: WatchedQuotas | None) -> None:
        """If the new content can't be used, the earlier limits stay in force. If there was no usable ConfigMap before, no pod can be
        placed."""
        if after is not None and after.problem is not None:
            used = "the earlier quotas"
            if self._configured is None:
                where, used = f"ConfigMap {self._configmap} can't be used", "nothing; no pod is placed"
                self._quotas.problem = f"{where}, so the quotas are not known: {after.problem}; correct it or delete it"
            _log.error("quotas_unusable", configmap=self._configmap, reason=after.problem, used_instead=used)
            return
        self._configured, self._quotas.problem = None if after is None else after.limits, None
        self._limits = self._quotas.limits = dict(self._configured or {})
        for namespace in self._hard:
            self._join(namespace)
        _log.info("quotas_changed", configmap=self._configmap, namespaces=len(self._configured or {}))

    def resource_quota_changed(self, before: WatchedResourceQuota | None, after: WatchedResourceQuota | None) -> None:
        if before is not None:
            self._hard[before.namespace].pop(before.uid, None)
            self._join(before.namespace)
        if after is not None and after.limit is not None:
            self._hard[after.namespace][after.uid] = after.limit
            self._join(after.namespace)

    def _join(self, namespace: str) -> None:
        configured, hard = (self._configured or {}).get(namespace), self._hard[namespace].values()
        if not hard:
            del self._hard[namespace]
        if configured is None and not hard:
            self._limits.pop(namespace, None)
            return
        quota = configured or NamespaceQuota()
        self._limits[namespace] = replace(quota, limits=(*quota.limits, *hard))
