"""The process of `gpumgr claims`: watches, Lease, metrics, probes and shutdown."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web
from msgspec.structs import replace

from gpumgr.cluster.claims.controller import OBJECTS, OUTCOMES, ClaimsController
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.cluster.scheduler.lifecycle import connections, serve, this_replica
from gpumgr.cluster.scheduler.metrics import Samples, process_gauges
from gpumgr.cluster.scheduler.pages import Routes, page_server, serve_pages
from gpumgr.common.aio import persistently
from gpumgr.common.prometheus_text import Family, counter, gauge, page, render_all
from gpumgr.settings import Settings
from gpumgr.settings.profile import replica_resources
from gpumgr.web.responses import metrics_response

_PROCESS: Final = process_gauges("claims", "writes")
_OWN: Final[Mapping[Family, Callable[[ClaimWatches, ClaimsController], Samples]]] = {
    gauge("claims_templates", "ResourceClaimTemplates of gpumgr in all namespaces."): lambda watches, _: {
        (): sum(each.managed for each in watches.templates.values())
    },
    gauge("claims_gated_pods", "Pods with the scheduling gate gpumgr.io/quota."): lambda watches, _: {
        (): sum(each.gate is not None for each in watches.pods.values())
    },
    gauge("claims_refused_pods", "Pods with the gate that the quota of their namespace does not allow."): lambda _, controller: {
        (): controller.refused
    },
    counter(
        "claims_writes_total",
        "Requests that write, by object (template, gate, event, sweep: a template that is deleted) and outcome (ok, error).",
        "object",
        "outcome",
    ): lambda _, controller: {(about, outcome): controller.writes[about, outcome] for about in OBJECTS for outcome in OUTCOMES},
}
FAMILIES: Final = (*_PROCESS, *_OWN)


def claims_routes(watches: ClaimWatches, controller: ClaimsController) -> Routes:
    async def scrape(_: web.Request) -> web.Response:
        families = {family: read(watches, controller.leads) for family, read in _PROCESS.items()}
        families |= {family: read(watches, controller) for family, read in _OWN.items()}
        return metrics_response(page(render_all(families), openmetrics=False))

    return {"/metrics": ("metrics", scrape)}


async def run_claims(settings: Settings, kubeconfig: Path | None, *, stop: asyncio.Event) -> None:
    """Works until `stop` is set, then gives the Lease up. Raises InputError for credentials or settings that can't be used."""
    wanted = settings.claims
    # Nothing is sent to the leader, so its pod needs no label.
    replica = replace(this_replica(wanted, "claims"), pod=None) if wanted.leader_election else None
    server, lease_server = await connections(kubeconfig or settings.kubernetes.kubeconfig)
    watches = ClaimWatches(server, settings.scheduler, hami=replica_resources(settings))
    leadership = Leadership(lease_server, replica, watches.refresh) if replica is not None else None
    controller = ClaimsController(server, watches, wanted, socket.gethostname(), leader=leadership)
    web_server = page_server(claims_routes(watches, controller), watches, settings, wanted.http_port)
    start = partial(serve_pages, web_server, lost="no metrics or probes; templates are still created, and gates removed")
    daemons = watches.run(), persistently("claims", controller.run)
    await serve(stop, start, [web_server], daemons, leadership, (server, lease_server))
