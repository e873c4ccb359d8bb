"""gpu-manager's answers against golden files, and through Google's protobuf."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from gpumgr._pb.display import GraphResponse, UsageResponse
from gpumgr.agent.node_report import NodeReport
from gpumgr.compat.gpu_manager.display import usage_message
from gpumgr.ledger.ids import ALL_CORES
from gpumgr.ledger.ledger import Allocation
from gpumgr.placement.pods import ContainerSpec, PodView
from tests.component.stage.stage import MemoryPods
from tests.display_api import as_json, display, golden
from tests.unit.ledger.samples import MIB, container, report_of, sample
from tests.unit.web.metrics.pictures import allocation, view_of

SHARE, TRAIN = ("team", "share"), ("team", "train")
SHARED = allocation("a", SHARE, cores={0: (1 << 30) - 1}, blocks={0: 0b11})
WHOLE = allocation("b", TRAIN, cores={1: ALL_CORES, 2: ALL_CORES})
SHARE_VIEW = PodView(
    namespace="team",
    name="share",
    uid="uid-a",
    containers=(ContainerSpec(name="main", cores=30, memory_blocks=2), ContainerSpec(name="log")),
    submitter="ana",
    cluster="west",
)
TRAIN_VIEW = PodView(namespace="team", name="train", uid="uid-b", containers=(ContainerSpec(name="main", cores=200),))


def pods(*views: PodView) -> MemoryPods:
    return MemoryPods({view.key: view for view in views})


def busy(*allocations: Allocation, shown: int | None = None) -> NodeReport:
    """Three GPUs: two processes of `a` on the first, one of `b` on the second, none on the third."""
    node = sample({40: 100 * MIB, 41: 200 * MIB + 1}, {2**31 - 1: 1500 * MIB}, {}, ratios={40: 0.07, 41: 0.3, 2**31 - 1: 0.75})
    owners = {40: container("a", SHARE), 41: container("a", SHARE), 2**31 - 1: container("b", TRAIN)}
    return report_of(view_of(*allocations, count=3, shown=shown), node, owners, sample=node)


def asked(usage: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one pod of the answer."""
    (pod,) = usage["usage"].values()
    return pod  # type: ignore[no-any-return]


def test_usage_with_a_share_and_with_whole_gpus() -> None:
    usage = usage_message(busy(SHARED, WHOLE), pods(SHARE_VIEW, TRAIN_VIEW))
    # As text, since 37.0 would be equal to 37.
    assert json.dumps(usage, indent=1, sort_keys=True) == json.dumps(golden("usage"), indent=1, sort_keys=True)


def test_without_use_sample_or_driver_and_of_freed_containers_the_message_is_empty() -> None:
    for report in (
        busy(),
        NodeReport(view=view_of(SHARED), nvml_up=True),
        replace(busy(SHARED), nvml_up=False),
        replace(busy(SHARED, WHOLE), view=view_of(count=3)),
    ):
        assert usage_message(report, pods(SHARE_VIEW)) == golden("nothing")


def test_without_the_api_server_it_is_what_was_granted() -> None:
    usage = usage_message(busy(SHARED, WHOLE), pods())["usage"]
    assert [usage[uid]["project"] for uid in ("uid-a", "uid-b")] == ["team", "team"]
    assert usage["uid-a"]["spec"] == {"main": {"gpu": 0.3, "mem": 512}}
    assert usage["uid-b"]["spec"] == {"main": {"gpu": 2, "mem": 4096}}
    assert usage["uid-a"].keys() == {"stat", "project", "spec"}


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_a_gpu_that_the_driver_does_not_show_is_left_out(shown: int) -> None:
    usage = usage_message(busy(WHOLE, shown=shown), pods(TRAIN_VIEW))
    assert [gpu["card_idx"] for gpu in asked(usage)["stat"]["main"]["dev"]] == ["1"] if shown == 2 else usage == {}


