"""Pods as far as a kubelet's device manager cares: containers in admission order, and how many devices each wants."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpumgr.units import CORE_RESOURCE, MEMORY_RESOURCE

Phase = Literal["Pending", "Running", "Succeeded", "Failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimContainer:
    """One container. "init" runs to its end before the apps, a "sidecar" is an init container that keeps running."""

    name: str
    cores: int = 0
    memory_blocks: int = 0
    kind: Literal["app", "init", "sidecar"] = "app"

    @property
    def limits(self) -> Mapping[str, int]:
        """Wanted devices by resource name; what is not wanted is not named."""
        wanted = {CORE_RESOURCE: self.cores, MEMORY_RESOURCE: self.memory_blocks}
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
    """An error of the kubelet's own, with the kubelet's own text."""
