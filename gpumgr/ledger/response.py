"""The response to one container's Allocate call, as a value."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A path of the host that the container sees at `container_path`."""

    container_path: str
    host_path: str
    read_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    """A device node of the host that the container may open. `permissions` are letters of "rwm"."""

    container_path: str
    host_path: str
    permissions: str = "rwm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerResponse:
    """Everything the kubelet adds to one container for one resource; `cdi_devices` are names like "vendor/class=name".

    The kubelet merges the responses of a container's resources; of two different values for one key it uses the first.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()


def merged(first: ContainerResponse, *others: ContainerResponse) -> ContainerResponse:
    """One response with all contents. If a variable, annotation or container path has two values, the later one counts."""
    every = (first, *others)
    return ContainerResponse(
        envs={key: value for each in every for key, value in each.envs.items()},
        mounts=tuple({mount.container_path: mount for each in every for mount in each.mounts}.values()),
        devices=tuple({node.container_path: node for each in every for node in each.devices}.values()),
        annotations={key: value for each in every for key, value in each.annotations.items()},
        cdi_devices=tuple(dict.fromkeys(name for each in every for name in each.cdi_devices)),
    )
