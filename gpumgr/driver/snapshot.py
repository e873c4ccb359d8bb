"""Reads the GPUs of the node and their topology. All functions block. None = the driver does not report the value."""

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from gpumgr.driver.binding import INVALID_ARGUMENT, NOT_SUPPORTED, Binding, CallError, Handle
from gpumgr.driver.mig import read_mig_enabled, read_mig_instances, read_mig_profiles
from gpumgr.placement.devices import Gpu, GpuFailure, Level, NodeSnapshot, Topology

_INTERNAL: Final = 0

#: NVML's numbers in ascending order (nvml.h, nvmlGpuTopologyLevel_t: INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM).
_MEANINGS: Final[tuple[tuple[int, Level], ...]] = (
    (_INTERNAL, Level.PSB),
    (10, Level.PIX),
    (20, Level.PXB),
    (30, Level.PHB),
    (40, Level.NODE),
    (50, Level.SYS),
)


def level_of(driver_version: str | None, nvml_level: int, on_same_board: bool | None) -> Level:
    """The PCIe level of a pair of GPUs for NVML's number. `on_same_board`: the pair is on one multi-GPU board; None = not reported.

    A number between two known ones counts as the farther level, a number above all as SYS. INTERNAL can be wrong: driver 396.26 reports it
    for GPUs behind the switch of a multi-GPU board, and a driver may report it for GPUs on two boards.
    """
    if nvml_level == _INTERNAL and (driver_version == "396.26" or on_same_board is False):
        return Level.PIX
    return next((level for number, level in _MEANINGS if nvml_level <= number), Level.SYS)


_MAX_NVLINKS: Final = 36
_REMOTE_SWITCH: Final = 2
_NVIDIA: Final = "0x10de"
_GPU_CLASSES: Final = ("0x0300", "0x0302")


