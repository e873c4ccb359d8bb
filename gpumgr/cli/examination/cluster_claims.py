"""Checks of claims in a cluster (docs/dra.md): the DeviceClass, and the admission policies and rights of `gpumgr claims`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final, Literal

from gpumgr.cli.examination.examine import CheckResult, error, ok, skipped, warning
from gpumgr.cluster.claims.shapes import DEVICE_CLASS, DRIVER
from gpumgr.kube.client import ApiServer, Right

_GROUP: Final = "resource.k8s.io"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
POLICIES_ANNOTATION: Final = "gpumgr.io/claims-policies"
#: The version of config/claims/admission-policies.yaml. Each change of the policies needs the next number.
POLICIES_VERSION: Final = "3"
#: Kind -> the suffixes of the policies' names.
_POLICIES: Final[Mapping[Literal["mutating", "validating"], Sequence[str]]] = {
    "mutating": ("vcuda", "quota"),
    "validating": ("pods", "classes", "requests", "quota"),
}


def needed_by_claims() -> Iterator[Right]:
    """The rights that it needs in all namespaces. The right to the ConfigMap of the quotas is not included, since a setting names it."""
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
    """The policies with a binding; if a binding has validation actions, Deny must be among them. None: the API server does not support
    policies of this kind."""
    found = await server.find(f"{_ADMISSION}/{kind}admissionpolicies")
    bindings = await server.find(f"{_ADMISSION}/{kind}admissionpolicybindings") or {}
    specs = [each["spec"] for each in bindings.get("items") or ()]
    bound = {spec["policyName"] for spec in specs if "Deny" in spec.get("validationActions", ["Deny"])}
    return None if found is None else [each for each in found.get("items") or () if each["metadata"]["name"] in bound]


async def look_at_class(server: ApiServer) -> CheckResult:
    if await server.find(f"/apis/{_GROUP}/v1/deviceclasses/{DEVICE_CLASS}") is not None:
        return ok(f"{DEVICE_CLASS} exists")
    slices = await server.find(f"/apis/{_GROUP}/v1/resourceslices", query={"fieldSelector": f"spec.driver={DRIVER}"})
    if not slices or not slices.get("items"):
        return skipped("no node is in mode dra")
    return error(f"no DeviceClass {DEVICE_CLASS}: pods that claim GPUs stay Pending", "apply config/dra/device-class.yaml")


async def look_at_policies(server: ApiServer, *, installed: bool) -> CheckResult:
    """`installed`: `gpumgr claims` runs in the cluster."""
    faults, known = [], 0
    for kind, ends in _POLICIES.items():
        policies = [each["metadata"] for each in await policies_in_force(server, kind) or ()]
        for end in (f"-claims-{end}" for end in ends):
            found = [each.get("annotations") or {} for each in policies if each["name"].endswith(end)]
            known += len(found)
            if not found:
                faults.append(f"no {kind} policy *{end} is in force")
            others = {each.get(POLICIES_ANNOTATION, "none") for each in found} - {POLICIES_VERSION}
            faults += [f"the {kind} policy *{end} has version {each} in place of {POLICIES_VERSION}" for each in sorted(others)]
    if not known and not installed:
        return skipped("gpumgr claims is not installed")
    if faults:
        return warning(
            ", ".join(faults), "apply the policies of this version: the chart, or config/claims/admission-policies.yaml"
        )
    return ok(f"{known} policies of version {POLICIES_VERSION} are in force")
