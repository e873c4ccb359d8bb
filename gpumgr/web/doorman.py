"""How many may be inside, for how long, and who goes first when it is full: bookkeeping without sockets or clocks of its own."""

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


class Visit:
    """One connection from its accept on. `line` changes once: a handshake becomes a transport."""

    def __init__(self, line: Line, now: float) -> None:
        self.line = line
        self.stage: Stage = "asking"
        self.half_closed = False
        #: Cut; what still opens for it must close again.
        self.ended = False
        self._since = now
        self._unsent_bytes, self._unsent_since = 0, now

    def became(self, stage: Stage, now: float) -> None:
        self.stage, self._since = stage, now

    @property
    def busy(self) -> bool:
        """A request is under way, or its answer is."""
        return self.stage in ("answering", "streaming") or self.line.get_write_buffer_size() > 0

    def overdue(self, now: float, patience: Patience) -> bool:
        """To be asked at each look: it keeps account of what the client takes.

        An answer must be taken within its time; of a stream, something.
        """
        unsent_bytes = self.line.get_write_buffer_size()
        went_on = self.stage == "streaming" and unsent_bytes != self._unsent_bytes
        if not unsent_bytes or not self._unsent_bytes or went_on:
            self._unsent_since = now
        self._unsent_bytes = unsent_bytes
        if unsent_bytes:
            return now - self._unsent_since >= patience.unsent_seconds
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

    def __init__(self, most: int, patience: Patience) -> None:
        self._most, self._patience = most, patience
        self._visits: dict[Visit, None] = {}
        self.refused = 0

    @property
    def inside(self) -> int:
        return len(self._visits)

    def admit(self, visit: Visit) -> bool:
        """False: every place is taken by somebody busy. Else the one who came first of those who are not makes room."""
        if len(self._visits) >= self._most:
            quiet = next((inside for inside in self._visits if not inside.busy), None)
            if quiet is None:
                self.refused += 1
                return False
            self._end(quiet)
        self._visits[visit] = None
        return True

    def leave(self, visit: Visit) -> None:
        self._visits.pop(visit, None)

    def look(self, now: float) -> None:
        """Ends who stayed too long."""
        for visit in [visit for visit in self._visits if visit.overdue(now, self._patience)]:
            self._end(visit)

    def end_all(self) -> None:
        for visit in list(self._visits):
            self._end(visit)

    def _end(self, visit: Visit) -> None:
        self.leave(visit)
        visit.ended = True
        visit.line.abort()
