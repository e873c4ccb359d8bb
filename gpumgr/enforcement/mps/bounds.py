"""Protocol 2: one outer bound for all clients of a daemon, which their own environment can only tighten: the largest of all shares.

Root in a container reaches the daemon's control socket and can change it. So what the daemon answered right after it was told is
compared with what it answers later, as text: how it writes a number differs from driver to driver.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.errors import MpsError, Unanswered
from gpumgr.enforcement.mps.folders import Share
from gpumgr.enforcement.mps.talk import Talk


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`cores` in percent; `memory_bytes` None: not limited by MPS."""

    cores: int
    memory_bytes: int | None


def largest(shares: Collection[Share], *, limit_memory: bool) -> Bound | None:
    """None: nobody is there to be bound."""
    if not shares:
        return None
    memory_bytes = max(share.memory_bytes for share in shares) if limit_memory else None
    return Bound(cores=max(share.cores for share in shares), memory_bytes=memory_bytes)


@dataclass(slots=True)
class Bounds:
    """`answers`: what the daemon said of each server (None: of those to come) after it was told the bound."""

    answers: Mapping[int | None, str] = field(default_factory=dict)

    async def put(self, talk: Talk, bound: Bound) -> None:
        """Raises MpsError."""
        await talk.ask(*commands.bound_servers_to_come(bound.cores, bound.memory_bytes))
        # Only now: a server that begins in between has the new values already.
        named = commands.parse_servers(2, await talk.ask(commands.list_servers(2)))
        servers = [pid for pid in named.values() if pid is not None]
        for pid in servers:
            await talk.ask_of_server(pid, *commands.bound_server(pid, bound.cores, bound.memory_bytes))
        self.answers = await _read(talk, bound, servers)

    async def hold(self, talk: Talk, bound: Bound, servers: Collection[int]) -> bool:
        """Puts right what is not as it was left; whether somebody had changed it. A server that is new is bound by its own name, so
        that a later change of it is seen. Raises MpsError."""
        found = await _read(talk, bound, servers)
        changed = any(self.answers.get(server, text) != text for server, text in found.items())
        if changed or not found.keys() <= self.answers.keys():
            await self.put(talk, bound)
        return changed


async def _read(talk: Talk, bound: Bound, servers: Collection[int]) -> Mapping[int | None, str]:
    """All by one run of the program, since a run is what costs; where it refuses one of the questions (a server has ended meanwhile, or
    an older driver can't tell), without that one. Raises Unanswered."""
    asked: tuple[int | None, ...] = (None, *servers)
    found = dict(await _answered(talk, bound, asked))
    if not found and servers:
        for each in asked:
            found.update(await _answered(talk, bound, (each,)))
    return found


async def _answered(talk: Talk, bound: Bound, asked: Sequence[int | None]) -> Mapping[int | None, str]:
    """Nothing if one of the questions was refused. Raises Unanswered."""
    memory = bound.memory_bytes is not None
    try:
        return commands.parse_bounds(asked, await talk.ask(commands.bounds_of(asked, memory=memory)), memory=memory)
    except Unanswered:
        raise
    except MpsError:
        return {}
