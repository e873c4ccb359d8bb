"""Whether anything keeps a share within its limits, and what."""

from collections.abc import Sequence
from typing import Final

#: Mechanisms by name that keep nobody: no limits at all, and MPS for those whom the operator exempted from them.
_OPEN: Final = ("none", "mps-open")


def keepers(mechanisms: Sequence[str]) -> tuple[str, ...]:
    """Those that keep it."""
    return tuple(name for name in mechanisms if name not in _OPEN)


def kept_sentence(mechanisms: Sequence[str]) -> str:
    if names := keepers(mechanisms):
        return f"kept within its share by {' and '.join(names)}"
    return f"nothing keeps it within its share{' (mps-open: it is exempt)' if 'mps-open' in mechanisms else ''}"
