"""Numbers as text, and the mechanisms that limit a share."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from gpumgr.common.units import BLOCK_BYTES

#: A value that the driver does not report.
UNKNOWN: Final = "unknown"
_GIB: Final = 1 << 30
#: Mechanisms that limit nothing: "none", and MPS for containers that are exempt from limits.
_UNLIMITED: Final = ("none", "mps-open")


def clock_time(at: float) -> str:
    """Unix seconds as a UTC date and time."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"@{at:g}"


def gibibytes(memory_bytes: int | None) -> str:
    return UNKNOWN if memory_bytes is None else f"{memory_bytes / _GIB:.1f}"


def memory_text(memory_bytes: int | None) -> str:
    return "unknown memory" if memory_bytes is None else f"{gibibytes(memory_bytes)} GiB"


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{ratio:.0%}"


def blocks(count: int) -> str:
    return f"{count} memory block{'' if count == 1 else 's'} ({count * BLOCK_BYTES / _GIB:g} GiB)"


def cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def limiting(mechanisms: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in mechanisms if name not in _UNLIMITED)


def limits_sentence(mechanisms: Sequence[str]) -> str:
    if names := limiting(mechanisms):
        return f"kept within its share by {' and '.join(names)}"
    return f"nothing keeps it within its share{' (mps-open: it is exempt)' if 'mps-open' in mechanisms else ''}"
