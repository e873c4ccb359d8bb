"""A container's pages (files that it shares with the agent) as values, in the layout of pages.h. Pure.

Agent and arbiter write `limits`. `use` has a slot (record) for each process, and by `turn` the arbiter gives turns to run kernels. The
container can write any bytes into these two pages, so limits are never read from them.
"""

import ctypes
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

#: Part of the files' names: a container that restarts after an update of the agent gets pages of the version that its library knows.
VERSION: Final = 1
MAGIC: Final = 0x4D475047
GPUS: Final = 16
SLOTS: Final = 1024
#: The order of enum gm_kind.
KINDS: Final = ("alloc", "managed", "array", "vmm", "pool", "graph", "context")
#: The pid of a slot that is being emptied.
HALF_FREED: Final = b"\xff\xff\xff\xff"
_DISABLED: Final = 2
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


def _all_of(kind: type[Any], *names: str) -> tuple[tuple[str, type[Any]], ...]:
    return tuple((name, kind) for name in names)


class LimitsGpu(ctypes.LittleEndianStructure):
    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *_all_of(_U64, "memory_bytes", "uncounted_bytes", "context_bytes"),
        *_all_of(_U32, "share", "ceiling", "quantum_us", "passes", "away_from", "spare"),
        ("reserved", _U64 * 7),
    )


class Limits(ctypes.LittleEndianStructure):
    _fields_ = (
        *_all_of(_U32, "magic", "version", "gpus", "suspend"),
        ("heartbeat_ns", _U64),
        ("reserved", _U64 * 5),
        ("gpu", LimitsGpu * GPUS),
    )


class UseSlotGpu(ctypes.LittleEndianStructure):
    _fields_ = (
        ("bytes", _U64 * 8),
        *_all_of(_U64, "launches", "stack", "spare", "unknown", "pending_bytes"),
        ("reserved", _U64 * 3),
    )


class UseSlot(ctypes.LittleEndianStructure):
    _fields_ = (
        *_all_of(_U32, "pid", "state"),
        ("pid_namespace", _U64),
        ("fault", ctypes.c_char * 48),
        ("gpu", UseSlotGpu * GPUS),
    )


class UseGpu(ctypes.LittleEndianStructure):
    _fields_ = (*_all_of(_U64, "reserved_bytes", "refused", "changes"), ("reserved", _U64 * 5))


class UseHead(ctypes.LittleEndianStructure):
    _fields_ = (
        *_all_of(_U32, "magic", "version", "slots", "resume_requests"),
        ("reserved", _U64 * 6),
        ("gpu", UseGpu * GPUS),
    )


class Use(ctypes.LittleEndianStructure):
    _anonymous_ = ("head",)
    _fields_ = (("head", UseHead), ("slot", UseSlot * SLOTS))


class TurnGpu(ctypes.LittleEndianStructure):
    _fields_ = (
        *_all_of(_U64, "granted_until_ns", "holding_since_ns"),
        *_all_of(_U32, "grants", "spare", "slots", "others"),
        ("reserved", _U64 * 4),
        ("word", _U32 * SLOTS),
    )


class Turn(ctypes.LittleEndianStructure):
    _fields_ = (*_all_of(_U32, "magic", "version"), ("reserved", _U64 * 7), ("gpu", TurnGpu * GPUS))


LAYOUTS: Final = {"limits": Limits, "use": Use, "turn": Turn}
SLOT_BYTES: Final = ctypes.sizeof(UseSlot)
HEAD: Final = MAGIC.to_bytes(4, "little") + VERSION.to_bytes(4, "little")


class PageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on one GPU. `memory_bytes`, `share_percent`: 0 is no limit. `ceiling_percent`: the cores while other containers are idle.
    `quantum_microseconds`: the length of a turn. `context_bytes`: the memory of a context there; 0: not known. `uncounted_bytes`: what the
    driver uses for the container beyond the library's count."""

    uuid: str
    memory_bytes: int
    share_percent: int
    ceiling_percent: int
    quantum_microseconds: int
    context_bytes: int = 0
    uncounted_bytes: int = 0


#: Field of LimitsGpu -> field of PageLimits.
_FIELDS: Final = {
    "memory_bytes": "memory_bytes",
    "uncounted_bytes": "uncounted_bytes",
    "context_bytes": "context_bytes",
    "share": "share_percent",
    "ceiling": "ceiling_percent",
    "quantum_us": "quantum_microseconds",
}


