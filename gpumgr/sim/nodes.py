"""Descriptions of simulated nodes: read from YAML and validated. The built-in ones in `nodes/` are examples of the format."""

import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from gpumgr.common.errors import SettingsError
from gpumgr.placement.devices import MigInstance, MigProfile

_BUILT_IN: Final = Path(__file__).parent / "nodes"
#: For UUIDs of GPUs without one in the description: the same node has the same UUIDs everywhere.
_NAMESPACE: Final = uuid.UUID("5b0ff8a4-33d5-5b28-9d0f-0c0f6c1c4f11")

MAX_GPUS: Final = 64
MAX_LINKS: Final = 36

# nvmlGpuTopologyLevel_t: how close two GPUs are.
INTERNAL, SINGLE, MULTIPLE, HOSTBRIDGE, NODE, SYSTEM = 0, 10, 20, 30, 40, 50

#: The MIG profiles of A100 and later: NVML's number -> (driver's id, compute slices, memory slices in a row, where they may begin).
_MIG_PROFILES: Final = {
    0: (19, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    1: (14, 2, 2, (0, 2, 4)),
    2: (9, 3, 4, (0, 4)),
    3: (5, 4, 4, (0,)),
    4: (0, 7, 8, (0,)),
    9: (15, 1, 2, (0, 2, 4, 6)),
}
#: Memory slices of a MIG device -> what is reserved of their memory, in units of 128 MiB (H100 with 80 GB).
_MIG_RESERVED: Final = {1: 1, 2: 2, 4: 2, 8: 3}

BusId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")]
MigProfileName = Annotated[str, msgspec.Meta(pattern=r"^([1-7]c\.)?[1-7]g\.[1-9][0-9]*gb(\+[a-z.]+)?$")]
NvmlFunction = Annotated[str, msgspec.Meta(pattern="^nvml[A-Z]")]
Whole = Annotated[int, msgspec.Meta(ge=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class GpuModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reserved_mib`: the memory that the driver reserves. The idle values apply until the control file has other values. `mig_memory_mib`:
    the memory of MIG devices with 1, 2, 4 and 8 memory slices; None: calculated as for an H100. `unsupported`: NVML functions that the
    driver does not support for this model."""

    model: str
    memory_mib: Annotated[int, msgspec.Meta(ge=1)]
    reserved_mib: NotNegative = 0
    mig: Literal["unsupported", "disabled", "enabled"] = "unsupported"
    idle_celsius: Whole = 30
    idle_watts: NotNegative = 40
    mig_memory_mib: tuple[Whole, Whole, Whole, Whole] | None = None
    unsupported: tuple[NvmlFunction, ...] = ()


class SimGpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pcie`: the chain of PCI parents, root complex first. `board`: the same for GPUs of one multi-GPU board. `mig_instances`: the
    profiles of its MIG devices, which exist while MIG is enabled."""

    model: str
    bus_id: BusId
    pcie: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    numa_node: Whole | None = None
    minor: Whole | None = None
    uuid: Annotated[str, msgspec.Meta(pattern=r"^GPU-[0-9a-f]{8}-[0-9a-f-]{27}$")] | None = None
    board: str | None = None
    mig_instances: Annotated[tuple[MigProfileName, ...], msgspec.Meta(max_length=7)] = ()


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NVSwitch: every GPU has `links_per_gpu` NVLinks, distributed over these switches."""

    switches: Annotated[tuple[BusId, ...], msgspec.Meta(min_length=1)]
    links_per_gpu: Annotated[int, msgspec.Meta(ge=1, le=MAX_LINKS)]


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GPUs are in the order of NVML's indices. `nvlinks`: [GPU, GPU, number of links]. `without`: NVML functions that this driver lacks."""

    about: str
    driver_version: str
    cuda_version: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+\.[0-9]$")]
    models: dict[str, GpuModel]
    gpus: Annotated[tuple[SimGpu, ...], msgspec.Meta(max_length=MAX_GPUS)]
    nvlinks: tuple[tuple[Whole, Whole, Whole], ...] = ()
    fabric: Fabric | None = None
    without: tuple[NvmlFunction, ...] = ()
    name: str = ""

    def model_of(self, index: int) -> GpuModel:
        return self.models[self.gpus[index].model]

    def uuid_of(self, index: int) -> str:
        return self.gpus[index].uuid or f"GPU-{uuid.uuid5(_NAMESPACE, f'{self.name}/{index}')}"

    def mig_profiles_of(self, index: int) -> dict[int, MigProfile]:
        model = self.model_of(index)
        gib = -(-model.memory_mib // 1024)
        return {
            number: MigProfile(
                name=f"{slices}g.{(2 * size * gib + 8) // 16}gb",
                number=driver_id,
                memory_mebibytes=model.mig_memory_mib[size.bit_length() - 1]
                if model.mig_memory_mib
                else 128 * (model.memory_mib * size // 1024 - _MIG_RESERVED[size]),
                slices=slices,
                size=size,
                starts=starts,
            )
            for number, (driver_id, slices, size, starts) in _MIG_PROFILES.items()
            if model.mig != "unsupported"
        }

    def mig_instances_of(self, index: int) -> tuple[MigInstance, ...]:
        """The MIG devices in NVML's order, with the same UUIDs everywhere. A device without a known profile has no memory slices. If the
        devices do not fit together, none has memory slices."""
        profiles = {each.name: each for each in self.mig_profiles_of(index).values()}
        found = [profiles.get(re.sub(r"^\dc\.|\+.*", "", name)) for name in self.gpus[index].mig_instances]
        wanted = [[((1 << each.size) - 1) << start for start in each.starts] if each else [0] for each in found]
        places = _places_of(wanted) or (0,) * len(wanted)
        return tuple(
            MigInstance(
                uuid=f"MIG-{uuid.uuid5(_NAMESPACE, f'{self.uuid_of(index)}/{number}')}",
                profile=profile,
                gpu_instance=number + 1,
                compute_instance=0,
                memory_bytes=int(profile.partition("gb")[0].rpartition(".")[2]) << 30,
                memory_slices=places[number],
            )
            for number, profile in enumerate(self.gpus[index].mig_instances)
        )

    def minor_of(self, index: int) -> int:
        minor = self.gpus[index].minor
        return index if minor is None else minor

    def nvml_level(self, a: int, b: int) -> int:
        """NVML's topology level of two GPUs, by their boards, PCI parents and NUMA nodes."""
        one, other = self.gpus[a], self.gpus[b]
        if one.board is not None and one.board == other.board:
            return INTERNAL
        if one.numa_node != other.numa_node:
            return SYSTEM
        shared = 0
        while shared < min(len(one.pcie), len(other.pcie)) and one.pcie[shared] == other.pcie[shared]:
            shared += 1
        if shared == 0:
            return NODE
        if shared == 1:
            return HOSTBRIDGE
        # Below the last shared port each GPU may have its own port on the same switch.
        return SINGLE if max(len(one.pcie), len(other.pcie)) - shared <= 1 else MULTIPLE


def _places_of(wanted: Sequence[Sequence[int]], taken: int = 0) -> tuple[int, ...] | None:
    """One bit mask from each list so that none overlap; None if that is not possible."""
    if not wanted:
        return ()
    for mask in wanted[0]:
        if not mask & taken and (others := _places_of(wanted[1:], taken | mask)) is not None:
            return mask, *others
    return None


def built_in_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _BUILT_IN.glob("*.yaml")))


def load_node(name_or_path: str) -> NodeDescription:
    """The built-in node of that name, else the description in that file. Raises SettingsError."""
    path = _BUILT_IN / f"{name_or_path}.yaml" if name_or_path in built_in_names() else Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        detail = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        names = ", ".join(built_in_names())
        raise SettingsError(f"simulated node {name_or_path!r}: {detail}; give a file or one of: {names}") from exc
    return _parse_node(text, name=path.stem, where=str(path))


def _parse_node(text: str, *, name: str, where: str) -> NodeDescription:
    try:
        # Scalars stay text until their type is known, because YAML reads an unquoted bus id as a base-60 number.
        raw = yaml.load(text, Loader=yaml.BaseLoader)
        node = msgspec.convert({"name": name, **raw} if isinstance(raw, dict) else raw, NodeDescription, strict=False)
    except yaml.YAMLError as exc:
        raise SettingsError(f"{where}: not YAML: {exc}") from exc
    except msgspec.ValidationError as exc:
        raise SettingsError(f"{where}: {exc}{_allowed_keys(str(exc))}") from exc
    for problem in _contradictions(node):
        raise SettingsError(f"{where}: {problem}")
    return node


def _allowed_keys(message: str) -> str:
    """For a message about an unknown key, the end of the message with the allowed keys; else empty."""
    if "unknown field" not in message:
        return ""
    place = re.search(r"`\$\.(models|gpus|fabric)", message)
    kinds: dict[str, Any] = {"models": GpuModel, "gpus": SimGpu, "fabric": Fabric}
    kind = kinds[place.group(1)] if place else NodeDescription
    return f"; allowed: {', '.join(kind.__struct_fields__)}"


def _contradictions(node: NodeDescription) -> list[str]:
    problems: list[str] = []
    for index, gpu in enumerate(node.gpus):
        if gpu.model not in node.models:
            problems.append(f"gpus[{index}].model: {gpu.model!r} is not among models; allowed: {', '.join(node.models)}")
    for key, values in {
        "bus_id": [gpu.bus_id for gpu in node.gpus],
        "uuid": [node.uuid_of(index) for index in range(len(node.gpus))],
        "minor": [str(node.minor_of(index)) for index in range(len(node.gpus))],
    }.items():
        twice = {value for value in values if values.count(value) > 1}
        problems += [f"gpus: {key} {value} occurs twice" for value in sorted(twice)]
    links = [node.fabric.links_per_gpu if node.fabric else 0] * len(node.gpus)
    for number, (a, b, count) in enumerate(node.nvlinks):
        if a == b or max(a, b) >= len(node.gpus):
            problems.append(f"nvlinks[{number}]: {a} and {b} must be two different GPUs, 0 to {len(node.gpus) - 1}")
            continue
        links[a] += count
        links[b] += count
    problems += [f"gpus[{i}] has {n} NVLinks; at most {MAX_LINKS} are allowed" for i, n in enumerate(links) if n > MAX_LINKS]
    return problems
