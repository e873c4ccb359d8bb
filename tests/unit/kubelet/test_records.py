"""The kubelet's records: its checkpoint, and Listings parsed from its bytes only for requested pods."""

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.errors import KubeletError
from gpumgr.common.rpc.wire import WireError
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kubelet.plugin import encode_container_response
from gpumgr.kubelet.records import CheckpointEntry, parse_kubelet_checkpoint, parse_listing, read_kubelet_checkpoint
from gpumgr.ledger.answer import ContainerResponse, Mount
from tests.kubelet_api import podresources as pb
from tests.listings import listing_from

RESPONSE = ContainerResponse(
    annotations={"tencent.com/vcuda-core": "20"},
    mounts=(Mount(container_path="/etc/vcuda", host_path="/run/gpumgr/0a1b", read_only=True),),
)


def entry(device_ids: object, answer: bytes | None = None) -> dict[str, Any]:
    return {
        "PodUID": "uid-1",
        "ContainerName": "main",
        "ResourceName": CORE_RESOURCE,
        "DeviceIDs": device_ids,
        "AllocResp": base64.b64encode(encode_container_response(RESPONSE) if answer is None else answer).decode(),
    }


def check(found: Sequence[CheckpointEntry] | None, *device_ids: str, response: ContainerResponse = RESPONSE) -> None:
    """One entry was found, with these ids and this response."""
    (only,) = found or ()
    assert (only.pod_uid, only.container, only.resource, only.device_ids) == ("uid-1", "main", CORE_RESOURCE, device_ids)
    assert only.response() == response


@pytest.mark.parametrize(
    ("device_ids", "read"),
    [
        pytest.param({"-1": ["a-c01", "a-c00"]}, ("a-c01", "a-c00"), id="by NUMA node"),
        pytest.param({"0": ["a-c00"], "1": ["a-c00", "a-c01"]}, ("a-c00", "a-c01"), id="an id on two nodes"),
        pytest.param(["a-c00"], ("a-c00",), id="list, before 1.20"),
        pytest.param(None, (), id="nil"),
        pytest.param({"0": None}, (), id="nil within a node"),
    ],
)
def test_device_ids(device_ids: object, read: tuple[str, ...]) -> None:
    text = json.dumps({"Data": {"PodDeviceEntries": [entry(device_ids)], "RegisteredDevices": {}}, "Checksum": 1})
    check(parse_kubelet_checkpoint(text.encode()), *read)


@pytest.mark.peer_bug("B11: it ends at lists where it expects a map by NUMA node")
def test_the_oldest_shape_has_no_data_level() -> None:
    text = json.dumps({"PodDeviceEntries": [entry(["a-c00"])], "RegisteredDevices": {}})
    check(parse_kubelet_checkpoint(text.encode()), "a-c00")


@pytest.mark.peer_bug("B11: it dereferences the missing data")
@pytest.mark.parametrize("text", ['{"Data":null}', '{"Data":null,"Checksum":0}', "{}", '{"Data":{"PodDeviceEntries":null}}'])
def test_a_checkpoint_without_data_is_empty(text: str) -> None:
    assert parse_kubelet_checkpoint(text.encode()) == ()


def test_an_unreadable_answer_costs_only_itself() -> None:
    text = json.dumps({"Data": {"PodDeviceEntries": [entry(["a-c00"], answer=b"\x0a\x7f")]}})
    check(parse_kubelet_checkpoint(text.encode()), "a-c00", response=ContainerResponse())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"Data": 3}', '{"Data": {"PodDeviceEntries": [{}]}}', "\ud800"])
def test_other_content_is_refused(text: str) -> None:
    with pytest.raises(KubeletError, match="checkpoint can't be read"):
        parse_kubelet_checkpoint(text.encode(errors="surrogatepass"))


@pytest.mark.peer_bug("B10: it does not start before the kubelet has written its checkpoint")
async def test_no_file_is_no_checkpoint(tmp_path: Path) -> None:
    assert await read_kubelet_checkpoint(tmp_path / "none") is None


async def test_a_half_written_file_is_read_again(tmp_path: Path) -> None:
    whole = json.dumps({"Data": {"PodDeviceEntries": [entry(["a-c00"])]}}).encode()
    path, fresh = tmp_path / "checkpoint", tmp_path / "fresh"
    path.write_bytes(whole[:40])
    fresh.write_bytes(whole)
    with pytest.raises(KubeletError):
        await read_kubelet_checkpoint(path, attempts=1)
    reading = asyncio.create_task(read_kubelet_checkpoint(path, attempts=1000, retry_seconds=0.001))
    await asyncio.sleep(0)
    fresh.replace(path)
    check(await reading, "a-c00")


