"""Collects the limits of namespaces from ResourceQuotas and the ConfigMap. A thread decodes the ConfigMap, since the longest one takes
seconds."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import structlog

from gpumgr.cluster.core.quota import Limit, NamespaceQuota, Quotas
from gpumgr.cluster.scheduler.quota_objects import KEYS, WatchedQuotas, WatchedResourceQuota, parse_quotas

_log = structlog.get_logger(__name__)

_NO_QUOTA = NamespaceQuota()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaTexts:
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
        used = "the quotas before" if self._known else "nothing; no pod is placed"
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
