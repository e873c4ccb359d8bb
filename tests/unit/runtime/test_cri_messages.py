"""CRI messages as containerd and CRI-O send them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr._pb.runtime.v1 import ContainerStatusResponse
from gpumgr.common.foreign_text import UnreadableText
from gpumgr.common.rpc import wire
from gpumgr.common.rpc.wire import WireError
from gpumgr.ledger.node_use import Container
from gpumgr.placement.pods import PodSandbox
from gpumgr.runtime.cri import FirstProcess, parse_containers, parse_ready_sandboxes, parse_status
from tests.cri_api import cri, recorded_list

CONTAINERD_ID = "d9eb7985aa99538d222c498c263207cf05bc76a1d151c972818061d5b33d06f4"
CONTAINERD_UID = "0c1c3a5e-6f2b-4d8e-9b57-3f1a2c4d5e6f"
CRIO_ID = "b1946ac92492d2347c6235b4d2611184f0e1c2d3a4b5968778695a4b3c2d1e0f"
words = st.text(st.characters(codec="utf-8"), max_size=20)


def status(answer: Any) -> FirstProcess:
    """What is read of Google's ContainerStatusResponse."""
    return parse_status(wire.parse(ContainerStatusResponse, answer.SerializeToString()))


def test_containerds_list_is_read() -> None:
    main, before, sidecar, static = parse_containers(recorded_list("containerd").SerializeToString())
    assert main == Container(
        id=CONTAINERD_ID,
        pod=("demo", "resnet"),
        pod_uid=CONTAINERD_UID,
        name="main",
        attempt=2,
        running=True,
        created_at=1795265754103919023 / 1e9,
    )
    assert (before.name, before.attempt, before.running) == ("main", 1, False)
    assert (sidecar.name, sidecar.attempt, sidecar.running) == ("sidecar", 0, False)
    assert (static.pod, static.pod_uid) == (("kube-system", "etcd-node-1"), "9f3c1d0b6a8e4f7281c5d3b2a1907e6f")


def test_the_cost_of_a_list_grows_with_its_length() -> None:
    """No container causes a decoding of the whole list."""

    class Answer(bytes):
        def decode(self, *_: Any) -> str:
            raise AssertionError("the whole list is decoded")

    answer = Answer(recorded_list("containerd").SerializeToString())
    assert parse_containers(answer) == parse_containers(bytes(answer))


def test_crios_list_is_read() -> None:
    (train,) = parse_containers(recorded_list("crio").SerializeToString())
    assert (train.id, train.pod, train.name, train.running) == (CRIO_ID, ("ml", "bert-0"), "train", True)


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"other": "{}"},
        {"info": "{}"},
        {"info": '{"pid": 0}'},
        {"info": '{"pid": 0, "runtimeSpec": null}'},
        {"info": '{"runtimeSpec": {"ociVersion": "1.0.2", "windows": {}}}'},
        {"info": '{"runtimeSpec": {"linux": {"cgroupsPath": ""}}}'},
    ],
)
def test_an_empty_status_is_no_error(info: dict[str, str]) -> None:
    assert status(cri.ContainerStatusResponse(info=info)) == FirstProcess()


@pytest.mark.parametrize("text", ["", "no JSON", "[]", '{"pid": "7"}', '{"runtimeSpec": []}'])
def test_a_malformed_status_is_an_error(text: str) -> None:
    with pytest.raises(UnreadableText):
        status(cri.ContainerStatusResponse(info={"info": text}))


@given(st.lists(st.tuples(words, words, words, words, st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1))))
def test_what_google_wrote_is_read(rows: list[tuple[str, str, str, str, int, int, int]]) -> None:
    answer = cri.ListContainersResponse()
    for container_id, namespace, pod, name, state, attempt, created in rows:
        container = answer.containers.add(id=container_id, state=state, created_at=created)
        container.metadata.name, container.metadata.attempt = name, attempt
        container.annotations["io.kubernetes.pod.uid"] = "not a label"
        kubelet = {"pod.namespace": namespace, "pod.name": pod, "pod.uid": "u", "container.name": name}
        container.labels.update({f"io.kubernetes.{key}": value for key, value in kubelet.items()})
    assert parse_containers(answer.SerializeToString()) == tuple(
        Container(
            id=container_id,
            pod=(namespace, pod),
            pod_uid="u",
            name=name,
            attempt=attempt,
            running=state == cri.CONTAINER_RUNNING,
            created_at=created / 1e9,
        )
        for container_id, namespace, pod, name, state, attempt, created in rows
    )


@given(st.lists(st.tuples(words, words, words, st.integers(0, 3), st.integers(0, 2**63 - 1))))
def test_sandboxes_that_google_wrote_are_read(rows: list[tuple[str, str, str, int, int]]) -> None:
    answer = cri.ListPodSandboxResponse()
    for namespace, name, uid, state, created in rows:
        sandbox = answer.items.add(id=name, state=state, created_at=created, labels={"io.kubernetes.pod.uid": "not read"})
        sandbox.metadata.name, sandbox.metadata.namespace, sandbox.metadata.uid = name, namespace, uid
    assert parse_ready_sandboxes(answer.SerializeToString()) == tuple(
        PodSandbox(pod=(namespace, name), uid=uid) for namespace, name, uid, state, _ in rows if state == cri.SANDBOX_READY
    )


@given(words, st.integers(1, 2**31), words)
def test_any_status_that_google_wrote_is_read(container_id: str, pid: int, path: str) -> None:
    info = {"info": json.dumps({"pid": pid, "runtimeSpec": {"linux": {"cgroupsPath": path}}}), "more": path}
    answer = cri.ContainerStatusResponse(status=cri.ContainerStatus(id=container_id), info=info)
    assert status(answer) == FirstProcess(pid=pid, cgroups_path=path if path.startswith("/") else None)


@given(st.data())
def test_of_a_truncated_list_nothing_wrong_is_read(data: st.DataObject) -> None:
    whole = recorded_list("containerd").SerializeToString()
    cut = data.draw(st.integers(0, len(whole) - 1))
    try:
        read = parse_containers(whole[:cut])
    except WireError:
        return  # said so; between two containers a cut can't be seen
    assert read == parse_containers(whole)[: len(read)]


def test_bytes_that_are_no_message_are_an_error() -> None:
    with pytest.raises(WireError, match="not UTF-8"):
        parse_containers(b"\x0a\x06" + b"\x42\x04" + b"\x0a\x02\xff\xfe")  # a label
    for data, words in ((b"\x0a\x7f", "truncated"), (b"\x0a\x04\x0a\x02\xff\xfe", "UnicodeDecodeError")):
        with pytest.raises(WireError, match=words):
            wire.parse(ContainerStatusResponse, data)
