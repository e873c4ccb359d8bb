"""HAMi's requests and device lists in a pod (cases of its own tests)."""

from collections.abc import Mapping
from typing import Any

import pytest

from gpumgr.common.units import Amounts
from gpumgr.kube.hami_formats import placed_by_hami, replica_request
from gpumgr.kube.pods import parse_pod, parse_quantity
from gpumgr.placement.pods import ContainerSpec, PodView
from gpumgr.placement.requests import ReplicaRequest
from gpumgr.settings.hami_resources import ReplicaResources

RESOURCES = ReplicaResources()
ONE = ContainerSpec(name="one", replicas=ReplicaRequest(count=1))
PAIR = ContainerSpec(name="pair", replicas=ReplicaRequest(count=2))


def wanted(**amounts: object) -> dict[str, object]:
    return {f"nvidia.com/{name.replace('_', '-')}": amount for name, amount in amounts.items()}


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        (wanted(gpu=1), ReplicaRequest(count=1, cores=100)),
        (wanted(gpu=2, gpumem=4096), ReplicaRequest(count=2, memory_mebibytes=4096)),
        (wanted(gpu=1, gpumem_percentage=150), ReplicaRequest(count=1, memory_percent=150)),
        (wanted(gpu=1, gpumem_percentage=50), ReplicaRequest(count=1, memory_percent=50)),
        (wanted(gpu=1, gpumem_percentage=0, gpucores=0), ReplicaRequest(count=1)),
        (wanted(gpu=1, gpumem=0, gpucores=70), ReplicaRequest(count=1, cores=70)),
        (wanted(gpu=1, gpumem=5, gpumem_percentage=50), ReplicaRequest(count=1, memory_mebibytes=5, memory_percent=50)),
        (wanted(gpu=1, gpucores=120), ReplicaRequest(count=1, cores=120)),
        (wanted(gpu=1, gpumem="16Gi"), ReplicaRequest(count=1, memory_mebibytes=16 << 30)),
        (wanted(gpumem=5), None),
        ({}, None),
    ],
)
def test_a_request(limits: Mapping[str, object], request_: ReplicaRequest | None) -> None:
    assert replica_request(limits, RESOURCES, parse_quantity) == request_


@pytest.mark.parametrize("disable_core_limit", [False, True])
@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        (wanted(gpu=1, gpucores=100), None),
        (wanted(gpu=1, gpumem_percentage=100, gpucores=0), None),
        (wanted(gpu=1, gpucores=101), "101 % of the cores of each GPU requested: gpucores must be 0 to 100"),
        (wanted(gpu=2, gpumem=1000, gpucores=150), "150 % of the cores of each GPU requested: gpucores must be 0 to 100"),
        (wanted(gpu=1, gpumem_percentage=101), "101 % of the memory of each GPU requested: gpumem-percentage must be 0 to 100"),
        (
            wanted(gpu=1, gpumem=1, gpumem_percentage="1k"),
            "1000 % of the memory of each GPU requested: gpumem-percentage must be",
        ),
    ],
)
def test_amounts_above_a_whole_gpu_have_a_problem(
    limits: Mapping[str, object], problem: str | None, disable_core_limit: bool
) -> None:
    request = replica_request(limits, ReplicaResources(disable_core_limit=disable_core_limit), parse_quantity)
    assert request is not None
    assert (request.problem or "").startswith(problem or "")
    assert (request.problem is None) is (problem is None)


def test_defaults_and_the_factor_of_memory() -> None:
    """As HAMi, the factor is for what is requested only, and an explicit 0 cores means no limit."""
    resources = ReplicaResources(
        count_resource="gpu",
        memory_resource="m",
        memory_percentage_resource="p",
        core_resource="c",
        default_memory=3,
        default_cores=20,
        memory_factor=1024,
    )
    for limits, request_ in (
        ({}, ReplicaRequest(count=1, cores=20, memory_mebibytes=3)),
        ({"m": 2}, ReplicaRequest(count=1, cores=20, memory_mebibytes=2048)),
        ({"m": 0, "c": 0}, ReplicaRequest(count=1, memory_mebibytes=3)),
        ({"p": 40, "c": 30}, ReplicaRequest(count=1, cores=30, memory_percent=40)),
    ):
        assert replica_request({"gpu": 1, **limits}, resources, parse_quantity) == request_


