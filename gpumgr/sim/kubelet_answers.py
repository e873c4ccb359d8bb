"""Answers of plugins to Allocate: as the kubelet stores them, and as the container runtime gets them."""

from collections.abc import Iterable

from gpumgr._pb.deviceplugin.v1beta1 import ContainerAllocateResponse
from gpumgr.common.rpc import wire
from gpumgr.ledger.response import ContainerResponse, DeviceNode, Mount

_CDI_DEVICES = 5


def without_cdi(answer: bytes) -> bytes:
    """A ContainerAllocateResponse as kubelets before 1.28 decode it: their message lacks the field and drops unknown ones."""
    fields = wire.spans(answer, 0, len(answer))
    return b"".join([wire.field(number, answer[start:end]) for number, start, end in fields if number != _CDI_DEVICES])


def merged(answers: Iterable[bytes]) -> ContainerResponse:
    """One container's settings from the answers for its resources. The first of two values for one key is used."""
    envs: dict[str, str] = {}
    annotations: dict[str, str] = {}
    mounts: dict[str, Mount] = {}
    devices: dict[str, DeviceNode] = {}
    cdi_devices: dict[str, None] = {}
    for answer in map(ContainerAllocateResponse().parse, answers):
        envs = {**answer.envs, **envs}
        annotations = {**answer.annotations, **annotations}
        for mount in answer.mounts:
            place = Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            mounts.setdefault(mount.container_path, place)
        for spec in answer.devices:
            node = DeviceNode(container_path=spec.container_path, host_path=spec.host_path, permissions=spec.permissions)
            devices.setdefault(spec.container_path, node)
        cdi_devices |= dict.fromkeys(device.name for device in answer.cdi_devices)
    return ContainerResponse(
        envs=envs,
        mounts=tuple(mounts.values()),
        devices=tuple(devices.values()),
        annotations=annotations,
        cdi_devices=tuple(cdi_devices),
    )
