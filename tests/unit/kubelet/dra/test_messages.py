"""The messages against Google's protobuf: what the kubelet writes and reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr._pb.pluginregistration import PluginInfo, RegistrationStatus
from gpumgr.common.errors import Refusal
from gpumgr.common.rpc import wire
from gpumgr.kubelet.dra.health import health_message
from gpumgr.kubelet.dra.service import decode_claims
from gpumgr.ledger.ledger import ClaimRef
from tests.kubelet_api import DecodeError, dra, drahealth, pluginregistration

TEXTS = st.text(min_size=1, max_size=5)
REQUESTS: Any = [dra.NodePrepareResourcesRequest, dra.NodeUnprepareResourcesRequest]


def as_refs(claims: Any) -> list[ClaimRef]:
    return [ClaimRef(namespace=each.namespace, name=each.name, uid=each.uid) for each in claims]


@given(
    st.lists(st.builds(ClaimRef, namespace=TEXTS, name=TEXTS, uid=TEXTS), unique_by=lambda each: each.uid),
    st.sampled_from(REQUESTS),
)
def test_claims_are_read_as_they_were_written(claims: list[ClaimRef], request: Any) -> None:
    wanted = [dra.Claim(namespace=each.namespace, name=each.name, uid=each.uid) for each in claims]
    assert decode_claims(request(claims=wanted).SerializeToString()) == claims


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
        refused = False
        found = decode_claims(data)
    except (wire.WireError, DecodeError):
        return
    except Refusal:
        refused, found = True, []
    complete = all(each.namespace and each.name and each.uid for each in google)
    assert refused != (complete and len({each.uid for each in google}) == len(google))
    assert refused or found == as_refs(google)


@given(st.builds(ClaimRef, namespace=TEXTS, name=TEXTS, uid=TEXTS), st.data())
def test_truncated_requests_are_refused(claim: ClaimRef, data: st.DataObject) -> None:
    wanted = dra.Claim(namespace=claim.namespace, name=claim.name, uid=claim.uid)
    request = dra.NodePrepareResourcesRequest(claims=[wanted]).SerializeToString()
    with pytest.raises(wire.WireError):
        decode_claims(request[: data.draw(st.integers(1, len(request) - 1))])


@pytest.mark.parametrize(("fault", "status"), [(None, 1), ("Xid 79", 2)])
def test_health(fault: str | None, status: int) -> None:
    message = health_message("node-1", {"gpu-0a1b2c30": fault}, 1_790_000_000.9)
    [read] = drahealth.NodeWatchResourcesResponse.FromString(bytes(message)).devices
    assert read == drahealth.DeviceHealth(
        device=drahealth.DeviceIdentifier(pool_name="node-1", device_name="gpu-0a1b2c30"),
        health=status,
        last_updated_time=1_790_000_000,
        message=fault or "",
    )


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


def test_registration() -> None:
    info = PluginInfo(type="DRAPlugin", name="n", endpoint="/e", supported_versions=["v1.DRAPlugin", "v1beta1.DRAPlugin"])
    expected = pluginregistration.PluginInfo(
        type="DRAPlugin", name="n", endpoint="/e", supported_versions=["v1.DRAPlugin", "v1beta1.DRAPlugin"]
    )
    assert bytes(info) == expected.SerializeToString()
    for registered, error in ((True, ""), (False, "no – reason")):
        data = pluginregistration.RegistrationStatus(plugin_registered=registered, error=error).SerializeToString()
        assert wire.parse(RegistrationStatus, data) == RegistrationStatus(plugin_registered=registered, error=error)
