"""Adds gpu-manager's running pods and their GPUs to the ledger, before the agent offers any device.

gpu-manager's device ids do not name a GPU. So gpumgr reads gpu-manager's checkpoint, which maps containers to GPUs:
{"PodGPUMapping": {"<pod uid>": {"<container>": {"Devices": ["/dev/nvidia0"], "Cores": 50, "Memory": 268435456}}}}
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog

from gpumgr.agent.admission import Admission
from gpumgr.agent.pods import find_pod
from gpumgr.agent.ports import Pods
from gpumgr.agent.reconciler import INCOMPLETE_SECONDS, Reconciler
from gpumgr.agent.state import AgentState
from gpumgr.common.errors import CheckpointError, InputError
from gpumgr.common.foreign_text import UnreadableText, decode_json
from gpumgr.common.units import VCUDA_NAMES, blocks_of
from gpumgr.kubelet.records import CheckpointEntry, entries_if_readable, ours_of, pods_with_devices
from gpumgr.ledger.rebuild import AnonymousRecord, Holders, foreign, migrate, names_of
from gpumgr.placement.pods import Listing, PodKey
from gpumgr.settings import Settings
from gpumgr.settings.profile import inner_names

log = structlog.get_logger(__name__)

_MOST_NAMED: Final = 5
REMEDY: Final = (
    "let checkpoint.gpu_manager_checkpoint name gpu-manager's file (in a pod it must be mounted: gpuManager.takeOver=true of the chart, "
    "`components: [config/kustomize/take-over]` of kustomize) and restart gpumgr, or delete these pods"
)


class TakeOver:
    """Migrates the records of gpu-manager's checkpoint to the ledger, even if the driver lists their GPUs late. Records of ended pods are
    skipped.

    While a container runs with ids of gpu-manager and no record names its GPU, no device is offered, because that GPU could be granted
    twice.

    `remember` saves that the migration is finished; it may raise CheckpointError. None: an earlier process has finished the migration, so
    there is work only if gpu-manager has run again. `wait_synced` waits for the API server's list of pods. `clock`: monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        agent_state: AgentState,
        reconciler: Reconciler,
        admission: Admission,
        pods: Pods,
        remember: Callable[[], Awaitable[None]] | None,
        wait_synced: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._folder = settings.checkpoint.gpu_manager_checkpoint, settings.kubelet.device_plugin_dir
        self._names = inner_names(settings)
        self._agent_state, self._reconciler, self._admission, self._pods = agent_state, reconciler, admission, pods
        self._remember, self._wait_synced, self._clock = remember, wait_synced, clock
        self._records: Sequence[AnonymousRecord] | None = None
        #: Records that are in the ledger or can never be in it.
        self._tried: set[AnonymousRecord] = set()
        #: Records of running pods that are not in the ledger with all their GPUs.
        self._waiting: tuple[AnonymousRecord, ...] = ()
        #: The input of the last attempt (`_state`), which is repeated only with another input.
        self._attempt: object = None
        #: `_taken`: no record waits. `_free`: devices may be offered. `_waited`: `wait_synced` was called.
        self._taken = self._free = self._waited = False
        #: Whether `before_offer` has work: it has not succeeded yet, or records wait for GPUs that the driver does not list.
        self._pending = True
        self._unreadable: str | None = None
        self._logged: tuple[str, ...] = ()
        self._entries: Sequence[CheckpointEntry] | None = None
        self._absent_since: dict[tuple[str, str], float] = {}

    async def before_offer(self) -> None:
        """Takes the records over. Call it with the agent state's lock, each time the driver has listed GPUs and before they are offered."""
        if self._pending:
            self._pending = False
            try:
                await self._take(await self._read())
            except CheckpointError as error:
                log.error("not_taken_over", error=str(error))
                self._pending = True

    async def held_back_by(self) -> str | None:
        """Why no device may be offered yet, with a remedy; None if devices may be offered from now on.

        Also takes over what gpu-manager has written since the last call.
        """
        if self._free:
            return None
        async with self._agent_state.lock:
            records = await self._read()
            try:
                await self._take(records)
            except CheckpointError as error:
                return f"the GPUs of gpu-manager's running pods can't be saved: {error}"
            left = self._left((self._waiting if self._agent_state.inventory.snapshot.gpus else records) or ())
        if left:
            await self._wait_for_pods()
            async with self._agent_state.lock:
                running = await self._running(left)
            if running:
                return self._reason(running)
        self._free = True
        await self._note()
        return None

    async def _wait_for_pods(self) -> None:
        if not self._waited:
            self._waited = True
            await self._wait_synced()

    def _left(self, records: Iterable[AnonymousRecord]) -> Holders:
        """The containers with GPUs from gpu-manager that are neither in the ledger nor in `records`.

        A record leaves its container out only if the driver lists none of the record's GPUs: those GPUs are not offered anyway.
        """
        shown = {gpu.minor for gpu in self._agent_state.inventory.snapshot.gpus}
        found = {(r.uid, r.container) for r in records if r.minors and None not in shown and shown.isdisjoint(r.minors)}
        found |= {(a.uid, a.container) for a in self._agent_state.ledger.allocations.values() if a.uid and a.container}
        return foreign(((e.pod_uid, e.container, e.device_ids) for e in self._entries or () if e.resource in VCUDA_NAMES), found)

    async def _read(self) -> Sequence[AnonymousRecord] | None:
        """Reads the kubelet's checkpoint and, if needed, gpu-manager's. Returns None if gpu-manager's could not be read yet."""
        self._entries = found if (found := await entries_if_readable(self._folder, self._names)) is not None else self._entries
        if self._remember is None and not self._waiting and not self._left(()):
            return ()
        try:
            self._records = await asyncio.to_thread(read_gpu_manager_checkpoint, self._path)
            self._unreadable = None
        except InputError as error:
            if self._unreadable != str(error):
                self._unreadable = str(error)
                consequence = "nothing is taken over; it is read again until GPUs are offered, and at the next start"
                log.error("gpu_manager_checkpoint_unreadable", error=str(error), consequence=consequence)
        return self._records

    async def _take(self, records: Sequence[AnonymousRecord] | None) -> None:
        """Writes the records of running pods to the ledger. Raises CheckpointError. The caller holds the agent state's lock."""
        if records is None or not self._agent_state.inventory.snapshot.gpus:
            return
        live = await self._live(records) if records else ()
        new = tuple(record for record in live if record not in self._tried)
        if (new and self._state(new) != self._attempt) or (records and self._attempt is None):
            taken = await self._place(new) if new else 0
            log.info("taken_over_from_gpu_manager", path=str(self._path), records=len(records), live=len(live), taken=taken)
        self._waiting = tuple(record for record in new if record not in self._tried)
        self._attempt = self._state(self._waiting) if records else self._attempt
        self._pending = self._pending or bool(self._waiting)
        self._taken = not self._waiting
        await self._note()

    async def _live(self, records: Sequence[AnonymousRecord]) -> tuple[AnonymousRecord, ...]:
        """The records of pods that have not ended, as far as the kubelet's checkpoint and the API server show.

        After the migration these are only the records of running containers that are not in the ledger, because the kubelet's checkpoint
        may still list ended pods."""
        await self._wait_for_pods()
        uids = pods_with_devices(self._entries)
        kept = tuple(record for record in records if (uids is None or record.uid in uids) and not self._gone(record.uid))
        if self._remember is not None:
            return kept
        running = await self._running(self._left(()))
        return tuple(record for record in kept if record in self._waiting or running.get((record.uid, record.container)))

    def _state(self, records: tuple[AnonymousRecord, ...]) -> object:
        """The input of an attempt. Once devices are offered, the ledger is no part of the input: new grants only reduce the free
        capacity, so another attempt would not succeed."""
        agent_state = self._agent_state
        return records, agent_state.inventory.gpus(agent_state.ledger.gpu_registry), None if self._free else agent_state.ledger

    async def _place(self, records: Sequence[AnonymousRecord]) -> int:
        """Adds the records to the ledger and returns how many were added.

        gpumgr's own pods are adopted first, because the kubelet has fixed their ids, while gpu-manager's pods may get any free ids.
        """
        reconciler = self._reconciler
        await reconciler.adopt_locked(ours_of(self._entries or ()))
        rebuilt = await reconciler.migrate(
            lambda ledger, minors: migrate(ledger, records, minors, new_id=reconciler.new_id, now=time.time())
        )
        self._tried.update(set(records) - set(rebuilt.left))
        listing = await self._admission.listings.list()
        if listing is not None:
            names = names_of(((e.pod_uid, e.container, frozenset(e.device_ids)) for e in self._entries or ()), listing)
            await reconciler.name(names)
        return len(rebuilt.added)

    async def _note(self) -> None:
        """Saves that the migration is finished. While the kubelet's checkpoint is unreadable, nothing is saved, and the next start tries
        again."""
        if self._remember is None or not (self._taken and self._free) or self._entries is None:
            return
        try:
            await self._remember()
        except CheckpointError as error:
            log.error("not_taken_over", error=str(error))

    def _gone(self, uid: str) -> bool:
        view = find_pod(self._pods, None, uid)
        return view.ended if view is not None else self._pods.synced

    async def _running(self, left: Holders) -> Mapping[tuple[str, str], PodKey | None]:
        """The containers of `left` that have not ended, with their pods' names. The caller holds the agent state's lock.

        The kubelet's checkpoint still lists ended pods, so a container has ended if both PodResources and the API server lack it. If one of
        them is unavailable, the other must lack it for INCOMPLETE_SECONDS, because PodResources lacks running pods after the kubelet's
        start."""
        listing = await self._admission.listings.list()
        shown = _holders_shown(listing) if listing is not None else {}
        running: dict[tuple[str, str], PodKey | None] = {}
        for holder, ids in left.items():
            view = find_pod(self._pods, None, holder[0])
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

    def _reason(self, running: Mapping[tuple[str, str], PodKey | None]) -> str:
        """The text of the node's condition, which names some of the containers. A log event names all of them, once."""
        problem = (
            f"{listed(running)} hold GPUs from gpu-manager, and {self._path} does not say which: no GPU is offered until "
            "this is known, since the same GPU could be granted twice"
        )
        if (holders := tuple(_texts(running))) != self._logged:
            self._logged = holders
            log.error("foreign_allocations", holders=holders, problem=problem, remedy=REMEDY)
        return f"{problem}; {REMEDY}"


