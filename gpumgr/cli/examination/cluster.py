"""`gpumgr doctor --cluster`: checks the scheduler's side of a cluster, and claims, through the API server."""

import re
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from gpumgr.cli.examination import Check, CheckResult, error, ok, skipped, warning
from gpumgr.cli.examination.api_server import IF_HUNG, Right, allowed, judged
from gpumgr.cli.examination.cluster_config import (
    look_at_class,
    look_at_policies,
    manages_hami,
    needed_by_claims,
    parse_config,
    policies_in_force,
    problems,
    profiles_of,
)
from gpumgr.cluster.scheduler.objects import parse_node, parse_watched_pod
from gpumgr.common.units import CORE_RESOURCE
from gpumgr.kube.client import ApiServer, items_of
from gpumgr.kube.cluster_annotations import PLACEMENT_ANNOTATION
from gpumgr.settings.hami_resources import ReplicaResources

#: HAMi's default resource names. Nodes with node.profile hami offer only these.
_HAMI: Final = ReplicaResources()
#: Lists of a large cluster take seconds.
LIMIT_SECONDS: Final = 60.0
_INSTALL: Final = "install it with the chart's scheduler.enabled (docs/scheduler.md)"
#: Prefix of the annotations with the choice of HAMi's scheduler.
_HAMI_KEYS: Final = "hami.io/vgpu-"
_LEASES: Final = "coordination.k8s.io"
_OURS: Final = "app.kubernetes.io/part-of=gpumgr"

Json = Mapping[str, Any]


class Deployed(NamedTuple):
    """`pod` is the spec of the Deployment's pods."""

    namespace: str
    name: str
    pod: Json


class Cluster:
    """`given`: kube-scheduler's configuration in YAML; None: the chart's ConfigMap."""

    def __init__(self, server: ApiServer, given: str | None) -> None:
        self.server, self.given = server, given

    async def get(self, path: str, **query: str) -> Json:
        return await self.server.read("GET", path, query=query)

    async def items(self, path: str, **query: str) -> list[Json]:
        return items_of(await self.get(path, **query))

    async def deployed(self, container: str) -> Deployed | None:
        """gpumgr's Deployment in which the first container has this name."""
        for each in await self.items("/apis/apps/v1/deployments", labelSelector=_OURS):
            pod = each["spec"]["template"]["spec"]
            if pod["containers"][0]["name"] == container:
                return Deployed(each["metadata"]["namespace"], each["metadata"]["name"], pod)
        return None

    async def config(self) -> Json | None:
        """kube-scheduler's configuration. None if neither a file nor the chart's ConfigMap has it. Raises ValueError."""
        if self.given is not None:
            return parse_config(self.given)
        found = await self.items("/api/v1/configmaps", labelSelector=_OURS)
        texts = [each["data"]["kube-scheduler.yaml"] for each in found if "kube-scheduler.yaml" in (each.get("data") or {})]
        return parse_config(texts[0]) if texts else None

    async def serves_hami(self) -> bool:
        """Whether the scheduler serves pods with HAMi's resources."""
        with suppress(ValueError):  # the check of the configuration reports this
            return manages_hami(await self.config() or {})
        return False


def checks_for_cluster(server: ApiServer, config: str | None) -> tuple[Check, ...]:
    """`config`: see `Cluster`."""
    cluster = Cluster(server, config)
    looks: dict[str, Callable[[Cluster], Coroutine[Any, Any, CheckResult]]] = {
        "configuration": _configuration,
        "rbac": _rights,
        "versions": _versions,
        "leader": _leader,
        "admission": _admission,
        "inventories": _inventories,
        "other-pods": _other_pods,
        "device-class": lambda cluster: look_at_class(cluster.server),
        "claims-policy": _claims_policies,
        "claims-rbac": _claims_rights,
    }
    return tuple(Check(name, partial(judged, look, cluster), IF_HUNG) for name, look in looks.items())


