"""What a look at one tenant of MPS tells its owner. Pure."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from gpumgr.allocator.ledger import AllocationId
from gpumgr.allocator.tenant import Tenant
from gpumgr.enforcement.backend import Finding, Running
from gpumgr.enforcement.mps.commands import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One GPU's daemon at its last look. `clients`: pid -> namespace. `server_user`: of the server that runs, None if none does.

    `multiuser`: the server takes clients of all users. `tampered`: the limits were not those that the daemon had been told.
    """

    protocol: Protocol
    multiuser: bool
    trouble: str | None = None
    tampered: bool = False
    server_user: int | None = None
    clients: Mapping[int, AllocationId | None] = field(default_factory=dict)


def strangers(running: Running, view: View) -> frozenset[int]:
    """Processes with a context on the GPU that are no clients, or clients in another container's namespace."""
    own = running.tenant.allocation
    mine = {pid for pid, namespace in view.clients.items() if view.protocol == 2 or namespace == own}
    return frozenset(running.gpu_processes.keys() - mine)


def unserved(running: Running, view: View) -> bool:
    """Whether it matters who its processes are: they may wait while the server is another user's. One process that is a client is
    proof enough that they don't: a container's first process may well run as another user."""
    return not view.multiuser and view.server_user is not None and not any(pid in view.clients for pid in running.pids)


def judge(running: Running, view: View, users: Collection[int], lasting: Collection[int]) -> Iterator[Finding]:
    """`users` are the user ids of an unserved container's processes, `lasting` those strangers that several looks have seen."""
    tenant = running.tenant
    who, gpu = tenant.describe(), tenant.gpu
    if view.trouble is not None:
        text = f"MPS on GPU {gpu} does not work at present, CUDA programs that {who} begins now fail: {view.trouble}"
        yield Finding(allocation=tenant.allocation, code="broken", message=text)
        return
    if view.tampered:
        text = (
            f"the limits of MPS on GPU {gpu} were changed through its daemon's control socket, which root in a container that shares "
            "the GPU can reach; gpumgr put them right, and programs that began meanwhile keep theirs until they end: let containers run as "
            "another user than root, or install driver r615 or newer and let the node run empty once"
        )
        yield Finding(allocation=tenant.allocation, code="tampered", message=text)
    if unserved(running, view) and users and view.server_user not in users:
        shown = ", ".join(map(str, sorted(users)))
        text = (
            f"{who} runs as user {shown}, and MPS on GPU {gpu} serves user {view.server_user} until all its processes have ended: "
            "give all containers that share GPUs of this node one runAsUser, or install a driver whose MPS has a multi-user mode"
        )
        yield Finding(allocation=tenant.allocation, code="broken", message=text)
    for pid in sorted(lasting):
        text = (
            f"process {pid} of {who} uses GPU {gpu} outside its MPS limits (it changed CUDA_MPS_PIPE_DIRECTORY?): end it; "
            "with mps.exclusive_process on it would get no GPU at all"
        )
        yield Finding(allocation=tenant.allocation, code="unregistered", message=text)


def lost(tenant: Tenant) -> Finding:
    """It runs, and nothing on disk is kept for it: somebody emptied the folder."""
    text = f"gpumgr's MPS files of {tenant.describe()} below enforcement.run_dir are gone: delete the pod and create it again"
    return Finding(allocation=tenant.allocation, code="broken", message=text)
