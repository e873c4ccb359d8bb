"""An operator's actions on one GPU: cordon, drain, uncordon, reset, and forget (`gone_gpus.py`).

1. A cordon is on disk and in force before it is confirmed.
2. A drain is a cordon that also reports the containers on the GPU. With `evict` the agent requests the eviction of their pods, also after a
   restart, until the GPU is uncordoned.
3. Only a cordoned GPU without containers and processes is reset. NVML can't reset a GPU, so nvidia-smi does.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec
import structlog
from msgspec.structs import replace

from gpumgr.agent.api import (
    CORDONS_NOTE,
    REASON_CHARACTERS,
    Cordon,
    MaintainedGpu,
    MaintenanceResult,
    container_row,
    decode_cordons,
)
from gpumgr.agent.gone_gpus import GoneGpus
from gpumgr.agent.history import about
from gpumgr.agent.pods import find_pod, pod_of, pods_of
from gpumgr.agent.ports import Eviction, Evictor, Pods
from gpumgr.agent.state import AgentState
from gpumgr.common.aio import run_shielded
from gpumgr.common.errors import CheckpointError, InputError, NvmlError, Refusal
from gpumgr.common.units import BLOCK_BYTES, GpuName
from gpumgr.ledger.history import HistoryEntry
from gpumgr.ledger.ids import RegisteredGpu
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.node_use import AllocationOnGpu, NodeUse
from gpumgr.ledger.tables import encode_note
from gpumgr.placement.devices import GpuProcess
from gpumgr.placement.pods import PodKey

log = structlog.get_logger(__name__)

Action = Literal["cordon", "drain", "uncordon", "reset", "forget"]

NAMED = 8
#: Code in the history, and reason of the pod's event.
EVICTED = "GpuDrained"


class MaintenanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`gpu` is any name that `find_gpu` accepts. `reason` is the operator's text. `evict` and `again` concern drains; `again`: it repeats
    an earlier drain, so the GPU must be cordoned already."""

    action: Action
    gpu: str
    reason: str = ""
    evict: bool = False
    again: bool = False


class HealthOverrides(Protocol):
    """Decides which GPUs accept new containers."""

    def cordon(self, uuid: str, message: str) -> None:
        """The GPU accepts no new containers, even if the driver lists it only later."""
        ...

    def uncordon(self, uuid: str) -> None: ...

    async def publish_health(self) -> None:
        """Returns when earlier calls of `cordon` and `uncordon` are in force."""
        ...

    async def processes(self, uuid: str) -> Sequence[GpuProcess] | None:
        """The processes on the GPU. None: the driver does not list them, or the GPU answers with an error. Raises NvmlError if the driver
        does not answer."""
        ...


#: Gets a UUID, and returns the output of nvidia-smi. Raises NvmlError with the output.
Reset = Callable[[str], Awaitable[str]]


