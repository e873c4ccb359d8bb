"""Claims in a cluster (docs/dra.md): the DeviceClass, the admission policies of `gpumgr claims`, and the rights that it needs."""

from collections.abc import Iterator
from itertools import product
from typing import Final

from gpumgr.claims.shapes import DEVICE_CLASS, DRIVER
from gpumgr.doctor.examine import CheckResult, error, ok, skipped, warning
from gpumgr.kubeapi.access import Right
from gpumgr.kubeapi.client import ApiServer

_GROUP: Final = "resource.k8s.io"
_ADMISSION: Final = "/apis/admissionregistration.k8s.io/v1"
POLICIES_ANNOTATION: Final = "gpumgr.io/claims-policies"
#: Of config/claims/admission-policies.yaml: each change of the policies needs the next number.
POLICIES_VERSION: Final = "2"
#: Kind -> the ends of the policies' names.
_POLICIES: Final = {"mutating": ("vcuda", "quota"), "validating": ("pods", "classes", "requests", "quota")}


def needed_by_claims() -> Iterator[Right]:
    """In all namespaces, without the ConfigMap of the quotas, which has the name that the settings give it."""
    for group, resources, verbs in (
        ("", "nodes pods", "list watch"),
        ("", "pods", "patch"),
        ("", "events", "create"),
        (_GROUP, "resourceclaims resourceslices resourceclaimtemplates", "list watch"),
        (_GROUP, "resourceclaimtemplates", "create delete"),
    ):
        for resource, verb in product(resources.split(), verbs.split()):
            yield Right(verb=verb, resource=resource, group=group)


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
        path = f"{_ADMISSION}/{kind}admissionpolic"
        policies, bindings = [(await server.find(path + end) or {}).get("items") or () for end in ("ies", "ybindings")]
        bound = {each["spec"]["policyName"] for each in bindings if "Deny" in each["spec"].get("validationActions", ["Deny"])}
        for end in (f"-claims-{end}" for end in ends):
            found = [each["metadata"] for each in policies if each["metadata"]["name"].endswith(end)]
            known += len(found)
            versions = [(each.get("annotations") or {}).get(POLICIES_ANNOTATION, "none") for each in found]
            if not any(each["name"] in bound for each in found):
                faults.append(f"no {kind} policy *{end} is in force")
            elif POLICIES_VERSION not in versions:
                faults.append(f"the {kind} policy *{end} has version {versions[0]} in place of {POLICIES_VERSION}")
    if not known and not installed:
        return skipped("gpumgr claims is not installed")
    if faults:
        return warning(
            ", ".join(faults), "apply the policies of this version: the chart, or config/claims/admission-policies.yaml"
        )
    return ok(f"{known} policies of version {POLICIES_VERSION} are in force")
