"""Sets the limits of containers at a daemon: in protocol 2 one bound for all its clients, in protocol 3 a namespace for each container.

The bound of protocol 2 is the largest of all shares; a client's own environment can only lower it. A container reaches the daemon's
control socket, by which it can change limits (in protocol 3 only as root). So the daemon's answer right after limits were set is compared
with its later answers, as text: drivers differ in how they print a number.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpumgr.allocator.ledger import AllocationId
from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.control import DaemonClient
from gpumgr.enforcement.mps.folders import GpuFolder, Share
from gpumgr.errors import MpsError, MpsTransientError

#: A namespace's limits of memory and cores as the daemon prints them.
NamespaceLimits = tuple[str, str]


def largest(shares: Collection[Share]) -> Share | None:
    """The bound for these shares; None without any."""
    if not shares:
        return None
    sizes = [share.memory_bytes for share in shares if share.memory_bytes is not None]
    return Share(cores=max(share.cores for share in shares), memory_bytes=max(sizes, default=None))


@dataclass(slots=True)
class BoundKeeper:
    """`answers`: for each server (None: for future ones) what the daemon answered after the bound was set."""

    answers: Mapping[int | None, str] = field(default_factory=dict)

    async def put(self, daemon: DaemonClient, bound: Share) -> None:
        """Sets the bound. Raises MpsError."""
        await daemon.run(*commands.set_bound(None, bound.cores, bound.memory_bytes))
        # Servers are listed after that: one that starts in between has the new values already.
        named = commands.parse_servers(2, await daemon.run(commands.list_servers(2)))
        servers = [pid for pid in named.values() if pid is not None]
        for pid in servers:
            await daemon.run_for_server(pid, *commands.set_bound(pid, bound.cores, bound.memory_bytes))
        answers = await _read(daemon, bound, servers)
        default = answers.get(None)
        if default is not None and not _holds(default, bound):
            self.answers = {}  # the next check sets the bound again
            raise MpsError(f"the MPS daemon did not accept the limits of its clients, it answers {default!r}")
        self.answers = answers

    async def restore(self, daemon: DaemonClient, bound: Share, servers: Collection[int]) -> bool:
        """Sets the bound again if it was changed; returns whether it was. A new server gets the bound by its own pid, so that a later
        change is noticed. Raises MpsError."""
        found = await _read(daemon, bound, servers)
        changed = any(self.answers.get(server, text) != text for server, text in found.items())
        if changed or not found.keys() <= self.answers.keys():
            await self.put(daemon, bound)
        return changed


def _holds(answer: str, bound: Share) -> bool:
    percentage, *memory = answer.splitlines()
    return commands.within(("".join(memory), percentage), bound.cores, bound.memory_bytes)


async def _read(daemon: DaemonClient, bound: Share, servers: Collection[int]) -> Mapping[int | None, str]:
    """All answers by one run of the control program, which is what costs time. If it refuses a query (a server has ended since, or an
    older driver lacks it), the queries are run one by one and the refused one is left out. Raises MpsTransientError."""
    queried: tuple[int | None, ...] = (None, *servers)
    found = dict(await _answers(daemon, bound, queried))
    if not found and servers:
        for each in queried:
            found.update(await _answers(daemon, bound, (each,)))
    return found


async def _answers(daemon: DaemonClient, bound: Share, queried: Sequence[int | None]) -> Mapping[int | None, str]:
    """Empty if a query was refused. Raises MpsTransientError."""
    memory = bound.memory_bytes is not None
    try:
        return commands.parse_bounds(queried, await daemon.run(commands.bounds_of(queried, memory=memory)), memory=memory)
    except MpsTransientError:
        raise
    except MpsError:
        return {}


async def limit_namespaces(
    daemon: DaemonClient, folder: GpuFolder, shares: Mapping[AllocationId, Share]
) -> Mapping[AllocationId, NamespaceLimits]:
    """Creates missing namespaces, sets their limits and checks them: a namespace without limits gets the whole GPU. Returns the daemon's
    answers. Raises MpsError."""
    # A run of the program costs milliseconds: a namespace without a socket is created without a listing first.
    sockets = {name: folder.namespace(name) / "control" for name in shares}
    existing: Collection[str] = ()
    if any(socket.exists() for socket in sockets.values()):
        existing = commands.parse_namespaces(await daemon.run(commands.list_namespaces()))
    for name, share in shares.items():
        if name not in existing:
            await daemon.run(commands.create_namespace(name))
        await daemon.run(commands.limit_namespace(name, share.cores, share.memory_bytes))
    found = commands.parse_namespaces(await daemon.run(commands.list_namespaces()))
    for name, share in shares.items():
        limited = name in found and commands.within(found[name], share.cores, share.memory_bytes)
        if not limited or not sockets[name].exists():
            raise MpsError(f"the MPS daemon did not accept the limits of namespace {name}; see {folder.log}")
    return {name: found[name] for name in shares}


async def compare_namespaces(
    daemon: DaemonClient, shares: Mapping[AllocationId, Share], answers: Mapping[str, NamespaceLimits]
) -> tuple[frozenset[AllocationId], frozenset[AllocationId], frozenset[str]]:
    """The namespaces that were changed or deleted; those that are missing or not too high, while the daemon's answer
    after they were set is not known (the agent has restarted); and those that others made. By one run of the control program. Raises
    MpsError."""
    found = commands.parse_namespaces(await daemon.run(commands.list_namespaces()))
    wrong = {name for name in shares if name not in found or answers.get(name) != found[name]}
    new = wrong - answers.keys()
    unchecked = {
        name for name in new if name not in found or commands.within(found[name], shares[name].cores, shares[name].memory_bytes)
    }
    return (
        frozenset(wrong - unchecked),
        frozenset(unchecked),
        frozenset(found.keys() - shares.keys() - {commands.DEFAULT_NAMESPACE}),
    )


async def drop_namespace(daemon: DaemonClient, name: str) -> None:
    """Raises MpsError."""
    if name in commands.parse_namespaces(await daemon.run(commands.list_namespaces())):
        await daemon.run(commands.delete_namespace(name))
