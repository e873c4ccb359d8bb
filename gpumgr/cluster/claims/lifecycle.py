"""The life of the controller's process: credentials, watches, the Lease, the probes, and its end."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

from gpumgr.cluster.claims.controller import ClaimsController
from gpumgr.cluster.claims.pages import ClaimsPages
from gpumgr.cluster.claims.watches import ClaimWatches
from gpumgr.cluster.scheduler.leader import Leadership
from gpumgr.cluster.scheduler.lifecycle import connections, run_together, this_replica
from gpumgr.cluster.scheduler.pages import page_server, serve_pages
from gpumgr.common.aio import persistently, run_until
from gpumgr.settings import Settings
from gpumgr.settings.profile import replica_resources


async def run_claims(settings: Settings, kubeconfig: Path | None, *, stop: asyncio.Event) -> None:
    """Works until `stop` is set, then gives the Lease up. Raises InputError for credentials or settings that can't be used."""
    wanted = settings.claims
    # Nothing is sent to the leader, so its pod needs no label.
    replica = replace(this_replica(wanted, "claims"), pod=None) if wanted.leader_election else None
    server, lease_server = await connections(kubeconfig or settings.kubernetes.kubeconfig)
    watches = ClaimWatches(server, settings.scheduler, hami=replica_resources(settings))
    leadership = Leadership(lease_server, replica, watches.refresh) if replica is not None else None
    controller = ClaimsController(server, watches, wanted, socket.gethostname(), leader=leadership)
    web_server = page_server(ClaimsPages(watches, controller), settings, wanted.http_port)
    try:
        await serve_pages(web_server, lost="no metrics or probes; templates are created and gates removed")
        leading = [leadership.run()] if leadership is not None else []
        daemons = run_together(watches.run(), persistently("claims", controller.run), *leading)
        working = await run_until(stop.wait(), daemons)
        if not working.cancelled():
            working.result()
    finally:
        await web_server.stop()
        if leadership is not None:
            await leadership.release()
        for each in (server, lease_server):
            await each.close()
