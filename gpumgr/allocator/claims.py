"""A ResourceClaim (DRA): what the kubelet names, what the API server has of it, and what is answered."""

from dataclasses import dataclass

from gpumgr.allocator.pods import PodKey
from gpumgr.units import GpuName

_DEVICE_PREFIX = "gpu-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRef:
    """A ResourceClaim as the kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimShare:
    """One device that a claim was allocated: `request` is the name of the main request, `device` a name of `device_name`, `share_id` the
    UUID of its share (None: not a shared device), the amounts are those that kube-scheduler counts. `admin`: with admin access."""

    request: str
    device: str
    share_id: str | None
    cores: int
    memory_mebibytes: int
    admin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedClaim:
    """What the API server has of an allocated claim, as far as it concerns this node and gpumgr's driver.

    `pods` (name and UID) are those that the claim is reserved for. `enforcement`: the mechanism that the configuration of the
    DeviceClass names.
    """

    ref: ClaimRef
    pods: tuple[tuple[PodKey, str], ...]
    shares: tuple[ClaimShare, ...]
    enforcement: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedDevice:
    """One device in the answer to NodePrepareResources (kubelet dra/v1 api.proto, message Device)."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None


def device_name(gpu: GpuName) -> str:
    """The device's name in the ResourceSlice. It comes from the UUID, so it is permanent."""
    return _DEVICE_PREFIX + gpu


def gpu_of_device(device: str) -> GpuName:
    return device.removeprefix(_DEVICE_PREFIX)