async def _configuration(cluster: Cluster) -> CheckResult:
    try:
        config = await cluster.config()
    except ValueError as failure:
        return error(
            f"{'the ConfigMap' if cluster.given is None else 'the file'}: {failure}",
            "give the file of kube-scheduler's --config to --scheduler-config",
        )
    if config is None:
        return skipped("no ConfigMap of the chart; --scheduler-config names the file of an existing kube-scheduler")
    found = list(problems(config))
    if found:
        judge = error if any(serious for serious, _ in found) else warning
        return judge(", ".join(text for _, text in found), "compare it with config/scheduler/kube-scheduler.yaml")
    return ok(f"profiles {', '.join(profiles_of(config))}")


def needed(namespace: str, lease: str, *, hami: bool = False) -> tuple[Right, ...]:
    """The rights in config/scheduler/rbac.yaml. `hami`: the scheduler serves pods with HAMi's resources."""
    watched = ("nodes", "pods", "resourcequotas") if hami else ("nodes", "pods")
    return (
        *(Right(verb=verb, resource=resource) for resource in watched for verb in ("get", "list", "watch")),
        Right(verb="create", resource="pods", subresource="binding"),
        *_of_lease(namespace, lease),
        Right(verb="patch", resource="pods", namespace=namespace),
    )


def _of_lease(namespace: str, name: str) -> Iterator[Right]:
    for verb, of_name in (("create", None), ("get", name), ("patch", name)):
        yield Right(verb=verb, resource="leases", group=_LEASES, namespace=namespace, name=of_name)


async def _rights(cluster: Cluster) -> CheckResult:
    found = await cluster.deployed("scheduler")
    if found is None:
        return skipped("no Deployment of the scheduler")
    wanted = needed(found.namespace, found.name, hami=await cluster.serves_hami())
    return await _judge_rights(cluster, found, wanted, "config/scheduler/rbac.yaml")


async def _claims_rights(cluster: Cluster) -> CheckResult:
    found = await cluster.deployed("claims")
    if found is None:
        return skipped("no Deployment of gpumgr claims")
    wanted = (*needed_by_claims(), *_of_lease(found.namespace, found.name))
    return await _judge_rights(cluster, found, wanted, "config/claims/rbac.yaml")


async def _judge_rights(cluster: Cluster, deployed: Deployed, wanted: Sequence[Right], manifest: str) -> CheckResult:
    account = f"system:serviceaccount:{deployed.namespace}:{deployed.pod.get('serviceAccountName', 'default')}"
    missing = [right for right in wanted if not await allowed(cluster.server, right, user=account)]
    if missing:
        return error(f"{account} is not allowed: {', '.join(map(str, missing))}", f"apply {manifest}")
    return ok(f"{account} has all {len(wanted)} rights")


async def _claims_policies(cluster: Cluster) -> CheckResult:
    return await look_at_policies(cluster.server, installed=await cluster.deployed("claims") is not None)


async def _versions(cluster: Cluster) -> CheckResult:
    """kube-scheduler must have the API server's minor version or the one before."""
    server = _minor(str((await cluster.get("/version"))["gitVersion"]))
    pods = await cluster.items("/api/v1/pods", labelSelector=_OURS)
    first = [pod["spec"]["containers"][0] for pod in pods]
    ours = sorted({_minor(str(each["image"])) for each in first if each["name"] == "kube-scheduler"})
    text = ", ".join([f"API server {_text(server)}", *(f"kube-scheduler {_text(each)}" for each in ours)])
    if server < (1, 20):
        return error(text, "gpumgr supports Kubernetes 1.20 and later")
    if any(each and each not in (server, (server[0], server[1] - 1)) for each in ours):
        return error(text, "set scheduler.kubeScheduler.image.tag to the API server's version")
    return ok(text)


def _minor(text: str) -> tuple[int, ...]:
    """(major, minor) of a version, or of an image with such a tag; empty for another text."""
    found = re.search(r"(?:^|:)v?(\d+)\.(\d+)(?:\.\d+)?[^:/]*$", text.partition("@")[0])
    return (int(found[1]), int(found[2])) if found else ()


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "unknown"


