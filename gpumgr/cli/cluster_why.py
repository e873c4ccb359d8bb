"""Asks the scheduler about a pod through the API server, so that the command runs on any machine with a kubeconfig.

For the scheduler, the API server's proxy is a remote client, so requests through the proxy need the token of http.token_file. Requests
through `kubectl port-forward` need no token, because they arrive at the scheduler's loopback address.
"""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import msgspec

from gpumgr.cli.formats import cleaned
from gpumgr.cluster.scheduler.api import Kind, Waiting, Why
from gpumgr.common.errors import GpumgrError
from gpumgr.common.foreign_text import UnreadableText, convert, decode_json
from gpumgr.common.units import count_text
from gpumgr.kube.client import REQUEST_TIMEOUT, AnswerError, ApiServer, items_of
from gpumgr.placement.pods import PodKey
from gpumgr.web.responses import PROXIED_AUTHORIZATION

#: Labels of the leader's pod, and of the pods of all replicas. Another replica's answer lacks only the leader's newest decisions, which
#: no watch shows yet.
_SELECTORS: Final = ("gpumgr.io/scheduler-leader=true", "app.kubernetes.io/name=gpumgr-scheduler")
_PORT_NAME: Final = "http"
_DEFAULT_PORT: Final = 5679
_FORWARDED: Final = re.compile(r"Forwarding from 127\.0\.0\.1:([0-9]+) ")
_FORWARD_SECONDS: Final = 20.0

_KINDS: Final[dict[Kind, str]] = {
    "refused": "No node grants such a request",
    "quota": "The quota of its namespace is used up",
    "resources": "No node has enough in total",
    "fragmentation": "Nodes have enough in total, but not on GPUs that it can use",
    "elsewhere": "GPUs are free for it: kube-scheduler has not tried yet, or rejects these nodes itself",
}


class SchedulerLocation(msgspec.Struct, frozen=True, kw_only=True):
    """`pod` None: find the scheduler's pod by its labels. `token` is the content of http.token_file."""

    kubeconfig: Path
    pod: PodKey | None = None
    token: str | None = None


async def ask_scheduler(location: SchedulerLocation, pod: PodKey, *, each_node: bool) -> tuple[dict[str, Any], Why]:
    """The answer as received, and decoded with printable texts. Raises GpumgrError."""
    query = {"namespace": pod[0], "name": pod[1], **({"nodes": "1"} if each_node else {})}
    async with ApiServer.session(location.kubeconfig, remedy="give another --kubeconfig") as server:
        document = await _ask(server, location, await _scheduler(server, location), query)
    try:
        return document, convert(cleaned(document), Why)
    except UnreadableText as error:
        raise GpumgrError(
            f"the scheduler's answer can't be decoded: {error}; it may be of another version than this command"
        ) from error


async def _scheduler(server: ApiServer, location: SchedulerLocation) -> Mapping[str, Any]:
    """Raises GpumgrError."""
    if location.pod is not None:
        namespace, pod = location.pod
        try:
            return await server.read("GET", f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(pod, safe='')}")
        except AnswerError as error:
            raise GpumgrError(f"the scheduler's pod can't be read: {error}") from error
    for selector in _SELECTORS:
        try:
            found = items_of(await server.read("GET", "/api/v1/pods", query={"labelSelector": selector}))
        except AnswerError as error:
            raise GpumgrError(
                f"pods of all namespaces can't be listed ({error}); name the scheduler's pod with --scheduler NAMESPACE/POD"
            ) from error
        running: list[Mapping[str, Any]] = [pod for pod in found if (pod.get("status") or {}).get("phase") == "Running"]
        if running:
            return running[0]
    raise GpumgrError(
        f"no running pod has the label {' or '.join(_SELECTORS)}: gpumgr scheduler does not run in this cluster, or its pods have other "
        "labels: then name one with --scheduler NAMESPACE/POD"
    )


