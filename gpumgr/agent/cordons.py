"""GPUs that an operator took out of service, with the reasons. A note in the checkpoint keeps them over restarts."""

import json
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import asdict

from gpumgr.common.errors import CheckpointError
from gpumgr.common.foreign_text import UnreadableText, decode_json

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


def encode_cordons(cordons: Mapping[str, Cordon]) -> str:
    """The text of the checkpoint's note. `cordons`: UUID -> cordon."""
    return json.dumps({uuid: asdict(cordon) for uuid, cordon in cordons.items()}, sort_keys=True)


def decode_cordons(note: str) -> dict[str, Cordon]:
    """Raises CheckpointError: a GPU that was taken out of service must not come back because its note can't be read."""
    try:
        return decode_json(note, dict[str, Cordon])
    except UnreadableText as error:
        raise CheckpointError(
            f"the checkpoint's note of cordoned GPUs can't be read ({error}): start the version of gpumgr that wrote it, or delete "
            f"the row {CORDONS_NOTE!r} from the table notes of the checkpoint's database and cordon the GPUs again"
        ) from error
