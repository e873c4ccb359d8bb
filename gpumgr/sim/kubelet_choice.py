"""Collects ids for one container and resource."""

from collections.abc import Callable, Collection, Iterable


class Choice:
    """Marks each id as allocated when it is taken."""

    def __init__(self, required: int, mark: Callable[[Collection[str]], None]) -> None:
        self.required = required
        self.ids: set[str] = set()
        self._mark = mark

    @property
    def needed(self) -> int:
        return self.required - len(self.ids)

    def take(self, ids: Iterable[str]) -> bool:
        """Takes ids until there are enough; True if there are."""
        for device_id in ids:
            if self.needed == 0:
                break
            self.ids.add(device_id)
        self._mark(self.ids)
        return self.needed == 0