class Maintenance:
    """Call `restore` before the first GPU is offered.

    `evictor` None: there is no API server. `still_used_by`: UUID -> which part of gpumgr uses the GPU (an MPS daemon), in words that follow
    "can't be reset:". `usage` returns the latest use by container (None before the first sample), and the allocations that exceed their
    memory limits, with the GPU.
    """

    def __init__(
        self,
        *,
        agent_state: AgentState,
        health: HealthOverrides,
        pods: Pods,
        evictor: Evictor | None,
        reset: Reset,
        gone_gpus: GoneGpus,
        still_used_by: Callable[[str], str | None] = lambda _: None,
        usage: Callable[[], tuple[NodeUse | None, Collection[AllocationOnGpu]]] = lambda: (None, ()),
    ) -> None:
        self._agent_state, self._health, self._pods, self._evictor = agent_state, health, pods, evictor
        self._reset, self._still_used_by, self._usage, self._gone_gpus = reset, still_used_by, usage, gone_gpus
        #: By UUID.
        self.cordons: Mapping[str, Cordon] = {}
        self._lock = asyncio.Lock()

    def restore(self, notes: Mapping[str, str]) -> None:
        """Raises CheckpointError if the note can't be read."""
        self.cordons = decode_cordons(notes)
        for uuid, cordon in self.cordons.items():
            self._health.cordon(uuid, cordon.sentence)

    async def evict_again(self) -> None:
        """Requests the evictions of drains again: after a restart, and for pods that became known since."""
        async with self._lock:
            for uuid, cordon in self.cordons.items():
                gpu = self._agent_state.ledger.gpu_registry.by_uuid.get(uuid)
                if gpu is not None and cordon.evict and self._evictor is not None:
                    self._evict(self._evictor, gpu, cordon, again=True)

    async def execute(self, request: MaintenanceRequest) -> MaintenanceResult:
        """Executes the request to its end, even if the caller is cancelled. Raises InputError for an unknown GPU or a reason that is too
        long, and Refusal."""
        return await run_shielded(self._execute(request), name=f"gpu_{request.action}")

    async def _execute(self, request: MaintenanceRequest) -> MaintenanceResult:
        request = replace(request, reason=" ".join(request.reason.split()))
        if len(request.reason) > REASON_CHARACTERS:
            raise InputError(f"the reason has {len(request.reason)} characters; {REASON_CHARACTERS} at most")
        async with self._lock:
            agent_state = self._agent_state
            gpu = find_gpu(request.gpu, agent_state.ledger.gpu_registry.gpus, agent_state.node().indices)
            match request.action:
                case "cordon" | "drain":
                    done = await self._cordon(gpu, request)
                case "uncordon":
                    done = {"changed": await self._put(gpu, None, request.reason)}
                    if self._evictor is not None:
                        self._evictor.evict(_requester(gpu), ())  # pods that are not evicted yet may stay
                case "reset":
                    done = await self._reset_empty(gpu, request)
                case "forget":
                    await self._gone_gpus.forget(gpu, request.reason)
                    done = {}
            return replace(self._state(gpu), action=request.action, **done)

    # -- cordons -----------------------------------------------------------------------------------------------------------

    async def _cordon(self, gpu: RegisteredGpu, request: MaintenanceRequest) -> dict[str, Any]:
        """A cordon does not cancel a drain, and a cordon without a reason keeps the earlier reason."""
        drain = request.action == "drain"
        evict = drain and request.evict
        if evict and self._evictor is None:
            raise Refusal(
                "invalid_request",
                "there is no API server to ask for evictions: this agent runs standalone; drain without evicting, and end the pods another "
                "way",
            )
        if request.again and gpu.uuid not in self.cordons:
            raise Refusal("conflict", f"{self._label(gpu)} was uncordoned by another request: it is no longer drained")
        before = self.cordons.get(gpu.uuid) or Cordon(since=self._agent_state.history.now())
        reason = request.reason or before.reason
        cordon = replace(before, reason=reason, draining=before.draining or drain, evict=before.evict or evict)
        done: dict[str, Any] = {"changed": await self._put(gpu, cordon, cordon.reason)}
        if evict and self._evictor is not None:
            done |= self._evict(self._evictor, gpu, cordon)
        return done

    def _evict(self, evictor: Evictor, gpu: RegisteredGpu, cordon: Cordon, *, again: bool = False) -> dict[str, Any]:
        """Requests the evictions; returns `evicting` and `not_evicted` of MaintenanceResult. `again`: the history has these evictions
        already."""
        reason = f"{self._label(gpu)} is drained" + (f": {cordon.reason}" if cordon.reason else "")
        pods: dict[tuple[PodKey, str], Allocation] = {}
        staying = []
        for holder in self._agent_state.ledger.on(gpu.name):
            view, names = find_pod(self._pods, holder.pod, holder.uid), pods_of(holder, self._pods)
            if view is not None and view.runtime_uid is not None:
                staying.append(
                    f"{holder.describe()}: it is a static pod, which ends only when its manifest is removed from the node"
                )
                continue
            for name in names:
                pods.setdefault(name, holder)
            if not names:
                staying.append(f"{holder.describe()}: its pod is not known")
        for (pod, uid), holder in pods.items():
            if not again:
                entry = HistoryEntry(what="event", code=EVICTED, pod=pod, pod_uid=uid, why=f"the pod is evicted: {reason}")
                self._agent_state.history.add(about(holder, entry))
        evictor.evict(_requester(gpu), [Eviction(uid=uid, pod=pod, reason=reason) for pod, uid in pods], immediately=not again)
        return {"evicting": tuple("/".join(pod) for pod, _ in pods), "not_evicted": tuple(staying)}

    async def _put(self, gpu: RegisteredGpu, cordon: Cordon | None, why: str) -> bool:
        """False if nothing changes."""
        if cordon == self.cordons.get(gpu.uuid):
            return False
        cordons = {uuid: kept for uuid, kept in self.cordons.items() if uuid != gpu.uuid}
        if cordon is not None:
            cordons[gpu.uuid] = cordon
        code = "uncordoned" if cordon is None else "draining" if cordon.draining else "cordoned"
        entry = HistoryEntry(what="gpu", code=code, gpus=(gpu.name,), why=why)
        try:
            await self._agent_state.save_note(CORDONS_NOTE, encode_note(cordons), entry)
        except CheckpointError as error:
            raise Refusal("internal", f"the cordons can't be saved, so nothing was changed: {error}") from error
        self.cordons = cordons
        if cordon is None:
            log.info("gpu_uncordoned", gpu=gpu.uuid, reason=why)
            self._health.uncordon(gpu.uuid)
        else:
            log.info("gpu_cordoned", gpu=gpu.uuid, draining=cordon.draining, reason=why)
            self._health.cordon(gpu.uuid, cordon.sentence)
        await self._health.publish_health()
        return True

    # -- the GPU's state ------------------------------------------------------------------------------------------------------

    def _state(self, gpu: RegisteredGpu) -> MaintenanceResult:
        use, over = self._usage()
        uses, unattributed = (use.containers, use.unattributed) if use else ({}, {})
        containers = [
            container_row(
                holder,
                gpu.name,
                gpu.memory_blocks * BLOCK_BYTES or None,
                pod=pod_of(holder, self._pods),
                use=uses.get((holder.id, gpu.name)),
                over=(holder.id, gpu.name) in over,
            )
            for holder in self._agent_state.ledger.on(gpu.name)
        ]
        processes = sorted((each for each in unattributed.values() if each.uuid == gpu.uuid), key=lambda each: each.pid)
        known = use is not None and gpu.name not in {name for name, _ in use.unknown}
        return MaintenanceResult(
            at=self._agent_state.history.now(),
            gpu=MaintainedGpu(uuid=gpu.uuid, name=gpu.name, index=self._agent_state.node().indices.get(gpu.name)),
            cordon=self.cordons.get(gpu.uuid),
            empty=known and not containers and not processes,
            containers=tuple(containers),
            unattributed=tuple(processes),
        )

    # -- reset -------------------------------------------------------------------------------------------------------------

    async def _reset_empty(self, gpu: RegisteredGpu, request: MaintenanceRequest) -> dict[str, Any]:
        cordon, label = self.cordons.get(gpu.uuid), self._label(gpu)
        if cordon is None:
            raise Refusal(
                "conflict",
                f"{label} can't be reset: it is not cordoned, so a container may be placed there at any moment; drain it first",
            )
        if holders := self._agent_state.ledger.on(gpu.name):
            raise Refusal(
                "conflict", f"{label} can't be reset: {_named([a.describe() for a in holders])} still on it; drain it first"
            )
        if obstacle := self._still_used_by(gpu.uuid):
            raise Refusal("conflict", f"{label} can't be reset: {obstacle}")
        try:
            await self._refuse_processes(gpu)
            said = await self._reset(gpu.uuid)
        except NvmlError as error:
            log.warning("gpu_not_reset", gpu=gpu.uuid, reason=str(error))
            raise Refusal("conflict", f"{label} was not reset: {error}") from error
        why = request.reason or cordon.reason
        log.info("gpu_reset", gpu=gpu.uuid, reason=why)
        self._agent_state.history.add(HistoryEntry(what="gpu", code="reset", gpus=(gpu.name,), why=why))
        return {"said": said}

    async def _refuse_processes(self, gpu: RegisteredGpu) -> None:
        """Raises Refusal if a process is on the GPU. If the driver can't list processes (of a lost GPU, for example), nvidia-smi still
        refuses while a process has the GPU open."""
        processes = await self._health.processes(gpu.uuid)
        if processes:
            names = [f"pid {p.pid} ({'?' if p.memory_bytes is None else p.memory_bytes >> 20} MiB)" for p in processes]
            raise Refusal(
                "conflict", f"{self._label(gpu)} can't be reset: {_named(names)} still on it, in no allocation; end them first"
            )

    def _label(self, gpu: RegisteredGpu) -> str:
        return self._agent_state.node().label(gpu.name)


