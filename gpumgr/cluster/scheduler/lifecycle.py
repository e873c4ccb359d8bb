"""The scheduler's process: credentials, watches, servers, the Lease and the shutdown."""

import asyncio
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

import structlog
from aiohttp import web

from gpumgr.cluster.scheduler.binding import pod_path
from gpumgr.cluster.scheduler.extender import Extender
from gpumgr.cluster.scheduler.hami_webhook import webhook_application
from gpumgr.cluster.scheduler.leader import Leadership, Replica
from gpumgr.cluster.scheduler.pages import ClusterPages, page_server, serve_pages
from gpumgr.cluster.scheduler.rejections import retry_waiting_pods
from gpumgr.cluster.scheduler.server import make_application
from gpumgr.cluster.scheduler.watches import ClusterWatches
from gpumgr.common.aio import persistently, run_until
from gpumgr.common.errors import InputError
from gpumgr.kube.client import ApiServer
from gpumgr.settings import Settings
from gpumgr.settings.profile import replica_resources
from gpumgr.settings.schema import ClaimsSettings, SchedulerSettings
from gpumgr.web.credentials import Certificates
from gpumgr.web.http_server import HttpServer, Limits

_log = structlog.get_logger(__name__)

REMEDY: Final = "give --kubeconfig FILE, or run in a pod with a service account"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def certificates(settings: SchedulerSettings, host: str, *, insecure_loopback: bool) -> Certificates | None:
    """The server's certificates; clients must present one, too. None: plain HTTP, which `insecure_loopback` allows on a loopback address.
    Raises InputError for any other combination."""
    cert_file, key_file, client_ca_file = settings.tls_cert_file, settings.tls_key_file, settings.client_ca_file
    if insecure_loopback:
        if cert_file is not None:
            raise InputError("--insecure-loopback serves plain HTTP, and scheduler.tls_cert_file is set; remove one of them")
        if not ip_address(host).is_loopback:
            raise InputError(
                f"--insecure-loopback needs a loopback address in --listen, for example 127.0.0.1:12345; {host} is none"
            )
        return None
    if cert_file is None or key_file is None or client_ca_file is None:
        raise InputError(
            "set scheduler.tls_cert_file, scheduler.tls_key_file and scheduler.client_ca_file; for first steps, add --insecure-loopback, "
            "and run the extender on the machine of kube-scheduler"
        )
    return Certificates(cert_file, key_file, client_ca_file, section="scheduler", clients_required=True)


def verb_server(
    application: web.Application, listen: tuple[str, int], tls: Certificates | None, *, stop_seconds: float
) -> HttpServer:
    # Go's client keeps only two idle connections, so a burst of binds opens many new ones.
    limits = Limits(connections=4096, request_seconds=30.0, stop_seconds=stop_seconds)
    host, port = listen
    return HttpServer(application, host=host, port=port, tls=tls, limits=limits)


def webhook(settings: Settings, host: str) -> HttpServer | None:
    """The webhook's server; None if the setting webhook.port is 0. Raises InputError."""
    wanted, hami = settings.webhook, replica_resources(settings)
    if not wanted.port:
        return None
    if hami is None or wanted.tls_cert_file is None or wanted.tls_key_file is None:
        raise InputError(
            "webhook.port needs `node.profile: hami` or `node.profile: both`, webhook.tls_cert_file and webhook.tls_key_file; set "
            "them, or the port to 0"
        )
    application = webhook_application(hami, wanted)
    tls = Certificates(wanted.tls_cert_file, wanted.tls_key_file, None, section="webhook")
    return verb_server(application, (host, wanted.port), tls, stop_seconds=settings.process.stop_grace_seconds)


def this_replica(settings: SchedulerSettings | ClaimsSettings, section: str = "scheduler") -> Replica:
    """This process as a candidate for the Lease. Raises InputError if the namespace is not known."""
    namespace = settings.lease_namespace or _pod_namespace()
    if namespace is None:
        raise InputError(f"outside of a pod, set {section}.lease_namespace to the namespace of the Lease")
    identity = f"{os.environ.get('POD_NAME') or socket.gethostname()}_{secrets.token_hex(8)}"
    return Replica(namespace=namespace, lease=settings.lease_name, identity=identity, pod=os.environ.get("POD_NAME"))


