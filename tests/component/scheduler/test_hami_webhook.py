"""The webhook's own texts; its rules are tested beside the policies' on a real API server (tests/e2e/test_hami_admission.py)."""

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gpumgr.errors import InputError
from gpumgr.kubeapi.replica_requests import ReplicaResources
from gpumgr.scheduler.hami_webhook import PATH, patches, webhook_application
from gpumgr.scheduler.lifecycle import webhook
from gpumgr.settings.schema import NodeSettings, Settings, WebhookSettings

HAMI = ReplicaResources(count="example.com/a~b", memory="mem", memory_percentage="percent", cores="cores")


def pod(*limits: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "c", "resources": {"limits": each}} for each in limits], **spec}}


def patched(item: dict[str, Any], runtime_class: str = "") -> list[tuple[str, str]]:
    found = patches(item, HAMI, scheduler="gpus", runtime_class=runtime_class)
    assert all(each["op"] == "add" for each in found)
    return [(each["path"], each["value"]) for each in found]


def test_the_names_of_the_settings_count() -> None:
    assert patched(pod({}, {"mem": 4})) == [
        ("/spec/containers/1/resources/limits/example.com~1a~0b", "1"),
        ("/spec/containers/1/resources/requests/example.com~1a~0b", "1"),
        ("/spec/schedulerName", "gpus"),
    ]
    assert patched(pod({"nvidia.com/gpu": 1})) == []


def test_a_runtime_class_is_written_where_the_pod_has_none() -> None:
    wanted = {"example.com/a~b": 1, "cores": 5}
    assert patched(pod(wanted), "nvidia") == [("/spec/schedulerName", "gpus"), ("/spec/runtimeClassName", "nvidia")]
    assert patched(pod(wanted, runtimeClassName="kata"), "nvidia") == [("/spec/schedulerName", "gpus")]


@pytest.fixture
async def client() -> AsyncIterator[TestClient[Any, Any]]:
    application = webhook_application(HAMI, scheduler="gpus", runtime_class="")
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
    "body", [b"", b"[]", b"{", b'{"request":{}}', b'{"request":{"uid":"u","object":{"spec":{"containers":[3]}}}}', b"\xff"]
)
async def test_a_body_that_is_no_review_is_named(client: TestClient[Any, Any], body: bytes) -> None:
    answer = await client.post(PATH, data=body)
    assert answer.status == 400
    assert (await answer.text()).startswith("the body is no AdmissionReview of a pod: ")


def test_it_needs_the_profile_and_a_certificate() -> None:
    assert webhook(Settings()) is None
    for node in (NodeSettings(), NodeSettings(profile="hami")):
        with pytest.raises(InputError, match=r"webhook.port needs node.profile hami or both, webhook.tls_cert_file"):
            webhook(Settings(node=node, webhook=WebhookSettings(port=8444)))
