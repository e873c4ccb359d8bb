"""Restricts a pod to the GPUs that its annotations demand. The agent does this itself, because the pod's scheduler may not know these
annotations. Pure."""

from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from gpumgr.common.errors import Refusal
from gpumgr.common.units import CORES_PER_GPU, GpuName
from gpumgr.ledger.callers import Caller
from gpumgr.ledger.choose import Choice, Request
from gpumgr.ledger.ledger import Ledger
from gpumgr.ledger.node import NodeView
from gpumgr.placement.pods import PodView
from gpumgr.placement.requests import UNCONSTRAINED

Select = Callable[[NodeView, Ledger, Caller, Request], Choice]


def choose_demanded(select: Select, node: NodeView, ledger: Ledger, caller: Caller, request: Request) -> Choice:
    """What `select` chooses among the GPUs that the pod demands. Raises Refusal."""
    view = caller.view
    if view is None or (view.constraints == UNCONSTRAINED and view.unreadable is None):
        return select(node, ledger, caller, request)
    refuse_undemanded(node, view, ())
    closed = {gpu: problem for gpu in node.rows if (problem := _problem(node, view, gpu, ledger))}
    # The containers after an init container use its GPUs.
    chain = caller.chain if caller.init else caller.chain[:1]
    wanted = max((spec.cores // CORES_PER_GPU or spec.wants("replica") for spec in chain), default=1)
    last = Refusal("no_fit", f"the pod demands {wanted} GPUs of one NUMA node, and the driver reports no GPU's NUMA node")
    for numa in _numa_nodes(node, node.rows) if view.constraints.same_numa_node and wanted > 1 else [None]:
        far = {gpu: "is on another NUMA node" for gpu in node.rows if numa is not None and _numa_nodes(node, [gpu]) != [numa]}
        undemanded = {**far, **closed}
        # A GPU that only its MIG mode closes is open for MIG devices.
        demanded = replace(
            node,
            unschedulable={**node.unschedulable, **undemanded},
            in_mig_mode=[gpu for gpu in node.in_mig_mode if gpu not in undemanded],
        )
        try:
            return select(demanded, ledger, caller, request)
        except Refusal as refusal:
            last = refusal
    raise last


def refuse_undemanded(node: NodeView, view: PodView | None, gpus: Collection[GpuName], ledger: Ledger | None = None) -> None:
    """Raises Refusal if a container of the pod may not have these GPUs. With a `ledger`, other containers on them count, too."""
    if view is None:
        return
    if view.unreadable is not None:
        raise Refusal("invalid_request", view.unreadable)
    if view.constraints == UNCONSTRAINED:
        return
    for gpu in gpus:
        if problem := _problem(node, view, gpu, ledger):
            raise Refusal("conflict", f"{node.label(gpu)} can't be granted: it {problem}")
    if view.constraints.same_numa_node and len(gpus) > 1 and len({*_numa_nodes(node, gpus, unknown=-1)}) > 1:
        names = ", ".join(map(node.label, gpus))
        raise Refusal("conflict", f"the pod demands GPUs of one NUMA node, and {names} are on several")


def _problem(node: NodeView, view: PodView, gpu: GpuName, ledger: Ledger | None) -> str | None:
    shown, wanted = node.shown.get(gpu), replace(view.constraints, unused=False)
    if shown is None:
        return None
    mig = bool(shown.mig_enabled or node.mig_profiles.get(gpu))
    if not wanted.allows(shown.uuid, shown.model or "", mig=mig):
        return f"is {shown.model or 'of an unknown model'} {shown.uuid}, and the pod demands a GPU{wanted.text}"
    others = ledger.on(gpu) if view.constraints.unused and ledger is not None else ()
    other = next((each for each in others if not (each.of_pod(view.key, view.uid) or each.admin)), None)
    return f"has {other.describe()}, and the pod demands a GPU without other containers" if other else None


def _numa_nodes(node: NodeView, gpus: Iterable[GpuName], unknown: int | None = None) -> list[int]:
    """Ascending, each once; `unknown` replaces a node that is not known."""
    found = {shown.numa_node if shown.numa_node is not None else unknown for gpu in gpus if (shown := node.shown.get(gpu))}
    return sorted(numa for numa in found if numa is not None)
