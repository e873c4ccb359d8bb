"""Which of MPS's two protocols this node speaks.

One for the whole node, and it stays while any container was answered in it: what a container was given once (a daemon's folder and
limits in its environment, or the folder of one namespace) can't be changed any more, also not over a reboot, and the answers must
depend on nothing that changes. So the choice is on disk, not under run_dir. A newer protocol is taken after the node was drained.
"""

import os
from pathlib import Path
from typing import Final

from gpumgr.enforcement.mps.commands import Abilities, Protocol, ProtocolSetting
from gpumgr.enforcement.mps.errors import MpsError

_NAME: Final = "mps_protocol"
_KNOWN: Final[dict[str, Protocol]] = {"2": 2, "3": 3}


def settle(setting: ProtocolSetting, abilities: Abilities, kept: Protocol | None) -> Protocol:
    """`kept`: what containers of this node were answered in. Raises MpsError."""
    newest: Protocol = 3 if 3 in abilities.protocols else 2
    wanted = kept or _KNOWN.get(setting, newest)
    if wanted not in abilities.protocols:
        why = "containers of this node use it: drain the node" if kept else "mps.protocol asks for it: set it to auto"
        raise MpsError(
            f"the installed nvidia-cuda-mps-control can't speak MPS protocol {wanted} (driver r615 and newer can), and {why}"
        )
    return wanted


def read(folder: Path) -> Protocol | None:
    """None: nothing (that can be understood) was kept. Raises OSError."""
    try:
        return _KNOWN.get((folder / _NAME).read_text().strip())
    except FileNotFoundError:
        return None


def write(folder: Path, protocol: Protocol) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".{_NAME}.new"
    beside.write_text(f"{protocol}\n")
    os.replace(beside, folder / _NAME)
