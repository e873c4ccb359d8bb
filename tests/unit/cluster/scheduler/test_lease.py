"""The election of a leader: two replicas, an API server that delays and loses requests and answers, in any order of events."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpumgr.cluster.scheduler.lease import Candidate, Lease, LeaseTimes, parse_lease

TIMES = LeaseTimes()
STEPS_SECONDS = (0.0, 1.0, 4.0, 10.0)


@dataclass
class Server:
    """The stored Lease; a write needs the version that it saw."""

    lease: Lease | None = None
    version: int = 0

    def write(self, me: str, seen: Lease | None) -> Lease | None:
        """None: conflict."""
        if (self.lease is None) != (seen is None) or (self.lease and seen and self.lease.version != seen.version):
            return None
        self.version += 1
        self.lease = Lease(holder=me, version=str(self.version), renewed=str(self.version), seconds=TIMES.lease_seconds)
        return self.lease


@dataclass
class Sent:
    """A write on its way: it began then, with this Lease seen."""

    began: float
    seen: Lease | None


#: A replica looks (unless it leads) and writes if it should; the write arrives with its answer, without, not at all, or not yet ("delayed",
#: until "arrives"). Or the replica gives the Lease up.
EVENTS = ("written", "unanswered", "lost", "delayed", "arrives", "released")
ANY_EVENTS = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(EVENTS), st.sampled_from(STEPS_SECONDS)), max_size=40)


@settings(max_examples=500)
@given(ANY_EVENTS, st.sampled_from((0.0, 1e6, -1e6)))
def test_two_replicas_never_lead_at_once(events: list[tuple[str, str, float]], skew: float) -> None:
    """Their clocks differ by `skew`."""
    server, now = Server(), 0.0
    clock = {"a": 0.0, "b": skew}
    candidates = {name: Candidate(me=name) for name in clock}
    sent: dict[str, Sent] = {}
    for name, event, seconds in events:
        now += seconds
        mine, local = candidates[name], clock[name] + now
        if event == "released":
            if mine.leads(local) and name not in sent:
                candidates[name] = mine.stopped()
                server.write("", server.lease)
        elif name in sent:
            write = sent.pop(name)
            stored = server.write(name, write.seen) if event != "lost" else None
            if stored is not None and event in ("written", "arrives"):
                candidates[name] = mine.wrote(stored, write.began)
        elif event != "arrives":
            mine = candidates[name] = mine if mine.leads(local) else mine.read(server.lease, local)
            if mine.may_write(local) and event != "lost":
                sent[name] = Sent(local, mine.seen)
                if event != "delayed":
                    stored = server.write(name, sent.pop(name).seen)
                    if event == "written" and stored is not None:
                        candidates[name] = mine.wrote(stored, local)
        assert not all(candidates[each].leads(clock[each] + now) for each in clock)


def test_a_lost_write_that_happened_is_found_by_the_next_look() -> None:
    mine = Candidate(me="a").read(Lease(holder="a", version="7"), 1.0)
    assert not mine.leads(1.0)
    assert mine.may_write(1.0)
    assert mine.wrote(Lease(holder="a", version="8"), 1.0).leads(1.0 + TIMES.lead_seconds - 0.01)
    assert not mine.wrote(Lease(holder="a", version="8"), 1.0).leads(1.0 + TIMES.lead_seconds)


def test_another_replica_takes_an_unchanged_lease_only() -> None:
    first = Lease(holder="b", version="1", renewed="then", seconds=10)
    mine = Candidate(me="a").read(first, 100.0)
    assert not mine.may_write(109.9)
    assert mine.may_write(110.0)
    labelled = mine.read(replace(first, version="2"), 105.0)
    assert labelled.may_write(110.0), "another version of the same content is no renewal"
    assert not mine.read(replace(first, version="3", renewed="later"), 105.0).may_write(114.9)
    assert mine.read(replace(first, holder=""), 105.0).may_write(105.0), "it was released"
    assert mine.pause_seconds(109.75) == pytest.approx(0.25)


def test_a_lease_that_was_deleted_is_not_created_while_its_holder_may_lead() -> None:
    assert Candidate(me="a").read(None, 5.0).may_write(5.0)
    gone = Candidate(me="a").read(Lease(holder="b", version="1"), 5.0).read(None, 6.0)
    assert (gone.may_write(15.9), gone.may_write(16.0)) == (False, True)
    led = Candidate(me="a").wrote(Lease(holder="a", version="1"), 5.0).read(None, 6.0)
    assert not led.leads(6.0)


def test_a_takeover_is_within_the_promised_time() -> None:
    """The last renewal of a killed leader, seen with the latest look, and the look after its end."""
    assert TIMES.lease_seconds + 2 * TIMES.look_seconds <= 12
    assert TIMES.lead_seconds + TIMES.request_seconds <= TIMES.lease_seconds, "the leader has stopped before"
    assert TIMES.renew_seconds + TIMES.request_seconds <= TIMES.lead_seconds - TIMES.look_seconds, "one lost renewal is no loss"


def test_the_document() -> None:
    assert parse_lease({"metadata": {"resourceVersion": "1"}}) == Lease(holder="", version="1")
    with pytest.raises(KeyError):
        parse_lease({"metadata": {}})
