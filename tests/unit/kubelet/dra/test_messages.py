"""The messages against Google's protobuf: what the kubelet writes and reads."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumgr.common.rpc import wire
from gpumgr.kubelet.dra_service import decode_claims, health_message
from gpumgr.ledger.ledger import ClaimRef
from tests.kubelet_api import DecodeError, dra, drahealth

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
