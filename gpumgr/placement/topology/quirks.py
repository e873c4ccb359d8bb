"""The meaning of NVML's common-ancestor numbers, with the drivers that report wrong ones.

NVML counts 0 INTERNAL, 10 SINGLE, 20 MULTIPLE, 30 HOSTBRIDGE, 40 NODE, 50 SYSTEM (nvml.h, nvmlGpuTopologyLevel_t).
"""

from dataclasses import dataclass
from typing import Final

from gpumgr.placement.topology.devices import Level

_INTERNAL: Final = 0

#: NVML's numbers in ascending order, with our names.
_MEANINGS: Final[tuple[tuple[int, Level], ...]] = (
    (_INTERNAL, Level.PSB),
    (10, Level.PIX),
    (20, Level.PXB),
    (30, Level.PHB),
    (40, Level.NODE),
    (50, Level.SYS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirk:
    """A driver that reports `reported` where `meant` is true. None in a condition: any."""

    driver_version: str | None = None
    on_same_board: bool | None = None
    reported: int
    meant: Level
    why: str


QUIRKS: Final[tuple[Quirk, ...]] = (
    Quirk(
        driver_version="396.26",
        reported=_INTERNAL,
        meant=Level.PIX,
        why="calls the GPUs of a multi-GPU board INTERNAL; each sits behind the board's switch, which is SINGLE",
    ),
    Quirk(
        on_same_board=False,
        reported=_INTERNAL,
        meant=Level.PIX,
        why="INTERNAL needs a multi-GPU board, and each board is reported to have one GPU",
    ),
)


def level_of(driver_version: str | None, nvml_level: int, on_same_board: bool | None = None) -> Level:
    """The PCIe level of a pair of GPUs for the number that NVML gave.

    `on_same_board`: what the driver reports about multi-GPU boards for this pair; None = nothing.
    A number that no known driver uses counts as the next farther level; above all of them, as SYS.
    """
    for quirk in QUIRKS:
        if (
            nvml_level == quirk.reported
            and quirk.driver_version in (None, driver_version)
            and quirk.on_same_board in (None, on_same_board)
        ):
            return quirk.meant
    return next((level for number, level in _MEANINGS if nvml_level <= number), Level.SYS)
