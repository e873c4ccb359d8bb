"""Which parts of a pod's JSON are used."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.units import Amounts
from gpumgr.kube.pods import parse_pod, parse_quantity
from gpumgr.placement.pods import NO_RESIZE, ContainerSpec, PodView, ResizeRequest
from tests.component.stage.stage import HAMI

METADATA = {"namespace": "ns", "name": "web-0", "uid": "u-1"}


def container(
    name: str, limits: dict[str, Any] | None = None, requests: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": limits, "requests": requests}, **more}


def parsed(*containers: dict[str, Any], annotations: dict[str, Any] | None = None, **more: Any) -> PodView:
    """A pod with these containers; `more`: the rest of its metadata."""
    return parse_pod({"metadata": {**METADATA, "annotations": annotations, **more}, "spec": {"containers": containers}})


def env(name: str, value: str) -> dict[str, Any]:
    return {"name": "app", "env": [{"name": name, "value": value}]}


def test_containers_are_in_the_kubelets_order_with_their_kind() -> None:
    view = parse_pod(
        {
            "metadata": {**METADATA, "creationTimestamp": "1970-01-01T00:01:00Z"},
            "spec": {
                "containers": [
                    container("app", {"tencent.com/vcuda-core": "50", "tencent.com/vcuda-memory": "1k"}),
                    {"name": "plain"},
                ],
                "initContainers": [
                    container("first", {"tencent.com/vcuda-core": 200}),
                    container("side", None, {"tencent.com/vcuda-memory": "3"}, restartPolicy="Always"),
                ],
                "ephemeralContainers": [container("debug", {"tencent.com/vcuda-core": "7"})],
            },
            "status": {"phase": "Running"},
        }
    )
    assert (view.key, view.uid, view.phase, view.created_at) == (("ns", "web-0"), "u-1", "Running", 60.0)
    assert view.containers == (
        ContainerSpec(name="first", kind="init", cores=200),
        ContainerSpec(name="side", kind="sidecar", memory_blocks=3),
        ContainerSpec(name="app", cores=50, memory_blocks=1000),
        ContainerSpec(name="plain"),
    )


def test_limits_come_before_requests() -> None:
    both = container("app", {"tencent.com/vcuda-core": "20"}, {"tencent.com/vcuda-core": "10", "tencent.com/vcuda-memory": "2"})
    (spec,) = parsed(both).containers
    assert (spec.cores, spec.memory_blocks) == (20, 2)


def test_a_pod_without_gpu_keeps_its_name_and_phase_only() -> None:
    view = parse_pod(
        {"metadata": METADATA, "spec": {"containers": [container("app", {"cpu": "500m"})]}, "status": {"phase": "Failed"}}
    )
    assert view.containers == ()
    assert view.ended
    assert not view.wants_gpu


def test_a_pod_without_status_is_pending() -> None:
    assert parse_pod({"metadata": METADATA}).phase == "Pending"


def test_the_kubelets_reason_for_a_refusal_is_in_the_status() -> None:
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "Allocate failed due to Requested: 400"}
    view = parse_pod({"metadata": METADATA, "status": status})
    assert (view.reason, view.message) == ("UnexpectedAdmissionError", "Allocate failed due to Requested: 400")
    long = parse_pod({"metadata": METADATA, "status": {"reason": "r" * 5000, "message": "m" * 5000}})
    assert (long.reason, long.message) == ("r" * 253, "m" * 1024)
    odd = parse_pod({"metadata": METADATA, "status": {"reason": "", "message": 5}})
    assert (odd.reason, odd.message) == (None, None)


def test_a_pod_runs_under_a_service_account() -> None:
    assert parse_pod({"metadata": METADATA, "spec": {"serviceAccountName": "trainer"}}).service_account == "trainer"
    assert parse_pod({"metadata": METADATA, "spec": {"serviceAccountName": ""}}).service_account is None
    assert parse_pod({"metadata": METADATA}).service_account is None


@pytest.mark.parametrize(
    ("text", "percent"),
    [
        ("0", 0),
        ("60", 60),
        ("0100", 100),
        ("101", 100),
        ("999999999999999999", 100),
        *((text, None) for text in ("", "-1", "+5", "1.5", " 5", "1_0", "٣", "9" * 5000, "many", None, 7)),
    ],
)
def test_the_core_limit_is_a_percentage_or_nothing(text: object, percent: int | None) -> None:
    assert parsed(annotations={"tencent.com/vcuda-core-limit": text}).core_limit == percent


@pytest.mark.parametrize("annotations", [None, {}])
def test_without_the_annotation_there_is_no_core_limit(annotations: dict[str, Any] | None) -> None:
    assert parsed(annotations=annotations).core_limit is None


def test_further_fields_of_gpu_managers_usage() -> None:
    first = {"name": "app", "env": [{"name": "OTHER", "value": "x"}, {"name": "SUBMITTER", "value": "ana"}]}
    spec = {"initContainers": [env("SUBMITTER", "init")], "containers": [first, env("SUBMITTER", "second")]}
    view = parse_pod({"metadata": {**METADATA, "annotations": {"clusterName": "west"}}, "spec": spec})
    assert (view.submitter, view.cluster) == ("ana", "west")


@pytest.mark.parametrize(
    "containers",
    [
        None,
        [],
        [{"name": "app"}],
        [{"name": "app", "env": None}],
        [{"name": "app", "env": [{"name": "SUBMITTER", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}],
        [{"name": "app", "env": [{"name": "SUBMITTER", "value": ""}]}],
        [{"name": "app"}, {"name": "b", "env": [{"name": "SUBMITTER", "value": "second"}]}],
    ],
)
def test_without_the_variable_there_is_no_submitter(containers: list[dict[str, Any]] | None) -> None:
    view = parse_pod({"metadata": {**METADATA, "annotations": {"clusterName": ""}}, "spec": {"containers": containers}})
    assert (view.submitter, view.cluster) == (None, None)


def test_long_texts_of_pods_are_cut() -> None:
    view = parsed(env("SUBMITTER", "x" * 100_000), annotations={"clusterName": "x" * 100_000})
    assert (view.submitter, view.cluster) == ("x" * 253, "x" * 253)


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("10", 10), ("1k", 1000), ("2Ki", 2048), ("1e3", 1000), ("1E", 10**18), ("3000m", 3), ("1.5k", 1500), ("+4", 4)],
)
def test_quantities(text: str, value: int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "-1", "0.5", "1500m", "k", "NaN", "Infinity", "1e30", "1e999999999", "10E", "1 0"])
def test_texts_that_are_not_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        parse_quantity(text)


@given(st.text(max_size=12))
def test_any_text_is_a_whole_quantity_or_a_value_error(text: str) -> None:
    try:
        assert 0 <= parse_quantity(text) < 1 << 63
    except ValueError:
        return


def placed(text: object, node: str | None = "node-1") -> PodView:
    spec = {"containers": [container("app", {"tencent.com/vcuda-core": "50"})], "nodeName": node}
    return parse_pod({"metadata": {**METADATA, "annotations": {"gpumgr.io/placement": text}}, "spec": spec})


def test_the_schedulers_placement_names_gpus_of_this_node() -> None:
    view = placed('{"containers":{"app":[["GPU-a",50,1024]]},"node":"node-1","version":1}')
    assert (view.placed, view.placement_ignored) == ((("app", (("GPU-a", Amounts(50, 1024)),)),), None)
    assert placed('{"containers":{},"node":"node-1","version":1}').placed == ()


@pytest.mark.parametrize(
    ("text", "node", "reason"),
    [
        ('{"containers":{"app":[["GPU-a",50,1024]]},"node":"node-2","version":1}', "node-1", "it is about node node-2"),
        ('{"containers":{"app":[["GPU-a",50,1024]]},"node":"node-1","version":1}', None, "the pod is bound to none"),
        ('{"containers":{"app":[["GPU-a",50,1024]]},"node":"node-1","version":2}', "node-1", "enum value 2"),
        ('{"containers":{"app":[["GPU-a",5000,1024]]},"node":"node-1","version":1}', "node-1", "not valid"),
        ("[" * 100_000, "node-1", "not valid"),
        ("", "node-1", "not valid"),
        (7, "node-1", "not valid"),
        (f'{{"node":"{"n" * 5000}","version":1}}', "node-1", "not valid"),
    ],
)
def test_a_placement_that_is_not_meant_for_this_node_is_ignored_with_the_reason(
    text: object, node: str | None, reason: str
) -> None:
    view = placed(text, node)
    assert (view.placed, view.containers[0].cores) == ((), 50)
    assert view.placement_ignored is not None
    assert view.placement_ignored.startswith("the annotation gpumgr.io/placement is ignored: ")
    assert reason in view.placement_ignored
    assert len(view.placement_ignored) < 400


@given(st.text())
def test_no_text_of_the_placement_makes_a_pod_unreadable(text: str) -> None:
    assert placed(text).placed == ()


@pytest.mark.parametrize(
    ("text", "limits", "ignored"),
    [
        ('{"main": 8192}', (("main", 8192),), None),
        ("{}", (), None),
        ("8192", (), "JSON object such as"),
        ('{"main": "8Gi"}', (), "Expected `int`"),
        ('{"main": 8.5}', (), "Expected `int`"),
        ('{"main": true}', (), "Expected `int`"),
        ("{", (), "JSON object such as"),
        ("[" * 100_000, (), "JSON object such as"),
        ('{"other": 1}', (), "it names container other, which the pod does not have"),
    ],
)
def test_the_memory_limit_is_read_with_the_pod(text: str, limits: tuple[tuple[str, int], ...], ignored: str | None) -> None:
    pod = parsed({"name": "main"}, annotations={"gpumgr.io/memory-limit": text})
    assert pod.memory_limits == limits
    assert (pod.memory_limits_ignored is None) == (ignored is None)
    assert (ignored or "") in (pod.memory_limits_ignored or "")


@pytest.mark.parametrize(
    ("text", "request_or_problem"),
    [
        ('{"main": {"cores": 40, "memoryMiB": 8192}}', ResizeRequest(cores=40, memory_mebibytes=8192)),
        ('{"main": {"cores": 40, "requestedAt": "12:00"}}', ResizeRequest(cores=40, requested_at="12:00")),
        ('{"main": {}}', NO_RESIZE),
        ("{}", NO_RESIZE),
        ('{"main": {"memory": 1}}', "unknown field `memory`"),
        ('{"main": {"cores": 1.5}}', "Expected `int | null`"),
        ('{"main": 1}', "Expected `object`"),
        ("[" * 100_000, "gpumgr.io/resize, such as"),
        ('{"other": {"cores": 1}}', "it names container other, which the pod does not have"),
    ],
)
def test_the_resize_is_read_with_the_pod(text: str, request_or_problem: ResizeRequest | str) -> None:
    found = parsed({"name": "main"}, annotations={"gpumgr.io/resize": text}).resize_of("main")
    if isinstance(request_or_problem, ResizeRequest):
        assert found == request_or_problem
    else:
        assert request_or_problem in found.problem


@pytest.mark.parametrize(("mig_resource", "wanted"), [("nvidia.com/mig-", [3]), ("nvidia.com/gpu", [4]), (None, [])])
def test_mig_devices_count_by_the_strategys_resources(mig_resource: str | None, wanted: list[int]) -> None:
    limits = {"nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-2g.20gb": "1", "nvidia.com/gpu": "4", "nvidia.com/gpumem": "8"}
    view = parse_pod({"metadata": METADATA, "spec": {"containers": [container("main", limits)]}}, mig_resource=mig_resource)
    assert [each.instances for each in view.containers] == wanted


@pytest.mark.parametrize(("limits", "priority"), [({}, 1), ({"nvidia.com/priority": "0"}, 0), ({"nvidia.com/priority": 7}, 7)])
def test_the_priority_is_hamis_resource(limits: dict[str, str | int], priority: int) -> None:
    pod = {"metadata": METADATA, "spec": {"containers": [container("main", {"nvidia.com/gpu": "1", **limits})]}}
    assert [each.priority for each in parse_pod(pod, HAMI).containers] == [priority]
    assert [each.priority for each in parse_pod(pod, msgspec.structs.replace(HAMI, priority_resource="other")).containers] == [1]


def test_a_pod_with_a_deletion_timestamp_is_deleted_and_its_grace_period_has_an_end() -> None:
    assert parsed(deletionTimestamp="2026-11-01T10:00:30Z").deleted
    known = parsed(deletionTimestamp="2026-11-01T10:00:30Z", deletionGracePeriodSeconds=30)
    assert (known.ends_at, known.grace_seconds) == (1793527230.0, 30.0)
    assert parsed(deletionTimestamp="2026-11-01T10:00:30Z").grace_seconds is None
    for alive in (parsed(), parsed(deletionTimestamp=None)):
        assert (alive.deleted, alive.ends_at) == (False, None)


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
    assert parse_pod({"metadata": METADATA, "spec": {}, "status": status}).started is started


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
    view = parsed(annotations={f"gpumgr.io/{key}": value for key, value in annotations.items()})
    assert (view.suspend, view.suspend_when_idle_seconds) == (suspend, idle_seconds)
    assert (view.suspend_ignored is None) == (ignored is None)
    assert (ignored or "") in (view.suspend_ignored or "")
