"""Completes pods that request HAMi's resources, in clusters without MutatingAdmissionPolicies. The rules are the ones of
config/hami/admission-policies.yaml; config/hami/webhook.yaml selects the pods.

Source: HAMi 2.10, pkg/scheduler/webhook.go, and MutateAdmission in pkg/device/nvidia/device.go.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from gpumgr.cluster.core.request import too_many
from gpumgr.common.foreign_text import decode_answer
from gpumgr.kube.pods import quantity_or_0
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import WebhookSettings
from gpumgr.web.bodies import Bodies

PATH: Final = "/hami/pods"
#: Limits of one body and of all bodies together, because any client that reaches the port may send bodies.
MOST_BYTES: Final = 1 << 20
TOTAL_BYTES: Final = 16 << 20
_NONE: Final = ("", "0")
#: A container with such a limit gets GPUs from a device plugin, even without HAMi's resources.
_OTHER_GPUS: Final = ("nvidia.com/", "tencent.com/vcuda-")


def refusal(pod: Mapping[str, Any], hami: ReplicaResources) -> str | None:
    """Why no node can grant the pod: amounts above 100 %, or too many containers. Raises what `patches` raises."""
    spec, asking = pod["spec"], 0
    for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
        limits = (container.get("resources") or {}).get("limits") or {}
        asking += any(str(limits.get(name, "")) not in _NONE for name in (hami.count_resource, *hami.amounts))
        for name in (hami.core_resource, hami.memory_percentage_resource):
            if quantity_or_0(str(limits.get(name, "0"))) > 100:
                return f"container {container['name']}: {name} {limits[name]} must be 0 to 100"
    return too_many(asking)


def patches(pod: Mapping[str, Any], hami: ReplicaResources, settings: WebhookSettings) -> list[dict[str, Any]]:
    """The changes to the pod as a JSON patch (RFC 6902). Raises KeyError, TypeError or AttributeError for an object that is no pod."""
    spec, made = pod["spec"], list[dict[str, Any]]()
    asking = dict[str, bool]()
    containers = {
        f"/spec/{field}/{place}": container
        for field in ("containers", "initContainers")
        for place, container in enumerate(spec.get(field) or ())
    }
    for path, container in containers.items():
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        count, memory, percent, cores = (str(limits.get(name, "")) for name in (hami.count_resource, *hami.amounts))
        uncounted = not count and any(amount not in _NONE for amount in (memory, percent, cores))
        asking[path] = uncounted or count not in _NONE
        part_of_memory = percent != "100" and (memory not in _NONE or percent not in _NONE)
        added = {hami.count_resource: str(settings.default_gpus)} if uncounted else {}
        if asking[path] and not cores and hami.core_resource not in requests and not part_of_memory:
            added[hami.core_resource] = "100"
        for name, amount in added.items():
            # The API server copied limits to requests before it called this webhook, so the webhook must set both.
            made += [
                _add(f"{path}/resources/{kind}/{name.replace('~', '~0').replace('/', '~1')}", amount)
                for kind in ("limits", "requests")
            ]
    wanted = any(asking.values())
    for path, container in containers.items():
        made += _env_patches(path, container, dict(_env(container, hami, settings, asks=asking[path], wanted=wanted)))
    if wanted:
        made.append(_add("/spec/schedulerName", settings.scheduler_name))
        if settings.runtime_class and "runtimeClassName" not in spec:
            made.append(_add("/spec/runtimeClassName", settings.runtime_class))
    return made


def _env(
    container: Mapping[str, Any], hami: ReplicaResources, settings: WebhookSettings, *, asks: bool, wanted: bool
) -> Iterator[tuple[str, str]]:
    """Variables that the container gets, unless it has them. `asks`: it requests GPUs; `wanted`: some container of the pod does."""
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    if wanted and hami.priority_resource in limits:
        yield "CUDA_TASK_PRIORITY", str(limits[hami.priority_resource])
    if wanted and settings.core_policy != "default":
        yield "GPU_CORE_UTILIZATION_POLICY", settings.core_policy
    if settings.hide_gpus and not (asks or resources.get("claims") or any(name.startswith(_OTHER_GPUS) for name in limits)):
        yield "NVIDIA_VISIBLE_DEVICES", "none"


def _env_patches(path: str, container: Mapping[str, Any], wanted: Mapping[str, str]) -> list[dict[str, Any]]:
    there = container.get("env") or ()
    names = [each["name"] for each in there]
    missing = [{"name": name, "value": value} for name, value in wanted.items() if name not in names]
    if not there:
        return [_add(f"{path}/env", missing)] if missing else []
    return [_add(f"{path}/env/-", each) for each in missing]


def _add(path: str, value: object) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def webhook_application(hami: ReplicaResources, settings: WebhookSettings) -> web.Application:
    bodies = Bodies(MOST_BYTES, TOTAL_BYTES)

    async def review(request: web.Request) -> web.Response:
        try:
            async with bodies.of(request) as body:
                asked = (await decode_answer(body, dict[str, Any]))["request"]
            refused = refusal(asked["object"], hami)
            patch = patches(asked["object"], hami, settings) if refused is None else []
            response: dict[str, Any] = {"uid": asked["uid"], "allowed": refused is None}
        except web.HTTPRequestEntityTooLarge:
            return web.Response(status=413, text=f"the AdmissionReview has more than {MOST_BYTES} bytes; shorten the pod\n")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.Response(status=400, text=f"the body is no AdmissionReview of a pod: {type(error).__name__}: {error}\n")
        if refused is not None:
            response["status"] = {"code": 422, "reason": "Invalid", "message": refused}
        if patch:
            response |= {"patchType": "JSONPatch", "patch": b64encode(msgspec.json.encode(patch)).decode()}
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")

    application = web.Application()
    application.add_routes([web.post(PATH, review)])
    return application
