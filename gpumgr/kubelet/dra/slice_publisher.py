"""Keeps the ResourceSlice of this node in the API server.

Invariants:

1. Nothing is written before the kubelet has registered the driver: on a node without the driver, pods with claims wait for more than a
   minute.
2. A starting kubelet deletes the slices of its node, a moment before or after it registers the driver. So a deleted slice is created again
   at once if the driver was registered recently; else at the next registration, but after `notify_seconds` at the latest, since other
   clients delete slices, too.
3. A change of the devices is written at once, and a further change `change_seconds` later. The last state is always written.
4. A slice is compared with the form in which the API server has stored it, so no write is repeated without a change.
5. A list may lack the slice although the watch has shown no deletion. Then the slice counts as deleted, unless it is newer than the list.
6. A server that drops the fields for sharing gets an empty list of devices. A request with dryRun finds this out before anything is
   offered.
"""

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import Final, NoReturn

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.aio import forever, wait_at_most
from gpumgr.common.errors import GpumgrError
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer
from gpumgr.kube.reflector import Reflector, Watched, WatchTimes
from gpumgr.kubelet.dra import slices
from gpumgr.kubelet.dra.slices import MAX_DEVICES, SLICES, Dropped, Json, SliceDevice, StoredSlice

_log = structlog.get_logger(__name__)

_FAILED: Final = (*API_FAILURES, *UNREADABLE)
_NEVER: Final = float("-inf")


class PublishTimes(msgspec.Struct, frozen=True, kw_only=True):
    """`change_seconds`: the shortest time between two writes of changes. `notify_seconds`: how long to wait for a registration after a
    deletion, and how long a registration counts as recent. Pauses after failures grow from the first to the longest of `retry_seconds`.
    `probe_seconds`: the interval of the requests that show whether a server still drops fields."""

    change_seconds: float = 2.0
    notify_seconds: float = 2.0
    retry_seconds: tuple[float, float] = (0.5, 10.0)
    probe_seconds: float = 60.0


class PublisherState(msgspec.Struct, frozen=True, kw_only=True):
    """`published`: the API server has the slice with the present devices. `devices`: how many devices the slice contains. `error`: the last
    failure since the slice was published. `dropped`: what the API server does not store, and what to do."""

    published: bool = False
    devices: int = 0
    error: str | None = None
    dropped: str | None = None


