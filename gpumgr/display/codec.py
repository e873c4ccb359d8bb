"""The answers (see `messages`) in protobuf's wire format. Texts are a tenant's or an operator's and may hold anything: what is no
Unicode is written as `?`."""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from gpumgr.rpc import wire

Message = Mapping[str, Any]


def encode_graph(message: Message) -> bytes:
    """GraphResponse."""
    return _text(1, message.get("graph", ""))


def encode_version(message: Message) -> bytes:
    """VersionResponse."""
    return _text(1, message.get("version", ""))


def encode_usage(message: Message) -> bytes:
    """UsageResponse."""
    return _map(1, message.get("usage", {}), _pod)


def _pod(pod: Message) -> bytes:
    words = b"".join(_text(number, pod.get(name, "")) for number, name in ((2, "project"), (3, "user"), (4, "cluster")))
    return _map(1, pod.get("stat", {}), _devices) + words + _map(5, pod.get("spec", {}), _spec)


def _devices(devices: Message) -> bytes:
    return b"".join(wire.field(1, _device(device)) for device in devices.get("dev", ()))


def _device(device: Message) -> bytes:
    pids = b"".join(map(wire.varint, device.get("pids", ())))
    return b"".join(
        (
            _text(1, device.get("id", "")),
            _text(2, device.get("card_idx", "")),
            _float(10, device.get("gpu", 0)),
            _float(11, device.get("mem", 0)),
            wire.field(12, pids) if pids else b"",
            _float(13, device.get("device_mem", 0)),
        )
    )


def _spec(spec: Message) -> bytes:
    return _float(1, spec.get("gpu", 0)) + _float(2, spec.get("mem", 0))


def _map(number: int, entries: Mapping[str, Message], encode: Callable[[Message], bytes]) -> bytes:
    """A map field: one message for each entry, with key and value always written."""
    return b"".join(
        wire.field(number, wire.field(1, _bytes(key)) + wire.field(2, encode(value))) for key, value in entries.items()
    )


def _text(number: int, text: str) -> bytes:
    return wire.field(number, _bytes(text)) if text else b""


def _bytes(text: str) -> bytes:
    return text.encode(errors="replace")


def _float(number: int, value: float) -> bytes:
    """A float field (`number` 1 to 15) as proto3 writes it: nothing at all for zero."""
    return struct.pack("<Bf", number << 3 | wire.FIXED32, value) if value else b""
