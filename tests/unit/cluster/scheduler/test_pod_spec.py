"""What is decoded of every pod: whether it requests GPUs, and its CPU as kube-scheduler counts it."""

import json
from typing import Any

import msgspec
import pytest

from gpumgr.cluster.scheduler.objects import CpuPod, decode_pod


def container(cpu: object, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu, "memory": "1Gi"}}, **more}


def decoded(**spec: Any) -> dict[str, Any] | CpuPod | None:
    item = {"metadata": {"name": "one", "uid": "uid-one"}, "spec": {"nodeName": "a", **spec}, "status": {"phase": "Running"}}
    return decode_pod(msgspec.Raw(json.dumps(item).encode()))


SIDECAR = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "cpu_milli"),
    [
        ({"containers": [container("500m"), container("2"), container("0.25"), container(1)]}, 3750),
        ({"containers": [container("1m"), container("1e-3"), container("0.0001")]}, 3),
        ({"containers": [container("1")], "initContainers": [container("3"), container("2")]}, 3000),
        ({"containers": [container("1")], "initContainers": [container("2", **SIDECAR), container("2")]}, 4000),
        ({"containers": [container("3")], "initContainers": [container("2"), container("2", **SIDECAR)]}, 5000),
        ({"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1250),
        ({"containers": [container("1")], "resources": {"requests": {"cpu": "4"}}, "overhead": {"cpu": "1"}}, 5000),
        ({"containers": [{"name": "c"}, {"name": "d", "resources": {}}]}, 0),
        ({"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}, container("1")]}, 3000),
        ({"containers": [container("1")], "resources": {"limits": {"cpu": "4"}}}, 1000),
        ({"containers": [{"name": "c"}], "resources": {"limits": {"cpu": "4"}}}, 4000),
        ({"containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "tencent.com/vcuda-core": "0"}}}]}, 1000),
    ],
)
def test_the_cpu_of_a_pod_without_gpus(spec: dict[str, Any], cpu_milli: int) -> None:
    assert decoded(**spec) == CpuPod("uid-one", "a", cpu_milli)


@pytest.mark.parametrize("where", ["requests", "limits"])
@pytest.mark.parametrize("resource", ["tencent.com/vcuda-core", "tencent.com/vcuda-memory"])
@pytest.mark.parametrize("kind", ["containers", "initContainers"])
def test_a_pod_with_gpus_is_decoded_whole(where: str, resource: str, kind: str) -> None:
    found = decoded(**{kind: [{"name": "c", "resources": {where: {resource: "10"}}}]})
    assert isinstance(found, dict)
    assert found["status"] == {"phase": "Running"}


def test_a_pod_without_gpus_and_without_a_node_is_left_out() -> None:
    assert decoded(nodeName=None, containers=[container("1")]) is None


@pytest.mark.parametrize("cpu", ["much", "-1", ["1"], {"a": 1}])
def test_cpu_that_cannot_be_read_is_an_error(cpu: object) -> None:
    with pytest.raises(ValueError, match="quantity"):
        decoded(containers=[container(cpu)])
