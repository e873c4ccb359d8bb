"""Listings: parsed from the kubelet's bytes only for requested pods."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.rpc.wire import WireError
from gpumgr.common.units import CORE_RESOURCE, MEMORY_RESOURCE
from gpumgr.kubelet.records import parse_listing
from tests.kubelet_api import podresources as pb
from tests.listings import listing_from

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
