"""What each GPU had left when a decision fell, for whoever asks later why it fell so."""

from gpumgr.allocator.history import Candidate
from gpumgr.allocator.ledger import Ledger
from gpumgr.allocator.node import NodeView
from gpumgr.units import CORES_PER_GPU


def candidates(node: NodeView, ledger: Ledger) -> tuple[Candidate, ...]:
    """All cards, in their order. A GPU that one container has whole has no blocks left for others."""
    cores, blocks, whole = ledger.held("core"), ledger.held("memory"), ledger.exclusive
    return tuple(
        Candidate(
            gpu=card.name,
            index=node.indices.get(card.name),
            cores_free=CORES_PER_GPU - cores.get(card.name, 0).bit_count(),
            memory_blocks_free=0 if card.name in whole else card.memory_blocks - blocks.get(card.name, 0).bit_count(),
            note=node.unfit.get(card.name),
        )
        for card in ledger.cards.cards
    )
