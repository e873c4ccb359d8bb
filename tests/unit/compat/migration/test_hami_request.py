"""What containers asked of HAMi, and what they ask of gpumgr."""

import json
from typing import Any, TypeVar

import msgspec
import pytest

from gpumgr.compat.hami.request import advise, requests, smallest_gpu, switched_off
from gpumgr.compat.objects import KubernetesContainer, PodSpec
from gpumgr.kube.hami_node import REGISTER
from gpumgr.kube.replica_requests import HAMI_ALLOCATED
from gpumgr.placement.evaluators.replicas import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

GPU = 16384
T = TypeVar("T")


def parsed(kind: type[T], document: dict[str, Any]) -> T:
    return msgspec.convert(document, type=kind)


@pytest.mark.parametrize(
    ("wish", "cores", "blocks", "remark"),
    [
        (ReplicaRequest(count=1, memory_mebibytes=3000, cores=30), 30, 12, None),
        (ReplicaRequest(count=1, memory_mebibytes=1, cores=1), 1, 1, None),
        (ReplicaRequest(count=1, memory_mebibytes=99999, cores=99), 99, 64, None),
        (ReplicaRequest(count=1, memory_percent=50, cores=30), 30, 32, None),
        (ReplicaRequest(count=1, cores=30), 30, 64, None),
        (ReplicaRequest(count=1, memory_mebibytes=4096), 25, 16, "its cores had no limit"),
        (ReplicaRequest(count=1, memory_percent=1), 1, 1, "its cores had no limit"),
        (ReplicaRequest(count=1, cores=100, memory_mebibytes=GPU), 100, None, None),
        (ReplicaRequest(count=1, cores=100), 100, None, None),
        (ReplicaRequest(count=1, memory_mebibytes=4096, cores=100), 100, None, "all the memory of its GPU"),
        (ReplicaRequest(count=4, cores=100), 400, None, None),
        (ReplicaRequest(count=2, memory_mebibytes=4096, cores=30), 200, None, "parts of 2 GPUs in one container can't be"),
    ],
)
def test_advice(wish: ReplicaRequest, cores: int, blocks: int | None, remark: str | None) -> None:
    memory = f", tencent.com/vcuda-memory: {blocks}" if blocks else ""
    request, _, remarks = advise(wish, GPU).partition("; ")
    assert request == f"tencent.com/vcuda-core: {cores}{memory}"
    assert (remark or "") in remarks
    assert bool(remarks) == (remark is not None)


def test_without_the_gpus_size_dependent_values_are_left_to_the_operator() -> None:
    known = advise(ReplicaRequest(count=1, memory_mebibytes=4096, cores=30), None)
    assert known == "tencent.com/vcuda-core: 30, tencent.com/vcuda-memory: 16"
    unknown = advise(ReplicaRequest(count=1, memory_percent=50), None)
    assert unknown.startswith("tencent.com/vcuda-core: N (1 to 99), tencent.com/vcuda-memory: N (blocks of 256 MiB); ")


def container(**limits: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "resources": {"limits": {f"nvidia.com/{key.replace('_', '-')}": value for key, value in limits.items()}},
    }


@pytest.mark.parametrize(
    ("limits", "wish"),
    [
        ({"gpu": "2", "gpumem": "3000", "gpucores": "30"}, ReplicaRequest(count=2, memory_mebibytes=3000, cores=30)),
        ({"gpu": 1}, ReplicaRequest(count=1, cores=100)),
        ({"gpumem": "3k"}, ReplicaRequest(count=1, memory_mebibytes=3000)),
        ({"gpumem_percentage": "150"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "0", "gpucores": "200"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "1", "gpumem": "a lot"}, ReplicaRequest(count=1, cores=100)),
        ({"gpu": "0"}, None),
        ({"gpu": 0, "gpumem": "3000"}, None),
        ({"rdma": "1"}, None),
    ],
)
def test_the_request_is_converted(limits: dict[str, Any], wish: ReplicaRequest | None) -> None:
    assert [found for _, found in requests(parsed(PodSpec, {"containers": [container(**limits)]}), {}, ReplicaResources())] == (
        [wish] if wish else []
    )


def test_what_was_granted_is_more_exact() -> None:
    spec = {
        "initContainers": [{"name": "fetch"}],
        "containers": [container(gpu="1", gpumem_percentage="50"), {"name": "side"}, container(gpu="2")],
    }
    text = ";GPU-a,NVIDIA,8000,30:;;GPU-a,NVIDIA,16384,100:GPU-b,NVIDIA,16384,100:;"
    granted = [wish for _, wish in requests(parsed(PodSpec, spec), {HAMI_ALLOCATED: text}, ReplicaResources())]
    assert granted == [ReplicaRequest(count=1, memory_mebibytes=8000, cores=30), ReplicaRequest(count=2, cores=100)]


def test_resources_under_other_names() -> None:
    spec = {"containers": [{"name": "main", "resources": {"requests": {"x.io/vgpu": "1", "x.io/mem": "256"}}}]}
    names = ReplicaResources(count_resource="x.io/vgpu", memory_resource="x.io/mem")
    assert [*requests(parsed(PodSpec, spec), {}, names)] == [("main", ReplicaRequest(count=1, memory_mebibytes=256))]


@pytest.mark.parametrize("text", ["", "nonsense", "GPU-a,NVIDIA,3000:;", "GPU-a,NVIDIA,x,0:;", "GPU-a,NVIDIA,-1,0:;"])
def test_with_a_text_that_is_none_of_hamis_the_request_counts(text: str) -> None:
    spec = parsed(PodSpec, {"containers": [container(gpu="1", gpumem="5")]})
    assert [*requests(spec, {HAMI_ALLOCATED: text}, ReplicaResources())] == [
        ("main", ReplicaRequest(count=1, memory_mebibytes=5))
    ]


def test_the_size_of_the_nodes_smallest_gpu() -> None:
    registered = json.dumps([{"id": "GPU-a", "devmem": 32768}, {"id": "GPU-b", "devmem": 16384}])
    assert smallest_gpu({REGISTER: registered}, 1.0) == 16384
    assert smallest_gpu({REGISTER: registered}, 2.0) == 8192
    assert smallest_gpu({REGISTER: "GPU-a,10,7680,100,NVIDIA-Tesla P4,0,true:"}, 1.0) == 7680
    for broken in ("GPU-a,10,7680,100:", "[1]", "{}", '[{"id": "GPU-a"}]'):
        assert smallest_gpu({REGISTER: broken}, 1.0) is None


def test_a_container_without_hamis_library() -> None:
    assert switched_off(parsed(KubernetesContainer, {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]}))
    assert not switched_off(
        parsed(KubernetesContainer, {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "0"}, {"name": "A", "valueFrom": {}}]})
    )
