"""Findings about running containers of MPS: `Observer` collects facts about daemons and processes, and the pure function `judge` makes the
findings about one container from them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.enforcement.backend import finding
from gpumgr.enforcement.mps import processes
from gpumgr.enforcement.mps.commands import MpsProtocol
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.enforcement.mps.limits import Tampering
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId

#: A client that has just started is not listed yet, so a process without MPS is reported after this many further checks.
_CHECKS: Final = 2
#: The driver does not list a process that waits for MPS. So the user ids of a container's first processes are read, whether or not they use
#: the GPU. This is the number of processes.
_USERS_OF: Final = 16


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's daemon at its last check, which has the number `checks`. `allocations`: the containers on record. `trouble`: why the daemon
    does not work. `clients`: pid -> MPS namespace (the allocation's id; None in protocol 2). `multiuser`: the server serves all users.
    `server_user`: the server's user id; None: no server runs. `suspects`: the containers that may have caused `tampering`."""

    protocol: MpsProtocol
    multiuser: bool
    checks: int = 0
    allocations: Collection[AllocationId] = ()
    trouble: str | None = None
    tampering: Tampering | None = None
    suspects: Sequence[GpuShare] = ()
    server_user: int | None = None
    clients: Mapping[int, AllocationId | None] = msgspec.field(default_factory=dict)


def processes_outside(running: RunningContainer, view: View) -> frozenset[int]:
    """Processes with a context on the GPU that are no clients of MPS, or clients in another container's namespace."""
    own = running.tenant.allocation
    mine = {pid for pid, namespace in view.clients.items() if view.protocol == 2 or namespace == own}
    return running.gpu_pids - mine


def unserved(running: RunningContainer, view: View) -> bool:
    """Whether the container's processes may wait because the server serves another user. They do not wait if one of them is a client."""
    return not view.multiuser and view.server_user is not None and not any(pid in view.clients for pid in running.pids)


def judge(running: RunningContainer, view: View, users: Collection[int], lasting: Collection[int]) -> Iterator[Finding]:
    """`users`: the user ids of an unserved container's processes. `lasting`: processes that were outside MPS in several checks."""
    tenant = running.tenant
    who, gpu = tenant.describe(), tenant.gpus[0].name
    if view.trouble is not None:
        text = f"MPS on GPU {gpu} does not work at present, so CUDA programs that {who} starts now fail: {view.trouble}"
        yield finding(tenant, "broken", text)
        return
    if (found := view.tampering) is not None and (tenant in view.suspects or tenant.allocation in found.concerned):
        text = _tampered(found.what, [each.describe() for each in view.suspects], view.protocol, gpu)
        yield finding(tenant, "tampered", text)
    if unserved(running, view) and users and view.server_user not in users:
        shown = ", ".join(map(str, sorted(users)))
        text = (
            f"{who} runs as user {shown}, and MPS on GPU {gpu} serves user {view.server_user} until all its processes have ended: "
            "give all containers that share GPUs of this node one runAsUser, or install a driver whose MPS has a multi-user mode"
        )
        yield finding(tenant, "broken", text)
    for pid in sorted(lasting):
        text = (
            f"process {pid} of {who} uses GPU {gpu} outside its MPS limits (it changed CUDA_MPS_PIPE_DIRECTORY?): end it; "
            "if mps.exclusive_process is on, such a process can't use the GPU"
        )
        yield finding(tenant, "unregistered", text)


def _tampered(what: str, suspects: Sequence[str], protocol: MpsProtocol, gpu: str) -> str:
    who = f"one of {', '.join(suspects)}" if suspects else "a process that has ended"
    if len(suspects) == 1:
        who = f"{suspects[0]}, the only container with a process that could do it when gpumgr looked,"
    remedy = (
        "run containers without root on the host (runAsNonRoot, or `hostUsers: false`)"
        if protocol == 3
        else "install driver r615 or newer, where only root can do this, and drain the node once"
    )
    return (
        f"{who} {what} of MPS on GPU {gpu} through the daemon's control socket; gpumgr has corrected that, but programs "
        f"that started before keep their limits: {remedy}"
    )


def lost(tenant: GpuShare) -> Finding:
    """A container runs, but its record is gone, because the folder was emptied."""
    text = f"gpumgr's MPS files of {tenant.describe()} below enforcement.run_dir are gone: delete the pod and create it again"
    return finding(tenant, "broken", text)


class Observer:
    def __init__(self) -> None:
        #: (container, process outside of MPS) -> the number of the check that found it first.
        self._outside: dict[tuple[AllocationId, int], int] = {}
        #: The containers of the last observations, also exempt ones.
        self._latest: dict[AllocationId, RunningContainer] = {}

    def observe(self, daemons: Sequence[Daemon], running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Blocks: reads files of processes. Raises OSError."""
        self._latest |= {each.tenant.allocation: each for each in running}
        views = {daemon.uuid: self._view(daemon, frozenset(daemon.folder.allocations())) for daemon in daemons}
        everyone = {name for view in views.values() for name in view.allocations}
        self._latest = {name: each for name, each in self._latest.items() if name in everyone}
        seen: dict[tuple[AllocationId, int], int] = {}
        found: list[Finding] = []
        for each in running:
            name, view = each.tenant.allocation, views.get(each.tenant.gpus[0].uuid)  # it has only this GPU, see `admit`
            if view is None or name not in view.allocations:
                found.append(lost(each.tenant))
                continue
            first = {(name, pid): self._outside.get((name, pid), view.checks) for pid in processes_outside(each, view)}
            seen |= first
            lasting = [pid for (_, pid), at in first.items() if view.checks - at >= _CHECKS]
            waiting = each.pids[:_USERS_OF] if unserved(each, view) else ()
            users = {user for pid in waiting if (user := processes.user_of(pid)) is not None}
            found += judge(each, view, users, lasting)
        others = everyone - {each.tenant.allocation for each in running}
        self._outside = {key: at for key, at in self._outside.items() if key[0] in others} | seen
        return found

    def _view(self, daemon: Daemon, allocations: Collection[AllocationId]) -> View:
        users = [user for pid in daemon.servers if (user := processes.user_of(pid)) is not None]
        return View(
            protocol=daemon.config.protocol,
            multiuser=bool(daemon.config.multiuser_option),
            checks=daemon.checks,
            allocations=allocations,
            trouble=daemon.trouble or daemon.trial.hang,
            tampering=daemon.tampering,
            suspects=self._suspects(allocations, daemon.tampering) if daemon.tampering else (),
            server_user=users[0] if users else None,
            clients=daemon.clients,
        )

    def _suspects(self, allocations: Collection[AllocationId], tampering: Tampering) -> list[GpuShare]:
        """The containers on the GPU with a process that may have tampered: if only root can, a process of the host's root."""
        there = [self._latest[name] for name in sorted(allocations) if name in self._latest]
        return [each.tenant for each in there if any(not tampering.root_only or processes.user_of(pid) == 0 for pid in each.pids)]
