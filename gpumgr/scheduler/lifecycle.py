"""The life of the scheduler's process: credentials, watches, the listening socket, and its end."""

import asyncio
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from gpumgr.aio import run_until
from gpumgr.cluster.index import ClusterIndex
from gpumgr.cluster.quota import Quotas
from gpumgr.errors import InputError
from gpumgr.kubeapi.client import ApiServer
from gpumgr.scheduler.extender import Extender
from gpumgr.scheduler.pages import ClusterServer, make_pages
from gpumgr.scheduler.server import make_application
from gpumgr.scheduler.watches import ClusterWatches
from gpumgr.settings import Settings

_log = structlog.get_logger(__name__)

_REMEDY: Final = "give --kubeconfig FILE, or run in a pod with a service account"
#: Go's client keeps two idle connections only, so a burst of binds opens many.
_BACKLOG: Final = 1024


def parse_listen(text: str) -> tuple[str, int]:
    """The address and port of "127.0.0.1:12345" or "[::1]:12345"; port 0 takes a free one. Raises InputError."""
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip_address(host)
    except ValueError as error:
        raise InputError(f"--listen {text!r}: expected ADDRESS:PORT with an IP address, for example 127.0.0.1:12345") from error
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        raise InputError(f"--listen {text!r}: the port must be a whole number from 0 to 65535")
    return host, int(port)


def check_transport(host: str, *, insecure_loopback: bool) -> None:
    """Raises InputError unless plain HTTP is wanted and reaches this machine only."""
    if not insecure_loopback:
        raise InputError(
            "this version serves the extender over plain HTTP only, without client certificates; add --insecure-loopback, and run it on "
            "the machine of kube-scheduler"
        )
    if not ip_address(host).is_loopback:
        raise InputError(f"--insecure-loopback needs a loopback address in --listen, for example 127.0.0.1:12345; {host} is none")


async def run_scheduler(settings: Settings, kubeconfig: Path | None, listen: tuple[str, int], *, stop: asyncio.Event) -> None:
    """Serves until `stop` is set. Requests that run then are finished.

    Raises InputError for credentials or an address that can't be used.
    """
    server = await ApiServer.connect(kubeconfig or settings.kubernetes.kubeconfig, remedy=_REMEDY)
    quotas = Quotas()
    index = ClusterIndex([quotas])
    watches = ClusterWatches(server, index, quotas, settings.scheduler)
    extender = Extender(server, index, quotas, watches, settings.scheduler)
    pages, metrics = make_pages(server, index, watches, quotas, settings)
    cluster_server = ClusterServer(pages, settings)
    application = make_application(
        extender, max_request_mebibytes=settings.scheduler.max_request_mebibytes, middlewares=[metrics.middleware]
    )
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=settings.process.stop_grace_seconds)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, *listen, backlog=_BACKLOG).start()
        except OSError as error:
            raise InputError(f"can't listen on {listen[0]}:{listen[1]}: {error.strerror}; give another --listen") from error
        _log.info("scheduler_listening", address=runner.addresses[0][0], port=runner.addresses[0][1], transport="plain HTTP")
        await cluster_server.start()
        watching = await run_until(stop.wait(), watches.run())
        if not watching.cancelled():
            watching.result()
    finally:
        await runner.cleanup()
        await cluster_server.stop()
        await server.close()
