"""How people name a pod on the command line."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Self

from gpumgr.allocator.pods import PodKey
from gpumgr.cli.printable import printable
from gpumgr.errors import InputError

DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodWord:
    """`namespace` None: it was not said."""

    namespace: str | None = None
    name: str

    def __str__(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"

    @classmethod
    def of(cls, text: str) -> Self:
        """NAME or NAMESPACE/NAME. Raises InputError."""
        namespace, slash, name = text.rpartition("/")
        if not name or "/" in namespace or (slash and not namespace):
            raise InputError(f"'{printable(text)}' names no pod: expected NAME or NAMESPACE/NAME, for example team/resnet-0")
        return cls(namespace=namespace if slash else None, name=name)

    def among(self, known: Collection[PodKey]) -> PodKey:
        """The pod that is meant, of those that are known or of the default namespace. Raises InputError if it could be several."""
        if self.namespace is not None:
            return self.namespace, self.name
        default = (DEFAULT_NAMESPACE, self.name)
        named = sorted(key for key in known if key[1] == self.name)
        if len(named) > 1 and default not in named:
            raise InputError(
                f"several pods on this node are called so: {', '.join(printable('/'.join(key)) for key in named)}; name one of them"
            )
        return named[0] if len(named) == 1 else default
