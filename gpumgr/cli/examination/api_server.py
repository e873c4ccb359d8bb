"""Checks that ask the API server: the rights of the agent's account, and mode dra. A refusal or unusable answer becomes the finding."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec.structs import asdict

from gpumgr.cli.examination import PEER_SECONDS, CheckResult, aside, error, error_of, ok, skipped, warning
from gpumgr.cli.examination.gpus import SharedNvml
from gpumgr.common.errors import GpumgrError
from gpumgr.common.units import DRA_DRIVER
from gpumgr.common.unix_socket import is_served
from gpumgr.kube.client import API_FAILURES, UNREADABLE, AnswerError, ApiServer, unreadable_text
from gpumgr.kube.pods import parse_quantity
from gpumgr.kubelet.claim_reader import find_shares
from gpumgr.kubelet.dra_registration import socket_patterns
from gpumgr.kubelet.slices import SLICES, dropped, probe_slice, slice_name
from gpumgr.ledger.store import read_checkpoint
from gpumgr.settings import Settings
from gpumgr.settings.schema import KubeletSettings

T = TypeVar("T")

IF_HUNG: Final = "the API server is overloaded or can't be reached: check the server's address in the kubeconfig"
_ACCOUNT: Final = "run gpumgr doctor with an account that may read this, for example an administrator's kubeconfig"


async def judged(look: Callable[[T], Awaitable[CheckResult]], peer: T) -> CheckResult:
    """Calls `look`, and returns its result, or the finding about its exception."""
    try:
        return await look(peer)
    except GpumgrError as failure:
        return error_of(failure, _ACCOUNT if isinstance(failure, AnswerError) else IF_HUNG)
    except API_FAILURES as failure:
        return error(f"the API server can't be asked: {' '.join(str(failure).split()) or 'no answer in time'}", IF_HUNG)
    except (*UNREADABLE, IndexError) as failure:
        return error(f"an object has an unexpected structure: {unreadable_text(failure)}", "look at the object with kubectl")


async def ask(settings: Settings, look: Callable[[ApiServer], Awaitable[CheckResult]]) -> CheckResult:
    """Calls `look` with the API server of the settings."""
    try:
        async with ApiServer.session(settings.kubernetes.kubeconfig) as server:
            return await judged(look, server)
    except GpumgrError as failure:
        return error_of(failure, IF_HUNG)


_REVIEWS: Final = "authorization.k8s.io/v1"


class Right(msgspec.Struct, frozen=True, kw_only=True):
    """One verb on one resource. `group` "" is the core API group. `namespace` None means all namespaces."""

    verb: str
    resource: str
    subresource: str | None = None
    group: str = ""
    namespace: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"{self.verb} {'/'.join(filter(None, (self.resource, self.subresource)))}"


async def allowed(server: ApiServer, right: Right, *, user: str | None = None) -> bool:
    """Whether this account, or `user`, has the right. A question about `user` needs the right to create SubjectAccessReviews. Raises the
    errors that `judged` handles."""
    kind = "SelfSubjectAccessReview" if user is None else "SubjectAccessReview"
    attributes = {key: value for key, value in asdict(right).items() if value is not None}
    spec = {"resourceAttributes": attributes} | ({} if user is None else {"user": user})
    body = {"apiVersion": _REVIEWS, "kind": kind, "spec": spec}
    answer = await server.read("POST", f"/apis/{_REVIEWS}/{kind.lower()}s", body)
    return answer["status"]["allowed"] is True


# -- the rights of the agent's account -----------------------------------------------------------------------------------------

_GRANT: Final = (
    "add them to the agent's ClusterRole: the chart grants them with rbac.create: true, config/examples/rbac.yaml names them all"
)


def needed(settings: Settings) -> Iterator[Right]:
    """Rights without which the agent, or a function that the settings switch on, does not work."""
    for verb in ("list", "watch"):
        yield Right(verb=verb, resource="pods")
    if settings.node.mode == "dra":
        for verb in ("get", "list", "watch", "create", "update", "delete"):
            yield Right(verb=verb, resource="resourceslices", group="resource.k8s.io")
        yield Right(verb="get", resource="resourceclaims", group="resource.k8s.io")
        yield Right(verb="get", resource="nodes")
        yield Right(verb="patch", resource="pods")  # makes the kubelet try waiting pods again
    if settings.enforcement.evict:
        yield Right(verb="create", resource="pods", subresource="eviction")
    if settings.kubernetes.delete_failed_pods:
        yield Right(verb="delete", resource="pods")


def recommended_rights(settings: Settings) -> Iterator[Right]:
    """Without these rights only annotations, events, labels or the node's condition are missing."""
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


async def look_at_rights(settings: Settings, *, timeout_seconds: float = PEER_SECONDS) -> CheckResult:
    if not settings.kubernetes.enabled:
        return skipped("standalone: no API server is asked")
    must, recommended = tuple(needed(settings)), tuple(recommended_rights(settings))

    async def look(server: ApiServer) -> CheckResult:
        async with asyncio.timeout(timeout_seconds):
            granted = [right for right in (*must, *recommended) if await allowed(server, right)]
        if missing := [right for right in (*must, *recommended) if right not in granted]:
            finding = error if any(right in must for right in missing) else warning
            return finding(f"not allowed: {', '.join(map(str, missing))}", _GRANT)
        return ok(", ".join(map(str, granted)))

    return await ask(settings, look)


