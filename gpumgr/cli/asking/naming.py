"""What to say of a word that names no pod of which anything is known."""

import difflib
from collections.abc import Collection
from typing import Final

from gpumgr.allocator.pods import PodKey
from gpumgr.cli.pod_word import PodWord
from gpumgr.cli.printable import printable

#: Names that are offered for one that is not known.
_OFFERED: Final = 3
_ALIKE: Final = 0.6


def nothing_known(word: PodWord, known: Collection[PodKey]) -> str:
    """A sentence, with the names that are near."""
    cause = f"it is not here, asks for no GPU, or is long gone{_near(word, known)}"
    return f"nothing is known of pod {printable(str(word))} on this node: {cause}"


def _near(word: PodWord, known: Collection[PodKey]) -> str:
    """Names that are alike, or begin so (those of controllers' pods end in letters that nobody remembers)."""

    def likeness(key: PodKey) -> float:
        return difflib.SequenceMatcher(None, key[1], word.name).ratio()

    near = [key for key in sorted(known) if likeness(key) >= _ALIKE or key[1].startswith(word.name)]
    offered = [printable("/".join(key)) for key in sorted(near, key=likeness, reverse=True)[:_OFFERED]]
    return f"; did you mean {' or '.join(offered)}?" if offered else ""
