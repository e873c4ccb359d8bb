"""Setting `kubernetes.delete_failed_pods`: which pods are deleted; a deletion is tried until the pod has gone."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from gpumgr.kube.pods import parse_pod
from gpumgr.kube.publisher.objects import REFUSED, waits_for_deletion

from .fake_api_server import Answer, FakeApiServer, lost, pod, status
from .stage import POD, Stage

OTHER = ("team", "b")


def deleted(api: FakeApiServer) -> list[tuple[str, str]]:
    """Name and UID of each request."""
    return [(path.rpartition("/")[2], body["preconditions"]["uid"]) for path, body in api.deleted]


async def test_a_deletion_that_fails_is_tried_again_and_a_refusal_logged_once(api: FakeApiServer, odd: Stage) -> None:
    api.deletions.extend([status(500, "no"), status(503, "no"), *[status(403, "forbidden")] * 2, status(429, "later")])
    odd.publisher.delete_pod(POD, "uid-a")
    with capture_logs() as logs:
        await odd.written()
    assert deleted(api) == [("web-0", "uid-a")] * 6
    assert api.deleted[0][0] == "/api/v1/namespaces/team/pods/web-0"
    named = [each for each in logs if not each["event"].startswith("announcements_")]
    assert [(each["event"], each.get("remedy")) for each in named] == [
        ("announcement_refused", "nothing; it is tried again"),
        ("announcement_refused", "nothing; it is tried again"),
        ("announcement_refused", "allow it in the agent's ClusterRole: delete on pods"),
        ("failed_pod_deleted", None),
    ]


@pytest.mark.parametrize("answers", [[status(403, "forbidden")], [status(500, "failed calling webhook")], [lost, lost]])
async def test_a_deletion_that_fails_holds_up_no_other_write(api: FakeApiServer, odd: Stage, answers: list[Answer]) -> None:
    """An admission webhook for deletions may be down while the API server works."""
    api.deletions.extend(answers)
    odd.publisher.delete_pod(POD, "uid-a")
    odd.publisher.delete_pod(OTHER, "uid-b")
    odd.time.passes.clear()
    await odd.a_try()
    odd.time.now += 0.1
    state = odd.publisher.state()
    assert (state.waiting, state.oldest_seconds, state.away) == (1, 0.0, False), "it is not late: the API server works"
    odd.time.passes.set()
    await odd.written()
    assert deleted(api)[len(answers) :] == [("b", "uid-b"), ("web-0", "uid-a")]


@pytest.mark.parametrize("code", [404, 409])
async def test_a_pod_that_is_gone_or_whose_name_another_has_is_not_deleted_again(
    api: FakeApiServer, odd: Stage, code: int
) -> None:
    api.deletions.append(status(code, "not this one"))
    odd.publisher.delete_pod(POD, "uid-a")
    with capture_logs() as logs:
        await odd.written()
    assert (deleted(api), logs) == ([("web-0", "uid-a")], [])


async def test_a_deletion_of_a_pod_that_went_by_itself_is_given_up(api: FakeApiServer, odd: Stage) -> None:
    api.deletions.append(status(500, "no"))
    odd.time.passes.clear()
    odd.publisher.delete_pod(POD, "uid-a")
    await odd.a_try()
    odd.publisher.forget_pod("uid-a")
    odd.publisher.delete_pod(OTHER, "uid-b")
    odd.time.passes.set()
    await odd.written()
    assert deleted(api) == [("web-0", "uid-a"), ("b", "uid-b")]


@pytest.mark.parametrize(("changes", "waits"), [
    ({}, True),
    ({"deletionTimestamp": "2026-03-01T10:00:00Z"}, False),
    ({"ownerReferences": []}, False),
    ({"cores": None}, False),
    ({"reason": "Evicted"}, False),
])  # fmt: skip
def test_a_pod_that_the_agent_refused_waits_for_its_deletion(changes: dict[str, Any], waits: bool) -> None:
    reason = changes.pop("reason", REFUSED)
    item = pod("a", "uid-a", phase="Failed", **{"ownerReferences": [{"controller": True}], **changes})
    item["status"]["reason"] = reason
    assert waits_for_deletion(parse_pod(item)) is waits
    assert not waits_for_deletion(None)
