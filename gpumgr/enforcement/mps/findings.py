"""The findings about one container of MPS. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from gpumgr.agent.ports import Finding, RunningContainer
from gpumgr.enforcement.backend import finding
from gpumgr.enforcement.mps.commands import MpsProtocol
from gpumgr.ledger.gpu_share import GpuShare
from gpumgr.ledger.ledger import AllocationId


class Tampering(msgspec.Struct, frozen=True):
    """What a container did through the daemon's control socket, such as "changed the limits". `concerned`: the containers with
    changed limits. `root_only`: only a process of root can do that."""

    what: str
    concerned: frozenset[AllocationId]
    root_only: bool


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's daemon at its last check. `clients`: pid -> MPS namespace (the allocation's id; None in protocol 2). `server_user`: the
    user of the server; None: no server runs.

    `multiuser`: the server serves clients of all users. `suspects`: the containers that may have caused `tampering`.
    """

    protocol: MpsProtocol
    multiuser: bool
    trouble: str | None = None
    tampering: Tampering | None = None
    suspects: Sequence[GpuShare] = ()
    server_user: int | None = None
    clients: Mapping[int, AllocationId | None] = msgspec.field(default_factory=dict)


def processes_outside(running: RunningContainer, view: View) -> frozenset[int]:
    """Processes with a context on the GPU that are not clients of MPS, or are clients in another container's namespace."""
    own = running.tenant.allocation
    mine = {pid for pid, namespace in view.clients.items() if view.protocol == 2 or namespace == own}
    return running.gpu_pids - mine


def unserved(running: RunningContainer, view: View) -> bool:
    """Whether the container's processes may wait because the server serves another user. If one of them is a client, none waits, also
    if the container's first process runs as another user."""
    return not view.multiuser and view.server_user is not None and not any(pid in view.clients for pid in running.pids)


def judge(running: RunningContainer, view: View, users: Collection[int], lasting: Collection[int]) -> Iterator[Finding]:
    """The findings. `users`: the user ids of an unserved container's processes; `lasting`: processes that were outside MPS in several
    checks."""
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
    """The finding about a container that runs although its record is gone, because the folder of the records was emptied."""
    text = f"gpumgr's MPS files of {tenant.describe()} below enforcement.run_dir are gone: delete the pod and create it again"
    return finding(tenant, "broken", text)
