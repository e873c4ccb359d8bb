"""What the agent's account may do in the API server."""

import asyncio
from collections.abc import Iterator
from typing import Final

import aiohttp

from gpumgr.doctor.finding import Finding, error, error_of, ok, skipped, warning
from gpumgr.errors import GpumgrError
from gpumgr.kubeapi.access import Right, allowed
from gpumgr.kubeapi.client import ApiServer
from gpumgr.settings import Settings

IF_HUNG: Final = "the API server is overloaded or can't be reached: look at the cluster line of the kubeconfig"
_REACH: Final = "look whether the address in the kubeconfig is right and can be reached from this node"
_GRANT: Final = "add the rules of config/examples/rbac.yaml to the agent's ClusterRole"


def needed(settings: Settings) -> Iterator[Right]:
    """Rights without which something that the settings ask for does not work."""
    for verb in ("list", "watch"):
        yield Right(verb=verb, resource="pods")
    if settings.enforcement.evict:
        yield Right(verb="create", resource="pods", subresource="eviction")
    if settings.kubernetes.delete_failed_pods:
        yield Right(verb="delete", resource="pods")


def for_people(settings: Settings) -> Iterator[Right]:
    """Rights without which people are told less, or can't drain GPUs with evictions (`gpumgr gpu drain --evict`), and nothing else is
    different."""
    kubernetes = settings.kubernetes
    if not settings.enforcement.evict:
        yield Right(verb="create", resource="pods", subresource="eviction")
    if kubernetes.annotate_pods:
        yield Right(verb="patch", resource="pods")
    if kubernetes.write_events:
        for verb in ("create", "patch"):
            yield Right(verb=verb, resource="events")
    if kubernetes.describe_node or kubernetes.node_labels:
        yield Right(verb="get", resource="nodes")
    yield Right(verb="patch", resource="nodes")
    if kubernetes.describe_node:
        yield Right(verb="patch", resource="nodes", subresource="status")


async def look_at_rights(settings: Settings, *, timeout_seconds: float) -> Finding:
    name = "rbac"
    if not settings.kubernetes.enabled:
        return skipped(name, "standalone: no API server is asked")
    must = tuple(needed(settings))
    asked = (*must, *for_people(settings))
    try:
        server = await ApiServer.connect(settings.kubernetes.kubeconfig)
        try:
            async with asyncio.timeout(timeout_seconds):
                missing = [right for right in asked if not await allowed(server, right)]
        finally:
            await server.close()
    except GpumgrError as exception:
        return error_of(name, exception, _REACH)
    except (aiohttp.ClientError, TimeoutError, OSError) as exception:
        reason = " ".join(str(exception).split()) or "no answer in time"
        return error(name, f"the API server can't be asked: {reason}", _REACH)
    if not missing:
        return ok(name, ", ".join(map(str, asked)))
    told = error if set(missing) & set(must) else warning
    return told(name, f"not allowed: {', '.join(map(str, missing))}", _GRANT)
