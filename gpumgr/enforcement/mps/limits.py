"""Sets the limits of containers at a daemon: in protocol 2 one bound for all clients of the daemon, in protocol 3 (driver r615 and newer)
the limits of an MPS namespace for each container.

The bound is the largest of all shares; a client's own environment can only lower it. A container can change limits through the daemon's
control socket (in protocol 3 only as root). So checks compare the daemon's answer with its answer right after the limits were set. They
compare the texts, since drivers print numbers differently.
"""

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from gpumgr.common.errors import MpsError, MpsTransientError
from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.control import DaemonClient
from gpumgr.enforcement.mps.folders import Share
from gpumgr.ledger.ledger import AllocationId

Shares = Mapping[AllocationId, Share]
#: The most namespaces that one check deletes.
_DELETED_AT_ONCE: Final = 8


class Tampering(msgspec.Struct, frozen=True):
    """What a container did through the daemon's control socket. `concerned`: the containers with changed limits. `root_only`: only root can
    do it."""

    what: str
    concerned: frozenset[AllocationId]
    root_only: bool


class Bounds(msgspec.Struct):
    """Protocol 2: the bound that was set at a daemon. A restarted daemon needs a new object. `_answers`: server (None: future servers) ->
    the daemon's answer after the bound was set."""

    _answers: Mapping[int | None, str] = msgspec.field(default_factory=dict)
    _bound: Share | None = None

    async def put(self, daemon: DaemonClient, shares: Shares, _: Collection[AllocationId], *, anew: bool) -> None:
        """`anew`: even if the bound was set already. Raises MpsError."""
        if not shares:
            return
        granted = shares.values()
        bound = Share(cores=max(each.cores for each in granted), memory_bytes=max(each.memory_bytes for each in granted))
        if bound == self._bound and not anew:
            return
        await daemon.run(*commands.set_bound(None, bound.cores, bound.memory_bytes))
        # The servers are listed after the defaults are set, because a server that starts later begins with these defaults.
        named = commands.parse_servers(2, await daemon.run(commands.list_servers(2)))
        servers = [pid for pid in named.values() if pid is not None]
        for pid in servers:
            await daemon.run_for_server(pid, *commands.set_bound(pid, bound.cores, bound.memory_bytes))
        answers = await _read(daemon, servers)
        default = answers.get(None)
        percentage, _, memory = (default or "").partition("\n")
        if default is not None and not commands.within((memory, percentage), bound.cores, bound.memory_bytes):
            self._answers = {}  # the next check sets the bound again
            raise MpsError(f"the MPS daemon did not accept the limits of its clients, it answers {default!r}")
        self._answers, self._bound = answers, bound

    async def drop(self, daemon: DaemonClient, shares: Shares, _: AllocationId) -> None:
        """Sets the bound without an ended container, which is not in `shares`. Raises MpsError."""
        await self.put(daemon, shares, (), anew=True)

    async def restore(self, daemon: DaemonClient, shares: Shares, servers: Collection[int]) -> Tampering | None:
        """If a container changed the bound, sets it again and returns this tampering. Also sets the bound for a new server, so that later
        changes are detected. Raises MpsError."""
        if not shares:
            return None
        found = await _read(daemon, servers)
        changed = any(self._answers.get(server, text) != text for server, text in found.items())
        if changed or not found.keys() <= self._answers.keys():
            await self.put(daemon, shares, (), anew=True)
        # Drivers 535 and 550 accept a server's limits from every user.
        return Tampering("changed the limits", frozenset(shares), root_only=False) if changed else None


async def _read(daemon: DaemonClient, servers: Collection[int]) -> Mapping[int | None, str]:
    """Queries all limits in one run of the control program, since runs cost time. If a query is refused (the server has ended, or an older
    driver lacks the query), the queries are run one by one, and refused ones are left out. Raises MpsTransientError."""
    queried: tuple[int | None, ...] = (None, *servers)
    found = dict(await _answers(daemon, queried))
    if not found and servers:
        for each in queried:
            found.update(await _answers(daemon, (each,)))
    return found


