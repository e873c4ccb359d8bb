"""gpu-manager's running pods: whose GPUs they have is known before anything is offered."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gpumgr.agent.admission import Admission
from gpumgr.agent.books import Books
from gpumgr.agent.housekeeping import INCOMPLETE_SECONDS, Housekeeping, view_of
from gpumgr.agent.ports import Pods
from gpumgr.allocator.listing import Listing
from gpumgr.allocator.pods import PodKey
from gpumgr.allocator.rebuild import AnonymousRecord, Holders, foreign, migrate, names_of
from gpumgr.app.recovery import look_at_entries, ours_of
from gpumgr.checkpoint.gpu_manager import GpuManagerRecord, read_gpu_manager_checkpoint
from gpumgr.deviceplugin.kubelet_checkpoint import CheckpointEntry, pods_with_devices
from gpumgr.errors import CheckpointError, InputError
from gpumgr.units import KIND_OF, blocks_of

log = structlog.get_logger(__name__)

#: So many containers a sentence names.
_NAMED: Final = 5
_REMEDY: Final = (
    "let checkpoint.gpu_manager_checkpoint name gpu-manager's file (in a pod it must be mounted: gpuManager.takeOver=true of the chart, "
    "components: [config/kustomize/take-over] of kustomize) and restart gpumgr, or end these pods"
)


class TakeOver:
    """gpu-manager's running pods. Their ids name no GPU, only gpu-manager's own checkpoint does: its records are taken into the ledger,
    before anything of their GPUs is offered, be it late that the driver shows one. Records whose pods the kubelet has forgotten, or the
    API server knows as ended or not at all, are left behind.

    While the kubelet knows a running container with such ids that no record tells of, nothing may be offered at all: its GPU would be
    given to others. That ends with these containers, or with a start that can read the file. `remember` makes durable that all is done,
    and raises CheckpointError; `done`: it was, and there is nothing to do unless gpu-manager came back meanwhile. `clock` is monotonic,
    in seconds.
    """

    def __init__(
        self,
        path: Path,
        device_plugin_dir: Path,
        *,
        books: Books,
        housekeeping: Housekeeping,
        admission: Admission,
        pods: Pods,
        done: bool,
        remember: Callable[[], Awaitable[None]],
        wait_synced: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._path, self._folder = path, device_plugin_dir
        self._books, self._housekeeping, self._admission, self._pods = books, housekeeping, admission, pods
        self._done, self._remember, self._wait_synced = done, remember, wait_synced
        self._clock, self._wall_clock = clock, wall_clock
        #: As gpu-manager's file had them when it could be read last.
        self._records: Sequence[AnonymousRecord] | None = None
        #: Those that are in the ledger, or can't ever be.
        self._tried: set[AnonymousRecord] = set()
        #: Those of live pods that are not in the ledger, or not with all their GPUs, and what was known when they were tried last.
        self._waiting: tuple[AnonymousRecord, ...] = ()
        self._attempt: object = None
        self._taken = self._free = self._waited = False
        self._unreadable: str | None = None
        self._told: tuple[str, ...] = ()
        #: As the kubelet's file had them when it could be read last.
        self._entries: Sequence[CheckpointEntry] | None = None
        self._absent_since: dict[tuple[str, str], float] = {}

    async def first(self) -> None:
        """With the first GPUs that the driver shows, and with each change while a GPU is missing. The caller holds the books' lock."""
        try:
            await self._take(await self._look())
        except CheckpointError as error:
            log.error("not_taken_over", error=str(error))
            self._books.before_first_offer = self.first

    async def held_back_by(self) -> str | None:
        """Why nothing may be offered yet, with what to do; None: nothing stands against it, now and later. What gpu-manager wrote since
        the last look is taken over, too."""
        if self._free:
            return None
        async with self._books.lock:
            records = await self._look()
            try:
                await self._take(records)
            except CheckpointError as error:
                return f"the GPUs of gpu-manager's running pods can't be remembered: {error}"
            left = self._left((self._waiting if self._books.inventory.snapshot.gpus else records) or ())
        if left:
            await self._know_pods()
            async with self._books.lock:
                running = await self._running(left)
            if running:
                return self._tell(running)
        self._free = True
        await self._note()
        return None

    async def _know_pods(self) -> None:
        if not self._waited:
            self._waited = True
            await self._wait_synced()

    def _left(self, records: Iterable[AnonymousRecord]) -> Holders:
        """The containers whose GPUs neither the ledger nor these records tell. A record that is not in the ledger tells only of GPUs that
        the driver does not show, which are not offered anyway."""
        shown = {gpu.minor for gpu in self._books.inventory.snapshot.gpus}
        told = {(r.uid, r.container) for r in records if r.minors and None not in shown and shown.isdisjoint(r.minors)}
        told |= {(a.uid, a.container) for a in self._books.ledger.allocations.values() if a.uid and a.container}
        return foreign(((e.pod_uid, e.container, e.device_ids) for e in self._entries or () if e.resource in KIND_OF), told)

    async def _look(self) -> Sequence[AnonymousRecord] | None:
        """Reads both files, gpu-manager's if there is need. None: it could not be read, and the next start must try again."""
        self._entries = found if (found := await look_at_entries(self._folder)) is not None else self._entries
        if self._done and not self._waiting and not self._left(()):
            return ()
        try:
            self._records = tuple(map(_record, await asyncio.to_thread(read_gpu_manager_checkpoint, self._path)))
            self._unreadable = None
        except InputError as error:
            if self._unreadable != str(error):
                self._unreadable = str(error)
                log.error("gpu_manager_checkpoint_unreadable", error=str(error), consequence="it is read again at the next start")
        return self._records

    async def _take(self, records: Sequence[AnonymousRecord] | None) -> None:
        """Raises CheckpointError. The caller holds the books' lock."""
        if records is None or not self._books.inventory.snapshot.gpus:
            return
        live = await self._live(records) if records else ()
        new = tuple(record for record in live if record not in self._tried)
        if (new and self._state(new) != self._attempt) or (records and self._attempt is None):
            taken = await self._place(new) if new else 0
            log.info("taken_over_from_gpu_manager", path=str(self._path), records=len(records), live=len(live), taken=taken)
        self._waiting = tuple(record for record in new if record not in self._tried)
        self._attempt = self._state(self._waiting) if records else self._attempt
        if self._waiting:
            self._books.before_first_offer = self.first
        self._taken = not self._waiting
        await self._note()

    async def _live(self, records: Sequence[AnonymousRecord]) -> tuple[AnonymousRecord, ...]:
        """Those whose pods have not ended as far as is known. The kubelet's file goes on naming pods that ended, so once all is done only
        those of which nobody told, and that somebody shows to run."""
        await self._know_pods()
        uids = pods_with_devices(self._entries)
        kept = tuple(record for record in records if (uids is None or record.uid in uids) and not self._gone(record.uid))
        if not self._done:
            return kept
        running = await self._running(self._left(()))
        return tuple(record for record in kept if record in self._waiting or running.get((record.uid, record.container)))

    def _state(self, records: tuple[AnonymousRecord, ...]) -> object:
        """What another attempt with these records depends on: while it stays the same, it would come to the same. What we grant
        meanwhile makes no room for them."""
        books = self._books
        return records, books.inventory.gpus(books.ledger.cards), None if self._free else books.ledger

    async def _place(self, records: Sequence[AnonymousRecord]) -> int:
        """The number of those that are new in the ledger. Our own pods come first, as after a lost ledger only the kubelet tells of them:
        their ids are settled, those of gpu-manager's pods lie where there is room."""
        housekeeping = self._housekeeping
        await housekeeping.adopt_locked(ours_of(self._entries or ()))
        rebuilt = await housekeeping.migrate(
            lambda ledger, minors: migrate(ledger, records, minors, new_id=housekeeping.new_id, now=self._wall_clock())
        )
        self._tried.update(set(records) - set(rebuilt.left))
        listing = await self._admission.look()
        if listing is not None:
            names = names_of(((e.pod_uid, e.container, frozenset(e.device_ids)) for e in self._entries or ()), listing)
            await housekeeping.name(names)
        return len(rebuilt.added)

    async def _note(self) -> None:
        """Not with a kubelet's file that can't be read: what is in it may be known at the next start."""
        if self._done or not (self._taken and self._free) or self._entries is None:
            return
        try:
            await self._remember()
        except CheckpointError as error:
            log.error("not_taken_over", error=str(error))

    def _gone(self, uid: str) -> bool:
        """As the API server has it."""
        view = view_of(self._pods, uid)
        return view.ended if view is not None else self._pods.synced

    async def _running(self, left: Holders) -> Mapping[tuple[str, str], PodKey | None]:
        """Those that have not ended, with their pods' names. The kubelet's file goes on naming pods that ended, so its API tells; for a
        while after its start that lacks pods, so the API server tells, too. In the absence of one of them the other must say so for
        that while. The caller holds the books' lock."""
        listing = await self._admission.look()
        shown = _holders_shown(listing) if listing is not None else {}
        running: dict[tuple[str, str], PodKey | None] = {}
        for holder, ids in left.items():
            view = view_of(self._pods, holder[0])
            pod = next((shown[each] for each in ids if each in shown), None)
            gone, absent = self._gone(holder[0]), listing is not None and pod is None
            if gone and absent:
                continue
            if pod is None and (gone or (absent and not self._pods.synced)):
                since = self._absent_since.setdefault(holder, self._clock())
                if self._clock() - since >= INCOMPLETE_SECONDS:
                    continue
            else:
                self._absent_since.pop(holder, None)
            running[holder] = view.key if view is not None else pod
        return running

    def _tell(self, running: Mapping[tuple[str, str], PodKey | None]) -> str:
        """The log has all of them, once; the sentence is for a node's condition, and names a few."""
        holders = tuple(
            f"{'/'.join(pod) if pod else f'pod uid {uid}'} ({container})" for (uid, container), pod in sorted(running.items())
        )
        more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
        problem = (
            f"{', '.join(holders[:_NAMED])}{more} hold GPUs from gpu-manager, and {self._path} does not tell which: nothing is offered, or "
            "they would be given out again"
        )
        if holders != self._told:
            self._told = holders
            log.error("foreign_allocations", holders=holders, problem=problem, remedy=_REMEDY)
        return f"{problem}; {_REMEDY}"


def _holders_shown(listing: Listing) -> Mapping[str, PodKey]:
    """Device id of one of our resources -> the pod that has it."""
    return {
        device_id: pod
        for pod in listing.pods
        for devices in listing.containers(pod).values()
        for resource, ids in devices.items()
        if resource in KIND_OF
        for device_id in ids
    }


def _record(record: GpuManagerRecord) -> AnonymousRecord:
    return AnonymousRecord(
        uid=record.pod_uid,
        container=record.container,
        minors=record.minors,
        cores=record.cores,
        memory_blocks=blocks_of(record.memory_bytes),
    )
