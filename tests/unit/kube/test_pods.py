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


WAITS = {"state": {"waiting": {"reason": "ContainerCreating"}}}
DELETED_AT = "2026-11-01T10:00:30Z"
SUBMITTER = {"name": "SUBMITTER", "value": "ana"}


@pytest.mark.parametrize(
    ("metadata", "spec", "status", "fields"),
    [
        ({}, {}, {}, {"phase": "Pending", "service_account": None, "core_limit": None, "started": False}),
        ({}, {"containers": [container("app", {"cpu": "500m"})]}, {"phase": "Failed"}, {"containers": (), "ended": True}),
        ({}, {}, {"reason": "Unexpected", "message": "why"}, {"reason": "Unexpected", "message": "why"}),
        ({}, {}, {"reason": "r" * 5000, "message": "m" * 5000}, {"reason": "r" * 253, "message": "m" * 1024}),
        ({}, {}, {"reason": "", "message": 5}, {"reason": None, "message": None}),
        ({}, {"serviceAccountName": "trainer"}, {}, {"service_account": "trainer"}),
        ({}, {"serviceAccountName": ""}, {}, {"service_account": None}),
        ({"annotations": {"clusterName": "west"}}, {}, {}, {"cluster": "west", "core_limit": None}),
        ({"annotations": {"clusterName": ""}}, {}, {}, {"cluster": None}),
        ({"annotations": {"clusterName": "x" * 9999}}, {}, {}, {"cluster": "x" * 253}),
        ({"deletionTimestamp": None}, {}, {}, {"deleted": False, "ends_at": None, "grace_seconds": None}),
        ({"deletionTimestamp": DELETED_AT}, {}, {}, {"deleted": True, "grace_seconds": None}),
        (
            {"deletionTimestamp": DELETED_AT, "deletionGracePeriodSeconds": 30},
            {},
            {},
            {"deleted": True, "ends_at": 1793527230.0, "grace_seconds": 30.0},
        ),
        ({}, {}, {"containerStatuses": [WAITS], "initContainerStatuses": None}, {"started": False}),
        ({}, {}, {"containerStatuses": [WAITS], "initContainerStatuses": [{"state": {"running": {}}}]}, {"started": True}),
        ({}, {}, {"containerStatuses": [{"state": {"terminated": {}}}, WAITS]}, {"started": True}),
        ({}, {}, {"containerStatuses": [{"state": None}]}, {"started": False}),
    ],
)
def test_fields_of_a_pod(metadata: dict[str, Any], spec: dict[str, Any], status: dict[str, Any], fields: dict[str, Any]) -> None:
    view = parse_pod(
        {"metadata": {**METADATA, **metadata}, **({"spec": spec} if spec else {}), **({"status": status} if status else {})}
    )
    assert {name: getattr(view, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("containers", "submitter"),
    [
        *(
            ([{"name": "app", "env": [{"name": "OTHER", "value": "x"}, variable]}], name)
            for variable, name in (
                (SUBMITTER, "ana"),
                ({"name": "SUBMITTER", "value": "x" * 9999}, "x" * 253),
                ({"name": "SUBMITTER", "value": ""}, None),
                ({"name": "SUBMITTER", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, None),
            )
        ),
        *((containers, None) for containers in (None, [], [{"name": "app", "env": None}])),
        ([{"name": "app"}, {"name": "second", "env": [SUBMITTER]}], None),
    ],
)
def test_the_submitter_is_a_variable_of_the_first_app_container(
    containers: list[dict[str, Any]] | None, submitter: str | None
) -> None:
    init = [{"name": "init", "env": [{"name": "SUBMITTER", "value": "init"}]}]
    view = parse_pod({"metadata": METADATA, "spec": {"initContainers": init, "containers": containers}})
    assert view.submitter == submitter


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
