"""What `gpumgr scheduler` refuses at its start."""

import pytest
from click.testing import CliRunner

from gpumgr.cli import group
from gpumgr.errors import InputError
from gpumgr.scheduler.lifecycle import check_transport, parse_listen


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:12345", ("127.0.0.1", 12345)), ("[::1]:0", ("::1", 0)), ("0.0.0.0:65535", ("0.0.0.0", 65535))],
)
def test_an_address_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", "localhost:1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:9999999", "::1"]
)
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--listen"):
        parse_listen(text)


@pytest.mark.parametrize(
    ("host", "insecure", "reason"),
    [
        ("127.0.0.1", False, "add --insecure-loopback"),
        ("0.0.0.0", True, "needs a loopback address"),
        ("10.0.0.1", True, "10.0.0.1 is none"),
    ],
)
def test_plain_http_beyond_this_machine_is_refused(host: str, insecure: bool, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_transport(host, insecure_loopback=insecure)
    check_transport("::1", insecure_loopback=True)


def test_the_command_refuses_before_it_reads_credentials() -> None:
    result = CliRunner().invoke(group, ["scheduler", "--kubeconfig", "/missing", "--listen", "127.0.0.1:0"])
    assert isinstance(result.exception, InputError)
    assert "--insecure-loopback" in str(result.exception)


def test_missing_credentials_are_named() -> None:
    result = CliRunner().invoke(
        group, ["scheduler", "--kubeconfig", "/missing", "--listen", "127.0.0.1:0", "--insecure-loopback"]
    )
    assert isinstance(result.exception, InputError)
    assert "give --kubeconfig FILE" in str(result.exception)