async def _leader(cluster: Cluster) -> CheckResult:
    found = await cluster.deployed("scheduler")
    if found is None:
        return error("no Deployment of the scheduler", _INSTALL)
    look = f"look at the scheduler's log: kubectl --namespace {found.namespace} logs deployment/{found.name}"
    document = await cluster.server.find(f"/apis/{_LEASES}/v1/namespaces/{found.namespace}/leases/{found.name}")
    if document is None:
        return error(f"Lease {found.namespace}/{found.name} does not exist", look)
    lease = document["spec"]
    if not lease.get("holderIdentity"):
        return error(f"Lease {found.namespace}/{found.name} has no holder", look)
    age = time.time() - datetime.fromisoformat(str(lease["renewTime"]).replace("Z", "+00:00")).timestamp()
    if age > 2 * lease["leaseDurationSeconds"]:
        return error(f"the Lease of {lease['holderIdentity']} was renewed {age:.0f} s ago", f"{look}, and compare the clocks")
    return ok(f"{lease['holderIdentity']} holds the Lease")


async def _admission(cluster: Cluster) -> CheckResult:
    gap = "users who may create or bind pods can forge placements; see docs/scheduler.md"
    policies = await policies_in_force(cluster.server, "validating")
    if policies is None:
        return warning("this API server has no ValidatingAdmissionPolicies (Kubernetes 1.30)", gap)
    for annotation in (PLACEMENT_ANNOTATION, *([_HAMI_KEYS] if await cluster.serves_hami() else [])):
        protected = {
            resource
            for each in policies
            if annotation in str(each["spec"])
            for rule in each["spec"]["matchConstraints"]["resourceRules"]
            for resource in rule["resources"]
        }
        if missing := sorted({"pods", "pods/status", "pods/binding", "bindings"} - protected):
            return warning(f"no policy protects {annotation} in requests to {', '.join(missing)}", gap)
    return ok("with the policies only the scheduler and agents can write placements")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


async def _inventories(cluster: Cluster) -> CheckResult:
    nodes = [parse_node(each, hami=_HAMI) for each in await cluster.items("/api/v1/nodes")]
    unusable = {each.state.name: str(each.problem) for each in nodes if each.inventory == "unusable"}
    if unusable:
        first = min(unusable)
        remedy = (
            "update the scheduler if the inventory is newer, else delete the annotation: the agent writes it again at its start"
        )
        return error(f"inventories that can't be used: {_some(unusable)} ({first}: {unusable[first][:200]})", remedy)
    if stale := [each.state.name for each in nodes if each.inventory == "outdated"]:
        return warning(
            f"the inventory has more GPUs than {CORE_RESOURCE} shows: {_some(stale)}",
            "check whether the agent runs there; else delete the annotation",
        )
    if none := [each.state.name for each in nodes if each.inventory == "none" and (each.state.gpus or each.problem)]:
        return warning(
            f"{CORE_RESOURCE} without an inventory (gpu-manager, or an agent that can't write to its node): {_some(none)}",
            "the GPUs of such a node count as equal; look at the agent's log, or replace gpu-manager (config/migrate-from-gpu-manager.md)",
        )
    return ok(f"{sum(each.inventory == 'used' for each in nodes)} nodes")


async def _other_pods(cluster: Cluster) -> CheckResult:
    config = await cluster.config()
    ours = profiles_of(config) if config is not None else ["gpumgr-scheduler"]
    fields = ["status.phase!=Succeeded", "status.phase!=Failed", *(f"spec.schedulerName!={name}" for name in ours)]
    pods = await cluster.items("/api/v1/pods", fieldSelector=",".join(fields))
    wanting = {f"{pod.namespace}/{pod.name}": each for each in pods if (pod := parse_watched_pod(each)).wants_gpu}
    others = [name for name, each in wanting.items() if PLACEMENT_ANNOTATION not in (each["metadata"].get("annotations") or {})]
    if not others:
        return ok(f"all pods with GPUs are placed by {', '.join(ours)}")
    return warning(
        f"pods with GPUs that other schedulers place: {_some(others)}",
        f"set schedulerName: {ours[0]} in their templates; until then the agent chooses their GPUs, and may refuse them",
    )
