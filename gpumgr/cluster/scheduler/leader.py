"""The leader election of the replicas through a Lease, and the label by which the Service selects the leader's pod."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final, NoReturn

import msgspec
import structlog

from gpumgr.cluster.scheduler.lease import Candidate, Lease, LeaseTimes, parse_lease
from gpumgr.common.aio import LatestValue, forever
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, failure_text, items_of

_log = structlog.get_logger(__name__)

LEADER_LABEL: Final = "gpumgr.io/scheduler-leader"
#: The longest pause between two tries to set the labels.
_LONGEST_PAUSE_SECONDS: Final = 30.0
_FAILED = (*API_FAILURES, *UNREADABLE)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """`identity` differs for each process. `pod`: the name of its pod, for the label; None: no label is set."""

    namespace: str
    lease: str
    identity: str
    pod: str | None = None


class Leadership:
    """Run `run` as a daemon, and call `release` after it has ended. A replica that has taken the Lease awaits `refresh` before it answers.
    `clock` is monotonic, in seconds."""

    def __init__(
        self,
        server: ApiServer,
        replica: Replica,
        refresh: Callable[[], Awaitable[None]],
        *,
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._replica, self._refresh, self._clock = server, replica, refresh, clock
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{replica.namespace}/leases"
        self._candidate = Candidate(me=replica.identity, times=times or LeaseTimes())
        #: `_terms` counts the terms of this replica. `_term`: the present one; 0: it does not lead. `_refreshed`: the last term in which
        #: `refresh` has returned.
        self._terms, self._term, self._refreshed = 0, LatestValue(0), 0
        self._logged = ""

    @property
    def answers(self) -> bool:
        """Whether this replica leads, and `refresh` has returned in this term."""
        return self._refreshed == self._term.value != 0 and self._candidate.leads(self._clock())

    def outlives(self, seconds: float) -> bool:
        """Whether this replica answers, and is sure to lead for so many seconds from now on."""
        return self.answers and self._candidate.leads(self._clock() + seconds)

    async def run(self) -> NoReturn:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("election", self._elect), name="election")
            group.create_task(forever("terms", self._follow), name="terms")
        raise AssertionError("both daemons run until they are cancelled")

    async def release(self) -> None:
        """Gives up the Lease after `run` has ended, so that another replica can lead at once."""
        led, self._candidate = self._term.value != 0, self._candidate.stopped()
        self._term.set(0)
        if not led:
            return
        try:
            async with asyncio.timeout(self._candidate.times.request_seconds):
                lease = await self._read()
                if lease is not None and lease.holder == self._replica.identity:
                    await self._write("", 1, lease)
                    _log.info("lease_released", lease=self._replica.lease)
                await self._label(leads=False)
        except _FAILED as error:
            _log.warning(
                "lease_not_released", error=failure_text(error), consequence="another replica leads when the Lease has expired"
            )

    # -- the Lease ---------------------------------------------------------------------------------------------------------

    async def _elect(self) -> NoReturn:
        while True:
            pause = self._candidate.times.look_seconds
            try:
                async with asyncio.timeout(self._candidate.times.request_seconds):
                    await self._step()
                self._logged = ""
                pause = self._candidate.pause_seconds(self._clock())
            except _FAILED as error:
                self._log_once(error)
            self._publish()
            await asyncio.sleep(pause)

    async def _step(self) -> None:
        """Reads the Lease, then writes it if needed. A leader writes without reading."""
        if not (led := self._candidate.leads(self._clock())):
            self._candidate = self._candidate.read(await self._read(), self._clock())
        began = self._clock()
        if not self._candidate.may_write(began):
            return
        try:
            written = await self._write(self._replica.identity, self._candidate.times.lease_seconds, self._candidate.seen)
            self._candidate = self._candidate.wrote(written, began)
            if not led:  # another replica may have led since, so this is another term
                self._term.set(0)
        except AnswerError as error:
            if error.status not in (404, 409):
                raise
            self._candidate = self._candidate.read(await self._read(), self._clock())

    async def _read(self) -> Lease | None:
        found = await self._server.find(f"{self._path}/{self._replica.lease}")
        return parse_lease(found) if found is not None else None

    async def _write(self, holder: str, seconds: int, seen: Lease | None) -> Lease:
        """Creates the Lease, or changes it if it still has the version of `seen`; otherwise the API server answers 409."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {"holderIdentity": holder, "leaseDurationSeconds": seconds, "renewTime": now}
        if seen is None:
            kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            made = {**kind, "metadata": {"name": self._replica.lease}, "spec": spec}
            return parse_lease(await self._server.read("POST", self._path, made))
        changed = {"metadata": {"resourceVersion": seen.version}, "spec": spec}
        return parse_lease(await self._server.read("PATCH", f"{self._path}/{self._replica.lease}", changed))

    def _publish(self) -> None:
        leads, led = self._candidate.leads(self._clock()), self._term.value != 0
        if leads and not led:
            self._terms += 1
            self._term.set(self._terms)
            _log.info("lease_taken", lease=self._replica.lease, identity=self._replica.identity)
        elif led and not leads:
            self._term.set(0)
            _log.warning("lease_lost", lease=self._replica.lease)

    # -- what a change of the term requires --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """After each change of the term: awaits `refresh` if this replica leads, then sets the pods' labels."""
        with self._term.subscribe() as terms:
            async for term in terms:
                pause = self._candidate.times.look_seconds
                if term:
                    await self._refresh()
                    self._refreshed = term
                    _log.info("leading", lease=self._replica.lease)
                while self._term.value == term:
                    try:
                        await self._label(leads=term != 0)
                        break
                    except _FAILED as error:
                        self._log_once(error)
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _label(self, *, leads: bool) -> None:
        own, pods = self._replica.pod, f"/api/v1/namespaces/{self._replica.namespace}/pods"
        if own is None:
            return

        async def set_label(name: str, value: str | None) -> None:
            await self._server.send("PATCH", f"{pods}/{name}", {"metadata": {"labels": {LEADER_LABEL: value}}}, but=(404,))

        await set_label(own, "true" if leads else None)
        if leads:  # an earlier leader may have ended without removing its label
            found = await self._server.read("GET", pods, query={"labelSelector": LEADER_LABEL})
            for name in (str(each["metadata"]["name"]) for each in items_of(found)):
                if name != own:
                    await set_label(name, None)

    def _log_once(self, error: BaseException) -> None:
        """Logs a failure, unless it repeats the last one and no step has succeeded in between."""
        if (text := failure_text(error)) != self._logged:
            self._logged = text
            _log.warning("leader_election_retries", lease=self._replica.lease, error=text)