@pytest.mark.hami_bug("B1: it omits the entries of containers without GPUs, and reads an app's devices as an init container's")
@pytest.mark.parametrize(
    ("text", "containers", "placed"),
    [
        ("GPU-a,NVIDIA,3000,0:;", [ONE], (("one", (("GPU-a", Amounts(0, 3000)),)),)),
        (
            "GPU-a,NVIDIA,1000,30:GPU-b,NVIDIA,1000,30:;",
            [PAIR],
            (("pair", (("GPU-a", Amounts(30, 1000)), ("GPU-b", Amounts(30, 1000)))),),
        ),
        (";GPU-a,NVIDIA A100,1000,10:;", [ContainerSpec(name="first"), ONE], (("one", (("GPU-a", Amounts(10, 1000)),)),)),
        ("GPU-a,NVIDIA A100,1000,10:;", [ContainerSpec(name="first"), ONE], (("one", (("GPU-a", Amounts(10, 1000)),)),)),
    ],
)
def test_a_device_list(text: str, containers: list[ContainerSpec], placed: object) -> None:
    assert placed_by_hami(text, containers) == placed


def view(annotations: Mapping[str, str], resources: ReplicaResources | None = RESOURCES) -> PodView:
    main: dict[str, Any] = {"name": "main", "resources": {"limits": wanted(gpu="1", gpumem="100")}}
    metadata = {"namespace": "team", "name": "a", "uid": "u", "annotations": annotations}
    return parse_pod({"metadata": metadata, "spec": {"nodeName": "node-1", "containers": [main]}}, resources)


def test_the_choice_of_hamis_scheduler_counts_on_its_node_only() -> None:
    mine = {"hami.io/vgpu-node": "node-1", "hami.io/vgpu-devices-allocated": "GPU-a,NVIDIA,100,0:;"}
    assert view(mine).placed == (("main", (("GPU-a", Amounts(0, 100)),)),)
    (main,) = view(mine).containers
    assert main.replicas == ReplicaRequest(count=1, memory_mebibytes=100)
    assert view({**mine, "hami.io/vgpu-node": "node-2"}).placed == ()
    wrong = view({**mine, "hami.io/vgpu-devices-allocated": "x"})
    assert (wrong.bound_by_hami, wrong.placed) == (True, (("", ()),))
    assert wrong.placement_ignored == (
        "the annotation hami.io/vgpu-devices-allocated can't be read: 'x' is no list of devices as HAMi writes it"
    )
    assert not view(mine, None).wants_gpu


def test_the_place_of_a_mig_device_is_hamis() -> None:
    """The positions are those of the device list, which may lack leading containers."""
    allocation = '[{"containerIndex":1,"deviceIndex":0,"gpuUUID":"GPU-a","profile":"2g.20gb","placement":{"start":2,"size":2}}]'
    mine = {
        "hami.io/vgpu-node": "node-1",
        "hami.io/vgpu-devices-allocated": ";GPU-a,NVIDIA,20096,28:;",
        "hami.io/vgpu-mig-allocations": allocation,
    }
    assert view(mine).placed == (("main", (("GPU-a", Amounts(28, 20096, slices=0b1100)),)),)
    wrong = view({**mine, "hami.io/vgpu-mig-allocations": "[{}]"})
    assert (wrong.bound_by_hami, wrong.placed) == (True, (("", ()),))
    assert "hami.io/vgpu-mig-allocations can't be read: no MIG allocations of HAMi" in (wrong.placement_ignored or "")
