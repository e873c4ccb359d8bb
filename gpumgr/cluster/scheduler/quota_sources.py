"""Collects the limits of namespaces from ResourceQuotas and the ConfigMap. A thread decodes the ConfigMap, since the longest one takes
seconds.

The ConfigMap has the key `gpu_quota` in gpu-admission's format and the key `quota.yaml` in gpumgr's (docs/scheduler.md). The limits of
both keys apply together.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, NoReturn

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

_NO_QUOTA: Final = NamespaceQuota()
GPU_ADMISSION_KEY: Final = "gpu_quota"
PLAIN_KEY: Final = "quota.yaml"
KEYS: Final = (GPU_ADMISSION_KEY, PLAIN_KEY)
#: The API server stores no larger ConfigMap.
_MAX_BYTES: Final = 1 << 20
_MEBIBYTE: Final = 1 << 20
_Amount = Annotated[int, Meta(ge=0, le=1 << 40)]
_Text = Annotated[str, Meta(min_length=1, max_length=253)]


class WatchedQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why `limits` can't be used."""

    limits: Mapping[str, NamespaceQuota]
    problem: str | None = None


class _GpuAdmission(msgspec.Struct):
    """`quota`: model -> whole GPUs. Without `quota` no model is allowed; without `pool` every pool is allowed."""

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


class WatchedResourceQuota(msgspec.Struct, frozen=True, kw_only=True):
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


class QuotaTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The ConfigMap, not decoded."""

    uid: str
    data: Mapping[str, Any]

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> "QuotaTexts":
        """Raises KeyError, TypeError or ValueError for an object that is not a ConfigMap."""
        data = dict(item.get("data") or {})
        return cls(uid=str(item["metadata"]["uid"]), data={key: data[key] for key in KEYS if key in data})


class _Limits(Mapping[str, NamespaceQuota]):
    """The limits of each namespace from both sources; all of them apply. They are joined when a namespace is looked up. Each change makes
    a new object, so objects are compared by identity."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, configured: Mapping[str, NamespaceQuota], hard: Mapping[str, Mapping[str, Limit]]) -> None:
        self._configured, self._hard = configured, hard
        self._joined: dict[str, NamespaceQuota] = {}

    def __getitem__(self, namespace: str) -> NamespaceQuota:
        if namespace not in self:
            raise KeyError(namespace)
        if (quota := self._joined.get(namespace)) is None:
            quota = self._configured.get(namespace, _NO_QUOTA)
            hard = dict.fromkeys(self._hard.get(namespace, {}).values())
            quota = self._joined[namespace] = replace(quota, limits=(*quota.limits, *hard))
        return quota

    def __contains__(self, namespace: object) -> bool:
        return namespace in self._configured or namespace in self._hard

    def __iter__(self) -> Iterator[str]:
        return iter({**self._configured, **self._hard})

    def __len__(self) -> int:
        return len(self._configured.keys() | self._hard.keys())


class QuotaSources:
    """Sets the limits of `quotas`. `configmap` is NAMESPACE/NAME, for messages. `read` is set while no ConfigMap waits to be decoded by
    `run`."""

    def __init__(self, quotas: Quotas, configmap: str) -> None:
        self._quotas, self._configmap = quotas, configmap
        self._configured: Mapping[str, NamespaceQuota] = {}
        #: Namespace -> UID of a ResourceQuota -> its limit.
        self._hard: defaultdict[str, dict[str, Limit]] = defaultdict(dict)
        self._known = False
        self._texts: QuotaTexts | None = None
        self._given, self.read = asyncio.Event(), asyncio.Event()
        self.read.set()

    def configmap_changed(self, _before: QuotaTexts | None, after: QuotaTexts | None) -> None:
        self._texts = after
        self._given.set()
        self.read.clear()

    async def run(self) -> NoReturn:
        """Decodes each new ConfigMap. Runs as a daemon."""
        while True:
            await self._given.wait()
            texts = self._texts
            found = await asyncio.to_thread(parse_quotas, {"data": texts.data}) if texts is not None else None
            if texts is self._texts:
                self._use_configmap(found)
                self._given.clear()
                self.read.set()

    def _use_configmap(self, found: WatchedQuotas | None) -> None:
        """A ConfigMap that can't be read changes nothing; if none has been read before, no pod can be placed."""
        if found is None or found.problem is None:
            self._configured, self._known = ({}, False) if found is None else (found.limits, True)
            self._quotas.problem = None
            self._join()
            _log.info("quotas_changed", configmap=self._configmap, namespaces=len(self._configured))
            return
        if not self._known:
            where = f"ConfigMap {self._configmap} can't be used, so the quotas are not known"
            self._quotas.problem = f"{where}: {found.problem}; correct it or delete it"
        used = "the earlier quotas" if self._known else "nothing; no pod is placed"
        _log.error("quotas_unusable", configmap=self._configmap, reason=found.problem, used_instead=used)

    def resource_quota_changed(self, before: WatchedResourceQuota | None, after: WatchedResourceQuota | None) -> None:
        if before is not None and before.namespace in self._hard:
            self._hard[before.namespace].pop(before.uid, None)
            if not self._hard[before.namespace]:
                del self._hard[before.namespace]
        if after is not None and after.limit is not None:
            self._hard[after.namespace][after.uid] = after.limit
        self._join()

    def _join(self) -> None:
        self._quotas.limits = _Limits(self._configured, self._hard)
