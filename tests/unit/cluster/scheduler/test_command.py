"""What `gpumgr scheduler` refuses at its start."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpumgr.cli import group
from gpumgr.cli.scheduler import parse_listen
from gpumgr.cluster.scheduler.lifecycle import certificates, this_replica
from gpumgr.common.errors import InputError
from gpumgr.settings.schema import SchedulerSettings


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
    ("host", "insecure", "settings", "reason"),
    [
        ("127.0.0.1", False, {}, "add --insecure-loopback"),
        ("0.0.0.0", True, {}, "needs a loopback address"),
        ("10.0.0.1", True, {}, "10.0.0.1 is none"),
        ("127.0.0.1", True, {"tls_cert_file": Path("/x")}, "remove one of them"),
        ("10.0.0.1", False, {"tls_cert_file": Path("/x"), "tls_key_file": Path("/x")}, "scheduler.client_ca_file"),
    ],
)
def test_plain_http_beyond_this_machine_is_refused(host: str, insecure: bool, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        certificates(SchedulerSettings(**settings), host, insecure_loopback=insecure)
    assert certificates(SchedulerSettings(), "::1", insecure_loopback=True) is None


def test_a_replica_has_its_pods_name_and_an_identity_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_NAME", "extender-1")
    monkeypatch.setenv("POD_NAMESPACE", "gpus")
    one, two = this_replica(SchedulerSettings()), this_replica(SchedulerSettings(lease_namespace="other", lease_name="mine"))
    assert (one.namespace, one.lease, one.pod) == ("gpus", "gpumgr-scheduler", "extender-1")
    assert (two.namespace, two.lease) == ("other", "mine")
    assert one.identity != two.identity


@pytest.mark.parametrize(
    ("options", "reason"), [([], "--insecure-loopback"), (["--insecure-loopback"], "give --kubeconfig FILE")]
)
def test_the_command_refuses_wrong_options_before_it_reads_credentials(options: list[str], reason: str) -> None:
    result = CliRunner().invoke(group, ["scheduler", "--kubeconfig", "/missing", "--listen", "127.0.0.1:0", *options])
    assert isinstance(result.exception, InputError)
    assert reason in str(result.exception)
