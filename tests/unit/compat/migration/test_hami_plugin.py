"""Flags and environment of HAMi's device plugin."""

import pytest

from gpumgr.compat.hami.plugin import _FLAGS, _VARIABLES, plugin_settings
from gpumgr.settings import load_settings

#: The chart's, and every default of HAMi 2.10.
CHART = ["nvidia-device-plugin", "--config-file=/device-config.yaml", "--mig-strategy=none", "--disable-core-limit=false", "-v=4"]
DEFAULTS = {
    "fail-on-init-error": "true",
    "nvidia-driver-root": "/",
    "pass-device-specs": "false",
    "device-list-strategy": "envvar",
    "device-id-strategy": "uuid",
    "gdrcopy-enabled": "false",
    "gds-enabled": "false",
    "mofed-enabled": "false",
    "kubelet-socket": "/var/lib/kubelet/device-plugins/kubelet.sock",
    "cdi-annotation-prefix": "cdi.k8s.io/",
    "nvidia-cdi-hook-path": "/usr/bin/nvidia-ctk",
    "driver-root-ctr-path": "/driver-root",
    "device-discovery-strategy": "auto",
    "imex-required": "false",
    "v": "0",
}


def test_defaults_need_nothing() -> None:
    assert plugin_settings([f"--{flag}={value}" for flag, value in DEFAULTS.items()], {}) == ({}, ())
    settings, notes = plugin_settings(CHART, {"NODE_NAME": "a", "HOOK_PATH": "/usr/local"})
    assert (settings, len(notes)) == ({}, 1)


@pytest.mark.parametrize(
    ("words", "environment", "expected"),
    [
        (["--mig-strategy=mixed"], {}, {"node.mig_strategy": "mixed"}),
        (["-mig-strategy", "single"], {}, {"node.mig_strategy": "single"}),
        ([], {"MIG_STRATEGY": "mixed"}, {"node.mig_strategy": "mixed"}),
        (["--mig-strategy=none"], {"MIG_STRATEGY": "mixed"}, {}),
        (["--nvidia-driver-root=/run/nvidia/driver"], {}, {"vcuda.driver_roots": ["/run/nvidia/driver"]}),
        (["--dev-root=/run/nvidia/driver"], {}, {"container.device_root": "/run/nvidia/driver/dev"}),
        (["--device-list-strategy=envvar,cdi-cri"], {}, {"enforcement.injection": "cdi"}),
        (
            [],
            {"KUBELET_SOCKET": "/data/kubelet/device-plugins/kubelet.sock"},
            {"kubelet.device_plugin_dir": "/data/kubelet/device-plugins"},
        ),
        (["-v", "5"], {}, {"log.level": "debug"}),
        ([], {"KUBECONFIG": "/etc/kubeconfig"}, {"kubernetes.kubeconfig": "/etc/kubeconfig"}),
    ],
)
def test_a_setting_of_the_same_meaning(words: list[str], environment: dict[str, str], expected: dict[str, object]) -> None:
    settings, notes = plugin_settings(words, environment)
    assert (settings, notes) == (expected, ())
    load_settings(None, environ={}, overrides=settings)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--fail-on-init-error=false"], "--fail-on-init-error=false: the agent always starts without a driver"),
        (["--device-list-strategy=volume-mounts"], "GPUs are named by environment variable, or by CDI"),
        (["--device-id-strategy=index"], "named by UUID"),
        (["--gds-enabled"], "--gds-enabled=true: has no counterpart; name the device nodes in container.extra_devices"),
        (["--kubelet-socket="], "always registers"),
        (["--dev-root=host"], "--dev-root=host: container.device_root needs an absolute path"),
        (["--cdi-annotation-prefix=x/"], "a field of their own"),
        (["--nvidia-ctk-path=/opt/ctk"], "no hooks"),
        (["--driver-root-ctr-path=/x"], "driver.root"),
        (["--device-discovery-strategy", "tegra"], "Tegra is not supported"),
        (["--imex-channel-ids=0"], "has no counterpart"),
        (["--node-name=a"], "$NODE_NAME"),
        (["--device-split-count=5"], "HAMi does not read it either"),
        (["--unheard-of=1"], "--unheard-of is no flag of HAMi 2.10's device plugin, and has no effect"),
    ],
)
def test_another_one_has_no_effect_and_the_reason_is_named(words: list[str], reason: str) -> None:
    settings, (note,) = plugin_settings(words, {})
    assert settings == {}
    assert reason in note


def test_variables_without_a_flag() -> None:
    _, notes = plugin_settings(
        [], {"DP_ENABLE_HEALTHCHECKS": "48", "HAMI_NODELOCK_EXPIRE": "5m", "ENABLE_TOPOLOGY_SCORE": "true"}
    )
    assert notes == (
        "DP_ENABLE_HEALTHCHECKS=48: all XIDs but nvml.ignored_xids count",
        "HAMI_NODELOCK_EXPIRE=5m: the agent needs no lock of the node",
    )


def test_every_flag_answers_any_text() -> None:
    for text in ("", "x", "true", "999999999999", "/"):
        for flag in _FLAGS:
            settings, notes = plugin_settings([f"--{flag}={text}"], {})
            assert len(settings) + len(notes) <= 1
        plugin_settings([], dict.fromkeys(_VARIABLES, text))
