"""`gpumgr doctor` as a person runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner, Result

from gpumgr.cli.doctor import command
from gpumgr.common.errors import InputError

from .conftest import GET_POD, VERSION, listening, serving, version_answer


def write_settings(folder: Path, **sections: dict[str, object]) -> Path:
    """A node with all paths in `folder`, without cgroup v1 and without an API server."""
    document: dict[str, dict[str, Any]] = {
        "node": {"name": "node-1"},
        "kubelet": {"device_plugin_dir": f"{folder}/plugins", "pod_resources_socket": f"{folder}/pods.sock"},
        "kubernetes": {"enabled": False},
        "cri": {"socket": f"{folder}/cri.sock", "cgroup_root": f"{folder}/cgroup"},
        "mps": {"control_program": "no-such-program"},
        "enforcement": {"backend": "none"},
        "checkpoint": {"dir": str(folder), "gpu_manager_checkpoint": f"{folder}/gpu-manager.json"},
        "container": {"allocation_dir": f"{folder}/vm"},
        "process": {"lock_path": f"{folder}/agent.lock"},
        "http": {"port": 0, "socket": f"{folder}/agent.sock"},
        **sections,
    }
    path = folder / "gpumgr.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def doctor(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)))


def test_json_has_an_object_for_each_check(folder: Path) -> None:
    result = doctor("--config", write_settings(folder), "--sim", "pcie-a10-4", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout.replace(str(folder), "DIR"))
    cri, cgroups = found.pop(12), found.pop(12)  # they speak in the words of their stations
    assert (cri["check"], cri["state"], cgroups["check"], cgroups["state"]) == ("cri", "error", "cgroups", "error")
    burst = found.pop(-3)
    assert (burst["check"], burst["state"]) == ("burst", "skipped")
    assert "no agent answers on this node" in burst["message"]
    folder_remedy = (
        "start the kubelet, or set kubelet.device_plugin_dir to the folder of its kubelet.sock: /var/lib/kubelet/device-plugins, "
        "whatever its --root-dir is"
    )
    pods = "can't ask for the pod resources at DIR/pods.sock: the socket does not exist (is the kubelet running?)"
    pods_remedy = "start the kubelet, or set kubelet.pod_resources_socket to <its --root-dir>/pod-resources/kubelet.sock"
    unused = "not used: enforcement.backend is none"
    assert [tuple(each.values()) for each in found] == [
        ("driver", "skipped", "a simulated node has none", None),
        ("nvml", "ok", "driver 535.183.01, CUDA 12.2, 4 NVIDIA A10", None),
        ("device-nodes", "skipped", "a simulated node has none", None),
        ("settings", "ok", "no settings file of earlier versions is left", None),
        ("mode", "ok", "plugin: GPUs are offered by the device plugin API", None),
        ("kubelet", "error", "DIR/plugins is no folder", folder_remedy),
        ("pod-resources", "error", pods, pods_remedy),
        ("plugins", "skipped", "DIR/plugins is no folder", None),
        ("agent", "ok", "none runs on this node", None),
        ("host-paths", "skipped", "not in a pod", None),
        ("folders", "ok", "2 folders can be written", None),
        ("checkpoint", "ok", "there is no checkpoint at DIR/gpumgr.sqlite3: the agent creates one", None),
        ("cdi", "skipped", "not used: enforcement.injection is mounts", None),
        ("driver-files", "skipped", "a simulated node has none", None),
        *((name, "skipped", unused, None) for name in ("limiter", "nvml-memory", "mps", "hami-core", "vcuda")),
        ("rbac", "skipped", "standalone: no API server is asked", None),
        (
            "enforcement",
            "warning",
            "no backend enforces the limits of shares (enforcement.backend is none)",
            "set enforcement.backend to auto",
        ),
    ]
    assert all(list(each) == ["check", "state", "message", "remedy"] for each in found)


def test_text_has_a_line_for_each_check_with_what_to_do_and_errors_last(folder: Path) -> None:
    result = doctor("--config", write_settings(folder), "--sim", "pcie-a10-4")
    lines = result.stdout.splitlines()
    assert (len(lines), lines[1]) == (24, "ok       nvml           driver 535.183.01, CUDA 12.2, 4 NVIDIA A10")
    states = [line.split()[0] for line in lines]
    first = states.index("error")
    assert set(states[first:]) == {"error"}
    assert lines[first].startswith(f"error    kubelet        {folder}/plugins is no folder; start the kubelet, or set ")


def test_warnings_alone_exit_0(folder: Path) -> None:
    (folder / "plugins").mkdir()
    with (
        listening(folder / "plugins/kubelet.sock"),
        serving(folder / "pods.sock", GET_POD, b""),
        serving(folder / "cri.sock", VERSION, version_answer("containerd", "v2.1.4")),
    ):
        settings = write_settings(folder, cri={"socket": f"{folder}/cri.sock"})
        result = doctor("--config", settings, "--sim", "pcie-a10-4", "--output", "json")
    states = {finding["check"]: finding["state"] for finding in json.loads(result.stdout)}
    assert (result.exit_code, "error" in states.values(), states["enforcement"]) == (0, False, "warning")
    assert (states["kubelet"], states["pod-resources"], states["cri"], states["mps"]) == ("ok", "ok", "ok", "skipped")


def test_flags_go_over_the_file(folder: Path) -> None:
    path = write_settings(folder, kubernetes={"kubeconfig": f"{folder}/none"})
    options = ("--config", path, "--sim", "mixed-2", "--json")
    for flags, check, state in (
        ((), "rbac", "error"),
        (("--standalone",), "rbac", "skipped"),
        (("--set", "enforcement.backend=mps"), "mps", "error"),
    ):
        findings = {each["check"]: each["state"] for each in json.loads(doctor(*options, *flags).stdout)}
        assert findings[check] == state


def test_wrong_settings_are_an_input_error(folder: Path) -> None:
    assert isinstance(doctor("--config", write_settings(folder, http={"port": "x"})).exception, InputError)
    assert isinstance(doctor("--set", "http.port").exception, InputError)
    wrong = subprocess.run(
        [sys.executable, "-m", "gpumgr", "doctor", "--set", "http.port=x"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "http.port: 'x' is not allowed" in wrong.stderr


STUCK = """
import asyncio, time
from gpumgr.cli.doctor import report
from gpumgr.cli.examination import Check, examine, ok

async def stuck():
    await asyncio.shield(asyncio.to_thread(time.sleep, 3600))

async def well():
    return ok("as it should be")

checks = [Check("stuck", stuck, "reboot"), Check("well", well, "")]
report(examine(checks, limit_seconds=0.05), as_json=True)
"""


def test_what_hangs_does_not_hold_up_the_end_of_the_command() -> None:
    ended = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=30)
    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout) == [
        {"check": "stuck", "state": "error", "message": "no answer within 0.05 s", "remedy": "reboot"},
        {"check": "well", "state": "ok", "message": "as it should be", "remedy": None},
    ]
