"""Hand-written codecs against Google's protobuf: the same bytes, the same values, and no surprise on bad bytes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.rpc import wire
from gpumgr.kubelet import plugin
from gpumgr.kubelet.dra_service import decode_claims, health_message
from gpumgr.kubelet.plugin import OPTIONS, encode_devices
from gpumgr.ledger.answer import ContainerResponse, DeviceNode, Mount
from gpumgr.ledger.ledger import ClaimRef
from tests.kubelet_api import DecodeError, dra, drahealth
from tests.kubelet_api import deviceplugin as pb

texts = st.text(st.characters(codec="utf-8"), max_size=200)
ids = st.lists(texts, max_size=20)
maps = st.dictionaries(texts, texts, max_size=5)
mounts = st.builds(Mount, container_path=texts, host_path=texts, read_only=st.booleans())
nodes = st.builds(DeviceNode, container_path=texts, host_path=texts, permissions=texts)
responses = st.builds(
    ContainerResponse,
    envs=maps,
    mounts=st.lists(mounts, max_size=4).map(tuple),
    devices=st.lists(nodes, max_size=4).map(tuple),
    annotations=maps,
    cdi_devices=st.lists(texts, max_size=3).map(tuple),
)


def to_google(response: ContainerResponse) -> object:
    return pb.ContainerAllocateResponse(
        envs=response.envs,
        mounts=[
            pb.Mount(container_path=mount.container_path, host_path=mount.host_path, read_only=mount.read_only)
            for mount in response.mounts
        ],
        devices=[
            pb.DeviceSpec(container_path=node.container_path, host_path=node.host_path, permissions=node.permissions)
            for node in response.devices
        ],
        annotations=response.annotations,
        cdi_devices=[pb.CDIDevice(name=name) for name in response.cdi_devices],
    )


@given(st.lists(ids, max_size=4))
def test_allocate_requests_read_as_google_wrote_them(containers: list[list[str]]) -> None:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=each) for each in containers])
    assert plugin.decode_allocate(request.SerializeToString()) == containers


def test_ids_of_every_length_are_read() -> None:
    """The tag of a field is a line feed, which is a length, too."""
    written = ["x" * size for size in (*range(140), 10, 10)]
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=written)])
    assert plugin.decode_allocate(request.SerializeToString()) == [written]
    assert plugin.encode_preferred([written]) == request.SerializeToString()


@given(ids, ids, st.integers(-(2**31), 2**31 - 1))
def test_preference_requests_read_as_google_wrote_them(available: list[str], must_include: list[str], size: int) -> None:
    wanted = pb.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
    )
    [read] = plugin.decode_preferred(pb.PreferredAllocationRequest(container_requests=[wanted]).SerializeToString())
    assert (read.available, read.must_include, read.size) == (available, must_include, size)


@given(st.lists(responses, max_size=3))
def test_google_reads_allocate_responses(containers: list[ContainerResponse]) -> None:
    read = pb.AllocateResponse.FromString(plugin.encode_allocate(containers))
    assert list(read.container_responses) == [to_google(response) for response in containers]


@given(responses)
def test_container_responses_survive_google_and_back(response: ContainerResponse) -> None:
    assert plugin.decode_container_response(to_google(response).SerializeToString()) == response  # type: ignore[attr-defined]


@given(st.lists(ids, max_size=3))
def test_preferences_are_googles_bytes(preferences: list[list[str]]) -> None:
    google = pb.PreferredAllocationResponse(
        container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=each) for each in preferences]
    )
    assert plugin.encode_preferred(preferences) == google.SerializeToString()


@given(st.lists(st.tuples(texts, st.booleans(), st.none() | st.integers(-1, 300)), max_size=20))
def test_device_lists_are_googles_bytes(entries: list[tuple[str, bool, int | None]]) -> None:
    google = pb.ListAndWatchResponse()
    for device_id, healthy, node in entries:
        device = google.devices.add(ID=device_id, health="Healthy" if healthy else "Unhealthy")
        if node is not None and node >= 0:
            device.topology.nodes.add(ID=node)
    assert encode_devices(entries) == google.SerializeToString()


def test_options_are_both_on() -> None:
    options = pb.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
    assert options.SerializeToString() == bytes(OPTIONS)


@given(st.binary(max_size=60))
def test_any_bytes_give_googles_values_or_an_error(data: bytes) -> None:
    """What Google refuses inside fields that we skip may pass; groups, which proto3 no longer knows, only Google skips."""
    try:
        read = plugin.decode_preferred(data)
        google = pb.PreferredAllocationRequest.FromString(data)
    except (wire.WireError, DecodeError):
        return
    assert [each.available for each in read] == [list(each.available_deviceIDs) for each in google.container_requests]
    assert [each.must_include for each in read] == [list(each.must_include_deviceIDs) for each in google.container_requests]
    assert [each.size for each in read] == [each.allocation_size for each in google.container_requests]


@given(st.lists(texts, min_size=1, max_size=5), st.data())
def test_truncated_requests_are_refused(devices: list[str], data: st.DataObject) -> None:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=devices)]).SerializeToString()
    cut = data.draw(st.integers(1, len(request) - 1))
    with pytest.raises(wire.WireError):
        plugin.decode_allocate(request[:cut])


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x05\x0a\x03ab", id="inner length beyond the outer end"),
        pytest.param(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", id="a length of 2**64"),
        pytest.param(b"\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", id="a number of more than 64 bits"),
        pytest.param(b"\x0a\x02\x0a\x80", id="length cut off"),
        pytest.param(b"\x0a\x03\x0a\x01\xff", id="not UTF-8"),
        pytest.param(b"\x0b", id="group"),
        pytest.param(b"\x0f", id="wire type 7"),
        pytest.param(b"\x02\x00", id="field number 0"),
        pytest.param(b"\x11\x00", id="fixed64 cut off"),
        pytest.param(b"\x15\x00", id="fixed32 cut off"),
    ],
)
def test_malformed_requests_are_refused(data: bytes) -> None:
    with pytest.raises(wire.WireError):
        plugin.decode_allocate(data)


def test_unknown_fields_of_every_wire_type_are_skipped() -> None:
    unknown = b"\x10\x96\x01" + b"\x19" + b"x" * 8 + b"\x22\x03abc" + b"\x2d" + b"y" * 4
    inner = unknown + wire.field(1, b"a-c00") + unknown
    assert plugin.decode_allocate(unknown + wire.field(1, inner) + unknown) == [["a-c00"]]


TEXTS = st.text(min_size=1, max_size=5)


def as_refs(claims: Any) -> list[ClaimRef]:
    return [ClaimRef(namespace=each.namespace, name=each.name, uid=each.uid) for each in claims]


FRAGMENTS = st.one_of(
    st.binary(max_size=6),
    st.sampled_from(
        [b"\x0a", b"\x12", b"\x1a", b"\x01a", b"\x00", b"\x0a\x09\x0a\x01n\x12\x01u\x1a\x01m", b"\x08\x05", b"\x1d1234"]
    ),
)


@given(st.lists(FRAGMENTS, max_size=8).map(b"".join))
def test_any_bytes_give_googles_claims_or_an_error(data: bytes) -> None:
    """What Google refuses inside fields that we skip may pass; groups, which proto3 does not have, only Google skips."""
    try:
        google = dra.NodePrepareResourcesRequest.FromString(data).claims
        found = decode_claims(data)
    except (wire.WireError, DecodeError):
        return
    assert found == as_refs(google)


@pytest.mark.parametrize(
    ("message", "cut"),
    [
        ("x" * 1024, "x" * 1024),
        ("x" * 1025, "x" * 1024),
        ("x" * 1023 + "é", "x" * 1023),
        ("€" * 400, "€" * 341),
        ("a\udcffb", "a?b"),
    ],
)
def test_long_messages_are_cut_between_characters(message: str, cut: str) -> None:
    [device] = health_message("p", {"d": message}, 0).devices
    assert device.message == cut
    assert drahealth.NodeWatchResourcesResponse.FromString(bytes(health_message("p", {}, 0))).devices == []
