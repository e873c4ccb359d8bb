"""Checks that ask the API server, and the check of the rights of the agent's account. If the API server refuses, or its answer can't be
used, the check reports that."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

from gpumgr.cli.examination.examine import CheckResult, error, error_of, ok, skipped, warning
from gpumgr.common.errors import GpumgrError
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, Right, allowed
from gpumgr.settings import Settings

IF_HUNG: Final = "the API server is overloaded or can't be reached: look at the cluster line of the kubeconfig"
_ACCOUNT: Final = "run it with an account that may read this, for example an administrator's kubeconfig"


async def judged(look: Awaitable[CheckResult]) -> CheckResult:
    """The result of `look`, or its failure as an error."""
    try:
        return await look
    except GpumgrError as failure:
        return error_of(failure, _ACCOUNT if isinstance(failure, AnswerError) else IF_HUNG)
    except API_FAILURES as failure:
        return error(f"the API server can't be asked: {' '.join(str(failure).split()) or 'no answer in time'}", IF_HUNG)
    except (*UNREADABLE, IndexError) as failure:
        return error(f"an object has another structure: {type(failure).__name__}: {failure}", "look at the object with kubectl")


async def ask(settings: Settings, look: Callable[[ApiServer], Awaitable[CheckResult]]) -> CheckResult:
    """Calls `look` with the API server of the settings, and returns the judged result."""
    try:
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
    except GpumgrError as failure:
        return error_of(failure, IF_HUNG)
    try:
        return await judged(look(server))
    finally:
        await server.close()


# -- the rights of the agent's account -----------------------------------------------------------------------------------------

_GRANT: Final = (
    "add them to the agent's ClusterRole: the chart grants them with rbac.create: true, config/examples/rbac.yaml names them all"
)
_EVICT: Final = Right(verb="create", resource="pods", subresource="eviction")


def needed(settings: Settings) -> Iterator[Right]:
    """Rights without which something that the settings require does not work."""
    for verb in ("list", "watch"):
        yield Right(verb=verb, resource="pods")
    if settings.node.mode == "dra":
        for verb in ("get", "list", "watch", "create", "update", "delete"):
            yield Right(verb=verb, resource="resourceslices", group="resource.k8s.io")
        yield Right(verb="get", resource="resourceclaims", group="resource.k8s.io")
        yield Right(verb="get", resource="nodes")
        yield Right(verb="patch", resource="pods")  # makes the kubelet try waiting pods again
    if settings.enforcement.evict:
        yield _EVICT
    if settings.kubernetes.delete_failed_pods:
        yield Right(verb="delete", resource="pods")


def for_people(settings: Settings) -> Iterator[Right]:
    """Rights without which annotations, events or labels are missing, and nothing else changes."""
    kubernetes = settings.kubernetes
    if kubernetes.annotate_pods and settings.node.mode == "plugin":
        yield Right(verb="patch", resource="pods")
    if kubernetes.write_events:
        for verb in ("create", "patch"):
            yield Right(verb=verb, resource="events")
    if kubernetes.describe_node or kubernetes.node_labels:
        yield Right(verb="get", resource="nodes")
    yield Right(verb="patch", resource="nodes")
    if kubernetes.describe_node:
        yield Right(verb="patch", resource="nodes", subresource="status")


def for_drains(settings: Settings) -> Iterator[Right]:
    """Rights that only `gpumgr gpu drain --evict` needs. Granting them is the operator's choice; their absence is no problem."""
    if not settings.enforcement.evict:
        yield _EVICT


async def look_at_rights(settings: Settings, *, timeout_seconds: float) -> CheckResult:
    if not settings.kubernetes.enabled:
        return skipped("standalone: no API server is asked")
    must, wished, drains = tuple(needed(settings)), tuple(for_people(settings)), tuple(for_drains(settings))

    async def look(server: ApiServer) -> CheckResult:
        async with asyncio.timeout(timeout_seconds):
            granted = [right for right in (*must, *wished, *drains) if await allowed(server, right)]
        if missing := [right for right in (*must, *wished) if right not in granted]:
            finding = error if any(right in must for right in missing) else warning
            return finding(f"not allowed: {', '.join(map(str, missing))}", _GRANT)
        without = "".join(
            f"; no drains with evictions: {right} is not granted (rbac.drain)" for right in drains if right not in granted
        )
        return ok(", ".join(map(str, granted)) + without)

    return await ask(settings, look)