def listed(holders: Mapping[tuple[str, str], PodKey | None]) -> str:
    """The first _MOST_NAMED containers as text. A pod without a known name is shown by its UID."""
    texts = list(_texts(holders))
    return ", ".join(texts[:_MOST_NAMED]) + (f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else "")


def _texts(holders: Mapping[tuple[str, str], PodKey | None]) -> Iterator[str]:
    for (uid, container), pod in sorted(holders.items()):
        yield f"{'/'.join(pod) if pod else f'pod uid {uid}'} ({container})"


def _holders_shown(listing: Listing) -> Mapping[str, PodKey]:
    return {
        device_id: pod
        for pod in listing.pods
        for devices in listing.containers(pod).values()
        for resource, ids in devices.items()
        if resource in VCUDA_NAMES
        for device_id in ids
    }


# -- gpu-manager's checkpoint ------------------------------------------------------------------------------------------------

_DEVICE: Final = re.compile(r"/dev/nvidia([0-9]{1,9})")
_Amount = Annotated[int, msgspec.Meta(ge=0)]


class _Container(msgspec.Struct, rename={"devices": "Devices", "cores": "Cores", "memory_bytes": "Memory"}):
    devices: tuple[str, ...] | None = None
    cores: _Amount = 0
    memory_bytes: _Amount = 0


