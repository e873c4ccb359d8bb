"""gpu-client against servers that answer in every way that HTTP/2 and HPACK allow, and in some that they don't."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import hpack
import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH

from gpumgr.common.errors import InputError
from gpumgr.compat.gpu_manager.vcuda import files
from gpumgr.compat.gpu_manager.vcuda.files import build_client
from tests.component.compat.gpu_manager.vcuda.harness import Ended, Node, api, compile_c, run

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, PADDED, PRIORITY = 1, 4, 8, 32
INTERPRETER = 3  # PT_INTERP of elf(5)
INCOMPLETE = "--addr, --pod-uid and one of --cont-name and --cont-id are needed"
UNREADABLE = "the agent's answer has headers that can't be read"
NAMES = ["--pod-uid", "uid", "--cont-name", "main"]


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(name: str, value: str, *, huffman: bool = False, index: bool = False) -> bytes:
    """A pair with a new name, with or without a request to remember it."""

    def text(value: str) -> bytes:
        plain = value.encode()
        coded = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH).encode(plain) if huffman else plain
        assert len(coded) < 127
        return bytes([len(coded) | (0x80 if huffman else 0)]) + coded

    return (b"\x40" if index else b"\x00") + text(name) + text(value)


FIRST = frame(SETTINGS, 0, b"\0\3\0\0\0\x64", 0) + frame(WINDOW_UPDATE, 0, b"\0\1\0\0", 0)
REPLY = frame(HEADERS, END_HEADERS, b"\x88" + literal("content-type", "application/grpc")) + frame(DATA, 0, bytes(5))
OK = literal("grpc-status", "0")


def trailers(block: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS | END_STREAM, block)


def split(block: bytes) -> bytes:
    """Every byte in a frame of its own."""
    parts = [frame(CONTINUATION, 0, block[at : at + 1]) for at in range(1, len(block))]
    return frame(HEADERS, END_STREAM, block[:1]) + b"".join(parts) + frame(CONTINUATION, END_HEADERS, b"")


@asynccontextmanager
async def server(node: Node, *answers: bytes) -> AsyncIterator[list[bytes]]:
    """Gives each connection the next of `answers` and closes it; yields what it received."""
    received: list[bytes] = []
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(65536))
        writer.write(left.pop(0) if len(left) > 1 else left[0])
        writer.write_eof()
        received[-1] += await reader.read()
        writer.close()

    listening = await asyncio.start_unix_server(serve, node.folder / "s")
    async with listening:
        yield received


async def ask(node: Node, answer: bytes) -> Ended:
    async with server(node, answer):
        return await run(node.client, "--addr", node.folder / "s", *NAMES)


@pytest.mark.parametrize(
    "answer",
    [
        REPLY + trailers(OK),
        REPLY + trailers(literal("grpc-status", "0", huffman=True)),
        REPLY + trailers(literal("grpc-status", "0", index=True)),
        REPLY + trailers(b"\x20" + OK + literal("grpc-message", "")),
        REPLY + split(literal("x-long", "y" * 100, huffman=True) + OK),
        REPLY + trailers(b"\x7d\x01v" + b"\x1f\x2e\x01v" + OK),  # names of the table, to its end; never to be indexed
        REPLY + frame(HEADERS, END_HEADERS | END_STREAM | PADDED | PRIORITY, b"\x03" + bytes(5) + OK + bytes(3)),
        REPLY + frame(PING, 0, b"12345678", 0) + frame(0xEE, 0xFF, b"?", 0) + trailers(OK),
        REPLY + frame(HEADERS, END_HEADERS, OK) + frame(DATA, END_STREAM, b""),
        frame(GOAWAY, 0, b"\0\0\0\1" + bytes(4), 0) + REPLY + trailers(OK),
        trailers(b"\x88" + OK),
        REPLY + trailers(OK) + frame(RST_STREAM, 0, bytes(4)),
    ],
)
async def test_success_in_every_shape(node: Node, answer: bytes) -> None:
    ended = await ask(node, FIRST + answer)
    assert (ended.status, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            trailers(b"\x88" + literal("grpc-status", "7") + literal("grpc-message", "not%20yours: %C3%BC%0A100%")),
            "the agent refused (gRPC status 7): not yours: ü 100%",
        ),
        (
            trailers(literal("grpc-status", "13", huffman=True) + literal("grpc-message", "~Broken| {}", huffman=True)),
            "the agent refused (gRPC status 13): ~Broken| {}",
        ),
        (trailers(literal("grpc-status", "x")), "the agent refused (gRPC status 2): no reason given"),
        (trailers(b"\x8d"), "the answer has HTTP status 404 and no gRPC status"),
        (trailers(b"\x08\x03502"), "the answer has HTTP status 502 and no gRPC status"),
        (frame(DATA, END_STREAM, b""), "the answer has HTTP status -1 and no gRPC status"),
        (trailers(b"\xbe"), UNREADABLE),  # refers to a table that we declined
        (trailers(b"\x80"), UNREADABLE),
        (trailers(b"\x3f\xe1\x1f"), UNREADABLE),
        (trailers(b"\x00\x7f\xff\xff\xff\xff\x0f"), UNREADABLE),
        (trailers(b"\x00\x84\xff\xff\xff\xff\x00"), UNREADABLE),  # the end mark in a text
        (trailers(b"\x00\x81\x00\x00"), UNREADABLE),  # padding that is no padding
        (trailers(b"\x00\x05ab"), UNREADABLE),
        (frame(HEADERS, END_HEADERS | PADDED, b"\xff" + OK), UNREADABLE),
        (frame(HEADERS, END_HEADERS | PADDED, b""), UNREADABLE),
        (frame(HEADERS, 0, b"x" * 16000) + frame(CONTINUATION, 0, b"x" * 16000) * 4, UNREADABLE),
        (frame(RST_STREAM, 0, b"\0\0\0\x0b"), "the agent broke the call off (HTTP/2 error 11)"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what answers is no gRPC server"),
    ],
)
async def test_failures_in_one_line(node: Node, answer: bytes, sentence: str) -> None:
    ended = await ask(node, answer)
    assert (ended.status, ended.stdout) == (255, "")
    assert ended.stderr == f"gpu-client: not registered at {node.folder}/s: {sentence}\n"


@pytest.mark.parametrize("text", [bytes(range(at, at + 32)).decode("latin-1") for at in range(0x20, 0x80, 32)] + ["äöü€\u2026"])
async def test_every_letter_of_a_huffman_coded_sentence(node: Node, text: str) -> None:
    ended = await ask(node, trailers(literal("grpc-status", "9") + literal("grpc-message", text, huffman=True)))
    assert ended.stderr.endswith(f"(gRPC status 9): {text.replace(chr(127), ' ')}\n")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        FIRST + REPLY,
        FIRST + frame(GOAWAY, 0, bytes(8), 0),
        trailers(literal("grpc-status", "14") + literal("grpc-message", "later")),
    ],
)
async def test_an_agent_that_restarts_is_asked_again(node: Node, first: bytes) -> None:
    async with server(node, first, first, REPLY + trailers(OK)) as received:
        ended = await run(node.client, "--addr", node.folder / "s", *NAMES)
    assert (ended.status, ended.stderr) == (0, "")
    assert len(received) == 3


async def test_what_it_sends(node: Node) -> None:
    names = ["--bus-id", "0000:18:00.0", "--pod-uid=uid", "--cont-name", "n" * 300]
    async with server(node, FIRST + frame(PING, 0, b"12345678", 0) + REPLY + trailers(OK)) as received:
        await run(node.client, "--addr", node.folder / "s", *names)
    sent = received[0].removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    frames: list[tuple[int, int, bytes]] = []
    while sent:
        size = int.from_bytes(sent[:3], "big")
        frames.append((sent[3], sent[4], sent[9 : 9 + size]))
        sent = sent[9 + size :]
    settings, headers, data, *acknowledged = frames
    assert settings == (SETTINGS, 0, b"\0\1\0\0\0\0\0\2\0\0\0\0")
    pairs = {str(name): str(value) for name, value in hpack.Decoder().decode(headers[2])}
    assert pairs.pop("grpc-timeout").endswith("m")
    assert pairs == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/vcuda.VCUDAService/RegisterVDevice",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    assert data[:2] == (DATA, END_STREAM)
    assert data[2][:5] == b"\0" + (len(data[2]) - 5).to_bytes(4, "big")
    message = api.VDeviceRequest.FromString(data[2][5:])
    assert message == api.VDeviceRequest(bus_id="0000:18:00.0", pod_uid="uid", container_name="n" * 300)
    assert acknowledged == [(SETTINGS, 1, b""), (PING, 1, b"12345678")]


async def test_an_id_goes_before_a_name(node: Node) -> None:
    async with server(node, REPLY + trailers(OK)) as received:
        await run(node.client, "--addr", node.folder / "s", "--cont-id", "c0ffee", *NAMES)
    assert received[0].endswith(api.VDeviceRequest(pod_uid="uid", container_id="c0ffee").SerializeToString())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], INCOMPLETE),
        (["--addr", "/s", "--pod-uid", "uid"], INCOMPLETE),
        (["--addr", "/s", "--cont-id", "c"], INCOMPLETE),
        (["--pod-uid", "uid", "--cont-id", "c"], INCOMPLETE),
        (["--addr"], "--addr needs a value"),
        (["--color=red"], "unknown argument --color=red"),
        (["-"], "unknown argument -"),
        (["--addr", "/" + "s" * 108, *NAMES], "--addr is longer than the path of a unix socket can be"),
        (["--cont-name", "n" * 4096], "--cont-name is longer than 4095 bytes"),
    ],
)
async def test_wrong_arguments(client: Path, arguments: list[str], sentence: str) -> None:
    ended = await run(client, *arguments)
    assert (ended.status, ended.stdout, ended.stderr) == (255, "", f"gpu-client: {sentence}\n")


@pytest.fixture(scope="session")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with a short deadline."""
    return compile_c(files._SOURCE, tmp_path_factory.mktemp("hasty") / "hasty", "-DDEADLINE_MS=120")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda _path: None, "can't connect: No such file or directory"),
        (lambda path: path.touch(), "can't connect: Connection refused"),
    ],
)
async def test_a_deadline_ends_the_wait(hasty: Path, node: Node, make: Callable[[Path], None], sentence: str) -> None:
    make(node.folder / "s")
    ended = await run(hasty, "--addr", node.folder / "s", *NAMES)
    assert (ended.status, ended.stderr) == (255, f"gpu-client: not registered at {node.folder}/s: {sentence}\n")


async def test_a_silent_agent_is_given_up(hasty: Path, node: Node) -> None:

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(say_nothing, node.folder / "s"):
        ended = await run(hasty, "--addr", node.folder / "s", *NAMES)
    assert ended.status == 255
    assert ended.stderr.endswith(": the agent did not answer within 120 ms\n")


def test_it_is_built_once_and_needs_no_library(client: Path) -> None:
    made = client.stat().st_mtime_ns
    assert build_client(client.parent) == client
    assert client.stat().st_mtime_ns == made
    assert client.stat().st_mode & 0o777 == 0o755
    assert INTERPRETER not in program_headers(client)


def program_headers(program: Path) -> list[int]:
    """Their types, of a 64-bit ELF file."""
    content = program.read_bytes()
    offset, size, count = struct.unpack_from("<Q", content, 32)[0], *struct.unpack_from("<HH", content, 54)
    return [struct.unpack_from("<I", content, offset + size * number)[0] for number in range(count)]


def test_without_a_compiler_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(InputError, match=r"'no-such-compiler' is not in PATH: install gcc or clang, or set vcuda\.client_path"):
        build_client(tmp_path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(InputError, match="it needs a static libc"):
        build_client(tmp_path)
