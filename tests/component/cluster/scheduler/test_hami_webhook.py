"""The webhook's own texts; its rules are tested beside the policies' on a real API server (tests/e2e/test_hami_admission.py)."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpumgr.cluster.scheduler.hami_webhook import PATH, patches, webhook_application
from gpumgr.cluster.scheduler.lifecycle import webhook
from gpumgr.common.errors import InputError
from gpumgr.settings.hami_resources import ReplicaResources
from gpumgr.settings.schema import NodeSettings, Settings, WebhookSettings

HAMI = ReplicaResources(
    count_resource="example.com/a~b",
    memory_resource="mem",
    memory_percentage_resource="percent",
    core_resource="cores",
    priority_resource="prio",
)
GPUS = WebhookSettings(scheduler_name="gpus")


def pod(*limits: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "c", "resources": {"limits": each}} for each in limits], **spec}}


def patched(item: dict[str, Any], **settings: Any) -> list[tuple[str, Any]]:
    found = patches(item, HAMI, msgspec.structs.replace(GPUS, **settings))
    assert all(each["op"] == "add" for each in found)
    return [(each["path"], each["value"]) for each in found]


def variables(item: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {path: value for path, value in patched(item, **settings) if "/env" in path}


def test_the_names_of_the_settings_count() -> None:
    assert patched(pod({}, {"mem": 4})) == [
        ("/spec/containers/1/resources/limits/example.com~1a~0b", "1"),
        ("/spec/containers/1/resources/requests/example.com~1a~0b", "1"),
        ("/spec/schedulerName", "gpus"),
    ]
    assert patched(pod({"nvidia.com/gpu": 1})) == []


def test_a_runtime_class_is_written_where_the_pod_has_none() -> None:
    wanted = {"example.com/a~b": 1, "cores": 5}
    both = [("/spec/schedulerName", "gpus"), ("/spec/runtimeClassName", "nvidia")]
    assert patched(pod(wanted), runtime_class="nvidia") == both
    assert patched(pod(wanted, runtimeClassName="kata"), runtime_class="nvidia") == both[:1]


def test_an_amount_without_a_count_is_of_so_many_gpus() -> None:
    assert patched(pod({"mem": 4}), default_gpus=3)[0] == ("/spec/containers/0/resources/limits/example.com~1a~0b", "3")


PRIORITY = {"name": "CUDA_TASK_PRIORITY", "value": "0"}
FORCE = {"name": "GPU_CORE_UTILIZATION_POLICY", "value": "force"}
HIDDEN = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}


def test_a_priority_becomes_a_variable_of_its_container() -> None:
    item = pod({"mem": 4, "prio": 0}, {"mem": 4})
    assert variables(item) == {"/spec/containers/0/env": [PRIORITY]}
    item["spec"]["containers"][0]["env"] = [{"name": "A"}]
    assert variables(item) == {"/spec/containers/0/env/-": PRIORITY}
    item["spec"]["containers"][0]["env"] = [{"name": "CUDA_TASK_PRIORITY", "value": "9"}]
    assert variables(item) == {}
    assert variables(pod({"prio": 0})) == {}


def test_a_policy_for_cores_is_a_variable_of_every_container() -> None:
    item = pod({"mem": 4}, {}, initContainers=[{"name": "i"}])
    assert variables(item, core_policy="force") == {
        "/spec/containers/0/env": [FORCE],
        "/spec/containers/1/env": [FORCE],
        "/spec/initContainers/0/env": [FORCE],
    }
    assert variables(pod({}), core_policy="force") == {}


def test_containers_without_gpus_see_none() -> None:
    """Exceptions are containers that get GPUs by other means, and containers that set the variable themselves."""
    item = pod({"mem": 4}, {"cpu": 1}, {"tencent.com/vcuda-core": 10}, {"nvidia.com/mig-1g.10gb": 1}, {})
    item["spec"]["containers"][-1]["resources"]["claims"] = [{"name": "gpu"}]
    item["spec"]["containers"].append({"name": "own", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]})
    assert variables(item, hide_gpus=True) == {"/spec/containers/1/env": [HIDDEN]}
    assert variables(item) == {}


@pytest.fixture
async def client() -> AsyncIterator[TestClient[Any, Any]]:
    application = webhook_application(HAMI, GPUS)
    async with TestClient(TestServer(application)) as made:
        yield made


async def test_an_answer_has_the_uid_and_the_patch(client: TestClient[Any, Any]) -> None:
    answer = await client.post(PATH, json={"request": {"uid": "u1", "object": pod({"mem": 4})}})
    body = await answer.json()
    assert (body["kind"], body["apiVersion"]) == ("AdmissionReview", "admission.k8s.io/v1")
    response = body["response"]
    assert (response["uid"], response["allowed"], response["patchType"]) == ("u1", True, "JSONPatch")
    assert json.loads(base64.b64decode(response["patch"]))[-1]["value"] == "gpus"
    untouched = await (await client.post(PATH, json={"request": {"uid": "u2", "object": pod({})}})).json()
    assert untouched["response"] == {"uid": "u2", "allowed": True}


@pytest.mark.parametrize(
    ("field", "limits", "message"),
    [
        ("containers", {"cores": "101", "mem": "4"}, "container c: cores 101 must be 0 to 100"),
        ("containers", {"example.com/a~b": 1, "percent": "1k"}, "container c: percent 1k must be 0 to 100"),
        ("initContainers", {"percent": 150}, "container c: percent 150 must be 0 to 100"),
    ],
)
async def test_a_pod_with_amounts_above_a_whole_gpu_is_refused(
    client: TestClient[Any, Any], field: str, limits: dict[str, Any], message: str
) -> None:
    item = {"spec": {"containers": [{"name": "first"}], field: pod(limits)["spec"]["containers"]}}
    answer = await client.post(PATH, json={"request": {"uid": "u1", "object": item}})
    status = {"code": 422, "reason": "Invalid", "message": message}
    assert (await answer.json())["response"] == {"uid": "u1", "allowed": False, "status": status}


async def test_a_pod_with_too_many_containers_is_refused(client: TestClient[Any, Any]) -> None:
    """As filter refuses it."""
    for count, allowed in ((64, True), (65, False)):
        item = pod(*[{"example.com/a~b": 1, "mem": 4}] * (count - 1), {"mem": 4}, {"cpu": 1})
        answer = await (await client.post(PATH, json={"request": {"uid": "u1", "object": item}})).json()
        assert answer["response"]["allowed"] is allowed
    assert answer["response"]["status"]["message"].startswith(
        "pod with 65 containers that request GPUs, at most 64 are supported"
    )


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b'{"request":{}}', b'{"request":{"uid":"u","object":{"spec":{"containers":[3]}}}}', b"\xff"]
)
async def test_a_body_that_is_no_review_is_named(client: TestClient[Any, Any], body: bytes) -> None:
    answer = await client.post(PATH, data=body)
    assert answer.status == 400
    assert (await answer.text()).startswith("the body is no AdmissionReview of a pod: ")


def test_it_needs_the_profile_and_a_certificate() -> None:
    assert webhook(Settings(), "127.0.0.1") is None
    for node in (NodeSettings(), NodeSettings(profile="hami")):
        with pytest.raises(
            InputError,
            match=r"needs `node.profile: hami` or `node.profile: both`, webhook.tls_cert_file and webhook.tls_key_file",
        ):
            webhook(Settings(node=node, webhook=WebhookSettings(port=8444)), "127.0.0.1")
