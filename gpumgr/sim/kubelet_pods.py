"""Pods with the part that a kubelet's device manager uses: containers in admission order, and the devices that each requests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimContainer:
    """One container. "init" ends before the app containers start; a "sidecar" is an init container that keeps running. `others`: requests
    of other resources, by name."""

    name: str
    cores: int = 0
    memory_blocks: int = 0
    kind: Literal["app", "init", "sidecar"] = "app"
    others: tuple[tuple[str, int], ...] = ()

    @property
    def limits(self) -> Mapping[str, int]:
        """Requested devices by resource name, without zeros."""
        wanted = {CORE_RESOURCE: self.cores, MEMORY_RESOURCE: self.memory_blocks, **dict(self.others)}
        return {resource: count for resource, count in wanted.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPod:
    """A pod bound to the node."""

    namespace: str
    name: str
    uid: str
    containers: tuple[SimContainer, ...]

    @property
    def admission_order(self) -> tuple[SimContainer, ...]:
        """Init containers and sidecars as written, then the apps: the kubelet's order."""
        return (
            *(container for container in self.containers if container.kind != "app"),
            *(container for container in self.containers if container.kind == "app"),
        )

    def container(self, name: str) -> SimContainer:
        """Raises KeyError if the pod has no such container."""
        for container in self.containers:
            if container.name == name:
                return container
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """What the API server would show; `message` is also the text of the event (there without "Pod was rejected: ")."""

    phase: Phase
    reason: str | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceStatus:
    """A resource in the node's status: all devices, and the healthy ones."""

    capacity: int
    allocatable: int


class SimKubeletError(Exception):
    """An error of the kubelet, with the kubelet's text."""
