"""The text of `gpumgr why` for a pod as the scheduler sees it. The texts of a `Why` are printable."""

from collections.abc import Iterator
from typing import Final

from gpumgr.cluster.scheduler.api import Kind, Waiting, Why

_KINDS: Final[dict[Kind, str]] = {
    "refused": "No node grants such a request",
    "quota": "The quota of its namespace is used up",
    "resources": "No node has enough in total",
    "fragmentation": "Nodes have enough in total, but not on GPUs that it can use",
    "elsewhere": "GPUs are free for it: kube-scheduler has not tried yet, or rejects these nodes itself",
}


def why_text(why: Why) -> str:
    return "\n".join(_lines(why))


def _lines(why: Why) -> Iterator[str]:
    name = f"Pod {why.namespace}/{why.pod}"
    if why.waiting is not None:
        yield f"{name} waits. It requests {why.waiting.request or 'GPUs'}."
        yield from _waiting(why.waiting)
        if why.condition:
            yield ""
            yield f"kube-scheduler: {why.condition}"
            yield "CPU, memory, taints and affinity are kube-scheduler's own filters, which only its message shows."
    elif why.node:
        yield f"{name} is bound to node {why.node}."
        for container, gpus in why.gpus.items():
            shares = ", ".join(f"{cores} cores and {memory} MiB of GPU {gpu}" for gpu, cores, memory in gpus)
            yield f"  {container}: {shares}"
        yield f"`gpumgr why {why.namespace}/{why.pod}` on that node shows what its agent did."
    else:
        yield f"{name} is not bound{f' ({why.phase})' if why.phase else ''}."
    if why.problem:
        yield f"Note: {why.problem}."


def _waiting(waiting: Waiting) -> Iterator[str]:
    yield f"{_KINDS[waiting.kind]}{f': {waiting.limit}' if waiting.limit else ''}."
    if waiting.groups:
        yield ""
    for group in waiting.groups:
        closest = f" (closest: {group.closest})" if group.closest and not group.nodes else ""
        yield f"  {group.count} {'node' if group.count == 1 else 'nodes'}: {group.reason}{closest}"
        for node, detail in group.nodes:
            yield f"    {node}{f': {detail}' if detail else ''}"
