"""Names of GPUs in requests of operators; the agent and the commands accept the same ones."""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from gpumgr.common.errors import InputError
from gpumgr.common.units import GpuName
from gpumgr.ledger.ids import GpuRegistry, RegisteredGpu
from gpumgr.placement.topology.devices import GpuFailure

_INDEX: Final = re.compile(r"(?:gpu)?([0-9]+)", re.ASCII)
#: Fewer digits of a UUID are too likely to be a mistake; the names in device ids have eight or more.
MIN_DIGITS: Final = 4


class KnownGpu(msgspec.Struct, frozen=True, kw_only=True):
    """`name` is the name in device ids: the first digits of the UUID. `index` is NVML's (None: unknown). `uuid` None: only these digits are
    known."""

    name: GpuName
    uuid: str | None = None
    index: int | None = None


def find_gpu(text: str, known: Sequence[KnownGpu], unreadable: Mapping[int, str]) -> GpuName:
    """The name of the GPU with this index ("3", "GPU3"), name in device ids, UUID, or beginning of a UUID ("GPU-0fe1", "0fe1"; MIN_DIGITS
    digits or more). A number is an index, unless it is the whole name of a GPU.

    `unreadable`: index -> reason, of GPUs that the driver lists and can't describe. Raises InputError with a list of the known GPUs.
    """
    word = text.strip().lower()
    if any(word == gpu.name for gpu in known):
        return word
    if index := _INDEX.fullmatch(word):
        found = [gpu for gpu in known if str(gpu.index) == index[1]]
        broken = {str(number): why for number, why in unreadable.items()}
        if not found and index[1] in broken:
            raise InputError(
                f"GPU{index[1]} of this node is not readable: {broken[index[1]]}; if it was readable before, "
                f"give its UUID; the GPUs of this node are: {_listed(known)}"
            )
    else:
        digits = _digits(word)
        found = [gpu for gpu in known if digits and _digits(gpu.uuid or gpu.name).startswith(digits)]
        if found and len(digits) < MIN_DIGITS:
            raise InputError(
                f"{text!r} is too short for a GPU's UUID: give {MIN_DIGITS} digits of it or more; the GPUs of this node "
                f"are: {_listed(known)}"
            )
    if len(found) == 1:
        return found[0].name
    what = "several GPUs of this node match" if found else "no GPU of this node is called"
    raise InputError(f"{what} {text!r}; the GPUs of this node are: {_listed(known)}")


def find_registered_gpu(
    text: str, gpu_registry: GpuRegistry, indices: Mapping[GpuName, int], failures: Sequence[GpuFailure]
) -> RegisteredGpu:
    """As `find_gpu`, among the registered GPUs. `indices` are NVML's; `failures`: the GPUs that the driver lists and can't describe."""
    known = [KnownGpu(name=gpu.name, uuid=gpu.uuid, index=indices.get(gpu.name)) for gpu in gpu_registry.gpus]
    return gpu_registry.by_name[find_gpu(text, known, {failure.index: failure.reason for failure in failures})]


def _digits(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-")


def _listed(known: Sequence[KnownGpu]) -> str:
    names = [(f"GPU{gpu.index} = " if gpu.index is not None else "") + (gpu.uuid or gpu.name) for gpu in known]
    return ", ".join(names) or "none"
