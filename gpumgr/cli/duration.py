"""How long, as people write it: 90s, 10m, 1h30m, 2d."""

import re
from typing import Final

from gpumgr.cli.printable import printable
from gpumgr.errors import InputError

_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_PART: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([dhms])")


def duration_seconds(text: str) -> float:
    """Raises InputError."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise InputError(f"'{printable(text)}' is no duration: expected numbers with d, h, m or s, for example 90s, 1h30m or 2d")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)
