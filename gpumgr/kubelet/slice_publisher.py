"""Keeps the ResourceSlice of this node in the API server.

Invariants:
1. Nothing is published while gpumgr's DRA driver is not registered with the kubelet. kube-scheduler would place pods by the slice, and they
   would wait on the node for more than a minute.
2. Each step reads the slice; the watch only starts a step. So a deletion that the watch has missed is noticed at the next step: after a new
   list, a change or a probe.
3. Two writes are at least `change_seconds` apart. The last state is always written.
4. The slice is written if it differs from the last one sent, or if its version shows that another client has changed it. The first write of
   a process always replaces it; with equal content the API server only changes the date of taints.
5. A server that drops the fields for sharing gets an empty list of devices. A request with dryRun finds this out before anything is
   offered.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.common.aio import forever, wait_at_most
from gpumgr.common.errors import GpumgrError
from gpumgr.common.rpc.unix_server import LinkState
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, failure_text
from gpumgr.kube.reflector import Reflector, WatchTimes
from gpumgr.kube.watched import Watched
from gpumgr.kubelet import slices
from gpumgr.kubelet.slices import SLICES, Dropped, Json, SliceDevice, StoredSlice

_log = structlog.get_logger(__name__)

_FAILED: Final = (*API_FAILURES, *UNREADABLE)
_NEVER: Final = float("-inf")


class PublishTimes(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. `change_seconds`: the shortest time between two writes. `retry_seconds`: the first and the longest pause after failures.
    `probe_seconds`: the interval of probes while a server drops fields."""

    change_seconds: float = 2.0
    retry_seconds: tuple[float, float] = (0.5, 10.0)
    probe_seconds: float = 60.0


class PublisherState(msgspec.Struct, frozen=True, kw_only=True):
    """`published`: the API server has the slice. `devices`: the number of devices in it. `error`: the last failure, until the slice is
    published again. `dropped`: what the API server does not store, and the remedy."""

    published: bool = False
    devices: int = 0
    error: str | None = None
    dropped: str | None = None


