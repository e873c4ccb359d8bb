"""What people call a GPU."""

import re
from collections.abc import Sequence
from typing import Final

from gpumgr.allocator.ids import Card, Cards
from gpumgr.errors import InputError
from gpumgr.topology.devices import Gpu

_INDEX: Final = re.compile(r"(?:gpu)?([0-9]+)", re.ASCII)


def find_card(text: str, cards: Cards, shown: Sequence[Gpu]) -> Card:
    """The card that is called so: by its name in device ids, its index ("3", "GPU3"), or its UUID or the beginning of it ("GPU-0fe1").

    `shown` are the GPUs that the driver shows now; others have no index. Raises InputError that lists the node's GPUs.
    """
    wanted = text.strip().lower()
    if wanted in cards.by_name:
        return cards.by_name[wanted]
    if index := _INDEX.fullmatch(wanted):
        found = [card for gpu in shown if str(gpu.index) == index[1] and (card := cards.by_uuid.get(gpu.uuid))]
    else:
        found = [card for card in cards.cards if wanted.startswith("gpu-") and card.uuid.lower().startswith(wanted)]
    if len(found) == 1:
        return found[0]
    what = "several GPUs of this node are called" if found else "no GPU of this node is called"
    raise InputError(f"{what} {text!r}; there are: {_listed(cards, shown)}")


def _listed(cards: Cards, shown: Sequence[Gpu]) -> str:
    indices = {gpu.uuid: gpu.index for gpu in shown}
    names = [(f"GPU{indices[card.uuid]} = " if card.uuid in indices else "") + card.uuid for card in cards.cards]
    return ", ".join(names) or "none"
