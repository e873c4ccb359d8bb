"""Protocol 3: a namespace for each container, with its limits."""

from collections.abc import Mapping

from gpumgr.allocator.ledger import AllocationId
from gpumgr.enforcement.mps import commands
from gpumgr.enforcement.mps.errors import MpsError
from gpumgr.enforcement.mps.folders import GpuFolder, Share
from gpumgr.enforcement.mps.talk import Talk


async def limit(talk: Talk, folder: GpuFolder, shares: Mapping[AllocationId, Share], *, limit_memory: bool) -> None:
    """Makes what is missing, and makes sure that the daemon will keep the limits: a namespace without any gets the whole GPU.

    Raises MpsError."""
    have = commands.parse_namespaces(await talk.ask(commands.list_namespaces()))
    memory = {name: share.memory_bytes if limit_memory else None for name, share in shares.items()}
    for name, share in shares.items():
        if name not in have:
            await talk.ask(commands.create_namespace(name))
        await talk.ask(commands.limit_namespace(name, share.cores, memory[name]))
    have = commands.parse_namespaces(await talk.ask(commands.list_namespaces()))
    for name, share in shares.items():
        kept = name in have and commands.within(have[name], share.cores, memory[name])
        if not kept or not (folder.namespace(name) / "control").exists():
            raise MpsError(f"the MPS daemon did not take the limits of namespace {name}; see {folder.log}")


async def drop(talk: Talk, name: AllocationId) -> None:
    """Raises MpsError."""
    if name in commands.parse_namespaces(await talk.ask(commands.list_namespaces())):
        await talk.ask(commands.delete_namespace(name))
