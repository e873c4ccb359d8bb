"""RegisterVDevice by hand over one new connection, as a small client in C makes it: the call costs its caller next to nothing.

A gRPC library would take as long as the server: fifty of them at once, on the same few CPUs, would be all that is measured.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import hpack

from gpumgr.common.rpc import wire

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_FRAME_HEAD_BYTES = 9
_REQUEST_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/vcuda.VCUDAService/RegisterVDevice"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _call() -> bytes:
    """All that the client says."""
    message = wire.text_field(2, "uid") + wire.text_field(3, "main")  # pod_uid and container_name
    return b"".join(
        (
            _PREFACE,
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_HEADERS, _END_HEADERS, 1, hpack.Encoder().encode(_REQUEST_HEADERS)),
            _frame(_DATA, _END_STREAM, 1, b"\0" + len(message).to_bytes(4, "big") + message),
        )
    )


_CALL = _call()


def register(path: Path) -> None:
    """Returns when the answer has ended. Raises RuntimeError if it was no."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(_CALL)
        headers, decoder = dict[str | bytes, str | bytes](), hpack.Decoder()
        for kind, flags, payload in _frames(connection):
            if kind == _HEADERS:
                headers.update(pair for pair in decoder.decode(payload))
                if flags & _END_STREAM:
                    break
    if headers.get("grpc-status") != "0":
        raise RuntimeError(f"not registered at {path}: {headers}")


def _frames(connection: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    """Type, flags and payload of each frame, until the peer hangs up."""
    received = b""
    while chunk := connection.recv(1 << 16):
        received += chunk
        while (end := _FRAME_HEAD_BYTES + int.from_bytes(received[:3], "big")) <= len(received):
            yield received[3], received[4], received[_FRAME_HEAD_BYTES:end]
            received = received[end:]
