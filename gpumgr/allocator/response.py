"""What a container gets with its devices: the answer to one container's Allocate call, as a value."""

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

    The kubelet merges the answers of a container's resources: of two different values for one key the first one wins in silence.
    """

    envs: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    devices: tuple[DeviceNode, ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    cdi_devices: tuple[str, ...] = ()