async def _answers(daemon: DaemonClient, queried: Sequence[int | None]) -> Mapping[int | None, str]:
    """Empty if the daemon refused a query. Raises MpsTransientError."""
    try:
        return commands.parse_bounds(queried, await daemon.run(commands.bounds_of(queried)))
    except MpsTransientError:
        raise
    except MpsError:
        return {}


class Namespaces(msgspec.Struct):
    """Protocol 3: the namespaces that were made at a daemon. A restarted daemon needs a new object. `_set`: container -> (the limits that
    were set last, the daemon's answer after that: memory and cores)."""

    _set: dict[AllocationId, tuple[tuple[int, int], tuple[str, str]]] = msgspec.field(default_factory=dict)

    async def put(self, daemon: DaemonClient, shares: Shares, names: Collection[AllocationId], *, anew: bool) -> None:
        """Creates missing namespaces of `names`, and sets and checks their limits: a namespace without limits gets the whole GPU. `anew`:
        also limits that were set already. Raises MpsError."""
        # Each run of the program costs milliseconds. So existing namespaces are listed first only if a new one has a socket already.
        there = {name for name in names if (daemon.folder.namespace(name) / "control").exists()}
        known = {name: limits for name, (limits, _) in self._set.items() if name in there and not anew}
        new = {name: share for name, share in shares.items() if name in names and share.limits != known.get(name)}
        existing = await _list(daemon) if there & new.keys() else ()
        for name, share in new.items():
            if name not in existing:
                await daemon.run(commands.create_namespace(name))
            await daemon.run(commands.limit_namespace(name, share.cores, share.memory_bytes))
        found = await _list(daemon) if new else {}
        for name, share in new.items():
            limited = name in found and commands.within(found[name], share.cores, share.memory_bytes)
            if not limited or not (daemon.folder.namespace(name) / "control").exists():
                raise MpsError(f"the MPS daemon did not accept the limits of namespace {name}; see {daemon.folder.log}")
        self._set |= {name: (share.limits, found[name]) for name, share in new.items()}

    async def drop(self, daemon: DaemonClient, _: Shares, name: AllocationId) -> None:
        """Raises MpsError."""
        if name in await _list(daemon):
            await daemon.run(commands.delete_namespace(name))
        self._set.pop(name, None)

    async def restore(self, daemon: DaemonClient, shares: Shares, _: Collection[int]) -> Tampering | None:
        """Sets limits again that were changed, or for which the daemon's answer is not known after a restart of the agent. Deletes
        namespaces of ended containers, and namespaces that gpumgr did not make: a few at each check, since a container can make thousands.

        Returns what a container changed. If gpumgr itself was changing the limits (the record has `former_bytes`), a difference does not
        count, since the agent may have ended in the middle. After a restart of the agent, missing namespaces and limits within the grant do
        not count either. Raises MpsError.
        """
        found = await _list(daemon)
        wrong = {name for name in shares if name not in found or name not in self._set or self._set[name][1] != found[name]}
        unchecked = {name for name in wrong if shares[name].former_bytes is not None} | {
            name
            for name in wrong - self._set.keys()
            if name not in found or commands.within(found[name], shares[name].cores, shares[name].memory_bytes)
        }
        changed, recorded = frozenset(wrong - unchecked), daemon.folder.allocations()  # also unreadable records
        foreign = found.keys() - shares.keys() - {commands.DEFAULT_NAMESPACE, *recorded}
        made = foreign - self._set.keys()
        self._set = {name: known for name, known in self._set.items() if name in shares}
        await self.put(daemon, shares, wrong, anew=True)
        for name in sorted(foreign)[:_DELETED_AT_ONCE]:
            with contextlib.suppress(MpsError):  # the next check tries again
                await daemon.run(commands.delete_namespace(name))
        what = "changed the limits" if changed else "made namespaces"
        return Tampering(what, changed, root_only=True) if changed or made else None


async def _list(daemon: DaemonClient) -> Mapping[str, tuple[str, str]]:
    """Raises MpsError."""
    return commands.parse_namespaces(await daemon.run(commands.list_namespaces()))


Limits = Bounds | Namespaces
