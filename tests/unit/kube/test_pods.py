"""What is read of a pod: its MIG devices, its priority, whether it is to be deleted, and whether one of its containers has started."""

import msgspec
import pytest

from gpumgr.kube.pods import parse_pod
from tests.component.stage.stage import HAMI


@pytest.mark.parametrize(
    ("mig_resource", "wanted"),
    [("nvidia.com/mig-", 3), ("nvidia.com/gpu", 4), (None, None)],
)
def test_mig_devices_count_by_the_strategys_resources(mig_resource: str | None, wanted: int | None) -> None:
    limits = {"nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-2g.20gb": "1", "nvidia.com/gpu": "4", "nvidia.com/gpumem": "8"}
    pod = {
        "metadata": {"namespace": "team", "name": "p", "uid": "u"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }
    view = parse_pod(pod, mig_resource=mig_resource)
    assert [each.instances for each in view.containers] == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(("limits", "priority"), [({}, 1), ({"nvidia.com/priority": "0"}, 0), ({"nvidia.com/priority": 7}, 7)])
def test_the_priority_is_hamis_resource(limits: dict[str, str | int], priority: int) -> None:
    containers = [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1", **limits}}}]
    pod = {"metadata": {"namespace": "team", "name": "p", "uid": "u"}, "spec": {"containers": containers}}
    assert [each.priority for each in parse_pod(pod, HAMI).containers] == [priority]
    assert [each.priority for each in parse_pod(pod, msgspec.structs.replace(HAMI, priority_resource="other")).containers] == [1]


@pytest.mark.parametrize("timestamp", [None, "2026-11-01T10:00:00Z"])
def test_a_pod_with_a_deletion_timestamp_is_deleted(timestamp: str | None) -> None:
    metadata = {"namespace": "team", "name": "p", "uid": "u", **({"deletionTimestamp": timestamp} if timestamp else {})}
    assert parse_pod({"metadata": metadata}).deleted is (timestamp is not None)


def test_the_end_of_a_deleted_pods_grace_period_is_read() -> None:
    metadata = {"namespace": "team", "name": "p", "uid": "u", "deletionTimestamp": "2026-11-01T10:00:30Z"}
    known = parse_pod({"metadata": {**metadata, "deletionGracePeriodSeconds": 30}})
    assert (known.ends_at, known.grace_seconds) == (1793527230.0, 30.0)
    assert parse_pod({"metadata": metadata}).grace_seconds is None
    assert parse_pod({"metadata": {**metadata, "deletionTimestamp": None}}).ends_at is None


WAITS = {"state": {"waiting": {"reason": "ContainerCreating"}}}


@pytest.mark.parametrize(
    ("status", "started"),
    [
        ({}, False),
        ({"containerStatuses": [WAITS], "initContainerStatuses": None}, False),
        ({"containerStatuses": [WAITS], "initContainerStatuses": [{"state": {"running": {}}}]}, True),
        ({"containerStatuses": [WAITS], "initContainerStatuses": [{"state": {"terminated": {}}}, WAITS]}, True),
        ({"containerStatuses": [{"state": None}]}, False),
    ],
)
def test_a_pod_has_started_with_its_first_container(status: dict[str, object], started: bool) -> None:
    pod = {"metadata": {"namespace": "team", "name": "p", "uid": "u"}, "spec": {}, "status": status}
    assert parse_pod(pod).started is started


@pytest.mark.parametrize(
    ("annotations", "suspend", "idle_seconds", "ignored"),
    [
        ({}, None, None, None),
        ({"suspend": "true"}, True, None, None),
        ({"suspend": "false", "suspend-when-idle": "10m"}, False, 600.0, None),
        ({"suspend-when-idle": "90s"}, None, 90.0, None),
        ({"suspend-when-idle": "2h"}, None, 7200.0, None),
        ({"suspend-when-idle": "never"}, None, 0.0, None),
        ({"suspend": "yes"}, None, None, 'the annotation gpumgr.io/suspend must be "true" or "false"'),
        ({"suspend-when-idle": "0s"}, None, None, "must be a time such as"),
        ({"suspend-when-idle": "10 minutes"}, None, None, "must be a time such as"),
    ],
)
def test_annotations_about_suspension(
    annotations: dict[str, str], suspend: bool | None, idle_seconds: float | None, ignored: str | None
) -> None:
    named = {f"gpumgr.io/{key}": value for key, value in annotations.items()}
    view = parse_pod({"metadata": {"namespace": "team", "name": "p", "uid": "u", "annotations": named}})
    assert (view.suspend, view.suspend_when_idle_seconds) == (suspend, idle_seconds)
    assert (view.suspend_ignored is None) == (ignored is None)
    assert (ignored or "") in (view.suspend_ignored or "")
