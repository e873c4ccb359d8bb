"""How many connections may be open, and for how long: bookkeeping without sockets or clocks of its own.

Invariants:

1. One remote address has at most a quarter of the slots, and all remote addresses together leave an eighth free, so that a flood from
   the network does not lock out the kubelet's probes and the users of the node.
2. When no slot is free, the connection on which a response has been unread for the longest is cut; then, oldest first, one on which
   no request is in progress; else the new connection is refused.
3. The bytes that all clients together leave unread are bounded: the connection that has done so for the longest is cut first.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

#: "receiving": a request is awaited or arrives (from the accept on); "responding": a handler works or its response is sent;
#: "streaming": the response has no end; "idle": a response was sent, and another request may follow.
Stage = Literal["receiving", "responding", "streaming", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds until a connection is cut. `half_closed_seconds`: the client has shut down its side and no request is in progress."""

    request_seconds: float = 10.0
    idle_seconds: float = 75.0
    unread_seconds: float = 30.0
    half_closed_seconds: float = 1.0
    #: The interval of the checks.
    check_seconds: float = 1.0


TIMEOUTS: Final = Timeouts()
#: What all clients together may leave unread.
MAX_UNREAD_BYTES: Final = 16 << 20
#: Groups of slots; a remote address is a group, too.
_ALL: Final = "all"
_REMOTE: Final = "remote"


class Slot:
    """One connection. `transports` are its transport and, with TLS, the one above it; the first is the socket's."""

    def __init__(self, transport: asyncio.WriteTransport, now: float, *, peer: str | None = None) -> None:
        """`peer` is the address of a remote client; None: the client is on this host."""
        self.transports, self.peer = [transport], peer
        self.stage: Stage = "receiving"
        self.half_closed = False
        self._since = now
        self._unread_bytes, self._unread_since = 0, now

    def enter(self, stage: Stage, now: float) -> None:
        self.stage, self._since = stage, now

    @property
    def busy(self) -> bool:
        """A request is in progress."""
        return self.stage in ("responding", "streaming")

    @property
    def unread_bytes(self) -> int:
        return sum(transport.get_write_buffer_size() for transport in self.transports)

    def unread_seconds(self, now: float) -> float | None:
        """For how long bytes have been unread, in a stream for how long none was read; None: the client has read everything.

        Must be called at each check, since it compares with the call before.
        """
        unread_bytes = self.unread_bytes
        progressed = self.stage == "streaming" and unread_bytes != self._unread_bytes
        if not unread_bytes or not self._unread_bytes or progressed:
            self._unread_since = now
        self._unread_bytes = unread_bytes
        return now - self._unread_since if unread_bytes else None

    def overdue(self, now: float, timeouts: Timeouts) -> bool:
        unread_seconds = self.unread_seconds(now)
        if unread_seconds is not None:
            return unread_seconds >= timeouts.unread_seconds
        if self.busy:
            return False
        limit = timeouts.request_seconds if self.stage == "receiving" else timeouts.idle_seconds
        return now - self._since >= (timeouts.half_closed_seconds if self.half_closed else limit)


class ConnectionLimit:
    """The open connections, oldest first. `refused` counts those for which no slot was free."""

    def __init__(self, max_connections: int, timeouts: Timeouts, *, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self._max, self._timeouts, self._max_unread_bytes = max_connections, timeouts, max_unread_bytes
        self._groups: dict[str, dict[Slot, None]] = {_ALL: {}, _REMOTE: {}}
        self.refused = 0

    @property
    def open(self) -> int:
        return len(self._groups[_ALL])

    def acquire(self, slot: Slot, now: float) -> bool:
        """False: no slot is free, and no connection can be cut for this one."""
        limits = self._limits(slot)
        for name, limit in limits.items():
            group = self._groups.get(name, {})
            if len(group) >= limit and not self._cut_one(group, now):
                self.refused += 1
                return False
        for name in limits:
            self._groups.setdefault(name, {})[slot] = None
        return True

    def release(self, slot: Slot) -> None:
        """May be called more than once."""
        for name in self._limits(slot):
            group = self._groups.get(name, {})
            group.pop(slot, None)
            if not group and name == slot.peer:
                self._groups.pop(name, None)

    def check(self, now: float) -> None:
        """Cuts the connections that are overdue, and the ones that keep too many bytes unread."""
        for slot in [slot for slot in self._groups[_ALL] if slot.overdue(now, self._timeouts)]:
            self._cut(slot)
        unread = _unread(self._groups[_ALL], now)
        unread_bytes = sum(slot.unread_bytes for slot in unread)
        for slot in unread:
            if unread_bytes <= self._max_unread_bytes:
                break
            unread_bytes -= slot.unread_bytes
            self._cut(slot)

    def cut_all(self) -> None:
        for slot in list(self._groups[_ALL]):
            self._cut(slot)

    def _limits(self, slot: Slot) -> Mapping[str, int]:
        """The groups of the slot, and how many slots each may have."""
        if slot.peer is None:
            return {_ALL: self._max}
        return {slot.peer: max(1, self._max // 4), _REMOTE: self._max - max(1, self._max // 8), _ALL: self._max}

    def _cut_one(self, group: Iterable[Slot], now: float) -> bool:
        slot = next(iter(_unread(group, now)), None) or next((slot for slot in group if not slot.busy), None)
        if slot is not None:
            self._cut(slot)
        return slot is not None

    def _cut(self, slot: Slot) -> None:
        self.release(slot)
        slot.transports[0].abort()


def _unread(slots: Iterable[Slot], now: float) -> list[Slot]:
    """Slots with an unread response, the one that has been unread for the longest first."""
    since = {slot: seconds for slot in slots if (seconds := slot.unread_seconds(now)) is not None}
    return sorted(since, key=lambda slot: -since[slot])
