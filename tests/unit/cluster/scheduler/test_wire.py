"""The messages of extender/v1 as the Go types of kube-scheduler write them: tests/data/extender, made by tests/e2e/go/extender."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpumgr.cluster.scheduler.objects import parse_watched_pod
from gpumgr.cluster.scheduler.wire import BindArgs, BindResult, FilterArgs, FilterResult, HostPriority
from gpumgr.common.foreign_text import UnreadableText, decode_stored

GOLDENS = Path(__file__).resolve().parents[3] / "data" / "extender"
NODES = json.loads((GOLDENS / "args_nodes.json").read_text())["Nodes"]
ANSWERS = {
    "filter_result_names": FilterResult(node_names=["a", "b"], failed_nodes={"c": "no room"}),
    "filter_result_nodes": FilterResult(nodes=NODES, failed_and_unresolvable_nodes={"c": "no room"}),
    "filter_result_error": FilterResult(error="not ready"),
    "priorities": [HostPriority("a", 10), HostPriority("b", 0)],
    "binding_result": BindResult(),
    "binding_result_error": BindResult("no room"),
}


def golden(name: str) -> bytes:
    return (GOLDENS / f"{name}.json").read_bytes()


@pytest.mark.parametrize(("name", "names"), [("args_names", ["a", "b"]), ("args_no_names", []), ("args_nodes", ["a", "b"])])
def test_arguments_of_filter_and_prioritize_are_read(name: str, names: list[str]) -> None:
    args = msgspec.json.decode(golden(name), type=FilterArgs)
    assert list(args.names()) == names
    assert list(args.items()) == (names if name == "args_nodes" else [])
    pod = parse_watched_pod(msgspec.json.decode(args.pod))
    assert (pod.namespace, pod.name, pod.uid, pod.containers) == ("team", "work", "uid-work", ("prepare", "main"))
    assert [(each.kind, each.cores, each.memory_blocks) for each in pod.request.containers] == [("init", 50, 8), ("app", 50, 8)]


def test_arguments_without_a_pod_are_an_error() -> None:
    args = msgspec.json.decode(golden("args_nothing"), type=FilterArgs)
    with pytest.raises(UnreadableText, match="Expected `object`, got `null`"):
        decode_stored(args.pod, dict[str, Any])


def test_arguments_of_bind_are_read() -> None:
    args = msgspec.json.decode(golden("binding_args"), type=BindArgs)
    assert (args.pod_name, args.pod_namespace, args.pod_uid, args.node) == ("work", "team", "uid-work", "a")


def given(message: Any) -> Any:
    """Go writes null for a map that is not there."""
    return {key: value for key, value in message.items() if value} if isinstance(message, dict) else message


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_the_go_types(name: str) -> None:
    assert given(json.loads(msgspec.json.encode(ANSWERS[name]))) == given(json.loads(golden(name)))
