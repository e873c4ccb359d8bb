"""Pod names on the command line."""

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from gpumgr.cli.printable import printable
from gpumgr.common.errors import InputError
from gpumgr.placement.pods import PodKey

DEFAULT_NAMESPACE: Final = "default"
#: How many similar names are suggested, and how similar they must be (difflib's ratio).
_SUGGESTIONS: Final = 3
_MIN_SIMILARITY: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class PodName:
    """NAME or NAMESPACE/NAME; `namespace` None: not given."""

    namespace: str | None = None
    name: str

    def __str__(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Raises InputError unless the text is NAME or NAMESPACE/NAME."""
        namespace, slash, name = text.rpartition("/")
        if not name or "/" in namespace or (slash and not namespace):
            raise InputError(
                f"'{printable(text)}' is not a pod's name: expected NAME or NAMESPACE/NAME, for example team/resnet-0"
            )
        return cls(namespace=namespace if slash else None, name=name)

    def among(self, known: Collection[PodKey]) -> PodKey:
        """The one known pod of this name, else the one in the default namespace. Raises InputError if several pods have the name."""
        if self.namespace is not None:
            return self.namespace, self.name
        default = (DEFAULT_NAMESPACE, self.name)
        named = sorted(key for key in known if key[1] == self.name)
        if len(named) > 1 and default not in named:
            raise InputError(
                f"several pods on this node have this name: {', '.join(printable('/'.join(key)) for key in named)}; name one of them"
            )
        return named[0] if len(named) == 1 else default


def unknown_pod_message(pod: PodName, known: Collection[PodKey]) -> str:
    """Why nothing is known of the pod, with similar names of known ones."""
    cause = f"it is not here, requests no GPU, or ended long ago{_suggestions(pod, known)}"
    return f"nothing is known of pod {printable(str(pod))} on this node: {cause}"


def _suggestions(pod: PodName, known: Collection[PodKey]) -> str:
    """Similar names, and those with the same beginning: controllers append random letters to their pods' names."""

    def similarity(key: PodKey) -> float:
        return difflib.SequenceMatcher(None, key[1], pod.name).ratio()

    near = [key for key in sorted(known) if similarity(key) >= _MIN_SIMILARITY or key[1].startswith(pod.name)]
    names = [printable("/".join(key)) for key in sorted(near, key=similarity, reverse=True)[:_SUGGESTIONS]]
    return f"; did you mean {' or '.join(names)}?" if names else ""
