"""Every flag of gpu-manager, one row each."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpumgr.common.errors import InputError, SettingsError
from gpumgr.compat.gpu_manager import flags as gpu_manager_flags
from gpumgr.compat.gpu_manager.flags import GpuManagerFlags, parse_gpu_manager_flags
from gpumgr.settings import Settings, load_settings


def settings_of(argv: Sequence[str]) -> Settings:
    return load_settings(None, environ={}, overrides=parse_gpu_manager_flags(argv).overrides)


SETS: list[tuple[str, str, object]] = [
    ("--query-port=8080", "http.port", 8080),
    ("--query-addr=0.0.0.0", "http.address", "0.0.0.0"),
    ("--query-addr=localhost", "http.address", "localhost"),
    ("--kubeconfig=/etc/k", "kubernetes.kubeconfig", Path("/etc/k")),
    ("--kubeconfig=", "kubernetes.kubeconfig", None),
    ("--sample-period=5", "nvml.sample_period_seconds", 5.0),
    ("--hostname-override=gpu-7.example", "node.name", "gpu-7.example"),
    ("--hostname-override=", "node.name", None),
    ("--virtual-manager-path=/vm", "container.allocation_dir", Path("/vm")),
    ("--device-plugin-path=/dp", "kubelet.device_plugin_dir", Path("/dp")),
    ("--device-plugin-path=", "kubelet.device_plugin_dir", None),
    ("--checkpoint-path=/c", "checkpoint.gpu_manager_checkpoint", Path("/c/gpumanager_internal_checkpoint")),
    ("--checkpoint-path=", "checkpoint.gpu_manager_checkpoint", None),
    ("--share-mode", "placement.share_mode", True),
    ("--share-mode=true", "placement.share_mode", True),
    ("--share-mode=false", "placement.share_mode", False),
    ("--v=4", "log.level", "debug"),
    (f"--v={'9' * 5000}", "log.level", "debug"),
    ("--v=2", "log.level", "info"),
    ("-v=5", "log.level", "debug"),
    ("-v5", "log.level", "debug"),
    ("--node-labels=a=b", "kubernetes.node_labels", ("a=b",)),
    (
        "--node-labels=gaia.tencent.com/gpu-model=,x.io/pool=night,",
        "kubernetes.node_labels",
        ("gaia.tencent.com/gpu-model=", "x.io/pool=night"),
    ),
    ("--container-runtime-endpoint=/run/crio/crio.sock", "cri.socket", Path("/run/crio/crio.sock")),
    ("--container-runtime-endpoint=", "cri.socket", None),
    ("--addr=/var/run/gpu-manager.sock", "display.socket", Path("/var/run/gpu-manager.sock")),
]

MOOT = [
    "--allocation-check-period=30",
    "--cgroup-driver=systemd",
    "--runtime-request-timeout=5s",
    "--wait-timeout=1m",
    "--logtostderr",
    "--logtostderr=false",
    "--alsologtostderr",
    "--stderrthreshold=2",
    "--vmodule=a=1",
    "--log-backtrace-at=:0",
    "--log-dir=/var/log/gpu-manager",
]

SILENT = ["--driver=nvidia", "--extra-config=", "--volume-config=", "--node-labels=", "--version=false"]

REFUSED = {
    "--driver=dummy": r"--driver=dummy is not supported; allowed: nvidia",
    "--driver=": r"--driver= is not supported",
    "--node-labels=a=b,-c=d": r"--node-labels: kubernetes.node_labels: 'a=b,-c=d' is not allowed; allowed: a list, each item key=value",
    "--node-labels=a=b=c": r"--node-labels: kubernetes.node_labels: 'a=b=c' is not allowed",
    "--container-runtime-endpoint=unix:///run/c.sock": r"cri.socket: 'unix:///run/c.sock' is not allowed; allowed: an absolute path",
    "--version": r"use `gpumgr --version`",
    "--version=raw": r"use `gpumgr --version`",
    **{
        f"--{flag}=": f"--{flag} must not be empty; it sets "
        for flag in ("query-port", "query-addr", "sample-period", "virtual-manager-path", "share-mode", "addr")
    },
    "--virtual-manager-path=vm": r"--virtual-manager-path: container.allocation_dir: 'vm' is not allowed; allowed: an absolute path",
    "--query-port=http": r"--query-port: http.port: 'http' is not allowed; allowed: a whole number from 0 to 65535",
    "--share-mode=maybe": r"--share-mode: placement.share_mode: 'maybe' is not allowed; allowed: true or false",
    "--sample-period=0": r"--sample-period: nvml.sample_period_seconds: '0' is not allowed",
    "--v=high": r"--v=high is not allowed; allowed: a whole number from 0",
    "--addr=": r"--addr must not be empty; it sets display.socket",
    "--address=/var/run/gpu-manager.sock": r"unknown flag --address; ",
    "--share-mod": r"unknown flag --share-mod; did you mean 'share-mode'\?",
    "--query-port": r"--query-port needs a value",
    "serve": r"unexpected argument 'serve'",
    "--": r"unexpected argument '--'",
}


@pytest.mark.parametrize(("word", "key", "value"), SETS)
def test_a_flag_sets_our_key(word: str, key: str, value: object) -> None:
    assert parse_gpu_manager_flags([word]).overrides == {key: value}
    settings_of([word])


@pytest.mark.parametrize("word", MOOT)
def test_a_flag_without_effect_has_a_reason(word: str) -> None:
    result = parse_gpu_manager_flags([word])
    assert result.overrides == {}
    (note,) = result.notes
    assert note.startswith(word.partition("=")[0] + " has no effect: ")


@pytest.mark.parametrize("word", SILENT)
def test_a_flag_at_what_we_do_anyway_changes_nothing(word: str) -> None:
    assert parse_gpu_manager_flags([word]) == parse_gpu_manager_flags([])


@pytest.mark.parametrize("word", REFUSED)
def test_a_refused_flag_has_a_reason(word: str) -> None:
    with pytest.raises(SettingsError, match=REFUSED[word]):
        parse_gpu_manager_flags([word])


def test_the_tables_here_and_in_the_docstring_have_every_flag() -> None:
    tested = {word.lstrip("-").partition("=")[0] for word in [*(row[0] for row in SETS), *MOOT, *SILENT, *REFUSED]}
    known = set(gpu_manager_flags._RULES)
    assert known <= tested
    documented = set(re.findall(r"--([a-z-]+)", gpu_manager_flags.__doc__ or ""))
    assert known - {"alsologtostderr", "stderrthreshold", "vmodule", "log-backtrace-at", "log-dir"} <= documented


@pytest.mark.parametrize("item", ["pool", "pool=", "=night"])
def test_an_invalid_node_label_is_ignored(item: str) -> None:
    note = f"--node-labels: {item!r} is ignored; allowed: key=value"
    assert parse_gpu_manager_flags([f"--node-labels={item}"]) == GpuManagerFlags(notes=(note,))
    with_another = parse_gpu_manager_flags([f"--node-labels={item},a=b"])
    assert (with_another.overrides, with_another.notes) == ({"kubernetes.node_labels": ("a=b",)}, (note,))


def test_underscores_and_separate_values_are_understood() -> None:
    settings = settings_of(["--query_port", "81", "--share_mode", "--virtual_manager-path", "/vm"])
    assert (settings.http.port, settings.placement.share_mode, settings.container.allocation_dir) == (81, True, Path("/vm"))


def test_the_last_of_two_counts() -> None:
    assert settings_of(["--query-port=1", "--query-port=2"]).http.port == 2


def test_what_gpu_managers_image_starts_with_is_accepted(tmp_path: Path) -> None:
    extra, volume = tmp_path / "extra-config.json", tmp_path / "volume.conf"
    extra.write_text("{}")
    names = ("nvidia", "origin")
    volume.write_text(
        json.dumps({"volume": [{"name": n, "base": "/vd", "mode": "x", "components": {"binaries": ["a"]}} for n in names]})
    )
    argv = [
        f"--extra-config={extra}",
        "--v=4",
        "--hostname-override=node-1",
        "--share-mode=true",
        f"--volume-config={volume}",
        "--log-dir=/var/log/gpu-manager",
        "--query-addr=0.0.0.0",
        "--logtostderr=false",
    ]
    settings = settings_of(argv)
    assert settings.container.driver_share_dir == Path("/vd/nvidia")
    assert settings.container.driver_whole_dir == Path("/vd/origin")
    assert (settings.node.name, settings.http.address, settings.log.level) == ("node-1", "0.0.0.0", "debug")


def test_extra_config_gives_further_devices(tmp_path: Path) -> None:
    path = tmp_path / "extra-config.json"
    path.write_text('{"default": {"devices": ["/dev/infiniband/rdma_cm", "/dev/x"]}, "other": {"devices": ["/dev/y"]}}')
    result = parse_gpu_manager_flags(["--extra-config", str(path)])
    assert result.overrides == {"container.extra_devices": (Path("/dev/infiniband/rdma_cm"), Path("/dev/x"))}
    (note,) = result.notes
    assert "names 'other', which has no effect" in note


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"default": []}', '{"default": {"devices": "/dev/x"}}', '{"default": {"devices": [1]}}']
)
def test_an_extra_config_that_is_none_is_a_clear_error(content: str, tmp_path: Path) -> None:
    path = tmp_path / "extra-config.json"
    path.write_text(content)
    with pytest.raises(InputError, match=rf"--extra-config: {path} is not what gpu-manager reads: .*; expected: "):
        parse_gpu_manager_flags([f"--extra-config={path}"])


def test_files_that_are_not_there_are_a_clear_error(tmp_path: Path) -> None:
    for flag in ("--extra-config", "--volume-config"):
        with pytest.raises(InputError, match=rf"{flag}: {tmp_path}/no can't be read: No such file"):
            parse_gpu_manager_flags([f"{flag}={tmp_path}/no"])


def test_a_device_that_is_no_path_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "extra-config.json"
    path.write_text('{"default": {"devices": ["nvidia9"]}}')
    with pytest.raises(
        SettingsError, match=r"extra_devices: 'nvidia9' is not allowed; allowed: a list, each item an absolute path"
    ):
        parse_gpu_manager_flags([f"--extra-config={path}"])
