"""Maps pids on the host to pids in a container, and back."""

from collections.abc import Callable, Collection, Sequence

#: The pid of a host process in its innermost pid namespace (the last column of NSpid in /proc/PID/status); None if it is gone.
NspidOf = Callable[[int], int | None]
#: Maps a pid in a container to the host's pids of the processes that have this pid in their pid namespace.
HostsOf = Callable[[int], Sequence[int]]


class PidMap:
    """/proc is read once for each process."""

    def __init__(self, nspid_of: NspidOf) -> None:
        self._nspid_of = nspid_of
        self._inside: dict[int, int] = {}

    def forget_all_but(self, pids: Collection[int]) -> None:
        self._inside = {pid: number for pid, number in self._inside.items() if pid in pids}

    def inside(self, pid: int) -> int | None:
        """The process's pid in its container; None if it is gone."""
        found = self._inside.get(pid)
        if found is None and (found := self._nspid_of(pid)) is not None:
            self._inside[pid] = found
        return found

    def hosts_of(self, pids: Collection[int]) -> HostsOf:
        """A function that finds the processes of `pids` by their pid in the container: one, or several with nested pid namespaces."""
        table: dict[int, list[int]] = {}
        for pid in pids:
            if (inside := self.inside(pid)) is not None:
                table.setdefault(inside, []).append(pid)
        return lambda number: table.get(number, ())