class _Links(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's active NVLinks. `direct`: bus id of another GPU -> links to it. `fabric`: links to NVSwitches."""

    direct: Mapping[str, int] = msgspec.field(default_factory=dict)
    fabric: int = 0


class DescribedGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU, its handle (valid until the session ends) and its NVLinks."""

    gpu: Gpu
    handle: Handle
    links: _Links


def read_node(nvml: Binding, sysfs_root: Path) -> NodeSnapshot:
    """A snapshot without GPUs; `with_gpus` adds them."""
    return NodeSnapshot(
        gpus=(),
        topology=Topology((), ()),
        driver_version=nvml.ask("nvmlSystemGetDriverVersion"),
        nvml_version=nvml.ask("nvmlSystemGetNVMLVersion"),
        cuda_version=_cuda_version(nvml.ask("nvmlSystemGetCudaDriverVersion_v2")),
        pci_gpus=read_pci_gpus(sysfs_root),
    )


def describe_gpu(
    nvml: Binding,
    index: int,
    *,
    sysfs_root: Path,
    seen: MutableMapping[int, str],
    unreported_memory_bytes: int | None,
) -> DescribedGpu:
    """The GPU with this index. Raises NvmlError.

    `seen`: index -> UUID of earlier readings, for a GPU that no longer reports its UUID. This reading adds its own.
    `unreported_memory_bytes`: the GPU's memory if the driver reports none.
    """
    handle = nvml.call("nvmlDeviceGetHandleByIndex", index)
    seen[index] = nvml.call("nvmlDeviceGetUUID", handle)
    gpu = _read_gpu(nvml, index, seen[index], handle, sysfs_root)
    if gpu.memory_bytes is None:
        gpu = replace(gpu, memory_bytes=unreported_memory_bytes)
    return DescribedGpu(gpu=gpu, handle=handle, links=_read_links(nvml, handle))


def read_pci_gpus(sysfs_root: Path) -> tuple[str, ...]:
    """The PCI addresses of NVIDIA's display and 3D controllers that NVML can list: no virtual functions, no devices of another driver
    (vfio-pci, for virtual machines).

    Source: the kernel's sysfs-bus-pci ABI; class codes of the PCI Code and ID Assignment Specification.
    """
    found = []
    for device in sorted((sysfs_root / "bus" / "pci" / "devices").glob("*")):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except (OSError, ValueError):
            continue
        if vendor == _NVIDIA and kind.startswith(_GPU_CLASSES) and not (device / "physfn").exists():
            driver = device / "driver"
            if not driver.exists() or driver.resolve().name == "nvidia":
                found.append(device.name)
    return tuple(found)


def with_gpus(
    node: NodeSnapshot, gpus: Sequence[DescribedGpu], levels: Mapping[frozenset[int], Level], failures: Sequence[GpuFailure]
) -> NodeSnapshot:
    """Adds GPUs, topology and failures to the snapshot. `levels`: pair of indices -> level; a missing pair is SYS."""

    def level(one: DescribedGpu, other: DescribedGpu) -> Level:
        return Level.PSB if one is other else levels.get(frozenset((one.gpu.index, other.gpu.index)), Level.SYS)

    return replace(
        node,
        gpus=tuple(each.gpu for each in gpus),
        topology=Topology(
            levels=tuple(tuple(level(one, other) for other in gpus) for one in gpus),
            nvlinks=tuple(tuple(_shared_links(one, other) for other in gpus) for one in gpus),
        ),
        failures=tuple(failures),
    )


def _read_gpu(nvml: Binding, index: int, uuid: str, handle: Handle, sysfs_root: Path) -> Gpu:
    pci = nvml.ask("nvmlDeviceGetPciInfo_v3", handle)
    bus_id = None if pci is None else _short_bus_id(pci)
    numa_node, chain = (None, ()) if bus_id is None else read_pci_place(sysfs_root, bus_id)
    if numa_node is None:
        # sysfs has the NUMA node with every driver; a newer driver reports it even if sysfs is hidden.
        numa_node = nvml.ask("nvmlDeviceGetNumaNodeId", handle)
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    memory_bytes = 0 if memory is None else int(memory.total)
    mig_enabled = read_mig_enabled(nvml, handle)
    return Gpu(
        index=index,
        uuid=uuid,
        minor=nvml.ask("nvmlDeviceGetMinorNumber", handle),
        bus_id=bus_id,
        model=nvml.ask("nvmlDeviceGetName", handle),
        memory_bytes=memory_bytes or None,
        mig_enabled=mig_enabled,
        mig_instances=read_mig_instances(nvml, handle) if mig_enabled else (),
        mig_profiles=() if mig_enabled is None else read_mig_profiles(nvml, handle, memory_bytes),
        numa_node=numa_node,
        pcie_chain=chain,
    )


def read_pci_place(sysfs_root: Path, bus_id: str) -> tuple[int | None, tuple[str, ...]]:
    """A PCI device's NUMA node (None: not known) and its parents, root complex first. `bus_id`: as in sysfs (0000:18:00.0). Source: the
    kernel's sysfs-bus-pci ABI; -1 in `numa_node` means unknown."""
    link = sysfs_root / "bus" / "pci" / "devices" / bus_id
    try:
        device = link.resolve(strict=True)
        parents = device.relative_to((sysfs_root / "devices").resolve()).parts[:-1]
    except (OSError, ValueError):
        return None, ()
    try:
        numa_node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        numa_node = -1
    return (numa_node if numa_node >= 0 else None), parents


def _short_bus_id(pci: Handle) -> str:
    """The bus id as in sysfs. NVML writes the domain with four or eight digits, in lower or upper case."""
    text = pci.busId.decode(errors="replace") if isinstance(pci.busId, bytes) else pci.busId
    domain, _, rest = text.partition(":")
    return f"{int(domain or '0', 16):04x}:{rest.lower()}"


def _read_links(nvml: Binding, handle: Handle) -> _Links:
    direct: dict[str, int] = {}
    fabric = 0
    for number in range(_MAX_NVLINKS):
        try:
            active = nvml.ask("nvmlDeviceGetNvLinkState", handle, number)
            if active is None:
                break  # no link has this number or a higher one
            if not active:
                continue
            if nvml.ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, number) == _REMOTE_SWITCH:
                fabric += 1
            elif (pci := nvml.ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, number)) is not None:
                # A remote device of unreported type is counted, too: if it is no GPU, its bus id matches none.
                bus_id = _short_bus_id(pci)
                direct[bus_id] = direct.get(bus_id, 0) + 1
        except CallError as exc:
            if exc.code not in (INVALID_ARGUMENT, NOT_SUPPORTED):
                raise
            break
    return _Links(direct=direct, fabric=fabric)


def _shared_links(one: DescribedGpu, other: DescribedGpu) -> int:
    """The direct links that both ends report, and the fabric links that both have."""
    if one is other:
        return 0
    there, back = (a.links.direct.get(b.gpu.bus_id or "", 0) for a, b in ((one, other), (other, one)))
    return min(there, back) + min(one.links.fabric, other.links.fabric)


def read_levels(
    nvml: Binding, one: DescribedGpu, others: Sequence[DescribedGpu], driver_version: str | None
) -> dict[frozenset[int], Level]:
    """Pair of indices -> PCIe level, without pairs for which the driver returns an error. A level that is not reported is SYS."""
    levels = {}
    for other in others:
        with suppress(CallError):
            levels[frozenset((one.gpu.index, other.gpu.index))] = _read_level(nvml, one.handle, other.handle, driver_version)
    return levels


def _read_level(nvml: Binding, first: Handle, second: Handle, driver_version: str | None) -> Level:
    number = nvml.ask("nvmlDeviceGetTopologyCommonAncestor", first, second)
    if number is None:
        return Level.SYS
    on_same_board = nvml.ask("nvmlDeviceOnSameBoard", first, second) if number == _INTERNAL else None
    return level_of(driver_version, number, None if on_same_board is None else bool(on_same_board))


def _cuda_version(number: int | None) -> str | None:
    """12040 is CUDA 12.4."""
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"
