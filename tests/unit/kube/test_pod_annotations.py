"""The annotations of a pod: gpu-manager's keys as gpu-admission reads them, and gpumgr's list, for any names."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr.kube.pod_annotations import is_ours, pod_annotations
from gpumgr.ledger.ledger import Allocation
from gpumgr.ledger.suspension import Suspension
from gpumgr.placement.pods import ContainerSpec, PodView
from tests.unit.web.metrics.pictures import BLOCKS, allocation, uuid_of, view_of, whole

WEB = ("team", "web")


def pod(*containers: ContainerSpec) -> PodView:
    return PodView(namespace="team", name="web", uid="uid-a", containers=containers)


def app(name: str) -> ContainerSpec:
    return ContainerSpec(name=name, cores=5, memory_blocks=2)


def share(letter: str, container: str | None, *, gpu: int = 0, init: bool = False) -> Allocation:
    return allocation(letter, WEB, container=container, init=init, cores={gpu: 0b11111}, blocks={gpu: 0b11})


def annotated(
    view: PodView, *allocations: Allocation, shown: int = 2, suspensions: dict[str, Suspension] | None = None, **evaluators: str
) -> dict[str, str]:
    node = view_of(shown=shown)
    registry = node.ledger.gpu_registry
    gpus = node.inventory.gpus(registry)
    return pod_annotations(view, allocations, registry, gpus, node="node-1", evaluators=evaluators, suspensions=suspensions or {})


def listed(annotations: dict[str, str]) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = json.loads(annotations["gpumgr.io/allocations"])
    return result


def test_the_annotations_have_gpu_managers_keys_and_gpumgrs() -> None:
    held = replace(share("a", "main", gpu=1), mechanisms=("limiter", "nvml-memory"), granted_at=1_800_000_000.25)
    annotations = annotated(pod(app("main")), held, a="share")
    assert listed(annotations) == [
        {
            "container": "main",
            "allocation": "a",
            "gpus": [uuid_of(1)],
            "indices": [1],
            "cores": 5,
            "memory_mebibytes": 512,
            "mechanisms": ["limiter", "nvml-memory"],
            "evaluator": "share",
            "why": "a test",
        }
    ]
    del annotations["gpumgr.io/allocations"]
    assert annotations == {
        "tencent.com/predicate-gpu-idx-0": "1",
        "tencent.com/predicate-time": "1800000000250000000",
        "tencent.com/predicate-node": "node-1",
        "tencent.com/gpu-assigned": "true",
    }
    assert all(map(is_ours, annotations))
    assert not is_ours("tencent.com/vcuda-core-limit")


def test_a_containers_index_counts_all_app_containers_and_no_others() -> None:
    init = ContainerSpec(name="fetch", kind="init", cores=5, memory_blocks=2)
    sidecar = ContainerSpec(name="proxy", kind="sidecar", cores=5, memory_blocks=2)
    view = pod(init, sidecar, ContainerSpec(name="log"), app("one"), app("two"))
    holders = [share("e", "two", gpu=1), share("d", "one"), share("c", "proxy"), share("b", "fetch", init=True), share("f", None)]
    annotations = annotated(view, *holders)
    indices = {key: value for key, value in annotations.items() if "idx" in key}
    assert indices == {"tencent.com/predicate-gpu-idx-1": "0", "tencent.com/predicate-gpu-idx-2": "1"}
    assert [each["container"] for each in listed(annotations)] == ["fetch", "proxy", "one", "two", None]
    assert annotations["tencent.com/predicate-time"] == str(ord("b") * 10**9)


def test_whole_gpus_have_all_their_memory() -> None:
    both = allocation("a", WEB, cores={0: (1 << 100) - 1, 1: (1 << 100) - 1})
    annotations = annotated(pod(app("main")), both)
    assert annotations["tencent.com/predicate-gpu-idx-0"] == "0,1"
    (made,) = listed(annotations)
    assert (made["cores"], made["memory_mebibytes"], made["indices"]) == (200, 2 * BLOCKS * 256, [0, 1])
    assert whole("a", WEB, 0).memory_mebibytes == BLOCKS * 256


def test_a_gpu_that_the_driver_does_not_show_has_no_index() -> None:
    annotations = annotated(pod(app("main")), share("a", "main", gpu=1), shown=1)
    assert listed(annotations)[0]["indices"] == [None]
    assert listed(annotations)[0]["gpus"] == [uuid_of(1)]
    assert "tencent.com/predicate-gpu-idx-0" not in annotations


def test_without_allocations_there_are_no_annotations() -> None:
    assert annotated(pod(app("main"))) == {}


@pytest.mark.parametrize("text", ['"],{"', "a\nb\r\t\\", "x" * 253, "ü\u2028\U0001f600", "\ud800", "</script>", "\x00"])
def test_any_names_and_reasons_are_preserved(text: str) -> None:
    annotations = annotated(pod(app(text)), replace(share("a", text), why=text))
    (made,) = listed(annotations)
    assert (made["container"], made["why"]) == (text, text)
    assert annotations["gpumgr.io/allocations"].isascii()
    assert annotations["gpumgr.io/allocations"].isprintable()


def test_the_same_ledger_gives_the_same_text() -> None:
    view = pod(app("one"), app("two"))
    holders = [share("a", "one"), share("b", "two")]
    assert annotated(view, *holders) == annotated(view, *reversed(holders))


def test_the_state_of_a_suspended_container_is_listed() -> None:
    states: dict[str, Suspension] = {"a": Suspension(state="suspended", reason="it waits"), "b": Suspension(state="running")}
    found = annotated(pod(app("one"), app("two")), share("a", "one"), share("b", "two"), suspensions=states)
    assert [(each.get("state"), each.get("reason")) for each in listed(found)] == [("suspended", "it waits"), (None, None)]
