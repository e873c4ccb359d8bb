"""How many may be inside, for how long, and who goes first when it is full: bookkeeping without sockets or clocks of its own.

Rule 1. Nobody from beyond this host takes more than a quarter of the places, and all of them together leave an eighth free: so whoever
floods the door, the kubelet's probes and the people on the node come in.
Rule 2. Where there is no room for one more, the client that lets an answer lie unread the longest goes first; then, oldest first, those
who wait or are waited for; else the new one is refused.
Rule 3. What all clients together let lie unread is bounded: whoever does so the longest goes, until it is.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

#: "asking": a request is awaited or arrives (from the start on); "answering": one is under way; "streaming": its answer has no end;
#: "idle": one was answered, and another may come.
Stage = Literal["asking", "answering", "streaming", "idle"]


class Line(Protocol):
    """The connection itself; every asyncio.Transport is one."""

    def get_write_buffer_size(self) -> int:
        """Bytes that the peer has not taken yet."""
        ...

    def abort(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds until a connection is cut. `half_closed`: its client said that nothing more will come, and waits for no answer."""

    request_seconds: float = 10.0
    idle_seconds: float = 75.0
    unsent_seconds: float = 30.0
    half_closed_seconds: float = 1.0
    #: How often it is looked.
    look_seconds: float = 1.0


PATIENCE: Final = Patience()
#: What may lie unread at a look, of all clients together.
MOST_UNREAD_BYTES: Final = 16 << 20
#: Groups of visits: all, and those from beyond this host.
_EVERYBODY: Final = "everybody"
_BEYOND: Final = "beyond"


class Visit:
    """One connection from its accept on. `line` changes once: a handshake becomes a transport."""

    def __init__(self, line: Line, now: float, *, peer: str | None = None) -> None:
        """`peer` is the address of a client beyond this host; None: it is on it."""
        self.line, self.peer = line, peer
        self.stage: Stage = "asking"
        self.half_closed = False
        #: Cut; what still opens for it must close again.
        self.ended = False
        self._since = now
        self._unread_bytes, self._unread_since = 0, now

    def became(self, stage: Stage, now: float) -> None:
        self.stage, self._since = stage, now

    @property
    def busy(self) -> bool:
        """A request is under way."""
        return self.stage in ("answering", "streaming")

    def unread_seconds(self, now: float) -> float | None:
        """How long an answer has lain there, or in a stream how long nothing was taken of it; None: the client has taken all.

        Counts from when it was first asked, so it must be asked at each look.
        """
        unread_bytes = self.line.get_write_buffer_size()
        went_on = self.stage == "streaming" and unread_bytes != self._unread_bytes
        if not unread_bytes or not self._unread_bytes or went_on:
            self._unread_since = now
        self._unread_bytes = unread_bytes
        return now - self._unread_since if unread_bytes else None

    def overdue(self, now: float, patience: Patience) -> bool:
        unread_seconds = self.unread_seconds(now)
        if unread_seconds is not None:
            return unread_seconds >= patience.unsent_seconds
        spent = now - self._since
        match self.stage:
            case "asking":
                return spent >= (patience.half_closed_seconds if self.half_closed else patience.request_seconds)
            case "idle":
                return spent >= (patience.half_closed_seconds if self.half_closed else patience.idle_seconds)
            case _:
                return False


class Doorman:
    """Who is inside, in the order in which they came. `refused` counts those who found no room."""

    def __init__(self, most: int, patience: Patience, *, most_unread_bytes: int = MOST_UNREAD_BYTES) -> None:
        self._most, self._patience, self._most_unread_bytes = most, patience, most_unread_bytes
        #: By group; an address is the group of those who come from there.
        self._groups: dict[str, dict[Visit, None]] = {_EVERYBODY: {}, _BEYOND: {}}
        self.refused = 0

    @property
    def inside(self) -> int:
        return len(self._groups[_EVERYBODY])

    def admit(self, visit: Visit, now: float) -> bool:
        """False: there is no room for it, and nobody who could make some."""
        places = self._places(visit)
        for name, most in places.items():
            group = self._groups.get(name, {})
            if len(group) >= most and not self._make_room(group, now):
                self.refused += 1
                return False
        for name in places:
            self._groups.setdefault(name, {})[visit] = None
        return True

    def leave(self, visit: Visit) -> None:
        for name in self._places(visit):
            group = self._groups.get(name, {})
            group.pop(visit, None)
            if not group and name == visit.peer:
                self._groups.pop(name, None)

    def look(self, now: float) -> None:
        """Ends who stayed too long, and who lets too much lie."""
        for visit in [visit for visit in self._groups[_EVERYBODY] if visit.overdue(now, self._patience)]:
            self._end(visit)
        unread = _unread(self._groups[_EVERYBODY], now)
        unread_bytes = sum(visit.line.get_write_buffer_size() for visit in unread)
        for visit in unread:
            if unread_bytes <= self._most_unread_bytes:
                break
            unread_bytes -= visit.line.get_write_buffer_size()
            self._end(visit)

    def end_all(self) -> None:
        for visit in list(self._groups[_EVERYBODY]):
            self._end(visit)

    def _places(self, visit: Visit) -> Mapping[str, int]:
        """The groups that it belongs to, and how many each may have."""
        if visit.peer is None:
            return {_EVERYBODY: self._most}
        return {visit.peer: max(1, self._most // 4), _BEYOND: self._most - max(1, self._most // 8), _EVERYBODY: self._most}

    def _make_room(self, group: Iterable[Visit], now: float) -> bool:
        leaves = next(iter(_unread(group, now)), None) or next((visit for visit in group if not visit.busy), None)
        if leaves is not None:
            self._end(leaves)
        return leaves is not None

    def _end(self, visit: Visit) -> None:
        self.leave(visit)
        visit.ended = True
        visit.line.abort()


def _unread(visits: Iterable[Visit], now: float) -> list[Visit]:
    """Those whose clients let something lie, the longest first."""
    since = {visit: seconds for visit in visits if (seconds := visit.unread_seconds(now)) is not None}
    return sorted(since, key=lambda visit: -since[visit])
