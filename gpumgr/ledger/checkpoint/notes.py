"""The checkpoint's notes that are JSON: what the agent remembers over a restart besides the ledger."""

from collections.abc import Mapping
from typing import Final, TypeVar

import msgspec

from gpumgr.common.errors import CheckpointError
from gpumgr.common.foreign_text import UnreadableText, decode_json

T = TypeVar("T")

#: The checkpoint has this note while a lost ledger is not rebuilt yet: the agent may end before that, and the next one must know.
LOST_NOTE: Final = "ledger_lost"
#: The remedy for a note that may be lost.
DELETE_IT: Final = ", or delete its row from the table notes of the checkpoint's database"


def encode_note(value: object) -> str:
    """Equal values have equal texts."""
    return msgspec.json.encode(value, order="deterministic").decode()


def decode_note(notes: Mapping[str, str], key: str, kind: type[T], *, remedy: str = "") -> T:
    """The note with this key; a missing note counts as `{}`. Raises CheckpointError if it can't be read; `remedy`: what else helps then."""
    try:
        return decode_json(notes.get(key) or "{}", kind)
    except UnreadableText as error:
        raise CheckpointError(
            f"the checkpoint's note {key} can't be read ({error}): start the version of gpumgr that wrote it{remedy}"
        ) from error