class _Document(msgspec.Struct, rename={"pods": "PodGPUMapping"}):
    pods: dict[str, dict[str, _Container | None] | None] | None = None


def read_gpu_manager_checkpoint(path: Path) -> tuple[AnonymousRecord, ...]:
    """The records, sorted by pod and container; empty if the file is missing or has none. Raises InputError.

    As in gpu-manager, null maps count as empty, and device paths that name no GPU are skipped.
    """
    try:
        document = decode_json(path.read_bytes(), _Document)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise InputError(f"can't read gpu-manager's checkpoint {path}: {error.strerror or error}") from error
    except UnreadableText as error:
        raise InputError(
            f"gpu-manager's checkpoint {path} can't be decoded: {error}; move it away if its pods have ended"
        ) from error
    return tuple(
        AnonymousRecord(
            uid=uid,
            container=name,
            minors=_minors(held.devices or ()),
            cores=held.cores,
            memory_blocks=blocks_of(held.memory_bytes),
        )
        for uid, containers in sorted((document.pods or {}).items())
        for name, held in sorted((containers or {}).items())
        if held is not None
    )


def _minors(devices: Iterable[str]) -> tuple[int, ...]:
    found = (_DEVICE.fullmatch(device) for device in devices)
    return tuple(dict.fromkeys(int(match[1]) for match in found if match))
