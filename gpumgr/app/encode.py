"""An offer as the two ListAndWatch messages."""

from gpumgr.allocator.ids import Cards
from gpumgr.allocator.offer import Offer
from gpumgr.deviceplugin.devices import DeviceEntry, encode_devices
from gpumgr.units import KINDS, Kind


def encode_offer(cards: Cards, offer: Offer) -> dict[Kind, bytes]:
    """kind -> encoded ListAndWatchResponse with every id of every card."""
    return {kind: encode_devices(_entries(cards, offer, kind)) for kind in KINDS}


def _entries(cards: Cards, offer: Offer, kind: Kind) -> list[DeviceEntry]:
    return [
        (text, bool(healthy >> number & 1), card.numa_node)
        for card in offer
        for healthy in [card.healthy_cores if kind == "core" else card.healthy_blocks]
        for number, text in enumerate(cards.ids[kind][card.card.name])
    ]
