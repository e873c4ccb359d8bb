"""Checks the KubeSchedulerConfiguration, and for claims the DeviceClass, the admission policies and the rights of `gpumgr claims`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal, TypedDict

from gpumgr.cli.examination import CheckResult, error, ok, skipped, warning
from gpumgr.cli.examination.api_server import Right
from gpumgr.cluster.claims.shapes import DEVICE_CLASS
from gpumgr.common.foreign_text import UnreadableText, convert, decode_yaml
from gpumgr.common.units import CORE_RESOURCE, DRA_DRIVER, MEMORY_RESOURCE
from gpumgr.kube.client import ApiServer, items_of
from gpumgr.settings.hami_resources import ReplicaResources

_MAX_BYTES: Final = 1 << 20
_HAMI: Final = ReplicaResources()
_VERBS: Final = {"filterVerb": "filter", "bindVerb": "bind", "preemptVerb": "preempt"}


class _Managed(TypedDict):
    name: str


class _Extender(TypedDict, total=False):
    managedResources: list[_Managed] | None
    tlsConfig: dict[str, Any] | None


class _Config(TypedDict, total=False):
    profiles: list[dict[str, Any]] | None
    extenders: list[_Extender] | None
    podMaxBackoffSeconds: int | None


def parse_config(text: str) -> Mapping[str, Any]:
    """Raises ValueError."""
    try:
        documents = decode_yaml(text, max_bytes=_MAX_BYTES)
    except UnreadableText as error:
        raise ValueError(f"it is not YAML: {error}") from error
    config = documents[0] if len(documents) == 1 else None
    if not isinstance(config, dict) or config.get("kind") != "KubeSchedulerConfiguration":
        raise ValueError("it is no KubeSchedulerConfiguration")
    convert(config, _Config)
    return config


def profiles_of(config: Mapping[str, Any]) -> list[str]:
    """The names of the profiles. A pod chooses one in spec.schedulerName."""
    return [str(each.get("schedulerName", "default-scheduler")) for each in config.get("profiles") or [{}]]


def problems(config: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yields (severe, what is wrong). `severe`: pods would be placed wrongly, or not at all."""
    managed = {CORE_RESOURCE, MEMORY_RESOURCE}
    ours = [each for each in config.get("extenders") or () if managed & _managed(each).keys()]
    if len(ours) != 1:
        yield True, f"{len(ours)} extenders have {CORE_RESOURCE} or {MEMORY_RESOURCE} in managedResources; exactly one must"
        return
    yield from _extender_problems(ours[0], managed)
    if (config.get("podMaxBackoffSeconds") or 10) > 2:
        yield False, "podMaxBackoffSeconds is above 2; after an outage of the extender, pods may wait that long"
    common = config.get("percentageOfNodesToScore")
    for profile in config.get("profiles") or [{}]:
        if (profile.get("percentageOfNodesToScore") or common) != 100:
            name = profile.get("schedulerName", "default-scheduler")
            yield False, f"percentageOfNodesToScore of profile {name} is not 100; a pod may wait although a node fits"


def manages_hami(config: Mapping[str, Any]) -> bool:
    """Whether the extender gets pods with HAMi's resources."""
    return any(_HAMI.count_resource in _managed(each) for each in config.get("extenders") or ())


