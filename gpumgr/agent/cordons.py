"""GPUs that an operator took out of service, and his words for it: values, and the note that keeps them over restarts."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from gpumgr.errors import CheckpointError

#: The checkpoint's note.
CORDONS_NOTE: Final = "cordons"
#: The reason stands in refusals, which become messages of events; the API server takes 1024 bytes of those.
REASON_CHARACTERS: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """`since` is in unix seconds. `draining`: those who are still on the GPU shall go, too; `evict`: the API server is asked for it."""

    reason: str = ""
    since: float = 0.0
    draining: bool = False
    evict: bool = False

    @property
    def sentence(self) -> str:
        """Why the GPU takes nothing new."""
        return "cordoned by the operator" + (f": {self.reason}" if self.reason else "")


def encode_cordons(cordons: Mapping[str, Cordon]) -> str:
    """By UUID."""
    return json.dumps({uuid: asdict(cordon) for uuid, cordon in cordons.items()}, sort_keys=True)


def decode_cordons(note: str) -> dict[str, Cordon]:
    """Raises CheckpointError: a GPU that was taken out of service must not come back because nobody can read why it was."""
    try:
        return {
            str(uuid): Cordon(
                reason=str(kept["reason"]),
                since=float(kept["since"]),
                draining=bool(kept["draining"]),
                evict=bool(kept.get("evict", False)),  # notes of before did not say
            )
            for uuid, kept in json.loads(note).items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's note of cordoned GPUs can't be read ({error!r}): start the gpumgr that wrote it, or remove the note "
            f"{CORDONS_NOTE!r} and cordon the GPUs again"
        ) from error