class SlotOnGpu(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has on one GPU. `bytes_by_kind`: in the order of KINDS. `unknown`: how often the process got a version of a CUDA
    function that the library does not limit; counted on the first GPU for all."""

    bytes_by_kind: tuple[int, ...]
    launches: int
    unknown: int


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One process: its `pid` in its pid namespace, and the `namespace`'s inode (0: not known). `stack`: where the stack of the process's
    main thread began when the process took the slot (an exec moves it); 0: not known. `fault`: why the library does not limit the process;
    None: it does."""

    index: int
    pid: int
    namespace: int
    stack: int
    fault: str | None
    gpus: tuple[SlotOnGpu, ...]


def encode_limits(gpus: Sequence[PageLimits]) -> bytes:
    """A new page. Raises ValueError for too many GPUs, and for a text that is not a UUID."""
    if len(gpus) > GPUS:
        raise ValueError(f"the limiter serves at most {GPUS} GPUs in one container, and this one has {len(gpus)}")
    page = Limits(magic=MAGIC, version=VERSION, gpus=len(gpus))
    for entry, gpu in zip(page.gpu, gpus, strict=False):
        ctypes.memmove(entry.uuid, uuid_bytes(gpu.uuid), 16)
        for name, field in _FIELDS.items():
            setattr(entry, name, getattr(gpu, field))
    return bytes(page)


def decode_limits(page: bytes) -> tuple[PageLimits, ...]:
    """Raises ValueError for a page of another version."""
    found = Limits.from_buffer_copy(page)
    if (found.magic, found.version) != (MAGIC, VERSION) or found.gpus > GPUS:
        raise ValueError("it is not a page of this version")
    return tuple(
        PageLimits(
            uuid=f"GPU-{uuid.UUID(bytes=bytes(gpu.uuid))}", **{field: getattr(gpu, name) for name, field in _FIELDS.items()}
        )
        for gpu in found.gpu[: found.gpus]
    )


def limits_words(page: bytes, wanted: Sequence[PageLimits]) -> list[tuple[str, int, bytes]]:
    """The words of `page` that differ from these limits: (name, offset, bytes to write)."""
    found = Limits.from_buffer_copy(page)
    differing = _differing(found, 0, {"magic": MAGIC, "version": VERSION, "gpus": len(wanted)})
    for index, (gpu, seen) in enumerate(zip(wanted, found.gpu, strict=False)):
        start, raw = Limits.gpu.offset + index * ctypes.sizeof(LimitsGpu), uuid_bytes(gpu.uuid)
        if bytes(seen.uuid) != raw:
            differing += [("uuid", start, raw[:8]), ("uuid", start + 8, raw[8:])]
        differing += _differing(seen, start, {name: getattr(gpu, field) for name, field in _FIELDS.items()})
    return differing


def _differing(seen: ctypes.Structure, start: int, wanted: Mapping[str, int]) -> list[tuple[str, int, bytes]]:
    fields = {name: getattr(type(seen), name) for name, value in wanted.items() if getattr(seen, name) != value}
    return [(name, start + at.offset, wanted[name].to_bytes(at.size, "little")) for name, at in fields.items()]


def decode_slots(data: bytes, gpus: int) -> tuple[Slot, ...]:
    """The slots with a process. `data`: the bytes of `use` from its first slot on."""
    slots = []
    for index in range(len(data) // SLOT_BYTES):
        if not any(data[index * SLOT_BYTES : index * SLOT_BYTES + 4]):
            continue
        slot = UseSlot.from_buffer_copy(data, index * SLOT_BYTES)
        on_gpus = tuple(
            SlotOnGpu(bytes_by_kind=tuple(each.bytes[: len(KINDS)]), launches=each.launches, unknown=each.unknown)
            for each in slot.gpu[:gpus]
        )
        fault = _printable(slot.fault) if slot.state == _DISABLED else None
        # While the state is 0, the process `pid` is emptying the slot, and `stack` may be that of the process before.
        stack = slot.gpu[0].stack if slot.state else 0
        slots.append(Slot(index=index, pid=slot.pid, namespace=slot.pid_namespace, stack=stack, fault=fault, gpus=on_gpus))
    return tuple(slots)


def uuid_bytes(text: str) -> bytes:
    """The UUID's bytes as from cuDeviceGetUuid. Raises ValueError."""
    return uuid.UUID(text.removeprefix("GPU-").removeprefix("MIG-")).bytes


def _printable(text: bytes) -> str:
    return "".join(character for character in text.decode("ascii", "replace") if character.isprintable())