def test_a_pod_without_a_known_uid_is_listed_under_its_name() -> None:
    nameless = replace(SHARED, uid=None)
    assert usage_message(busy(nameless), pods(SHARE_VIEW))["usage"].keys() == {"uid-a"}
    assert usage_message(busy(nameless), pods())["usage"].keys() == {"team/share"}
    assert usage_message(busy(replace(nameless, pod=None)), pods(SHARE_VIEW)) == {}


def test_a_pod_with_only_a_known_uid() -> None:
    only_uid = replace(SHARED, pod=None)
    assert asked(usage_message(busy(only_uid), pods(SHARE_VIEW)))["project"] == "team"
    assert "project" not in asked(usage_message(busy(only_uid), pods()))


def test_a_static_pod_stands_under_its_mirrors_uid() -> None:
    mirror = replace(SHARE_VIEW, uid="mirror", runtime_uid="uid-a")
    assert usage_message(busy(SHARED), pods(mirror))["usage"].keys() == {"mirror"}


def test_another_uid_of_the_same_name_is_another_pod() -> None:
    usage = usage_message(busy(SHARED), pods(replace(SHARE_VIEW, uid="uid-next")))
    assert usage["usage"].keys() == {"uid-a"}
    assert "user" not in asked(usage)


def test_an_init_container_is_there_while_it_runs_something() -> None:
    init = replace(SHARED, container="prepare", init=True)
    view = replace(SHARE_VIEW, containers=(ContainerSpec(name="prepare", kind="init", cores=30), *SHARE_VIEW.containers))
    follower = replace(SHARED, id="c")
    node = sample({7: MIB})
    running = report_of(view_of(init, follower), node, {7: container("a", SHARE, "prepare")})
    ended = report_of(view_of(init, follower), node, {7: container("a", SHARE, "main")})
    assert asked(usage_message(running, pods(view)))["stat"].keys() == {"prepare", "main"}
    assert asked(usage_message(running, pods(view)))["spec"].keys() == {"prepare", "main", "log"}
    assert asked(usage_message(ended, pods(view)))["stat"].keys() == {"main"}
    assert asked(usage_message(ended, pods(view)))["spec"].keys() == {"main", "log"}


def test_containers_without_a_known_name_are_listed_under_their_allocations() -> None:
    one, other = replace(SHARED, container=None), replace(WHOLE, container=None, pod=SHARE, uid="uid-a")
    pod = asked(usage_message(busy(one, other), pods()))
    assert pod["stat"].keys() == pod["spec"].keys() == {"a", "b"}


def test_values_that_the_driver_does_not_report_are_left_out() -> None:
    view = view_of(SHARED)
    silent = report_of(view, sample({40: None}), {40: container("a", SHARE)})
    unreadable = report_of(view, sample(None), {})
    gpu = {"id": "0000:00:00.0", "card_idx": "0", "device_mem": 2048}
    assert asked(usage_message(silent, pods()))["stat"]["main"]["dev"] == [{**gpu, "pids": [40]}]
    assert asked(usage_message(unreadable, pods()))["stat"]["main"]["dev"] == [gpu]


# -- protobuf --------------------------------------------------------------------------------------------------------------

HOSTILE = ("", "a/b", "Ω‮", "\0\n\x1b[2J", '{"}', "x" * 70_000)


@pytest.mark.parametrize("word", HOSTILE)
def test_hostile_names_are_encoded_safely(word: str) -> None:
    """One pod with any names from the API server, the kubelet or its author, in both encodings."""
    named = replace(SHARED, pod=(word, word), uid=word or None, container=word)
    view = replace(SHARE_VIEW, namespace=word, name=word, uid=word or "u", submitter=word, cluster=word)
    usage = usage_message(report_of(view_of(named), sample({40: MIB}), {40: None}), pods(view))
    assert asked(usage)["stat"][word or "a"]["dev"][0]["card_idx"] == "0"
    assert json.loads(json.dumps(usage)) == usage
    pod = asked(as_json(display.UsageResponse.FromString(bytes(UsageResponse().from_dict(usage)))))
    assert [pod.get(name, "") for name in ("project", "user", "cluster")] == [word] * 3
    assert pod["stat"].keys() == {word or "a"}
    assert display.GraphResponse.FromString(bytes(GraphResponse(graph=word))).graph == word
