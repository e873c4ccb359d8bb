"""A container's pages (files that it shares with the agent) as values, in the layout of pages.h. Pure.

Agent and arbiter write `limits`. `use` has a slot (record) for each process, and by `turn` the arbiter gives turns to run kernels. The
container can write any bytes into these two pages, so limits are never read from them.
"""

import ctypes
import uuid
from collections.abc import Sequence
from typing import Final

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


class _LimitsGpu(ctypes.LittleEndianStructure):
    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        ("memory_bytes", _U64),
        ("uncounted_bytes", _U64),
        ("context_bytes", _U64),
        ("share", _U32),
        ("ceiling", _U32),
        ("quantum_us", _U32),
        ("passes", _U32),
        ("away_from", _U32),
        ("spare", _U32),
        ("reserved", _U64 * 7),
    )


class _Limits(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", _U32),
        ("version", _U32),
        ("gpus", _U32),
        ("suspend", _U32),
        ("heartbeat_ns", _U64),
        ("reserved", _U64 * 5),
        ("gpu", _LimitsGpu * GPUS),
    )


class _UseSlotGpu(ctypes.LittleEndianStructure):
    _fields_ = (
        ("bytes", _U64 * 8),
        ("launches", _U64),
        ("stack", _U64),
        ("spare", _U64),
        ("unknown", _U64),
        ("pending_bytes", _U64),
        ("reserved", _U64 * 3),
    )


class _UseSlot(ctypes.LittleEndianStructure):
    _fields_ = (
        ("pid", _U32),
        ("state", _U32),
        ("pid_namespace", _U64),
        ("fault", ctypes.c_char * 48),
        ("gpu", _UseSlotGpu * GPUS),
    )


class _UseGpu(ctypes.LittleEndianStructure):
    _fields_ = (("reserved_bytes", _U64), ("refused", _U64), ("changes", _U64), ("reserved", _U64 * 5))


class _UseHead(ctypes.LittleEndianStructure):
    _fields_ = (
        ("magic", _U32),
        ("version", _U32),
        ("slots", _U32),
        ("resume_requests", _U32),
        ("reserved", _U64 * 6),
        ("gpu", _UseGpu * GPUS),
    )


_HEAD_BYTES: Final = 64
#: `turn` has for each GPU a head of this size and one 32-bit word for each slot.
_TURN_GPU_HEAD_BYTES: Final = 64
_TURN_GPU_BYTES: Final = _TURN_GPU_HEAD_BYTES + 4 * SLOTS
_SLOT_BYTES: Final = ctypes.sizeof(_UseSlot)
USE_HEAD_BYTES: Final = ctypes.sizeof(_UseHead)
SIZES: Final = {
    "limits": ctypes.sizeof(_Limits),
    "use": USE_HEAD_BYTES + SLOTS * _SLOT_BYTES,
    "turn": _HEAD_BYTES + GPUS * _TURN_GPU_BYTES,
}
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


class CountedOnGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The library's count for the container on one GPU. `changes`: how often `reserved_bytes` changed."""

    reserved_bytes: int
    refused: int
    changes: int


def encode_limits(gpus: Sequence[PageLimits]) -> bytes:
    """A new page. Raises ValueError for too many GPUs, and for a text that is not a UUID."""
    if len(gpus) > GPUS:
        raise ValueError(f"the limiter serves at most {GPUS} GPUs in one container, and this one has {len(gpus)}")
    page = _Limits(magic=MAGIC, version=VERSION, gpus=len(gpus))
    for entry, gpu in zip(page.gpu, gpus, strict=False):
        ctypes.memmove(entry.uuid, uuid_bytes(gpu.uuid), 16)
        for name, value in _words(gpu):
            setattr(entry, name, value)
    return bytes(page)


def decode_limits(page: bytes) -> tuple[PageLimits, ...]:
    """Raises ValueError for a page of another version."""
    found = _Limits.from_buffer_copy(page)
    if (found.magic, found.version) != (MAGIC, VERSION) or found.gpus > GPUS:
        raise ValueError("it is not a page of this version")
    return tuple(
        PageLimits(
            uuid=f"GPU-{uuid.UUID(bytes=bytes(gpu.uuid))}",
            memory_bytes=gpu.memory_bytes,
            share_percent=gpu.share,
            ceiling_percent=gpu.ceiling,
            quantum_microseconds=gpu.quantum_us,
            context_bytes=gpu.context_bytes,
            uncounted_bytes=gpu.uncounted_bytes,
        )
        for gpu in found.gpu[: found.gpus]
    )


def decode_in_turns(page: bytes, gpus: int) -> tuple[bool, ...]:
    """For each GPU, whether launches need a turn. They need none without a limit of cores, or while `passes` is set (by the arbiter, if
    the container is alone on the GPU and its ceiling is 100)."""
    found = _Limits.from_buffer_copy(page)
    return tuple(bool(gpu.share) and not gpu.passes for gpu in found.gpu[:gpus])


