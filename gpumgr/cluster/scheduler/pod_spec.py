"""The parts of a pod's JSON that are decoded for every pod of the cluster: whether it requests GPUs, and its CPU."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import msgspec

from gpumgr.common.foreign_text import decode_stored
from gpumgr.common.units import VCUDA_NAMES
from gpumgr.kube.pods import parse_milli

_Amounts = dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class CpuPod:
    """A pod without GPU requests on its node. `cpu_milli` is in thousandths."""

    uid: str
    node: str
    cpu_milli: int


class _Resources(msgspec.Struct):
    requests: _Amounts = None
    limits: _Amounts = None


_NONE: Final = _Resources()


class _Container(msgspec.Struct, rename="camel"):
    name: str = ""
    resources: _Resources | None = None
    restart_policy: str | None = None

    def wants_any(self, names: Iterable[str]) -> bool:
        wanted = _wanted(self.resources)
        return any(str(wanted.get(name, "0")) != "0" for name in names)


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str | None = None
    containers: list[_Container] | None = None
    init_containers: list[_Container] | None = None
    resources: _Resources | None = None
    overhead: _Amounts = None

    @property
    def all_containers(self) -> list[_Container]:
        return [*(self.init_containers or ()), *(self.containers or ())]

    def wants_any(self, names: Iterable[str]) -> bool:
        """Whether a container requests one of these resources."""
        return any(each.wants_any(names) for each in self.all_containers)

    @property
    def cpu_milli(self) -> int:
        """What kube-scheduler counts: app containers and sidecars together, or more while an init container runs; the pod's own request
        replaces it. The API server fills missing requests in from limits."""
        most = sidecars = 0
        for each in self.init_containers or ():
            cpu = _cpu(each.resources)
            most = max(most, sidecars + cpu)
            sidecars += cpu if each.restart_policy == "Always" else 0
        total = max(most, sidecars + sum(_cpu(each.resources) for each in self.containers or ()))
        whole = self.resources or _NONE
        return (_milli(whole.requests) or total or _milli(whole.limits)) + _milli(self.overhead)


class _Metadata(msgspec.Struct):
    uid: str


class _Pod(msgspec.Struct):
    metadata: _Metadata
    spec: PodSpec = PodSpec()


def decode_pod(item: msgspec.Raw, gpu_resources: Iterable[str] = VCUDA_NAMES) -> dict[str, Any] | CpuPod | None:
    """The whole object only of a pod with GPU requests. Most pods of a cluster have none: of these the CPU counts, on their nodes. Raises
    ValueError."""
    pod = decode_stored(item, _Pod)
    if pod.spec.wants_any(gpu_resources):
        found: dict[str, Any] = decode_stored(item)
        return found
    node = pod.spec.node_name
    return CpuPod(pod.metadata.uid, node, pod.spec.cpu_milli) if node else None


def _wanted(resources: _Resources | None) -> dict[str, Any]:
    found = resources or _NONE
    return {**(found.limits or {}), **(found.requests or {})}


def _cpu(resources: _Resources | None) -> int:
    return _milli(_wanted(resources))


def _milli(amounts: _Amounts) -> int:
    return _cached_milli(str(amounts["cpu"])) if amounts and "cpu" in amounts else 0


_cached_milli = lru_cache(maxsize=4096)(parse_milli)