_INDEX: Final = re.compile(r"(?:gpu)?([0-9]+)", re.ASCII)
#: Fewer digits of a UUID are probably a mistake.
MIN_DIGITS: Final = 4


def find_gpu(text: str, gpus: Sequence[RegisteredGpu], indices: Mapping[GpuName, int]) -> RegisteredGpu:
    """The GPU with this index ("3", "GPU3"), name in device ids, UUID, or beginning of a UUID ("GPU-0fe1", "0fe1"). A number is NVML's
    index, unless it is the whole name of a GPU. Raises InputError with a list of the GPUs."""
    word = text.strip().lower()
    digits, index = word.removeprefix("gpu-"), _INDEX.fullmatch(word)
    found = [gpu for gpu in gpus if word == gpu.name]
    if not found and index:
        found = [gpu for gpu in gpus if str(indices.get(gpu.name)) == index[1]]
    elif not found and len(digits) >= MIN_DIGITS:
        found = [gpu for gpu in gpus if gpu.uuid.lower().removeprefix("gpu-").startswith(digits)]
    if len(found) == 1:
        return found[0]
    what = "several GPUs of this node match" if found else "no GPU of this node is called"
    listed = [(f"GPU{indices[gpu.name]} = " if gpu.name in indices else "") + gpu.uuid for gpu in gpus]
    raise InputError(
        f"{what} {text!r} (give an index, or {MIN_DIGITS} digits or more of a UUID); the GPUs of this node are: "
        f"{', '.join(listed) or 'none'}"
    )


def _requester(gpu: RegisteredGpu) -> str:
    """Each drained GPU has its own requester, so the end of its drain cancels only its own evictions."""
    return f"drain of {gpu.uuid}"


def _named(names: Sequence[str]) -> str:
    more = len(names) - NAMED
    listed = ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