_START: Final = "start the agent, and look at its log for registration_failed, slice_not_published or registration_waits"
_FOLDER: Final = "start the kubelet, or set kubelet.plugins_dir and kubelet.plugins_registry_dir to the folders in its --root-dir"
_STANDALONE: Final = "node.mode dra needs the API server"
_ENABLE: Final = "set kubernetes.enabled to true, or node.mode to plugin"
#: The most claims that are read, one by one.
_MAX_CLAIMS: Final = 100


async def look_at_mode(mode: str) -> CheckResult:
    return ok(f"{mode}: GPUs are offered " + ("to ResourceClaims" if mode == "dra" else "by the device plugin API"))


def look_at_sockets(kubelet: KubeletSettings) -> CheckResult:
    """Whether the kubelet's folders can be written, and whether gpumgr's DRA driver listens there."""
    for folder in (kubelet.plugins_dir, kubelet.plugins_registry_dir):
        if not folder.is_dir():
            return error(f"{folder} is no folder", _FOLDER)
        if not os.access(folder, os.W_OK | os.X_OK):
            return error(f"{folder} is not writable", "run gpumgr as root")
    of_driver, of_registration = socket_patterns()
    places = ((kubelet.plugins_dir / DRA_DRIVER, of_driver), (kubelet.plugins_registry_dir, of_registration))
    served = {
        place: [each for each in sorted(place[0].glob(place[1])) if each.is_socket() and is_served(each)] for place in places
    }
    if away := [f"{folder}/{pattern}" for (folder, pattern), found in served.items() if not found]:
        return warning(f"the driver {DRA_DRIVER} does not listen at {' and '.join(away)}", _START)
    return ok(f"the driver {DRA_DRIVER} listens at {' and '.join(str(path) for found in served.values() for path in found)}")


async def look_at_slice(settings: Settings, gpus: SharedNvml) -> CheckResult:
    """Which parts of a ResourceSlice the API server stores (by a dry run), and whether the slice has the GPUs that NVIDIA's driver
    lists."""
    if not settings.kubernetes.enabled:
        return error(_STANDALONE, _ENABLE)
    return await ask(settings, partial(_slice, settings.node.name, gpus))


async def _slice(node: str, gpus: SharedNvml, server: ApiServer) -> CheckResult:
    version = str((await server.read("GET", "/version")).get("gitVersion", "version unknown"))
    probe = probe_slice(node)
    try:
        loss = dropped(probe, await server.read("POST", SLICES, probe, query={"dryRun": "All"}))
    except AnswerError as answer:
        if answer.status != 404:
            raise
        return error(f"the API server ({version}) has no resource.k8s.io/v1", "use Kubernetes 1.36 or later, or node.mode plugin")
    if loss is not None:
        what, _, remedy = loss.sentence.partition("; ")
        return (error if loss.sharing else warning)(f"API server {version}: {what}", remedy)
    stored = await server.find(f"{SLICES}/{slice_name(node)}")
    if stored is None:
        return warning(f"API server {version}: the node has no ResourceSlice {slice_name(node)}", _START)
    published = stored["spec"].get("devices") or []
    blocks = {gpu.uuid: None if gpu.memory_bytes is None else gpu.memory_blocks for gpu in (await gpus.snapshot()).gpus}
    different = differences(blocks, published)
    if different:
        return warning(f"ResourceSlice {slice_name(node)} differs from the driver: {', '.join(different)}", _START)
    tainted = sum(bool(device.get("taints")) for device in published)
    return ok(f"API server {version}: {len(published)} GPUs in {slice_name(node)}, {tainted} with taints")


def differences(blocks: Mapping[str, int | None], published: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """`blocks`: UUID of each GPU that the driver lists -> its memory in blocks of 256 MiB (None: unknown). GPUs with less than two blocks
    are not published. The driver need not list published GPUs with taints."""
    found = {device["attributes"]["uuid"]["string"]: device for device in published}
    missing = [f"{uuid} is not published" for uuid, number in blocks.items() if number not in (0, 1) and uuid not in found]
    gone = [f"the driver does not list {uuid}" for uuid, each in found.items() if uuid not in blocks and not each.get("taints")]
    memory = {uuid: each["capacity"].get("memory") for uuid, each in found.items()}
    sizes = {uuid: each and parse_quantity(str(each["value"])) >> 28 for uuid, each in memory.items()}
    wrong = [
        f"{uuid} has {sizes[uuid] or 'no'} blocks of memory in place of {number or 'none'}"
        for uuid, number in blocks.items()
        if sizes.get(uuid, number) != number
    ]
    return (*missing, *gone, *wrong)


async def look_at_claims(settings: Settings) -> CheckResult:
    """Whether the API server still has all claims that hold GPUs."""
    if not settings.kubernetes.enabled:
        return skipped(_STANDALONE)
    held = sorted((await aside(read_checkpoint, settings.checkpoint.dir)).ledger.claims.values(), key=str)

    async def look(server: ApiServer) -> CheckResult:
        node = settings.node.name
        gone = [
            each for each in held[:_MAX_CLAIMS] if (await find_shares(server, node, each.namespace, each.name))[0] != each.uid
        ]
        if gone:
            return warning(
                f"these claims hold GPUs, but do not exist in the API server: {', '.join(map(str, gone))}",
                "nothing to do if the agent runs: it frees the GPUs about a minute after the kubelet has ended their pods",
            )
        return ok(f"{len(held)} claims hold GPUs" + (f"; {_MAX_CLAIMS} of them looked up" if len(held) > _MAX_CLAIMS else ""))

    return await ask(settings, look)