async def test_content_that_stays_bad_is_an_error_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    path.write_bytes(b'{"Data": ')
    with pytest.raises(KubeletError, match=str(path)):
        await read_kubelet_checkpoint(path, attempts=2, retry_seconds=0)


async def test_a_folder_in_its_place_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KubeletError, match="Is a directory"):
        await read_kubelet_checkpoint(tmp_path)


names = st.text(st.characters(codec="utf-8", categories=("L", "N")), max_size=12)
held = st.dictionaries(
    st.tuples(names, names),
    st.dictionaries(names, st.dictionaries(names, st.lists(names, min_size=1, max_size=6, unique=True), max_size=3), max_size=3),
    max_size=5,
)


def google_bytes(pods: dict[tuple[str, str], dict[str, dict[str, list[str]]]]) -> bytes:
    """One entry for each id, with a topology, as the kubelet writes it."""
    answer = pb.ListPodResourcesResponse()
    for (namespace, name), containers in pods.items():
        pod = answer.pod_resources.add(name=name, namespace=namespace)
        for container_name, resources in containers.items():
            container = pod.containers.add(name=container_name)
            for resource, ids in resources.items():
                for device_id in ids:
                    container.devices.add(resource_name=resource, device_ids=[device_id]).topology.nodes.add(ID=0)
    data: bytes = answer.SerializeToString()
    return data


@given(held)
def test_what_google_wrote_is_read(pods: dict[tuple[str, str], dict[str, dict[str, list[str]]]]) -> None:
    listing = parse_listing(google_bytes(pods))
    assert listing.pods == tuple(pods)
    plain = listing_from(pods)
    for pod in pods:
        assert listing.containers(pod) == plain.containers(pod)


def test_only_requested_pods_are_read() -> None:
    good = google_bytes({("ns", "good"): {"c": {CORE_RESOURCE: ["a-c00"]}}})
    spoilt = pb.ListPodResourcesResponse(pod_resources=[pb.PodResources(name="bad", namespace="ns")]).SerializeToString()
    spoilt = b"\x0a" + bytes([spoilt[1] + 3]) + spoilt[2:] + b"\x1a\x01\x0a"  # a container that is cut off
    listing = parse_listing(good + spoilt)
    assert listing.pods == (("ns", "good"), ("ns", "bad"))
    assert listing.containers(("ns", "good")) == {"c": {CORE_RESOURCE: ("a-c00",)}}
    with pytest.raises(WireError):
        listing.containers(("ns", "bad"))


def test_claims_are_read_of_all_containers_and_without_those_of_pods() -> None:
    answer = pb.ListPodResourcesResponse()
    for pod, claims in (("a", ["one", "two"]), ("b", []), ("c", ["two"])):
        container = answer.pod_resources.add(name=pod, namespace="team").containers.add(name="main")
        container.devices.add(resource_name=CORE_RESOURCE, device_ids=["a-c00"])
        for name in claims:
            container.dynamic_resources.add(claim_name=name, claim_namespace="team")
    listing = parse_listing(answer.SerializeToString())
    assert listing.claims == {("team", "one"), ("team", "two")}
    assert listing.pods == (("team", "a"), ("team", "b"), ("team", "c"))
    assert listing.containers(("team", "a")) == {"main": {CORE_RESOURCE: ("a-c00",)}}
    assert not parse_listing(b"").claims


def test_namesakes_count_as_one_pod() -> None:
    first = google_bytes({("ns", "pod"): {"c": {CORE_RESOURCE: ["a-c00"]}}})
    second = google_bytes({("ns", "pod"): {"c": {CORE_RESOURCE: ["a-c01"], MEMORY_RESOURCE: ["a-m0"]}}})
    listing = parse_listing(first + second)
    assert listing.pods == (("ns", "pod"),)
    assert listing.containers(("ns", "pod")) == {"c": {CORE_RESOURCE: ("a-c00", "a-c01"), MEMORY_RESOURCE: ("a-m0",)}}


def test_an_id_on_two_numa_nodes_counts_once() -> None:
    answer = pb.ListPodResourcesResponse()
    container = answer.pod_resources.add(name="pod", namespace="ns").containers.add(name="c")
    for node in (0, 1):
        container.devices.add(resource_name=CORE_RESOURCE, device_ids=["a-c00"]).topology.nodes.add(ID=node)
    listing = parse_listing(answer.SerializeToString())
    assert listing.containers(("ns", "pod")) == {"c": {CORE_RESOURCE: ("a-c00",)}}


def test_truncated_answers_are_refused() -> None:
    data = google_bytes({("ns", "pod"): {}})
    with pytest.raises(WireError):
        parse_listing(data[:-1])
