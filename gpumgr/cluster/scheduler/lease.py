"""Decides from the reads and writes of a Lease which of several replicas leads. Pure.

Times are seconds of this process's own monotonic clock, so the clocks of the replicas need only run at about the same speed.

Invariant: two replicas never lead at the same time. A leader leads for `lead_seconds` after it has *begun* a write that succeeded. Another
replica takes the Lease only after it has *seen* it without a change for `lease_seconds`, which is longer than `lead_seconds`. The write
that takes the Lease has the version that this replica has seen as a precondition, so it fails if the Lease has changed since then.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import replace


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """A leader stops answering `lead_seconds` after its last write of the Lease, and stops sending bindings `bind_seconds` before that.
    With these times another replica takes over within 12 s after the last write."""

    lease_seconds: int = 10
    lead_seconds: float = 7.0
    renew_seconds: float = 2.0
    #: Time between two reads of the Lease by a replica that does not lead, and after a failed request.
    look_seconds: float = 1.0
    request_seconds: float = 3.0
    bind_seconds: float = 3.0


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: its resource version. `holder` is empty after a release. `renewed` differs for each write."""

    holder: str
    version: str
    renewed: str = ""
    seconds: int = 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One replica's view. `seen`: the Lease as last read; None: there is none. `seen_at`: when this content was first seen. `until`: when
    this replica ceases to lead."""

    me: str
    times: LeaseTimes = LeaseTimes()
    seen: Lease | None = None
    seen_at: float = float("-inf")
    until: float = float("-inf")

    def leads(self, now: float) -> bool:
        return now < self.until

    def read(self, lease: Lease | None, now: float) -> "Candidate":
        """The replica's view after it has read the Lease. `now` is a time after the answer."""
        if lease is None:  # the leader of a deleted Lease still leads for a while
            return replace(self, seen=None, seen_at=now if self.seen is not None else self.seen_at, until=float("-inf"))
        unchanged = self.seen is not None and (lease.holder, lease.renewed) == (self.seen.holder, self.seen.renewed)
        until = self.until if lease.holder == self.me else float("-inf")
        return replace(self, seen=lease, seen_at=self.seen_at if unchanged else now, until=until)

    def wrote(self, lease: Lease, began: float) -> "Candidate":
        """The replica's view after a write that made it the holder. `began` is a time before the write was sent."""
        return replace(self, seen=lease, seen_at=began, until=began + self.times.lead_seconds)

    def stopped(self) -> "Candidate":
        return replace(self, until=float("-inf"))

    def may_write(self, now: float) -> bool:
        return now >= self._expires or (self.seen is not None and self.seen.holder in (self.me, ""))

    def pause_seconds(self, now: float) -> float:
        """The time until the next read or renewal."""
        if self.leads(now):
            return self.times.renew_seconds
        left = self._expires - now
        return min(self.times.look_seconds, left) if left > 0 else self.times.look_seconds

    @property
    def _expires(self) -> float:
        return self.seen_at + max(self.times.lease_seconds, self.seen.seconds if self.seen is not None else 0)


def parse_lease(document: Mapping[str, Any]) -> Lease:
    """Raises KeyError, TypeError, ValueError or AttributeError for a document that is no Lease."""
    spec = document.get("spec") or {}
    return Lease(
        holder=str(spec.get("holderIdentity") or ""),
        version=str(document["metadata"]["resourceVersion"]),
        renewed=str(spec.get("renewTime") or ""),
        seconds=int(spec.get("leaseDurationSeconds") or 0),
    )