async def _ask(
    server: ApiServer, location: SchedulerLocation, scheduler: Mapping[str, Any], query: Mapping[str, str]
) -> dict[str, Any]:
    """Asks with a token through the API server's proxy, else through a forwarded port. Raises GpumgrError."""
    namespace, pod = scheduler["metadata"]["namespace"], scheduler["metadata"]["name"]
    ports = [port for container in scheduler["spec"].get("containers") or () for port in container.get("ports") or ()]
    port = next((port["containerPort"] for port in ports if port.get("name") == _PORT_NAME), _DEFAULT_PORT)
    if location.token is not None:
        headers = {PROXIED_AUTHORIZATION: f"Bearer {location.token}"}

        def through_proxy(scheme: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
            path = f"/api/v1/namespaces/{namespace}/pods/{scheme}:{pod}:{port}/proxy/api/why"
            return server.request("GET", path, query, headers=headers)

        return await _answer(through_proxy, f"the scheduler's pod {namespace}/{pod} can't be reached through the API server")
    async with (
        _forwarded(location.kubeconfig, namespace, pod, port) as local,
        aiohttp.ClientSession(timeout=REQUEST_TIMEOUT) as session,
    ):

        def through_port(scheme: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
            # No certificate is checked: the connection goes through the API server, which kubectl has authenticated.
            return session.get(f"{scheme}://127.0.0.1:{local}/api/why", params=query, ssl=False)

        return await _answer(through_port, "the scheduler does not answer at the forwarded port")


async def _answer(request: Callable[[str], AbstractAsyncContextManager[aiohttp.ClientResponse]], failed: str) -> dict[str, Any]:
    """Tries HTTP, then HTTPS, because only an attempt shows whether the port serves TLS. Raises GpumgrError; without an answer its
    message begins with `failed`."""
    failures = []
    for scheme in ("http", "https"):
        try:
            async with request(scheme) as response:
                text = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            failures.append(f"{scheme}: {str(error) or 'no answer in time'}")
            continue
        try:
            document = decode_json(text)
        except UnreadableText:
            document = {"message": text.decode(errors="replace")}
        match document:
            case {"error": sentence}:
                raise GpumgrError(str(sentence))
            case dict() if response.status == 200:
                return document
            case {"message": message}:
                failures.append(f"{scheme}: HTTP {response.status}: {' '.join(str(message).split())[:300]}")
            case _:
                failures.append(f"{scheme}: HTTP {response.status}")
        if response.status == 403:
            break
    raise GpumgrError(f"{failed}: {'; '.join(failures)}")


@asynccontextmanager
async def _forwarded(kubeconfig: Path, namespace: str, pod: str, port: int) -> AsyncIterator[int]:
    """A port of this machine that is forwarded to the pod's port. Raises GpumgrError."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise GpumgrError(
            "kubectl is not installed, and without a token its port-forward is needed: install it, or set http.token_file of the "
            "scheduler and give the token with --token-file FILE"
        )
    target = ("port-forward", "--address", "127.0.0.1", f"pod/{pod}", f":{port}")
    process = await asyncio.create_subprocess_exec(
        kubectl,
        *("--kubeconfig", str(kubeconfig), "--namespace", namespace, *target),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None, "it is a pipe"
    assert process.stderr is not None, "it is a pipe"
    try:
        try:
            async with asyncio.timeout(_FORWARD_SECONDS):
                line = (await process.stdout.readline()).decode(errors="replace")
                found = _FORWARDED.match(line)
                text = "" if found else " ".join((await process.stderr.read()).decode(errors="replace").split())
        except TimeoutError:
            found, text = None, f"it printed nothing for {_FORWARD_SECONDS:g} s"
        if found is None:
            raise GpumgrError(f"kubectl port-forward to the scheduler's pod {namespace}/{pod} failed: {text[:300]}")
        yield int(found[1])
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


# -- text --------------------------------------------------------------------------------------------------------------------


def why_text(why: Why) -> str:
    """The texts of `why` must be printable (`cleaned`)."""
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
        yield f"  {count_text(group.count, 'node')}: {group.reason}{closest}"
        for node, detail in group.nodes:
            yield f"    {node}{f': {detail}' if detail else ''}"