def limits_words(page: bytes, wanted: Sequence[PageLimits]) -> list[tuple[str, int, bytes]]:
    """The words of `page` that differ from these limits: (name, offset, bytes to write)."""
    found = _Limits.from_buffer_copy(page)
    words = [
        (name, getattr(_Limits, name), value, getattr(found, name))
        for name, value in (("magic", MAGIC), ("version", VERSION), ("gpus", len(wanted)))
    ]
    differing = [(name, at.offset, value.to_bytes(at.size, "little")) for name, at, value, seen in words if seen != value]
    for index, gpu in enumerate(wanted):
        start = _Limits.gpu.offset + index * ctypes.sizeof(_LimitsGpu)
        if bytes(found.gpu[index].uuid) != uuid_bytes(gpu.uuid):
            raw = uuid_bytes(gpu.uuid)
            differing += [("uuid", start, raw[:8]), ("uuid", start + 8, raw[8:])]
        for name, value in _words(gpu):
            at = getattr(_LimitsGpu, name)
            if getattr(found.gpu[index], name) != value:
                differing.append((name, start + at.offset, value.to_bytes(at.size, "little")))
    return differing


def suspend_word(*, suspended: bool) -> tuple[int, bytes]:
    """The offset in `limits`, and the bytes that make CUDA calls wait, or continue."""
    return _Limits.suspend.offset, int(suspended).to_bytes(4, "little")


def decode_suspended(page: bytes) -> bool:
    return bool(_Limits.from_buffer_copy(page).suspend)


def resume_requests_word() -> tuple[int, bytes]:
    """The offset in `use`, and the bytes that clear the requests."""
    return _UseHead.resume_requests.offset, bytes(4)


def decode_resume_requested(head: bytes) -> bool:
    """`head` as for `decode_counts`."""
    return bool(_UseHead.from_buffer_copy(head).resume_requests)


def decode_counts(head: bytes, gpus: int) -> tuple[CountedOnGpu, ...]:
    """`head`: the first USE_HEAD_BYTES of `use`."""
    found = _UseHead.from_buffer_copy(head)
    return tuple(
        CountedOnGpu(reserved_bytes=each.reserved_bytes, refused=each.refused, changes=each.changes) for each in found.gpu[:gpus]
    )


def slots_in_use(head: bytes) -> int:
    return min(int(_UseHead.from_buffer_copy(head).slots), SLOTS)


def slot_offset(index: int) -> int:
    return USE_HEAD_BYTES + index * _SLOT_BYTES


def word_offset(gpu: int, slot: int) -> int:
    return _HEAD_BYTES + gpu * _TURN_GPU_BYTES + _TURN_GPU_HEAD_BYTES + 4 * slot


def decode_slots(data: bytes, gpus: int) -> tuple[Slot, ...]:
    """The slots with a process. `data`: the bytes of `use` from slot_offset(0) on."""
    slots = []
    for index in range(len(data) // _SLOT_BYTES):
        if not any(data[index * _SLOT_BYTES : index * _SLOT_BYTES + 4]):
            continue
        slot = _UseSlot.from_buffer_copy(data, index * _SLOT_BYTES)
        on_gpus = tuple(
            SlotOnGpu(bytes_by_kind=tuple(each.bytes[: len(KINDS)]), launches=each.launches, unknown=each.unknown)
            for each in slot.gpu[:gpus]
        )
        fault = _printable(slot.fault) if slot.state == _DISABLED else None
        # While the state is 0, the process `pid` is emptying the slot, and `stack` may be that of the process before.
        stack = slot.gpu[0].stack if slot.state else 0
        slots.append(Slot(index=index, pid=slot.pid, namespace=slot.pid_namespace, stack=stack, fault=fault, gpus=on_gpus))
    return tuple(slots)


def empty_slot() -> bytes:
    """The bytes of an empty slot after its pid and state."""
    return bytes(_SLOT_BYTES - 8)


def _words(gpu: PageLimits) -> Sequence[tuple[str, int]]:
    return (
        ("memory_bytes", gpu.memory_bytes),
        ("uncounted_bytes", gpu.uncounted_bytes),
        ("context_bytes", gpu.context_bytes),
        ("share", gpu.share_percent),
        ("ceiling", gpu.ceiling_percent),
        ("quantum_us", gpu.quantum_microseconds),
    )


def uuid_bytes(text: str) -> bytes:
    """The UUID's bytes as from cuDeviceGetUuid. Raises ValueError."""
    return uuid.UUID(text.removeprefix("GPU-").removeprefix("MIG-")).bytes


def _printable(text: bytes) -> str:
    return "".join(character for character in text.decode("ascii", "replace") if character.isprintable())
