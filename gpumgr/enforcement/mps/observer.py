"""Observes the running containers of MPS: collects what `findings` judges. Reads files of processes: call it on a thread."""

from collections.abc import Collection, Sequence
from typing import Final

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.enforcement.mps import findings, processes
from gpumgr.enforcement.mps.daemon import Daemon
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId

#: A process without MPS is reported after this many further checks, since a client that has just started is not listed yet.
_CHECKS: Final = 2
#: The driver does not list a process that waits for MPS, so the users of all processes of a container are read, at most this many.
_USERS_OF: Final = 16


class Observer:
    def __init__(self) -> None:
        #: Container and process outside of MPS -> the number of the check that found the process first.
        self._outside: dict[tuple[AllocationId, int], int] = {}
        #: The containers of the last observations, including exempt ones.
        self._latest: dict[AllocationId, RunningContainer] = {}

    def observe(self, daemons: Sequence[Daemon], running: Sequence[RunningContainer]) -> Sequence[Finding]:
        """Raises OSError."""
        kept_by = {daemon.uuid: frozenset(daemon.folder.allocations()) for daemon in daemons}
        everyone = frozenset().union(*kept_by.values())
        self._latest |= {each.tenant.allocation: each for each in running}
        self._latest = {name: each for name, each in self._latest.items() if name in everyone}
        views = {daemon.uuid: (daemon, self._view(daemon, kept_by[daemon.uuid]), kept_by[daemon.uuid]) for daemon in daemons}
        seen: dict[tuple[AllocationId, int], int] = {}
        found: list[Finding] = []
        for each in running:
            tenant = each.tenant
            daemon, view, kept = views.get(tenant.gpus[0].uuid, (None, None, frozenset()))  # it has only this GPU, see `admit`
            if daemon is None or view is None or tenant.allocation not in kept:
                found.append(findings.lost(tenant))
                continue
            first = {
                pid: self._outside.get((tenant.allocation, pid), daemon.checks) for pid in findings.processes_outside(each, view)
            }
            seen |= {(tenant.allocation, pid): at for pid, at in first.items()}
            lasting = [pid for pid, at in first.items() if daemon.checks - at >= _CHECKS]
            waiting = each.pids[:_USERS_OF] if findings.unserved(each, view) else ()
            users = {user for pid in waiting if (user := processes.user_of(pid)) is not None}
            found += findings.judge(each, view, users, lasting)
        others = everyone - {each.tenant.allocation for each in running}
        self._outside = {key: at for key, at in self._outside.items() if key[0] in others} | seen
        return found

    def _view(self, daemon: Daemon, allocations: Collection[AllocationId]) -> findings.View:
        users = [user for pid in daemon.servers if (user := processes.user_of(pid)) is not None]
        return findings.View(
            protocol=daemon.config.protocol,
            multiuser=bool(daemon.config.multiuser_option),
            trouble=daemon.trouble or daemon.hang,
            tampering=daemon.tampering,
            suspects=self._suspects(allocations, daemon.tampering) if daemon.tampering else (),
            server_user=users[0] if users else None,
            clients=daemon.clients,
        )

    def _suspects(self, allocations: Collection[AllocationId], tampering: findings.Tampering) -> list[GpuShare]:
        """The containers on a GPU that may have tampered: all that have processes. If only root can tamper, only those with a process of
        the host's root."""
        there = [self._latest[name] for name in sorted(allocations) if name in self._latest]
        return [each.tenant for each in there if any(not tampering.root_only or processes.user_of(pid) == 0 for pid in each.pids)]