def own_pod_path() -> str | None:
    """The API path of this process's pod, from the downward API or the service account; None: not known."""
    name, namespace = os.environ.get("POD_NAME"), _pod_namespace()
    return pod_path(namespace, name) if name and namespace else None


def _pod_namespace() -> str | None:
    with suppress(OSError):
        return os.environ.get("POD_NAMESPACE") or _SERVICE_ACCOUNT.read_text().strip() or None
    return None


async def run_scheduler(
    settings: Settings, kubeconfig: Path | None, listen: tuple[str, int], *, insecure_loopback: bool, stop: asyncio.Event
) -> None:
    """Serves until `stop` is set. Then it finishes the requests that still run, and gives up the Lease. Raises InputError for credentials,
    certificates or an address that can't be used."""
    wanted = settings.scheduler
    tls = certificates(wanted, listen[0], insecure_loopback=insecure_loopback)
    hami_webhook = webhook(settings, listen[0])
    replica = this_replica(wanted) if wanted.leader_election else None
    server, lease_server = await connections(kubeconfig or settings.kubernetes.kubeconfig)
    watches = ClusterWatches(server, wanted, hami=replica_resources(settings))
    leadership = Leadership(lease_server, replica, watches.refresh) if replica is not None else None
    extender = Extender(server, watches, wanted, leadership=leadership)
    pages = ClusterPages(server, watches, wanted.policy, leader=lambda: extender.answers)
    web_server = page_server(pages.routes(), watches, settings, wanted.http_port)
    application = make_application(
        extender,
        max_request_mebibytes=wanted.max_request_mebibytes,
        client_names=wanted.client_names,
        answered=pages.metrics.answered,
    )
    verbs = verb_server(application, listen, tls, stop_seconds=settings.process.stop_grace_seconds)
    daemons: list[Coroutine[Any, Any, object]] = [watches.run(), persistently("assumed pods", extender.run)]
    if (own_pod := own_pod_path()) is not None:
        daemons.append(persistently("waiting pods", partial(retry_waiting_pods, server, extender.retryable, own_pod)))

    async def start() -> None:
        await verbs.start()
        _log.info("scheduler_listening", url=verbs.url, client_certificates=tls is not None)
        if hami_webhook is not None:
            await hami_webhook.start()
            _log.info("webhook_listening", url=hami_webhook.url)
        await serve_pages(web_server, lost="no cluster page, metrics or `gpumgr why`; pods are still scheduled")

    servers = [verbs, web_server] if hami_webhook is None else [verbs, web_server, hami_webhook]
    await serve(stop, start, servers, daemons, leadership, (server, lease_server))


async def serve(
    stop: asyncio.Event,
    start: Callable[[], Awaitable[None]],
    servers: Sequence[HttpServer],
    daemons: Iterable[Coroutine[Any, Any, object]],
    leadership: Leadership | None,
    clients: Iterable[ApiServer],
) -> None:
    """Runs until `stop` is set or a daemon fails. `start` starts the `servers`. The Lease is renewed until the last request has ended."""
    leading = [leadership.run()] if leadership is not None else []
    running = asyncio.create_task(_together(*daemons, *leading))
    try:
        await start()
        serving = await run_until(stop.wait(), asyncio.shield(running))
        if not serving.cancelled():
            serving.result()
    finally:
        await asyncio.gather(*(each.stop() for each in servers))
        running.cancel()
        await asyncio.wait([running])
        if leadership is not None:
            await leadership.release()
        for each in clients:
            await each.close()


async def connections(kubeconfig: Path | None) -> tuple[ApiServer, ApiServer]:
    """Two clients. The second client is only for the Lease, because bindings can use up all connections of the first client. The second one
    ignores Retry-After, because a leader must renew its Lease in time. Raises SettingsError."""
    lease_server = await ApiServer.connect(kubeconfig, remedy=REMEDY, max_retry_after_seconds=0.0)
    return await ApiServer.connect(kubeconfig, remedy=REMEDY), lease_server


async def _together(*daemons: Coroutine[Any, Any, object]) -> None:
    async with asyncio.TaskGroup() as group:
        for daemon in daemons:
            group.create_task(daemon)
