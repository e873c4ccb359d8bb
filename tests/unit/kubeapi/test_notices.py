"""Bodies of requests keep Kubernetes' bounds, whatever they are about."""

import json

import pytest

from gpumgr.kubeapi.writer.notices import (
    MAX_MESSAGE_BYTES,
    Count,
    Notice,
    annotations_patch,
    event_body,
    node_subject,
    pod_subject,
)

ONCE = Count(count=1, first_at=1_800_000_000.5, last_at=1_800_000_000.5)


@pytest.mark.parametrize("text", ['a "quoted" word', "two\nlines\t", "x" * 5000, "ü\ud800" * 900, ""])
def test_messages_of_any_kind(text: str) -> None:
    notice = Notice(about=pod_subject(("team", "web"), "u"), reason="R", message=text, warning=True, allocations=("0123",))
    body = json.loads(json.dumps(event_body(notice, ONCE, "node-1")))
    assert len(body["message"].encode()) <= MAX_MESSAGE_BYTES
    assert body["message"].endswith(" [allocation 0123]")
    assert body["message"].startswith(text[:10].encode(errors="replace").decode())


@pytest.mark.parametrize("name", ["w" * 253, "w" * 235 + ".-" + "w" * 16])
def test_names_of_253_characters_make_names_of_events(name: str) -> None:
    body = event_body(Notice(about=pod_subject(("team", name), "u"), reason="R", message="m", warning=False), ONCE, "node-1")
    assert len(body["metadata"]["name"]) <= 253
    assert ".-." not in body["metadata"]["name"]
    assert body["involvedObject"]["name"] == name


def test_the_name_depends_on_all_that_makes_a_notice_another() -> None:
    about = pod_subject(("team", "web"), "u")
    notices = [
        Notice(about=about, reason="R", message="m", warning=False),
        Notice(about=about, reason="R", message="m", warning=False, allocations=("0123",)),
        Notice(about=about, reason="R", message="n", warning=False),
        Notice(about=about, reason="S", message="m", warning=False),
        Notice(about=about, reason="R", message="m", warning=True),
        Notice(about=pod_subject(("team", "web"), "v"), reason="R", message="m", warning=False),
    ]
    assert len({event_body(notice, ONCE, "n")["metadata"]["name"] for notice in notices}) == len(notices)


def test_a_node_has_its_name_for_a_uid_and_its_events_lie_in_default() -> None:
    body = event_body(Notice(about=node_subject("node-1"), reason="R", message="m", warning=True), ONCE, "node-1")
    assert body["metadata"]["namespace"] == "default"
    assert body["involvedObject"] == {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-1"}


def test_a_uid_in_a_patch_is_a_precondition() -> None:
    assert annotations_patch({"a": None}, uid="u") == {"metadata": {"uid": "u", "annotations": {"a": None}}}
    assert annotations_patch({"a": "1"}) == {"metadata": {"annotations": {"a": "1"}}}
