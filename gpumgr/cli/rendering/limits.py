"""Which mechanisms limit a share, in words."""

from collections.abc import Sequence
from typing import Final

#: Mechanisms that limit nothing: "none", and MPS for containers that are exempt from limits.
_UNLIMITED: Final = ("none", "mps-open")


def limiting(mechanisms: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in mechanisms if name not in _UNLIMITED)


def limits_sentence(mechanisms: Sequence[str]) -> str:
    if names := limiting(mechanisms):
        return f"kept within its share by {' and '.join(names)}"
    return f"nothing keeps it within its share{' (mps-open: it is exempt)' if 'mps-open' in mechanisms else ''}"
