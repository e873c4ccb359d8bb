"""GPUs that an operator took out of service, with the reasons. A note in the checkpoint keeps them over restarts."""

from collections.abc import Mapping
from typing import Final

import msgspec

from gpumgr.ledger.checkpoint.notes import DELETE_IT, decode_note

#: The key of the checkpoint's note.
CORDONS_NOTE: Final = "cordons"
#: Refusals contain the reason and become messages of events, which gpumgr cuts at 1024 bytes. A longer reason would displace the rest.
REASON_CHARACTERS: Final = 256


class Cordon(msgspec.Struct, frozen=True, kw_only=True):
    """Why a GPU is out of service. `since` is in unix seconds. `draining`: the operator waits for the GPU's containers to end; `evict`:
    their pods are evicted."""

    reason: str = ""
    since: float = 0.0
    draining: bool = False
    evict: bool = False

    @property
    def sentence(self) -> str:
        """Why the GPU accepts no new containers."""
        return "cordoned by the operator" + (f": {self.reason}" if self.reason else "")


def decode_cordons(notes: Mapping[str, str]) -> dict[str, Cordon]:
    """UUID -> cordon, from the checkpoint's notes. Raises CheckpointError: a GPU that was taken out of service must not return to service
    because the note can't be read."""
    return decode_note(notes, CORDONS_NOTE, dict[str, Cordon], remedy=f"{DELETE_IT} and cordon the GPUs again")