class SlicePublisher:
    """`run` it as a daemon. `devices` is None until the hardware is known. `registration`: the state of the driver's registration."""

    def __init__(
        self, server: ApiServer, node: str, *, times: PublishTimes | None = None, watch_times: WatchTimes | None = None
    ) -> None:
        self._server, self._node = server, node
        self.devices: tuple[SliceDevice, ...] | None = None
        self.registration = LinkState()
        self._times, self._clock, self._name = times or PublishTimes(), time.monotonic, slices.slice_name(node)
        self._wake, self._writing = asyncio.Event(), asyncio.Lock()
        self._reflector: Reflector[StoredSlice] = Reflector(
            server,
            Watched(path=SLICES, query={"fieldSelector": f"metadata.name={self._name}"}, parse=slices.stored_slice),
            on_change=lambda *_: self._wake.set(),
            on_list=self._wake.set,
            watch_times=watch_times,
        )
        #: What was sent last, and the version that the API server gave it.
        self._last: tuple[Json, str] | None = None
        self._node_uid = ""
        self._probed = False
        self._loss: Dropped | None = None
        self._written_at = _NEVER
        self._pause = self._times.retry_seconds[0]
        self._withdrawn = False
        self.state = PublisherState()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("slice_watch", self._reflector.run), name="slice_watch")
            group.create_task(forever("slice_writes", self._keep), name="slice_writes")

    async def withdraw(self, *, timeout_seconds: float) -> bool:
        """Deletes the slice, so that no further pods are scheduled to this driver, and stops all writes. Returns False if that failed."""
        first, self._withdrawn = not self._withdrawn, True
        self.state = replace(self.state, published=False)
        try:
            async with asyncio.timeout(timeout_seconds), self._writing:
                if await self._server.send("DELETE", f"{SLICES}/{self._name}", {}, but=(404,)):
                    _log.info("slice_withdrawn", slice=self._name)
                self.state = replace(self.state, published=False)  # a write may have ended in the meantime
                return True
        except _FAILED as error:
            text = failure_text(error)
            if first or text != self.state.error:
                # In mode plugin the agent may lack the right to delete slices.
                level = _log.info if isinstance(error, AnswerError) and error.status == 403 else _log.warning
                level("slice_not_withdrawn", error=text, consequence="the kubelet deletes it 30 s after the driver's end")
            self.state = replace(self.state, error=text)
            return False

    def offer(self, devices: tuple[SliceDevice, ...]) -> None:
        if devices != self.devices:
            self.devices = devices
            self._wake.set()

    def follow(self, registration: LinkState) -> None:
        self.registration = registration
        self._wake.set()

    async def _keep(self) -> NoReturn:
        while True:
            self._wake.clear()
            try:
                pause = await self._step()
            except _FAILED as error:
                text = failure_text(error)
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

    @property
    def _may_write(self) -> bool:
        return self.registration.registered and not self._withdrawn

    async def _step(self) -> float | None:
        """Writes if a write is due. Returns the seconds until the next step; None if it waits for an event. Raises what requests raise."""
        devices = self.devices
        if devices is None or not self._may_write:
            return None
        async with self._writing:
            if not self._probed or self._loss is not None:
                await self._probe()
            found = await self._server.find(f"{SLICES}/{self._name}")
            if found is None or not self._node_uid:
                node = await self._server.read("GET", f"/api/v1/nodes/{self._node}")
                self._node_uid = str(node["metadata"]["uid"])
            if not self._may_write:  # changed in the meantime
                return None
            wanted = slices.offered(devices, self._loss)
            sent = slices.resource_slice(self._node, self._node_uid, wanted)
            if found is None or (sent, slices.stored_slice(found).version) != self._last:
                if (pause := self._written_at + self._times.change_seconds - self._clock()) > 0:
                    return pause
                await self._write(sent, found)
                if slices.offered(devices, self._loss) != wanted:  # the API server dropped something this time
                    self._written_at = _NEVER
                    return 0.0
            self._pause = self._times.retry_seconds[0]
            reason = self._loss.sentence if self._loss is not None else None
            self.state = PublisherState(published=True, devices=len(wanted), dropped=reason)
        return self._times.probe_seconds if self._loss is not None else None

    async def _write(self, sent: Json, found: Mapping[str, Any] | None) -> None:
        """If another client has changed the slice since it was read, the API server answers 404 or 409, and the next step reads it
        again."""
        self._written_at = self._clock()
        if found is None:
            answer = await self._server.read("POST", SLICES, sent)
        else:
            # Labels of others stay, because a controller that sets them again would cause a write each time. The generation stays, because
            # the pool has one slice, which is replaced as a whole.
            metadata = {**found["metadata"], **sent["metadata"]}
            spec = {**sent["spec"], "pool": {**sent["spec"]["pool"], "generation": found["spec"]["pool"]["generation"]}}
            answer = await self._server.read("PUT", f"{SLICES}/{self._name}", {**sent, "metadata": metadata, "spec": spec})
        self._last = (sent, slices.stored_slice(answer).version)
        self._examine(slices.dropped(sent, answer) or self._loss)
        devices = len(sent["spec"]["devices"])
        _log.info("slice_published", slice=self._name, devices=devices, created=found is None)

    async def _probe(self) -> None:
        sent = slices.probe_slice(self._node)
        try:
            answer = await self._server.read("POST", SLICES, sent, query={"dryRun": "All"})
        except AnswerError as error:
            if error.status != 404:
                raise
            raise GpumgrError(
                "the API server has no resource.k8s.io/v1: use Kubernetes 1.36 or later (1.34 and 1.35 need feature gates)"
            ) from error
        self._probed = True
        self._examine(slices.dropped(sent, answer))

    def _examine(self, loss: Dropped | None) -> None:
        if loss != self._loss:
            self._loss = loss
            if loss is not None:
                _log.error("slice_fields_dropped", reason=loss.sentence)
