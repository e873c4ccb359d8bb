"""Completes pods with HAMi's resources, in clusters without MutatingAdmissionPolicies: the rules of config/hami/admission-policies.yaml.

Which pods it is asked about stands in config/hami/webhook.yaml. Source: HAMi 2.10, pkg/scheduler/webhook.go, and MutateAdmission in
pkg/device/nvidia/device.go.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from gpumgr.kubeapi.replica_requests import ReplicaResources

PATH: Final = "/hami/pods"
#: The API server sends no larger objects.
_MOST_BYTES: Final = 8 << 20
_NONE: Final = ("", "0")


def patches(pod: Mapping[str, Any], hami: ReplicaResources, *, scheduler: str, runtime_class: str) -> list[dict[str, Any]]:
    """A JSON patch (RFC 6902). Raises KeyError, TypeError or AttributeError for an object that is no pod."""
    spec, made, wanted = pod["spec"], [], False
    for field in ("containers", "initContainers"):
        for place, container in enumerate(spec.get(field) or ()):
            resources = container.get("resources") or {}
            limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
            count, memory, percent, cores = (
                str(limits.get(name, "")) for name in (hami.count, hami.memory, hami.memory_percentage, hami.cores)
            )
            uncounted = not count and any(amount not in _NONE for amount in (memory, percent, cores))
            asks = uncounted or count not in _NONE
            part = percent != "100" and (memory not in _NONE or percent not in _NONE)
            added = {hami.count: "1"} if uncounted else {}
            if asks and not cores and hami.cores not in requests and not part:
                added[hami.cores] = "100"
            wanted |= asks
            path = f"/spec/{field}/{place}/resources"
            for name, amount in added.items():
                # The API server has copied limits to requests before.
                made += [
                    _add(f"{path}/{kind}/{name.replace('~', '~0').replace('/', '~1')}", amount) for kind in ("limits", "requests")
                ]
    if wanted:
        made.append(_add("/spec/schedulerName", scheduler))
        if runtime_class and "runtimeClassName" not in spec:
            made.append(_add("/spec/runtimeClassName", runtime_class))
    return made


def _add(path: str, value: str) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def webhook_application(hami: ReplicaResources, *, scheduler: str, runtime_class: str) -> web.Application:
    """Answers AdmissionReviews (admission.k8s.io/v1) for pods."""

    async def review(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read())["request"]
            patch = patches(asked["object"], hami, scheduler=scheduler, runtime_class=runtime_class)
            response: dict[str, Any] = {"uid": asked["uid"], "allowed": True}
        except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            return web.Response(status=400, text=f"the body is no AdmissionReview of a pod: {type(error).__name__}: {error}\n")
        if patch:
            response |= {"patchType": "JSONPatch", "patch": b64encode(msgspec.json.encode(patch)).decode()}
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    application = web.Application(client_max_size=_MOST_BYTES)
    application.add_routes([web.post(PATH, review)])
    return application
