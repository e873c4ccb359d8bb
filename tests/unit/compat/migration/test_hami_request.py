"""What containers requested from HAMi."""

from typing import Any

import msgspec
import pytest

from gpumgr.compat.hami.takeover import specs
from gpumgr.compat.objects import PodSpec
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources


def requested(limits: dict[str, Any], names: ReplicaResources) -> ReplicaRequest | None:
    document = {"containers": [{"name": "main", "resources": {"limits": limits}}]}
    (spec,) = specs(msgspec.convert(document, type=PodSpec), names)
    return spec.replicas


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"gpu": "2", "gpumem": "3000", "gpucores": "30"}, ReplicaRequest(count=2, memory_mebibytes=3000, cores=30)),
        ({"gpu": 1}, ReplicaRequest(count=1, cores=100)),
        ({"gpumem": "3k"}, ReplicaRequest(count=1, memory_mebibytes=3000)),
        ({"gpumem-percentage": "150"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "0", "gpucores": "200"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "a lot"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "0"}, None),
        ({"gpu": 0, "gpumem": "3000"}, None),
        ({"rdma": "1"}, None),
    ],
)
def test_requests_are_read_as_hami_reads_them(limits: dict[str, Any], request_: ReplicaRequest | None) -> None:
    assert requested({f"nvidia.com/{key}": value for key, value in limits.items()}, ReplicaResources()) == request_


def test_resources_have_the_names_of_the_configuration() -> None:
    names = ReplicaResources(count_resource="x.io/vgpu", memory_resource="x.io/mem")
    assert requested({"x.io/vgpu": "1", "x.io/mem": "256"}, names) == ReplicaRequest(count=1, memory_mebibytes=256)