def _extender_problems(extender: Mapping[str, Any], managed: set[str]) -> Iterator[tuple[bool, str]]:
    found = {name: ignored for name, ignored in _managed(extender).items() if name != _HAMI.priority_resource}
    hami = found.keys() & {_HAMI.count_resource, *_HAMI.amounts}
    if found.keys() - hami != managed or hami not in (set(), {_HAMI.count_resource, *_HAMI.amounts}):
        given, of_hami = ", ".join(sorted(found)), ", ".join((_HAMI.count_resource, *_HAMI.amounts))
        rule = f"list {CORE_RESOURCE} and {MEMORY_RESOURCE}, also {of_hami} if HAMi's pods are scheduled, and no other resource"
        yield True, f"managedResources are {given}; {rule}"
    for name in sorted(name for name, ignored in found.items() if ignored and name not in _HAMI.amounts):
        yield True, f"ignoredByScheduler of {name} is true; kube-scheduler and autoscalers must count it"
    for name in sorted(name for name in hami if not found[name] and name != _HAMI.count_resource):
        yield True, f"ignoredByScheduler of {name} is false; no node has this resource, so its pods stay Pending"
    if extender.get("ignorable"):
        yield True, "ignorable is true; while the extender does not answer, pods would start without a placement"
    for key, verb in _VERBS.items():
        if extender.get(key) != verb:
            yield key != "preemptVerb", f"{key} is {extender.get(key)!r}; set it to {verb}"
    if str(extender.get("urlPrefix", "")).startswith("https:"):
        tls = extender.get("tlsConfig") or {}
        if missing := [key for key in ("caFile", "certFile", "keyFile") if not tls.get(key)]:
            why = "it needs a CA to verify the extender, and a certificate that the extender accepts"
            yield True, f"tlsConfig has no {', '.join(missing)}; {why}"
    if not extender.get("nodeCacheCapable"):
        yield False, "nodeCacheCapable is not true; each call sends whole nodes, which is slow"


def _managed(extender: Mapping[str, Any]) -> dict[str, bool]:
    return {str(each["name"]): bool(each.get("ignoredByScheduler")) for each in extender.get("managedResources") or ()}


_GROUP: Final = "resource.k8s.io"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
#: Kind -> the suffixes of the policies' names.
_POLICIES: Final[Mapping[Literal["mutating", "validating"], Sequence[str]]] = {
    "mutating": ("vcuda", "quota"),
    "validating": ("pods", "classes", "requests", "quota"),
}


def needed_by_claims() -> Iterator[Right]:
    """Rights in all namespaces. The right to the quotas' ConfigMap, which a setting names, is left out."""
    for group, resources, verbs in (
        ("", "nodes pods", "list watch"),
        ("", "pods", "patch"),
        ("", "events", "create"),
        (_GROUP, "resourceclaims resourceslices resourceclaimtemplates", "list watch"),
        (_GROUP, "resourceclaimtemplates", "create delete"),
    ):
        for resource, verb in product(resources.split(), verbs.split()):
            yield Right(verb=verb, resource=resource, group=group)


async def policies_in_force(server: ApiServer, kind: Literal["mutating", "validating"]) -> Sequence[Mapping[str, Any]] | None:
    """The policies that a binding activates. The binding of a validating policy must have the action Deny. None: the API server has no
    policies of this kind."""
    found = await server.find(f"{_ADMISSION}/{kind}admissionpolicies")
    bindings = await server.find(f"{_ADMISSION}/{kind}admissionpolicybindings")
    specs = [each["spec"] for each in items_of(bindings)] if bindings is not None else []
    bound = {spec["policyName"] for spec in specs if "Deny" in spec.get("validationActions", ["Deny"])}
    return None if found is None else [each for each in items_of(found) if each["metadata"]["name"] in bound]


async def look_at_class(server: ApiServer) -> CheckResult:
    if await server.find(f"/apis/{_GROUP}/v1/deviceclasses/{DEVICE_CLASS}") is not None:
        return ok(f"{DEVICE_CLASS} exists")
    slices = await server.find(f"/apis/{_GROUP}/v1/resourceslices", query={"fieldSelector": f"spec.driver={DRA_DRIVER}"})
    if slices is None or not items_of(slices):
        return skipped("no node is in mode dra")
    return error(f"no DeviceClass {DEVICE_CLASS}: pods that claim GPUs stay Pending", "apply config/dra/device-class.yaml")


async def look_at_policies(server: ApiServer, *, installed: bool) -> CheckResult:
    found = {(kind, str(each["metadata"]["name"])) for kind in _POLICIES for each in await policies_in_force(server, kind) or ()}
    ends = [(kind, f"-claims-{end}") for kind, suffixes in _POLICIES.items() for end in suffixes]
    missing = [(kind, end) for kind, end in ends if not any(each == kind and name.endswith(end) for each, name in found)]
    if missing == ends and not installed:
        return skipped("gpumgr claims is not installed")
    if missing:
        faults = ", ".join(f"no {kind} policy *{end} is in force" for kind, end in missing)
        return warning(faults, "apply the policies of this version: the chart, or config/claims/admission-policies.yaml")
    return ok(f"{len(ends)} policies are in force")