class SlicePublisher:
    """`run` it as a daemon. `withdraw` deletes the slice; it can be called during `run` or after it.

    `devices` is None until the hardware is known; `registration` is the state of the driver's registration. `offer` and `follow` set them.
    """

    def __init__(
        self,
        server: ApiServer,
        node: str,
        *,
        times: PublishTimes | None = None,
        watch_times: WatchTimes | None = None,
    ) -> None:
        self._server, self._node = server, node
        self.devices: tuple[SliceDevice, ...] | None = None
        self.registration = LinkState()
        self._times, self._clock, self._name = times or PublishTimes(), time.monotonic, slices.slice_name(node)
        self._reflector: Reflector[StoredSlice] = Reflector(
            server,
            Watched(path=SLICES, query={"fieldSelector": f"metadata.name={self._name}"}, parse=slices.stored_slice),
            on_change=self._seen,
            on_list=self._listed,
            watch_times=watch_times,
        )
        self._wake, self._writing = asyncio.Event(), asyncio.Lock()
        self._stored: StoredSlice | None = None
        #: What may arrive before the answer to a write: the UID of the slice that was deleted last; version and UIDs of a list.
        self._gone, self._list = "", ("", frozenset[str]())
        #: What was sent last, and what the API server stored for it; both in comparable form.
        self._last: tuple[Json, Json | None] | None = None
        self._node_uid = ""
        self._loss: Dropped | None = None
        self._registered_at = self._deleted_at = self._changed_at = self._probed_at = _NEVER
        self._pause = self._times.retry_seconds[0]
        self._withdrawn = False
        self.state = PublisherState()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("slice_watch", self._reflector.run), name="slice_watch")
            group.create_task(forever("slice_writes", self._keep), name="slice_writes")

    async def withdraw(self, *, timeout_seconds: float) -> bool:
        """Deletes the slice, so that no further pods are scheduled to this driver; nothing is written afterwards. False: that failed."""
        first, self._withdrawn = not self._withdrawn, True
        self.state = replace(self.state, published=False)
        try:
            async with asyncio.timeout(timeout_seconds), self._writing:
                if await self._server.send("DELETE", f"{SLICES}/{self._name}", {}, but=(404,)):
                    _log.info("slice_withdrawn", slice=self._name)
                self.state = replace(self.state, published=False)  # a write may have ended in the meantime
                return True
        except _FAILED as error:
            text = _text(error)
            if first or text != self.state.error:
                # In mode plugin the agent may lack the right to delete slices.
                level = _log.info if isinstance(error, AnswerError) and error.status == 403 else _log.warning
                level("slice_not_withdrawn", error=text, consequence="the kubelet deletes it 30 s after the driver's end")
            self.state = replace(self.state, error=text)
            return False

    # -- events ------------------------------------------------------------------------------------------------------------

    def offer(self, devices: tuple[SliceDevice, ...]) -> None:
        self.devices = devices
        self._wake.set()

    def follow(self, registration: LinkState) -> None:
        """Sets the state of the driver's registration: without one, nothing is written."""
        before, self.registration = self.registration, registration
        if registration.registered and (not before.registered or registration.registrations != before.registrations):
            self._registered_at = self._clock()
        self._wake.set()

    def _seen(self, before: StoredSlice | None, after: StoredSlice | None) -> None:
        if after is not None:
            self._stored = after
        elif before is not None:
            self._gone = before.uid
            self._find_deletion()
        self._wake.set()

    def _listed(self, version: str, uids: Collection[str]) -> None:
        self._list = version, frozenset(uids)
        self._find_deletion()
        self._wake.set()

    def _find_deletion(self) -> None:
        """Notices a deletion that the watch has shown, or that it has missed: the last list lacks the slice. A slice that is newer than
        the list is in a later event. If a version is no number, the slice counts as older: if it still exists, the API server refuses to
        create it again, and it is read."""
        stored, (version, uids) = self._stored, self._list
        if stored is None:
            return
        newer = stored.version.isdecimal() and version.isdecimal() and int(stored.version) > int(version)
        if stored.uid == self._gone or (version and stored.uid not in uids and not newer):
            self._deleted()

    def _deleted(self) -> None:
        self._stored, self._deleted_at = None, self._clock()
        _log.info("slice_deleted", slice=self._name)

    # -- writes ------------------------------------------------------------------------------------------------------------

    async def _keep(self) -> NoReturn:
        while True:
            self._wake.clear()
            try:
                pause = await self._step()
            except _FAILED as error:
                text = _text(error)
                if text != self.state.error:  # each text is logged once until the slice is published
                    consequence = (
                        "kube-scheduler places pods by the last published slice, and without a slice new pods with claims wait; running "
                        f"pods keep their GPUs; the agent tries again within {self._times.retry_seconds[1]:g} s"
                    )
                    _log.warning("slice_not_published", slice=self._name, error=text, consequence=consequence)
                self.state = replace(self.state, published=False, error=text)
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, self._times.retry_seconds[1])
                continue
            await wait_at_most(self._wake, pause)

    async def _step(self) -> float | None:
        """Writes once if a write is due. Returns the seconds until the next step, or None if the next step waits for an event. Raises what
        requests raise."""
        devices = self.devices
        if devices is None or not self.registration.registered or self._withdrawn:
            return None
        if len(devices) > MAX_DEVICES:
            raise GpumgrError(
                f"this node has {len(devices)} GPUs, and a ResourceSlice can have {MAX_DEVICES} devices at most; set node.mode to plugin"
            )
        async with self._writing:
            await self._probe()
            if self._stored is None or not self._node_uid:
                node = await self._server.read("GET", f"/api/v1/nodes/{self._node}")
                self._node_uid = str(node["metadata"]["uid"])
            if self._withdrawn or not self.registration.registered:  # changed in the meantime
                return None
            wanted, stored = slices.offered(devices, self._loss), self._stored
            if not self._settled(wanted, stored):
                if (pause := self._due(stored) - self._clock()) > 0:
                    return pause
                await self._write(wanted, stored)
                if slices.offered(devices, self._loss) != wanted:  # the API server dropped something this time
                    self._changed_at = _NEVER
                    return 0.0
            self._pause = self._times.retry_seconds[0]
            reason = self._loss.sentence if self._loss is not None else None
            self.state = PublisherState(published=True, devices=len(wanted), dropped=reason)
        return self._probed_at + self._times.probe_seconds - self._clock() if self._loss else None

    def _due(self, stored: StoredSlice | None) -> float:
        """The earliest time of the next write."""
        if stored is not None or self._deleted_at == _NEVER:
            return self._changed_at + self._times.change_seconds
        recent = self._registered_at >= self._deleted_at - self._times.notify_seconds
        return self._deleted_at if recent else self._deleted_at + self._times.notify_seconds

    def _settled(self, wanted: Sequence[SliceDevice], stored: StoredSlice | None) -> bool:
        if stored is None or stored.content is None:
            return False
        sent = slices.comparable(slices.resource_slice(self._node, self._node_uid, wanted))
        return stored.content == sent or (sent, stored.content) == self._last

    async def _write(self, wanted: Sequence[SliceDevice], stored: StoredSlice | None) -> None:
        self._changed_at, self._list = self._clock(), ("", frozenset())
        sent = slices.resource_slice(self._node, self._node_uid, wanted)
        try:
            answer = await self._send(sent, stored)
        except AnswerError as error:
            if error.status not in (404, 409):
                raise
            # The watch has not shown yet that the slice was created, changed or deleted.
            found = await self._server.find(f"{SLICES}/{self._name}")
            stored = slices.stored_slice(found) if found is not None else None
            answer = found if found is not None and self._settled(wanted, stored) else await self._send(sent, stored)
        self._deleted_at = _NEVER
        self._stored = slices.stored_slice(answer)
        self._last = (slices.comparable(sent), self._stored.content)
        self._examine(slices.dropped(sent, answer) or self._loss)
        _log.info("slice_published", slice=self._name, devices=len(wanted), created=stored is None)
        self._find_deletion()

    async def _send(self, sent: Json, stored: StoredSlice | None) -> Json:
        if stored is None:
            return await self._server.read("POST", SLICES, sent)
        # The version is a precondition: the API server answers 409 if the slice has another one. The generation stays, since the pool has
        # one slice, which is replaced as a whole.
        metadata = {**sent["metadata"], "resourceVersion": stored.version}
        spec = {**sent["spec"], "pool": {**sent["spec"]["pool"], "generation": stored.generation}}
        return await self._server.read("PUT", f"{SLICES}/{self._name}", {**sent, "metadata": metadata, "spec": spec})

    async def _probe(self) -> None:
        known = self._probed_at != _NEVER and (self._loss is None or self._clock() < self._probed_at + self._times.probe_seconds)
        if not known:
            sent = slices.probe_slice(self._node)
            try:
                answer = await self._server.read("POST", SLICES, sent, query={"dryRun": "All"})
            except AnswerError as error:
                if error.status != 404:
                    raise
                raise GpumgrError("the API server has no resource.k8s.io/v1: use Kubernetes 1.34 or later") from error
            self._probed_at = self._clock()
            self._examine(slices.dropped(sent, answer))

    def _examine(self, loss: Dropped | None) -> None:
        if loss != self._loss:
            self._loss = loss
            if loss is not None:
                _log.error("slice_fields_dropped", reason=loss.sentence)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, AnswerError) else f"{type(error).__name__}: {error}"
